"""Checkpoints of a sharded head: rows are gathered when one is saved, and sliced when one is loaded.

A checkpoint holds whole tensors, like one of a single process, so it can be loaded anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead

State = dict[str, Any]


def whole_parameters(module: LightningModule, head: ShardedHead) -> State:
    """Gather the head's parameters, by their names in ``module``. All ranks must call it.

    Raises:
        RuntimeError: after an exception, or if the ranks' trunks differ, so that none of them could stand for all.
    """
    require_all_ranks(module)
    _require_one_trunk(module, head)
    return {name: head.whole(p.data, p) for name, p in head.names_in(module).items()}


def own_parameters(module: LightningModule, head: ShardedHead, state: State) -> State:
    """Return ``state``, a state_dict of the whole ``module``, with this rank's rows of the head."""
    named = head.names_in(module).items()
    return state | {name: head.own_rows(state[name], p) for name, p in named if name in state}


def whole_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return ``state``, a state_dict of ``optimizer``, with the head's part gathered. All ranks must call it."""

    def gather(value: Any, p: Tensor) -> Any:
        return head.whole(value, p) if _is_like(value, p.shape) else value

    return _with_head(optimizer, state, head, gather)


def own_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return ``state``, a whole state_dict of ``optimizer``, with this rank's rows of the head's part."""

    def slice_rows(value: Any, p: Tensor) -> Any:
        return head.own_rows(value, p) if _is_like(value, head.whole_shape(p)) else value

    return _with_head(optimizer, state, head, slice_rows)


def make_whole(optimizer: Optimizer, head: ShardedHead) -> None:
    """Gather the state of ``optimizer`` in place. All ranks must call it, while the head is sharded."""
    for p, of_p in optimizer.state.items():
        if head.owns(p):
            of_p.update({name: head.whole(value, p) for name, value in of_p.items() if _is_like(value, p.shape)})


def require_all_ranks(module: LightningModule) -> None:
    """Raise RuntimeError after an exception, when other ranks may be gone and a gather would wait for them."""
    if module.trainer.interrupted:
        raise RuntimeError(
            "cannot save a checkpoint after an exception: the head's parameters lie on all ranks, and the others may "
            "be gone. Save every few steps: ModelCheckpoint(every_n_train_steps=...)"
        )


def _with_head(optimizer: Optimizer, state: State, head: ShardedHead, convert: Callable[[Any, Tensor], Any]) -> State:
    of_parameters = dict(state["state"])
    # A state_dict numbers the parameters of all groups in order.
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if head.owns(p) and index in of_parameters:
            of_parameters[index] = {name: convert(value, p) for name, value in of_parameters[index].items()}
    return state | {"state": of_parameters}


def _is_like(value: Any, shape: torch.Size) -> bool:
    """Whether a state has one number for each number of the parameter: momentum has, a step count has not."""
    return isinstance(value, Tensor) and value.shape == shape


def _require_one_trunk(module: LightningModule, head: ShardedHead) -> None:
    """Raise RuntimeError if the ranks' trunks have drifted apart."""
    trunk = [p.detach().double().abs().sum() for p in module.parameters() if not head.owns(p)]
    sums = head.channel.all_gather("checksums", torch.stack(trunk)) if trunk else torch.zeros(1)
    if not torch.allclose(sums, sums[:1].expand_as(sums), rtol=1e-6, equal_nan=True):
        raise RuntimeError(
            "the trunk's parameters are not the same on all ranks. Something in the module scales or skips their "
            "gradients by what a rank sees of the head's, as torch.nn.utils.clip_grad_norm_ does: use "
            "self.clip_gradients(optimizer, gradient_clip_val=...), or Trainer(gradient_clip_val=...)"
        )
