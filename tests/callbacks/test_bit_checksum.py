from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.callbacks import ranks_agree
from lightning_dp.callbacks.ranks_agree import bit_checksum
from tests.ranks import run_processes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]
SIZE = 1000


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch) -> None:
    monkeypatch.setattr(ranks_agree, "_CHUNK_ELEMENTS", 300)
    ranks_agree._weights.cache_clear()
    yield
    ranks_agree._weights.cache_clear()


def numbers(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_changes_the_checksum(dtype):
    tensor = numbers(dtype)
    expected = bit_checksum(tensor)
    assert expected.shape == ()
    assert torch.equal(bit_checksum(tensor.clone()), expected)
    flipped = tensor.clone()
    row = flipped.view(torch.uint8).view(SIZE, -1)
    for element in (0, 299, 300, SIZE - 1):
        for byte in range(row.shape[1]):
            for bit in range(1 if dtype == torch.bool else 8):
                row[element, byte] ^= 1 << bit
                assert not torch.equal(bit_checksum(flipped), expected), (element, byte, bit)
                row[element, byte] ^= 1 << bit
    assert torch.equal(bit_checksum(flipped), expected)


def test_order_and_size_change_the_checksum():
    tensor = numbers(torch.float32)
    expected = bit_checksum(tensor)
    for other in (tensor.flip(0), tensor.roll(300), tensor.roll(1), tensor[:-1], torch.cat([tensor, tensor[:1]])):
        assert not torch.equal(bit_checksum(other), expected)
    # Two changes that cancel in a sum.
    shifted = tensor.view(torch.int32).clone()
    shifted[5] += 1
    shifted[6] -= 1
    assert not torch.equal(bit_checksum(shifted.view(torch.float32)), expected)


def test_numbers_that_compare_equal_or_unequal_are_told_apart_by_their_bits():
    zero, negative_zero = torch.zeros(1), -torch.zeros(1)
    assert torch.equal(zero, negative_zero)
    assert not torch.equal(bit_checksum(zero), bit_checksum(negative_zero))
    assert torch.equal(bit_checksum(torch.tensor(math.nan)), bit_checksum(torch.tensor(math.nan)))


def test_strides_and_views_do_not_matter():
    matrix = numbers(torch.complex64).view(20, 50)
    for view in (matrix.T, matrix[:, ::3], matrix.conj(), matrix.imag, matrix.conj().imag):
        assert torch.equal(bit_checksum(view), bit_checksum(view.resolve_conj().resolve_neg().clone().contiguous()))
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    assert not bit_checksum(parameter).requires_grad
    assert bit_checksum(torch.empty(0)).item() == 0


def checksum_and_state(rank: int) -> tuple[int, bool]:
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    checksum = int(bit_checksum(numbers(torch.float32)))
    return checksum, torch.equal(torch.get_rng_state(), state)


def test_it_is_the_same_in_all_processes_and_draws_no_random_numbers():
    (first, first_kept), (second, second_kept) = run_processes(2, checksum_and_state)
    assert first == second
    assert first_kept
    assert second_kept
