"""Optimizer states of a head of which ranks hold parts: whole for checkpoints, parts for the rank that loads one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead

State = dict[str, Any]


def whole_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """``state``, a state_dict of ``optimizer``, with what belongs to the head gathered. All ranks must call it."""
    return _with_head(
        optimizer, state, head, lambda value, p: head.whole(value, p) if is_like(value, p.shape) else value
    )


def own_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """``state``, a state_dict with all of the head, with this rank's rows instead."""

    def own(value: Any, p: Tensor) -> Any:
        return head.own_rows(value, p) if is_like(value, head.whole_shape(p)) else value

    return _with_head(optimizer, state, head, own)


def _with_head(optimizer: Optimizer, state: State, head: ShardedHead, convert: Callable[[Any, Tensor], Any]) -> State:
    of_parameters = dict(state["state"])
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if head.owns(p) and index in of_parameters:
            of_parameters[index] = {name: convert(value, p) for name, value in of_parameters[index].items()}
    return state | {"state": of_parameters}


def make_whole(optimizer: Optimizer, head: ShardedHead) -> None:
    """Gather the state of ``optimizer`` itself, in place. All ranks must call it, while the head is sharded."""
    for p, of_p in optimizer.state.items():
        if head.owns(p):
            of_p.update({name: head.whole(value, p) for name, value in of_p.items() if is_like(value, p.shape)})


def is_like(value: Any, shape: torch.Size) -> bool:
    """Whether a state is one number a parameter, as momentum is and a step count is not."""
    return isinstance(value, Tensor) and value.shape == shape
