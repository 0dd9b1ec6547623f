"""Checksum of the bits of a tensor, computed on the tensor's device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_dp.collectives.groups import dense

_CHUNK_ELEMENTS = 2**18
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D  # multiplier of a 64-bit linear congruential generator (Knuth)


@torch.no_grad()
def bit_checksum(tensor: Tensor) -> Tensor:
    """Return a checksum, () in int64, of the bits of ``tensor``, (*) of any dense dtype.

    The bits of each element are read as an integer, multiplied by a fixed odd number that depends on the position, and
    summed modulo 2^64. Multiplication by an odd number is invertible modulo 2^64. Therefore a change of a single
    element, by a single bit or more, always changes the checksum. For other changes the probability that it stays the
    same is about 2^-64. A sum of floating-point numbers would round small differences away.
    """
    flat = dense(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).view(-1)
    integers = flat.view(_INTEGERS[flat.itemsize])
    weights = _weights(tensor.device)
    checksum = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # In chunks, because the products take eight bytes per element.
    for chunk in torch.split(integers, _CHUNK_ELEMENTS):
        checksum = (checksum + (chunk * weights[: chunk.numel()]).sum()) * _ODD
    return checksum


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return the odd numbers, (_CHUNK_ELEMENTS,), which are the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(20340)
    numbers = torch.randint(-(2**62), 2**62, (_CHUNK_ELEMENTS,), generator=generator)
    return (2 * numbers + 1).to(device)
