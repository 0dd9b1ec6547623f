"""Checkpoints of a sharded head with whole tensors: rows are gathered to save one, and cut out when one is loaded.

Such a checkpoint is like one of a single process and can be loaded anywhere. Only rank 0 writes it, so only rank 0
gathers, one tensor after the other, in host memory. `sharded_checkpoint` is for heads that are too large for that.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import tree_leaves, tree_map_only
from lightning_dp.strategies.krizhevsky_hybrid.parameter_rows import whole_on_all_ranks, whole_on_rank_0
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead

State = dict[str, Any]
Convert = Callable[[Any, Tensor], Any]


def gather_parameters(module: LightningModule, head: ShardedHead) -> State:
    """Return the head's parameters by their names in ``module``: whole on rank 0, rows elsewhere.

    All ranks must call it.
    """
    whole = {p: whole_on_rank_0(head, p.data, p) for p in head.parameters}
    return {name: whole[p] for name, p in head.names_in(module).items()}


def gather_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return ``state``, a state_dict of ``optimizer``, in which the head's part is whole on rank 0, rows elsewhere.

    All ranks must call it.
    """

    def gather(value: Any, p: Tensor) -> Any:
        return whole_on_rank_0(head, value, p) if _is_like(value, p.shape) else value

    return convert_head(optimizer, state, head, gather)


def own_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return a copy of ``state``, a state_dict of ``optimizer``, in which the head's part is cut to this rank's rows.

    Everything is copied, because ``state`` may be mapped from a file that is replaced while the copy is in use.
    """
    whole_shapes = {p: head.whole_shape(p) for p in head.parameters}

    def slice_rows(value: Any, p: Tensor) -> Any:
        return head.own_rows(value, p) if _is_like(value, whole_shapes[p]) else value

    own = convert_head(optimizer, state, head, slice_rows)
    is_copied = {id(value) for value in tree_leaves(own)} - {id(value) for value in tree_leaves(state)}
    return tree_map_only(Tensor, lambda tensor: tensor if id(tensor) in is_copied else tensor.clone(), own)


def shard_state(optimizer: Optimizer, head: ShardedHead) -> None:
    """Cut the state of ``optimizer`` to this rank's rows, in place, where it is that of the whole head.

    An optimizer that the module has built before `fit`, or has kept from an earlier one, has such a state.
    """
    for p, of_p in optimizer.state.items():
        if head.owns(p):
            for name, value in of_p.items():
                if _is_like(value, head.whole_shape(p)) and not _is_like(value, p.shape):
                    of_p[name] = head.own_rows(value, p)


def make_whole(optimizer: Optimizer, head: ShardedHead) -> None:
    """Gather the state of ``optimizer`` in place, in host memory. All ranks must call it while the head is sharded."""
    for p, of_p in optimizer.state.items():
        if head.owns(p):
            for name, value in of_p.items():
                if _is_like(value, p.shape):
                    of_p[name] = whole_on_all_ranks(head, value, p, torch.device("cpu"))


def convert_head(optimizer: Optimizer, state: State, head: ShardedHead, convert: Convert) -> State:
    """Return ``state``, a state_dict of ``optimizer``, with ``convert(value, parameter)`` for the head's values."""
    if "state" not in state:  # Lightning's stand-in for the optimizer of a module that has none
        return state
    of_parameters = dict(state["state"])
    # A state_dict numbers the parameters of all groups in order.
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if head.owns(p) and index in of_parameters:
            of_parameters[index] = {name: convert(value, p) for name, value in of_parameters[index].items()}
    return state | {"state": of_parameters}


def require_all_ranks(module: LightningModule) -> None:
    """Raise RuntimeError after an exception: other ranks may be gone, and a gather would wait for them."""
    if module.trainer.interrupted:
        raise RuntimeError(
            "cannot save a checkpoint after an exception: the head's parameters are spread over all ranks, and the "
            "others may be gone. Save every few steps instead: ModelCheckpoint(every_n_train_steps=...)"
        )


def require_one_trunk(module: LightningModule, head: ShardedHead) -> None:
    """Raise RuntimeError if the trunk's parameters differ between ranks. All ranks must call it."""
    # Sums differ in their last bits between kinds of processors, so they are compared with a tolerance.
    trunk = [p.detach().double().abs().sum() for p in module.parameters() if not head.owns(p)]
    sums = head.control.all_gather("checksums", torch.stack(trunk)) if trunk else torch.zeros(1)
    if not torch.allclose(sums, sums[:1].expand_as(sums), rtol=1e-6, equal_nan=True):
        raise RuntimeError(
            "the trunk's parameters are not the same on all ranks. Something in the module changes or skips their "
            "gradients depending on this rank's part of the head, as torch.nn.utils.clip_grad_norm_ does; use "
            "self.clip_gradients(optimizer, gradient_clip_val=...), or Trainer(gradient_clip_val=...)"
        )


def warn_of_rows(checkpoint: State, module: LightningModule, head: ShardedHead) -> None:
    """Warn of rows that a callback or the module has put into ``checkpoint``, an average of the weights for example.

    Only rank 0's would be saved: the strategy gathers parameters and optimizer states, and knows of nothing else.
    """
    if head.channel.rank != 0:
        return
    # Of weights only: the length of a bias may be that of anything.
    rows = {p.shape: name for name, p in head.names_in(module).items() if p.ndim > 1 and p.shape != head.whole_shape(p)}
    gathered = ("state_dict", "optimizer_states")
    for path, tensor in _tensors({key: value for key, value in checkpoint.items() if key not in gathered}):
        if tensor.shape in rows:
            warnings.warn(
                f"checkpoint{path} has the shape {tuple(tensor.shape)} of this rank's rows of {rows[tensor.shape]!r}. "
                "If it is a copy of them, such as an average of the weights, the other ranks' rows are not saved. Let "
                "each rank save its copy to a file of its own",
                stacklevel=2,
            )


def warn_of_other_shapes(optimizer: Optimizer, head: ShardedHead) -> None:
    """Warn of states of the head's parameters that are neither single numbers nor of the parameter's shape.

    How the ranks' states would make a whole one is not known, so a checkpoint holds those of rank 0.
    """
    if head.channel.rank != 0:
        return
    for p, of_p in optimizer.state.items():
        for name, value in of_p.items() if head.owns(p) else ():
            if isinstance(value, Tensor) and value.numel() > 1 and not _is_like(value, p.shape):
                warnings.warn(
                    f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} for this rank's rows of "
                    f"the head, of shape {tuple(p.shape)}. A checkpoint holds rank 0's, so on other ranks a resumed "
                    "training differs from one that was not interrupted; use an optimizer of torch.optim",
                    stacklevel=2,
                )


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor within dicts and sequences, and where it is."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}[{key!r}]")


def write_to_disk(checkpoint: State, path: str | os.PathLike[str]) -> None:
    """Save to a local file without a copy in memory. The file appears when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_plain_file(checkpoint_io: Any, path: Any) -> bool:
    """Return whether Lightning would write the checkpoint as an ordinary local file, so that we may do it instead."""
    return type(checkpoint_io).__name__ == "TorchCheckpointIO" and "://" not in str(path)


def map_from_disk(path: str | os.PathLike[str], weights_only: bool | None = None) -> State:
    """Load a checkpoint from a local file, and map parameters and optimizer states into memory instead of reading them.

    Only the rows that are used are then read, and the ranks of a host share them. They must be copied before they are
    changed or kept, because the file may be replaced.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        checkpoint: State = torch.load(str(path), map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError:  # files of old versions of torch cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    mapped = ("state_dict", "optimizer_states")
    return {
        key: value if key in mapped else tree_map_only(Tensor, Tensor.clone, value) for key, value in checkpoint.items()
    }


def _is_like(value: Any, shape: torch.Size) -> bool:
    """Return whether a state has one number for each of the parameter's. Momentum has; a count of steps has not."""
    return isinstance(value, Tensor) and value.shape == shape
