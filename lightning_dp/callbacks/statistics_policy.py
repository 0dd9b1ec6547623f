"""Policy of `AdaptiveGlobalBatchNorm`: in which steps statistics are global. Pure functions, no Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_dp._private.torch_names import tree_leaves
from lightning_dp.callbacks.convergence import Convergence

GlobalPhase = Literal["until_converged", "after_converged", "always"]


def in_global_phase(global_phase: GlobalPhase, converged: bool) -> bool:
    """Return whether statistics are global in this phase of training, apart from the batch size."""
    return global_phase == "always" or converged == (global_phase == "after_converged")


def local_batch_size(batch: Any) -> int:
    """Return the length of the first tensor in ``batch``, which may consist of nested lists, tuples and dictionaries.

    Raises:
        ValueError: ``batch`` holds no tensor with at least one dimension, or a list of tensors that may be images.
    """
    siblings = _list_of_first_tensor(batch)
    if len(siblings) > 1 and all(isinstance(each, Tensor) and _may_be_image(each) for each in siblings):
        raise ValueError(
            f"max_batch_size needs the size of the batch, but a list of {len(siblings)} tensors of shapes such as "
            f"{tuple(siblings[0].shape)} may hold single images, whose length is their number of channels; stack them "
            "to one tensor in the collate function, or leave max_batch_size out"
        )
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise ValueError(
        f"max_batch_size needs the size of the batch, but a {type(batch).__name__} without tensors does not have one; "
        "return tensors from the collate function, or leave max_batch_size out"
    )


def _may_be_image(tensor: Tensor) -> bool:
    """Whether ``tensor`` may be (C, H, W). A sequence of signals, (N, C, L), is taken for one only if N is so small."""
    return tensor.dim() == 3 and tensor.shape[0] in (1, 3, 4)


def _list_of_first_tensor(batch: Any) -> Sequence[Any]:
    """Return the innermost list or tuple that begins with the first tensor of ``batch``; an empty one if none does."""
    while isinstance(batch, (list, tuple, dict)) and batch:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if isinstance(first, Tensor):
            return () if isinstance(batch, dict) else batch
        batch = first
    return ()


def single_value_error(names_by_rank: list[list[str]]) -> str:
    """Return the error message for layers that had a single value per channel, given their names for each rank."""
    named = [f"rank {rank}: {', '.join(map(repr, names))}" for rank, names in enumerate(names_by_rank) if names]
    return (
        f"batch norm layers had a single value per channel ({'; '.join(named)}). Global statistics accept that, but "
        "training would fail when the convergence criterion makes statistics local. Give each rank at least two "
        "samples (also in the last batch: drop_last=True), or use global_phase='always'"
    )


def check_arguments(
    max_batch_size: int | None, convergence: Convergence | None, global_phase: GlobalPhase, group_size: int | None
) -> None:
    """Raise ValueError for values out of range, and for a phase that could never begin or end."""
    for name, value in (("max_batch_size", max_batch_size), ("group_size", group_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1, or None")
    if global_phase not in get_args(GlobalPhase):
        raise ValueError(
            f"global_phase={global_phase!r} is not known; use 'until_converged', 'after_converged' or 'always'"
        )
    if global_phase == "always" and convergence is not None:
        raise ValueError("global_phase='always' does not use a criterion; leave convergence out, or change the phase")
    if global_phase == "after_converged" and convergence is None:
        raise ValueError(
            "global_phase='after_converged' never begins without a criterion; pass convergence=Plateau(monitor=...)"
        )
    if convergence is not None and not callable(getattr(convergence, "update", convergence)):
        raise ValueError(
            f"convergence={convergence!r} is neither a function nor has it update(metrics); use Plateau(...)"
        )
