"""Parameter groups with and without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_dp.optim.krizhevsky import scale_learning_rate


def weight_decay_groups(
    model: nn.Module, *, lr: float, weight_decay: float, batch_size: int = 256, reference_batch_size: int = 256
) -> list[dict[str, Any]]:
    """Return parameter groups "decayed" and "not_decayed", with the learning rate for a batch size.

    Biases and the parameters of batch norm, which have one dimension, are not decayed (Goyal et al. 2017, arXiv
    1706.02677, section 5.1). The learning rate grows linearly with the batch, and the weight decay does not change
    (section 2.1).

    Args:
        model: the network.
        lr: learning rate for ``reference_batch_size``.
        weight_decay: weight decay of weights.
        batch_size: number of images in a global batch, over all ranks.
        reference_batch_size: the batch size that ``lr`` is for.

    Raises:
        ValueError: ``lr`` or a batch size is not positive.
    """
    rate = scale_learning_rate(lr, batch_size / reference_batch_size)
    parameters = list(model.parameters())
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    rest = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [
        {"params": decayed, "name": "decayed", "lr": rate, "weight_decay": weight_decay},
        {"params": rest, "name": "not_decayed", "lr": rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
