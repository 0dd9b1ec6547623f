"""8-bit compression: integers with a scale for each block of a parameter's gradient, with error feedback.

Blockwise symmetric quantization to the nearest integer. All roundings, that of each group's sum and that of the sum of
more than two groups, are fed back, as in DoubleSqueeze (Tang et al. 2019, arXiv 1905.05957, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.collectives.compression.compressor import Compressor
from lightning_dp.collectives.compression.parameters import BLOCK, ParameterInfo, Part, Piece, num_blocks
from lightning_dp.collectives.compression.wire import SEGMENT, Wire, in_segments

LARGEST = 127  # -128 is not used, so that a gradient and its negative are rounded alike
SCALE_BYTES = 4  # float32


class Quantized(NamedTuple):
    """Blocks of integers, (R, `BLOCK`), and the scale of each, (R,)."""

    integers: Tensor
    scales: Tensor

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the values, (R, `BLOCK`)."""
        return self.integers.to(dtype).mul_(self.scales.to(dtype)[:, None])


class Int8(Compressor):
    """Sums of 8-bit integers with one float32 scale for each block of 256 elements.

    Two carriers send each other all blocks, and both add. Among more carriers every block has an owner, which adds what
    all of them send, and rounds the sum. The owner follows from the block's number in the whole model, not from its
    place in a bucket, so that residuals stay where they are when buckets are rebuilt, and are the same after a
    checkpoint is loaded.

    Args:
        error_feedback: False drops what is left out, for comparisons.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        super().__init__()
        self._error_feedback = error_feedback

    @override
    def start(self, tensor: Tensor, piece: Piece, wire: Wire) -> Iterator[None]:
        if not piece.parts:
            return
        values = self._with_residual(tensor, piece)
        is_padded = any(part.numel % BLOCK for part in piece.parts) or tensor.dtype != values.dtype
        sums = torch.empty_like(values) if is_padded else tensor.view(-1, BLOCK)
        yield from wire.run_in_turn(self._exchanges(values, sums, piece, wire))
        for part, rows, here in zip(piece.parts, _rows_of(piece.parts), piece.split(tensor), strict=True):
            if is_padded:
                here.copy_(sums[rows].view(-1)[: part.numel])
            if self._error_feedback:
                self.residuals.keep(part, values[rows].view(-1)[: part.numel])

    def _exchanges(self, values: Tensor, sums: Tensor, piece: Piece, wire: Wire) -> list[Iterator[None]]:
        length = SEGMENT // BLOCK
        blocks = zip(in_segments(values, length), in_segments(sums, length), strict=True)
        if wire.is_pair:
            return [_exchange_all(*each, wire) for each in blocks]
        owners = in_segments(_owner(piece.parts, wire.num_ranks), length)
        return [_exchange_owned(*each, owner, wire) for each, owner in zip(blocks, owners, strict=True)]

    @override
    def keeps_residual(self, info: ParameterInfo) -> bool:
        return self._error_feedback

    def _with_residual(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return gradient plus residual, in blocks (R, `BLOCK`); each part begins a block and is padded with zeros."""
        num_rows = sum(num_blocks(part.numel) for part in piece.parts)
        blocks = torch.zeros(num_rows, BLOCK, dtype=piece.parts[0].info.dtype)
        for part, rows, here in zip(piece.parts, _rows_of(piece.parts), piece.split(tensor), strict=True):
            place = blocks[rows].view(-1)[: part.numel]
            residual = self.residuals.get(part)
            if residual is None:
                place.copy_(here)
            else:
                torch.add(here, residual, out=place)
        return blocks


def _exchange_all(values: Tensor, sums: Tensor, wire: Wire) -> Iterator[None]:
    """Do what `_exchange_owned` does, between two carriers: each sends all blocks, and both add. One rounding only."""
    messages, exchange = wire.start_swap(_pack(quantize(values)))
    yield
    exchange.wait()
    first, second = (_unpack(message).decode(sums.dtype) for message in messages)
    torch.add(first, second, out=sums)


def _exchange_owned(values: Tensor, sums: Tensor, owner: Tensor, wire: Wire) -> Iterator[None]:
    """Write the carriers' sum of blocks (R, `BLOCK`) to ``sums``, and leave the residual in ``values``."""
    owned = _owned_rows(owner, wire.num_ranks)
    counts = torch.bincount(owner, minlength=wire.num_ranks).tolist()
    # Step 1: each carrier sends every owner its blocks.
    quantized = quantize(values)
    inbox = _empty_messages([counts[wire.rank]] * wire.num_ranks)
    exchange = wire.start([_pack(_select(quantized, rows)) for rows in owned], inbox)
    yield
    exchange.wait()
    total = _unpack(inbox[0]).decode(values.dtype)
    for message in inbox[1:]:
        total += _unpack(message).decode(values.dtype)
    # Step 2: each owner sends all carriers its sums.
    outbox = _empty_messages(counts)
    exchange = wire.start([_pack(quantize(total))] * wire.num_ranks, outbox)
    # An owner has also rounded its own contribution, so both roundings add up in its residual.
    values[owned[wire.rank]] += total
    yield
    exchange.wait()
    for rows, message in zip(owned, outbox, strict=True):
        sums[rows] = _unpack(message).decode(sums.dtype)


def quantize(values: Tensor) -> Quantized:
    """Round blocks, (R, `BLOCK`), to integers, and leave in ``values`` what the rounding leaves out.

    The largest element of a block becomes 127 or -127. A block with an element that is infinite or NaN decodes to NaN,
    so that a reader of the gradient sees it, and leaves nothing out, so that the next step is not affected.
    """
    largest = values.abs().amax(1)  # eight times as fast as `torch.linalg.vector_norm` and its infinity norm
    scales = (largest / LARGEST).to(torch.float32)
    # Below the smallest normal number the quotient would be too coarse to divide by. All of the block is left out then.
    scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
    is_bad = ~scales.isfinite()
    if is_bad.any():
        values.masked_fill_(is_bad[:, None], 0.0)
    wide = scales.masked_fill(is_bad, 1.0).to(values.dtype)[:, None]
    decoded = (values / wide).round_()
    integers = decoded.to(torch.int8)
    values.sub_(decoded.mul_(wide))
    return Quantized(integers, scales.masked_fill_(is_bad, float("nan")))


def _rows_of(parts: Sequence[Part]) -> list[slice]:
    """Return which rows of the blocks hold each part."""
    slices = []
    begin = 0
    for part in parts:
        slices.append(slice(begin, begin + num_blocks(part.numel)))
        begin += num_blocks(part.numel)
    return slices


def _owner(parts: Sequence[Part], num_ranks: int) -> Tensor:
    """Return which rank owns each row."""
    numbers = [torch.arange(num_blocks(part.numel)) + (part.info.first_block + part.begin // BLOCK) for part in parts]
    return torch.cat(numbers) % num_ranks


def _owned_rows(owner: Tensor, num_ranks: int) -> Sequence[slice | Tensor]:
    """Return the rows that each rank owns: as slices if all rows follow each other in the model, which is faster."""
    first = int(owner[0])
    if torch.equal(owner, (torch.arange(len(owner)) + first) % num_ranks):
        return [slice((rank - first) % num_ranks, None, num_ranks) for rank in range(num_ranks)]
    return [(owner == rank).nonzero().view(-1) for rank in range(num_ranks)]


def _select(quantized: Quantized, rows: slice | Tensor) -> Quantized:
    return Quantized(quantized.integers[rows], quantized.scales[rows])


def _pack(quantized: Quantized) -> Tensor:
    """Return scales and integers as the bytes of one message."""
    # A slice of one element may keep the stride of the whole, which cannot be viewed as bytes: hence the format.
    scales = quantized.scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat([scales, quantized.integers.reshape(-1).view(torch.uint8)])


def _unpack(message: Tensor) -> Quantized:
    num_rows = len(message) // (SCALE_BYTES + BLOCK)
    scales = message[: num_rows * SCALE_BYTES].view(torch.float32)
    return Quantized(message[num_rows * SCALE_BYTES :].view(torch.int8).view(-1, BLOCK), scales)


def _empty_messages(num_rows: Sequence[int]) -> list[Tensor]:
    return [torch.empty(count * (SCALE_BYTES + BLOCK), dtype=torch.uint8) for count in num_rows]
