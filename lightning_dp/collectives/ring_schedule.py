"""The ring: which chunk goes where at which step, and the loop that moves the chunks.

After "Bringing HPC Techniques to Deep Learning" (A. Gibiansky, Baidu Research, 2017), sections "The Scatter-Reduce" and
"The Allgather". A rank sends to its right neighbour only and receives from its left neighbour only.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_dp.collectives.point_to_point import Transfer, post


def chunk_bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk: sizes differ by one at most, the larger first (as `torch.tensor_split`)."""
    size, larger = divmod(num_elements, num_chunks)
    begins = [chunk * size + min(chunk, larger) for chunk in range(num_chunks + 1)]
    return list(pairwise(begins))


def chunk_schedule(rank: int, world_size: int, step: int) -> tuple[int, int]:
    """(chunk that ``rank`` sends, chunk that it receives) at ``step``.

    "The nth GPU starts by sending chunk n and receiving chunk n - 1, and then proceeds backwards." Steps 0 ... N-2
    are the scatter-reduce; the all-gather (steps N-1 ... 2N-3), which "starts by sending the n+1th chunk", goes on in
    the same sequence, for n + 1 = n - (N-1) modulo N.
    """
    return (rank - step) % world_size, (rank - step - 1) % world_size


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
    """Run ``num_reducing`` steps that add what arrives and then ``num_copying`` steps that keep it, in place.

    Args:
        flat: (K,) contiguous; the same K and dtype on every rank, and all other arguments too.
        group: the ranks of the ring, in its order.
        num_reducing: N-1 for a reduction, else 0.
        num_copying: N-1 for the all-gather, else 0.
        position: place in the schedule; this rank's own where None. One less leaves the sum of chunk n on rank n.
        segment_bytes: chunks are cut in pieces of about this size, and each piece goes on by itself: while piece j
            is added, the next ones arrive, and the piece that went before is on its way to the neighbour.
        wire_dtype: what messages are cast to. Sums stay in ``flat.dtype``.

    A sum is rounded to ``wire_dtype`` at each hop, and its last owner keeps the rounded sum as the others get it: all
    ranks end with the same bits.
    """
    rank, world_size = group.rank(), group.size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    position = rank if position is None else position
    chunks = [flat[begin:end] for begin, end in chunk_bounds(flat.numel(), world_size)]
    wire_dtype = wire_dtype or flat.dtype
    num_segments = max(1, math.ceil(chunks[0].numel() * wire_dtype.itemsize / segment_bytes))
    pieces = [chunk.tensor_split(num_segments) for chunk in chunks]
    casts = wire_dtype != flat.dtype
    # Chunk 0 is the largest, and so is each of its pieces.
    inbox = [torch.empty_like(piece, dtype=wire_dtype) for piece in pieces[0]] if num_reducing or casts else []

    def arrival(step: int, segment: int) -> torch.Tensor:
        piece = pieces[chunk_schedule(position, world_size, step)[1]][segment]
        # A copying step may write over a piece that was sent before: the sum that arrives contains what was sent.
        return inbox[segment][: piece.numel()] if step < num_reducing or casts else piece

    def start(step: int, segment: int) -> tuple[Transfer, Transfer]:
        piece = pieces[chunk_schedule(position, world_size, step)[0]][segment]
        outgoing = piece.to(wire_dtype)
        if casts and step == num_reducing:
            piece.copy_(outgoing)
        (received,), (sent,) = post(group, [(arrival(step, segment), left)], [(outgoing, right)])
        return received, sent

    def accept(step: int, segment: int) -> None:
        piece = pieces[chunk_schedule(position, world_size, step)[1]][segment]
        if step < num_reducing:
            piece.add_(arrival(step, segment))
        elif casts:
            piece.copy_(arrival(step, segment))

    num_steps = num_reducing + num_copying
    on_the_way = [start(0, segment) for segment in range(num_segments)] if num_steps else []
    for step in range(num_steps):
        for segment in range(num_segments):
            received, sent = on_the_way[segment]
            received.wait()
            accept(step, segment)
            if step + 1 < num_steps:
                on_the_way[segment] = start(step + 1, segment)
            sent.wait()
