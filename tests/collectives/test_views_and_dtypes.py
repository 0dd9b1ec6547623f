"""Views with a pending conjugation or negation, and dtypes that PyTorch cannot add."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.collectives import (
    chunk_bounds,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    star_all_reduce,
)
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.groups import all_gather
from lightning_dp.collectives.small_all_gather import small_all_gather
from tests.ranks import run_threads

WORLD_SIZE, SIZE = 3, 7
VIEWS = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: torch._neg_view(z.imag.contiguous()),
    "imaginary part of a conjugate": lambda z: z.conj().imag,
    "transposed conjugate": lambda z: z.conj().view(SIZE, 1).mT,
}


def numbers(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.complex128, generator=torch.Generator().manual_seed(rank))


def materialized(view: str) -> torch.Tensor:
    """(ranks, SIZE): the values that the views of all ranks stand for."""
    views = [VIEWS[view](numbers(rank)) for rank in range(WORLD_SIZE)]
    return torch.stack([tensor.resolve_conj().resolve_neg().flatten() for tensor in views])


def communicate(rank, group, view):
    def made():
        tensor = VIEWS[view](numbers(rank))
        assert tensor.is_conj() or tensor.is_neg()
        return tensor

    sums = [function(made(), group) for function in (ring_all_reduce, star_all_reduce)]
    chunk = ring_reduce_scatter(made(), group)
    gathered = ring_all_gather(made(), group)
    received = torch.empty(WORLD_SIZE, *made().shape, dtype=made().dtype)
    Channel(group).all_to_all("views", [made()] * WORLD_SIZE, list(received)).wait()
    received[rank] = made()
    rows = [gather(made(), group) for gather in (all_gather, small_all_gather)]
    clean = [t.resolve_conj().resolve_neg() for t in (*sums, chunk, gathered, received, *rows)]
    return clean[:2], clean[2], clean[3], clean[4:]


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_sent_as_the_values_that_they_stand_for(view):
    expected = materialized(view)
    bounds = chunk_bounds(SIZE, WORLD_SIZE)
    for rank, (sums, chunk, gathered, rows) in enumerate(run_threads(WORLD_SIZE, communicate, view)):
        begin, end = bounds[rank]
        for result in sums:
            torch.testing.assert_close(result.flatten(), expected.sum(0))
        torch.testing.assert_close(chunk, expected.sum(0)[begin:end])
        own_chunks = [expected[owner, begin:end] for owner, (begin, end) in enumerate(bounds)]
        assert torch.equal(gathered.flatten(), torch.cat(own_chunks))
        for result in rows:
            assert torch.equal(result.flatten(1), expected)


def reduce_inference_tensors(rank, group):
    sums = []
    for function in (ring_all_reduce, star_all_reduce):
        for step in (1, 2):  # with 2 the tensor is not contiguous, so that the sum is copied into it
            with torch.inference_mode():
                tensor = (torch.arange(8.0) + rank)[::step]
            sums.append(function(tensor, group).tolist())
    return sums


def test_tensors_of_inference_mode_can_be_summed_outside_of_it():
    whole = torch.arange(8.0) * 2 + 1
    assert run_threads(2, reduce_inference_tensors) == [[whole.tolist(), whole[::2].tolist()] * 2] * 2


CANNOT_BE_ADDED = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def refuse_and_continue(rank, group, dtype):
    bits = (torch.arange(SIZE * dtype.itemsize, dtype=torch.uint8) * (rank == 0)).view(dtype)
    with pytest.raises(ValueError, match=f"cannot compute the sum of {dtype} on cpu; cast the tensor"):
        ring_all_reduce(bits.clone(), group)
    with pytest.raises(ValueError, match=f"cannot compute the sum of {dtype}"):
        ring_reduce_scatter(bits.clone(), group)
    with pytest.raises(ValueError, match=f"cannot compute the sum of {dtype}"):
        star_all_reduce(bits.clone(), group)
    if dtype.is_floating_point:
        with pytest.raises(ValueError, match=f"cannot compute the mean of {dtype}"):
            ring_all_reduce(bits.clone(), group, "mean")
    gathered = ring_all_gather(bits.clone(), group)
    begin, end = chunk_bounds(SIZE, WORLD_SIZE)[0]
    return gathered[begin:end].view(torch.uint8).tolist(), bits[begin:end].view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", CANNOT_BE_ADDED, ids=str)
def test_dtypes_that_cannot_be_added_are_refused_on_all_ranks_and_can_be_gathered(dtype):
    results = run_threads(WORLD_SIZE, refuse_and_continue, dtype)
    sent = results[0][1]
    assert [gathered for gathered, _ in results] == [sent] * WORLD_SIZE


def reduce_quantized(rank, group):
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    message = r"a quantized tensor \(torch.quint8\) cannot be sent; use \.dequantize\(\)"
    for function in (ring_all_reduce, ring_all_gather, star_all_reduce):
        with pytest.raises(ValueError, match=message):
            function(quantized, group)
    assert ring_all_reduce(torch.ones(1), group).item() == 2


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors_are_refused():
    run_threads(2, reduce_quantized)
