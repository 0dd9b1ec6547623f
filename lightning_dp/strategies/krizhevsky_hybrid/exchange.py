"""The messages between data-parallel trunks and a model-parallel head (arXiv 1404.5997, section 4).

All ranks must call the same methods in the same order. A method that returns a `Finish` has started its messages; call
the `Finish` to wait for them and get the result. Other work goes in between.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_dp._private.torch_names import tree_flatten, tree_leaves, tree_unflatten
from lightning_dp.collectives.all_to_all import Channel, Finish
from lightning_dp.collectives.ring import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.head import Bounds, begin_sum


class FeatureExchange:
    """Sends samples from the rank that has them to all ranks, and returns logits and gradients to that rank.

    In the shapes below, N is the number of samples in a pass, n that in this rank's batch, and m that of this rank's
    samples in the pass.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank = channel.rank

    def assemble(self, features: Tensor, part: SubPass) -> Finish:
        """All-gather: (n, *) on each rank to (N, *) on all, the pass's samples in rank order."""
        begin, end = part.rows[self.rank]
        assembled = features.new_empty(part.num_samples, *features.shape[1:])
        blocks = list(assembled.split(part.counts))
        blocks[self.rank].copy_(features[begin:end].detach())
        return self.channel.begin("features", [blocks[self.rank]] * len(blocks), blocks, lambda: assembled)

    def sum_back(self, gradient: Tensor, part: SubPass) -> Finish:
        """Reduce-scatter: (N, *), a summand on each rank, to (m, *), the sum for this rank's samples."""
        return begin_sum("feature gradients", gradient.contiguous().split(part.counts), self.channel)

    def to_owners(self, columns: Tensor, part: SubPass, bounds: Bounds) -> Finish:
        """All-to-all: (N, own columns) on each rank to (m, C), all columns of this rank's samples."""
        blocks = list(columns.contiguous().split(part.counts))
        parts = [columns.new_empty(len(blocks[self.rank]), end - begin) for begin, end in bounds]
        parts[self.rank] = blocks[self.rank].detach()
        return self.channel.begin("logits", blocks, parts, lambda: torch.cat(parts, dim=1))

    def from_owners(self, rows: Tensor, part: SubPass, bounds: Bounds) -> Finish:
        """The reverse of `to_owners`: (n, C) on each rank to (N, own columns)."""
        (begin, end), (first, last) = part.rows[self.rank], bounds[self.rank]
        assembled = rows.new_empty(part.num_samples, last - first)
        parts = list(assembled.split(part.counts))
        blocks = [rows[begin:end, first:last] for first, last in bounds]
        parts[self.rank].copy_(blocks[self.rank])
        return self.channel.begin("logit gradients", blocks, parts, lambda: assembled)

    def exchange_batch_sizes(
        self,
        features: Tensor,
        targets: Sequence[tuple[str, Tensor]] = (),
        constants: Any = (),
        needs_seed: bool = False,
    ) -> tuple[list[int], int | None]:
        """Return the batch size of each rank, and a seed that is the same on all ranks, if one is needed.

        Raises:
            ValueError: ranks differ in more than the number of samples.
        """
        named = (("features", features), *targets)
        call = str([(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in named])
        call += f" with {constants}" if constants else ""
        if not torch.is_grad_enabled():
            call += " without gradients"
        elif not features.requires_grad:
            call += " where the features need no gradient"  # then this rank expects none from the others
        # Messages of NCCL have no labels. With this number, a call that one rank has made alone is found here.
        call += f" as exchange {self.channel.num_exchanges}"
        seed = int(torch.randint(2**62, ()).item()) if needs_seed else -1
        gathered = self.channel.gather_integers("sizes", [len(features), zlib.crc32(call.encode()), seed])
        sizes, calls, seeds = (list(of_ranks) for of_ranks in zip(*gathered, strict=True))
        if len(set(calls)) > 1:
            raise ValueError(
                f"the ranks pass different things to the head, this one {call} (shapes without the number of samples);"
                " only that number may differ, and all ranks must call the head at the same time. Pass a number of "
                "this rank alone as a tensor with a row for each sample: features.new_full((len(features),), number), "
                "and sequences of another length on each rank as rows: features.flatten(0, 1)"
            )
        return sizes, seeds[0] if needs_seed else None


def prefetch_one(begin: Callable[[SubPass], Finish], plan: Iterable[SubPass]) -> Iterator[tuple[SubPass, Tensor]]:
    """Yield each pass with what has arrived for it. The messages of the next pass travel while the caller works."""
    waiting: tuple[SubPass, Finish] | None = None
    for part in plan:
        following = part, begin(part)
        if waiting is not None:
            yield waiting[0], waiting[1]()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1]()


# --- Which samples are in which pass through the head: schemes a, b and c of arXiv 1404.5997, section 4.

Scheme = Literal["a", "b", "c"]
SCHEMES: tuple[Scheme, ...] = ("a", "b", "c")


@dataclass(frozen=True)
class SubPass:
    """One pass through the head. ``rows[r]`` is (begin, end) of the rows that it takes from the batch of rank r."""

    rows: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> list[int]:
        """How many samples each rank contributes."""
        return [end - begin for begin, end in self.rows]

    @property
    def num_samples(self) -> int:
        """How many samples there are in this pass."""
        return sum(self.counts)

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return begin and end of a rank's samples among those of this pass."""
        begin = sum(self.counts[:rank])
        return begin, begin + self.counts[rank]

    def rows_of(self, batches: Sequence[Tensor]) -> Tensor:
        """Return this pass's rows of ``batches``, which are those of all ranks, concatenated in rank order."""
        return torch.cat([batch[begin:end] for batch, (begin, end) in zip(batches, self.rows, strict=True)])


def sub_passes(scheme: Scheme, batch_sizes: Sequence[int], num_passes: int | None = None) -> list[SubPass]:
    """Divide the ranks' batches into passes through the head. Every sample is in exactly one, in its batch's order.

    - (a): one pass with everything.
    - (b): the batch of rank 0, then that of rank 1, and so on. With fewer passes than ranks, several ranks at a time.
    - (c): each rank contributes an equal part of its batch to each of P passes. If P does not divide a batch, its
      parts differ by one. Each rank has its larger parts in other passes, so that the passes are as equal as possible.

    Args:
        scheme: "a", "b" or "c".
        batch_sizes: batch size of each rank. They may differ, and may be 0. An empty pass is left out, unless all are.
        num_passes: P, for b and c. None: as many as there are ranks. b has no more than these.
    """
    num_passes = num_passes or len(batch_sizes)
    if scheme == "a":
        passes = [SubPass(tuple((0, size) for size in batch_sizes))]
    elif scheme == "b":
        turns = chunk_bounds(len(batch_sizes), min(num_passes, len(batch_sizes)))
        passes = [
            SubPass(tuple((0, size) if begin <= rank < end else (0, 0) for rank, size in enumerate(batch_sizes)))
            for begin, end in turns
        ]
    else:
        parts = [_rotated_parts(size, num_passes, rank % num_passes) for rank, size in enumerate(batch_sizes)]
        passes = [SubPass(tuple(part[turn] for part in parts)) for turn in range(num_passes)]
    # One pass of no sample gives gradients of zero, as plain training does. Momentum goes on with them.
    return [one for one in passes if one.num_samples] or passes[:1]


def _rotated_parts(size: int, num_parts: int, shift: int) -> list[tuple[int, int]]:
    """Consecutive parts of ``size`` rows, the larger ones from place ``-shift`` on."""
    sizes = [end - begin for begin, end in chunk_bounds(size, num_parts)]
    return list(pairwise(accumulate(sizes[shift:] + sizes[:shift], initial=0)))


# --- The arguments of ``head_step`` beside the features: from this rank's samples to those of a pass.

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), np.generic)


def require_features(value: Any, receiver: str) -> None:
    """Raise ValueError if ``value`` cannot be features: ``receiver`` got something else, or in another order."""
    if isinstance(value, Tensor) and value.dim() and (value.is_floating_point() or value.is_complex()):
        return
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
    raise ValueError(
        f"{receiver} is {what}; it must be the features, one floating-point tensor with a row for each sample. Put "
        "targets behind the features, and join several tensors of features with torch.cat(..., dim=1)"
    )


class StepArguments:
    """The arguments of one call of ``head_step``, by name.

    A tensor, which may stand in tuples, lists and dicts, has a row for each of this rank's samples. Each pass gets the
    rows of its own samples, which come from all ranks. Numbers and text must be the same on all ranks.

    Args:
        arguments: the arguments of ``head_step``, without the features.
        features: the features of this rank's batch.

    Attributes:
        tensors: all tensors, (n, *), with their names, in an order that is the same on all ranks.
        constants: everything that is not a tensor, with its name.

    Raises:
        ValueError: a tensor has another number of rows or another device, or is sparse, or requires a gradient, or an
            object is neither a tensor nor a number nor text.
    """

    def __init__(self, arguments: Mapping[str, Any], features: Tensor) -> None:
        for name, value in arguments.items():
            for leaf in tree_leaves(value):
                _require_rows_or_constant(name, leaf, features)
        self._leaves, self._structure = tree_flatten(dict(arguments))
        # The names, with the keys of dicts, are compared between ranks: each would use the rows of all by its own name.
        named = dict(_in_one_order(tree_unflatten(range(len(self._leaves)), self._structure)))
        self._places = [place for place in named if isinstance(self._leaves[place], Tensor)]
        self.tensors = [(named[place], self._leaves[place]) for place in self._places]
        self.constants = [(named[place], self._leaves[place]) for place in named if place not in self._places]
        self._of_ranks: list[list[Tensor]] = []  # for each tensor, those of all ranks, in rank order

    def gather(self, channel: Channel, batch_sizes: list[int]) -> None:
        """Receive the rows of all ranks. All ranks must call it, once."""
        for _, leaf in self.tensors:
            parts = [leaf.new_empty(size, *leaf.shape[1:]) for size in batch_sizes]
            parts[channel.rank] = leaf.detach()
            channel.all_to_all("targets", [leaf] * len(parts), parts).wait()
            self._of_ranks.append(parts)

    def of_pass(self, part: SubPass) -> dict[str, Any]:
        """Return the arguments for one pass, in the structure in which the module has passed them."""
        leaves = list(self._leaves)
        for place, of_ranks in zip(self._places, self._of_ranks, strict=True):
            leaves[place] = part.rows_of(of_ranks)
        arguments: dict[str, Any] = tree_unflatten(leaves, self._structure)
        return arguments


def _in_one_order(value: Any, name: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the leaves of ``value`` with their names, those of a dict sorted by keys, whatever its own order is.

    A dict that is made from a set of names has another order in each process.
    """
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _in_one_order(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _in_one_order(each, f"{name}[{number}]")
    else:
        yield from ((leaf, name) for leaf in tree_leaves(value))


def _require_rows_or_constant(name: str, leaf: Any, features: Tensor) -> None:
    if isinstance(leaf, CONSTANTS):
        return
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        what = f"a tensor of {leaf.layout}" if isinstance(leaf, Tensor) else f"an object of type {type(leaf).__name__}"
        raise ValueError(
            f"head_step's argument {name!r} contains {what}, which cannot be sent to other ranks; pass dense tensors "
            "with a row for each sample, numbers, or text"
        )
    if leaf.dim() == 0 or len(leaf) != len(features):
        raise ValueError(
            f"head_step's argument {name!r} has shape {tuple(leaf.shape)} beside {len(features)} features; pass "
            "tensors with a row for each sample, and single numbers as Python numbers (.item())"
        )
    if leaf.device != features.device:
        raise ValueError(
            f"head_step's argument {name!r} is on {leaf.device}, and the features, with which it goes to other ranks, "
            f"are on {features.device}; pass {name}.to(features.device)"
        )
    if leaf.requires_grad:
        # Its rows go to other ranks, which return gradients of the features only.
        raise ValueError(
            f"head_step's argument {name!r} requires a gradient, which would be lost: only the features' gradient "
            "comes back from other ranks. Concatenate it with the features, or use it in training_step, or detach it"
        )
