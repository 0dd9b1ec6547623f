"""Which chunk each rank sends at which step. Integers only, no communication."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.collectives import chunk_bounds, chunk_schedule


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_schedule_moves_each_chunk_around_the_ring(world_size):
    ranks, steps = range(world_size), range(2 * (world_size - 1))
    for step in steps:
        for rank in ranks:
            _, receives = chunk_schedule(rank, world_size, step)
            assert receives == chunk_schedule((rank - 1) % world_size, world_size, step)[0]
            if step + 1 < len(steps):
                assert chunk_schedule(rank, world_size, step + 1)[0] == receives
    # The ranks whose values each chunk contains, as in the figures of the paper.
    held = [[{rank} for _ in ranks] for rank in ranks]
    for step in steps:
        arriving = {rank: held[(rank - 1) % world_size][chunk_schedule(rank, world_size, step)[1]] for rank in ranks}
        for rank, contribution in arriving.items():
            chunk = chunk_schedule(rank, world_size, step)[1]
            if step < world_size - 1:
                assert not held[rank][chunk] & contribution, "a value would be added twice"
                held[rank][chunk] = held[rank][chunk] | contribution
            else:
                held[rank][chunk] = contribution
    assert held == [[set(ranks) for _ in ranks] for _ in ranks]


def test_the_schedule_is_that_of_the_paper():
    # The tables for five GPUs: first iteration of the scatter-reduce and of the allgather.
    assert [chunk_schedule(rank, 5, 0) for rank in range(5)] == [(0, 4), (1, 0), (2, 1), (3, 2), (4, 3)]
    assert [chunk_schedule(rank, 5, 4) for rank in range(5)] == [(1, 0), (2, 1), (3, 2), (4, 3), (0, 4)]


@pytest.mark.parametrize(("size", "chunks"), [(0, 3), (2, 3), (9, 3), (11, 4)])
def test_chunks_are_those_of_tensor_split(size, chunks):
    expected = [piece.tolist() for piece in torch.arange(size).tensor_split(chunks)]
    assert [list(range(begin, end)) for begin, end in chunk_bounds(size, chunks)] == expected
