"""Updates of a sharded head alone, and clipping by a norm to which every rank contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead


def update_head(
    module: LightningModule,
    plugin: Any,
    optimizers: Sequence[Optimizer],
    head: ShardedHead,
    gradients: Sequence[Tensor | None],
) -> None:
    """Update the head alone with the gradients of one pass (arXiv 1404.5997, section 4.2). All ranks must call it.

    It steps the user's own optimizers, as Lightning does after a backward: with the hooks ``on_after_backward`` and
    ``on_before_optimizer_step`` and with clipping. Parameters outside the head have no gradient meanwhile, so the
    optimizers skip them.
    """
    own = dict(zip(head.parameters, gradients, strict=True))
    # The forward of the head may have run under autocast. An update does not.
    of_optimizers = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    everything = dict.fromkeys([*module.parameters(), *of_optimizers])
    with _gradients_alone(everything, own), torch.autocast(head.parameters[0].device.type, enabled=False):
        plugin.post_backward(torch.zeros(()), module)  # calls on_after_backward; it returns the loss, unused here
        for optimizer in optimizers:
            if any(p in own for group in optimizer.param_groups for p in group["params"]):
                plugin.optimizer_step(optimizer, model=module, closure=lambda: None)


@contextmanager
def _gradients_alone(parameters: Iterable[Tensor], gradients: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """Within the context, ``parameters`` have these gradients, or none. Afterwards those of ``gradients`` have none."""
    # With gradient accumulation the trunk has gradients of earlier batches, which it keeps for its own step.
    before = {p: p.grad for p in parameters if p not in gradients}
    for p in (*before, *gradients):
        p.grad = gradients.get(p)
    try:
        yield
    finally:
        for p in (*before, *gradients):
            p.grad = before.get(p)


def clip_by_global_norm(parameters: Iterable[Tensor], clip_val: float, head: ShardedHead) -> None:
    """Clip gradients, in place, by the norm of the whole gradient. All ranks must call it.

    Each rank holds slices of the head's gradients. The norm that it would compute alone differs from the other ranks',
    and the trunks, scaled by different factors, would drift apart.
    """
    parameters = list(parameters)
    device = head.parameters[0].device
    ours = [p.grad for p in parameters if p.grad is not None and head.owns(p)]
    others = [p.grad for p in parameters if p.grad is not None and not head.owns(p)]
    own_square = torch.nn.utils.get_total_norm(ours).to(device) ** 2
    square_of_head = head.channel.all_gather("norm", own_square).sum()
    norm = (torch.nn.utils.get_total_norm(others).to(device) ** 2 + square_of_head).sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)
