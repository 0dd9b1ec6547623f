"""The ring: which chunk each rank sends at which step, and the loop that moves the chunks.

A. Gibiansky, "Bringing HPC Techniques to Deep Learning" (Baidu Research, 2017), sections "The Scatter-Reduce" and "The
Allgather". "Scatter-reduce" is the source's name for reduce-scatter. A rank sends to its right neighbor only and
receives from its left neighbor only.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_dp.collectives.point_to_point import Transfer, post


def chunk_bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return begin and end of each chunk, larger first. Sizes differ by at most one, as in `torch.tensor_split`."""
    size, num_larger = divmod(num_elements, num_chunks)
    begins = [chunk * size + min(chunk, num_larger) for chunk in range(num_chunks + 1)]
    return list(pairwise(begins))


def chunk_schedule(rank: int, world_size: int, step: int) -> tuple[int, int]:
    """Return (chunk that ``rank`` sends, chunk that it receives) at ``step``.

    "The nth GPU starts by sending chunk n and receiving chunk n - 1, and then proceeds backwards." Steps 0 ... N-2
    are the reduce-scatter. The all-gather, steps N-1 ... 2N-3, "starts by sending the n+1th chunk". It continues the
    same sequence, because n + 1 = n - (N-1) modulo N.
    """
    return (rank - step) % world_size, (rank - step - 1) % world_size


# Long because the inner functions and the loop share one schedule.
def run_ring(
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    num_reducing: int,
    num_copying: int,
    segment_bytes: int,
    position: int | None = None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Run ``num_reducing`` steps that add the received chunk, then ``num_copying`` steps that store it, in place.

    Every rank of the group must call it with the same arguments, except for ``position``. A partial sum is rounded to
    ``wire_dtype`` at each hop. The rank that completes a sum rounds its own copy too, so that the result is bitwise
    identical on all ranks.

    Args:
        flat: (numel,) contiguous, with the same size and dtype on every rank.
        group: the ranks of the ring, in its order.
        num_reducing: N-1 for a reduce-scatter, else 0.
        num_copying: N-1 for an all-gather, else 0.
        segment_bytes: approximate size of a message. Chunks are split into segments that move independently: while
            one segment is added, the following ones arrive, and the previous one is on its way to the neighbor.
        position: position of this rank in the schedule. None: its group rank. A rank at position p ends the
            reduce-scatter with the sum of chunk p + 1, so position n - 1 leaves chunk n on group rank n.
        wire_dtype: dtype of the messages. None: ``flat.dtype``. Sums are computed in ``flat.dtype``.
    """
    rank = group.rank()
    world_size = group.size()
    left = (rank - 1) % world_size
    right = (rank + 1) % world_size
    position = rank if position is None else position
    wire_dtype = wire_dtype or flat.dtype
    casts = wire_dtype != flat.dtype
    chunks = [flat[begin:end] for begin, end in chunk_bounds(flat.numel(), world_size)]
    # Chunk 0 is the largest. Every rank must compute the same number of segments, also for a smaller chunk.
    num_segments = max(1, math.ceil(chunks[0].numel() * wire_dtype.itemsize / segment_bytes))
    pieces = [chunk.tensor_split(num_segments) for chunk in chunks]
    # Messages that must be added or cast arrive here. The segments of chunk 0 are at least as large as any other.
    inbox = [torch.empty_like(piece, dtype=wire_dtype) for piece in pieces[0]] if num_reducing or casts else []

    def destination(step: int, segment: int) -> torch.Tensor:
        piece = pieces[chunk_schedule(position, world_size, step)[1]][segment]
        if step < num_reducing or casts:
            return inbox[segment][: piece.numel()]
        # This may overwrite a piece whose own send has not been awaited. That is safe: the piece was sent in the
        # reduce-scatter, and the sum that arrives now includes it, so it has been received.
        return piece

    def start(step: int, segment: int) -> tuple[Transfer, Transfer]:
        piece = pieces[chunk_schedule(position, world_size, step)[0]][segment]
        outgoing = piece.to(wire_dtype)
        if casts and step == num_reducing:
            # First step of the all-gather. This rank holds the exact sum and the others will get the rounded one.
            piece.copy_(outgoing)
        (received,), (sent,) = post(group, [(destination(step, segment), left)], [(outgoing, right)])
        return received, sent

    def accept(step: int, segment: int) -> None:
        piece = pieces[chunk_schedule(position, world_size, step)[1]][segment]
        if step < num_reducing:
            piece.add_(destination(step, segment))
        elif casts:
            piece.copy_(destination(step, segment))

    num_steps = num_reducing + num_copying
    in_flight = [start(0, segment) for segment in range(num_segments)] if num_steps else []
    for step in range(num_steps):
        for segment in range(num_segments):
            received, sent = in_flight[segment]
            received.wait()
            accept(step, segment)
            # What was just received is what the next step sends. Starting it here, before the other segments of this
            # step have arrived, keeps the link to the right neighbor busy.
            if step + 1 < num_steps:
                in_flight[segment] = start(step + 1, segment)
            sent.wait()
