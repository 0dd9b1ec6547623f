"""Updates of a sharded head alone, and clipping by a norm to which every rank contributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.lightning_names import clip_gradients
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead


def update_head(
    module: LightningModule,
    plugin: Any,
    optimizers: Sequence[Optimizer],
    head: ShardedHead,
    gradients: Sequence[Tensor | None],
) -> None:
    """Update the head alone with the gradients of one pass (arXiv 1404.5997, section 4.2). All ranks must call it.

    It steps the user's own optimizers. They skip parameters without a gradient, so the trunk does not change.
    """
    own = dict(zip(head.parameters, gradients, strict=True))
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p in own for p in parameters):
            continue
        # With gradient accumulation the trunk has gradients of earlier batches, which it keeps for its own step.
        accumulated = {p: p.grad for p in parameters if p not in own}
        for p in parameters:
            p.grad = own.get(p)
        trainer = module.trainer
        clip_gradients(plugin, module, optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        optimizer.step()
        for p in parameters:
            p.grad = accumulated.get(p)


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
