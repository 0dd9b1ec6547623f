"""Compressors of gradients: 16 bits, 8 bits with error feedback, and PowerSGD. What each sends, keeps and counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.collectives.compression.layout import BLOCK, BucketShard, ParameterInfo, ParamSlice, num_blocks
from lightning_dp.collectives.compression.options import Compression, PowerSGD
from lightning_dp.collectives.compression.wire import Transport, complete, in_segments
from lightning_dp.collectives.point_to_point import wait_for_all


class Compressor(ABC):
    """Sums pieces of gradient buckets over the ranks that carry them, with fewer bytes than the gradients have.

    Attributes:
        residuals: what was left out, by parameter; stays empty without error feedback.
    """

    def __init__(self) -> None:
        self.residuals = Residuals()

    @abstractmethod
    def start(self, tensor: Tensor, piece: BucketShard, wire: Transport) -> Iterator[None]:
        """Replace ``tensor``, (numel of the piece,), by about its sum over the ranks of ``wire``, in place.

        Every rank that carries the piece must call it, for the same pieces in the same order. The result is bitwise
        identical on all of them, and does not depend on how parameters are distributed over buckets. Sums are in
        float32, or float64 for float64 gradients.

        Returns:
            The sum that is under way: an iterator that yields at most once, when its last messages have been started.
            Meanwhile the next sum may be started. ``tensor`` holds the sum when the iterator has ended.
        """

    def all_reduce(self, tensor: Tensor, piece: BucketShard, wire: Transport) -> None:
        """Do what `start` begins, and return when ``tensor`` holds the sum."""
        complete(self.start(tensor, piece, wire))

    def keeps_residual(self, info: ParameterInfo) -> bool:
        """Return whether the compressor ever keeps a residual of a parameter; the same on all ranks."""
        return False

    def clear(self) -> None:
        """Forget residuals and all other state."""
        self.residuals.clear()

    def state_of(self, info: ParameterInfo) -> dict[str, Tensor | int]:
        """Return what the compressor keeps of a parameter besides the residual; the same on all carriers."""
        return {}

    def load_state_of(self, info: ParameterInfo, state: dict[str, Tensor | int]) -> None:  # noqa: B027
        """Continue with what `state_of` has returned."""


class SixteenBit(Compressor):
    """Messages of 16 bits: each group's sum is rounded once, and the sum of three or more groups once more.

    Torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` also add in 16 bits. There is no error feedback: the
    rounding is about as small as the noise of the gradient.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``. A value beyond 65504 becomes infinite in float16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    @override
    def start(self, tensor: Tensor, piece: BucketShard, wire: Transport) -> Iterator[None]:
        return wire.all_reduce(tensor, self._dtype, torch.promote_types(tensor.dtype, torch.float32))


# --- Error feedback: what compression left out of each gradient, to be added to the next one.
#
# Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019 (arXiv 1901.09847) show why SGD needs it.


class Residuals:
    """The residual of each parameter, or of the part of it that this rank carries.

    A residual has the scale of the gradient that is averaged over all ranks. The sum of all ranks' residuals is what
    has not reached the parameters yet.
    """

    def __init__(self) -> None:
        self._held: dict[ParameterInfo, tuple[int, Tensor]] = {}  # where it begins in the parameter, and the elements

    def get(self, part: ParamSlice) -> Tensor | None:
        """Return the residual of ``part``, (numel,), or None if there is none yet."""
        if part.info not in self._held:
            return None
        begin, held = self._held[part.info]
        assert begin <= part.begin <= part.end <= begin + len(held), "the residual lies on another rank"
        return held[part.begin - begin : part.end - begin]

    def keep(self, part: ParamSlice, residual: Tensor) -> None:
        """Replace the residual of the parameter by that of ``part``, (numel,), which is kept without a copy."""
        self._held[part.info] = (part.begin, residual)

    def drop(self, info: ParameterInfo) -> None:
        """Forget the residual of a parameter."""
        self._held.pop(info, None)

    def clear(self) -> None:
        """Forget all residuals."""
        self._held.clear()

    def expanded(self, info: ParameterInfo) -> Tensor:
        """Return the residual of the whole parameter, (numel,): zero where this rank holds nothing. A copy."""
        whole = torch.zeros(info.numel, dtype=info.dtype)
        if info in self._held:
            begin, held = self._held[info]
            whole[begin : begin + len(held)] = held
        return whole


# --- 8-bit compression: integers with a scale for each block of a parameter's gradient, with error feedback.
#
# Blockwise symmetric quantization to the nearest integer. All roundings, that of each group's sum and that of the sum
# of more than two groups, are fed back, as in DoubleSqueeze (Tang et al. 2019, arXiv 1905.05957, Algorithm 1).

LARGEST = 127  # -128 is not used, so that a gradient and its negative are rounded alike
SCALE_BYTES = 4  # float32


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
    def start(self, tensor: Tensor, piece: BucketShard, wire: Transport) -> Iterator[None]:
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

    def _exchanges(self, values: Tensor, sums: Tensor, piece: BucketShard, wire: Transport) -> list[Iterator[None]]:
        length = wire.segment // BLOCK
        blocks = zip(in_segments(values, length), in_segments(sums, length), strict=True)
        if wire.is_pair:
            return [_exchange_all(*each, wire) for each in blocks]
        owners = in_segments(_owner(piece.parts, wire.num_ranks), length)
        return [_exchange_owned(*each, owner, wire) for each, owner in zip(blocks, owners, strict=True)]

    @override
    def keeps_residual(self, info: ParameterInfo) -> bool:
        return self._error_feedback

    def _with_residual(self, tensor: Tensor, piece: BucketShard) -> Tensor:
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


def _exchange_all(values: Tensor, sums: Tensor, wire: Transport) -> Iterator[None]:
    """Do what `_exchange_owned` does, between two carriers: each sends all blocks, and both add. One rounding only."""
    messages, transfers = wire.start_swap(quantize(values))
    yield
    wait_for_all(transfers)
    first, second = (dequantize(message, sums.dtype) for message in messages)
    torch.add(first, second, out=sums)


def _exchange_owned(values: Tensor, sums: Tensor, owner: Tensor, wire: Transport) -> Iterator[None]:
    """Write the carriers' sum of blocks (R, `BLOCK`) to ``sums``, and leave the residual in ``values``."""
    # In the order of their owners, what goes to one of them is a slice: one call packs the messages to all.
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=wire.num_ranks).tolist()
    # Step 1: each carrier sends every owner its blocks.
    outgoing = quantize(values).index_select(0, order).split(counts)
    inbox = outgoing[wire.rank].new_empty(wire.num_ranks, *outgoing[wire.rank].shape)
    transfers = wire.start(outgoing, list(inbox))
    yield
    wait_for_all(transfers)
    total = dequantize(inbox[0], values.dtype)
    for message in inbox[1:]:
        total += dequantize(message, values.dtype)
    # Step 2: each owner sends all carriers its sums.
    outbox = inbox.new_empty(len(owner), inbox.shape[-1])
    transfers = wire.start([quantize(total)] * wire.num_ranks, outbox.split(counts))
    # An owner has also rounded its own contribution, so both roundings add up in its residual.
    values.index_add_(0, order.split(counts)[wire.rank], total)
    yield
    wait_for_all(transfers)
    for rows, message in zip(order.split(counts), outbox.split(counts), strict=True):
        sums.index_copy_(0, rows, dequantize(message, sums.dtype))


def quantize(values: Tensor) -> Tensor:
    """Round blocks, (R, `BLOCK`), to integers, and leave in ``values`` what the rounding leaves out.

    The largest element of a block becomes 127 or -127. A block with an element that is infinite or NaN decodes to NaN,
    so that a reader of the gradient sees it, and leaves nothing out, so that the next step is not affected.

    Returns:
        The message: each block's scale and integers as bytes, (R, `SCALE_BYTES` + `BLOCK`).
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
    scales.masked_fill_(is_bad, float("nan"))
    return torch.cat([scales[:, None].view(torch.uint8), integers.view(torch.uint8)], 1)


def dequantize(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the blocks that `quantize` has put into ``message``, as values, (R, `BLOCK`)."""
    scales = message[:, :SCALE_BYTES].contiguous().view(torch.float32)
    return message[:, SCALE_BYTES:].view(torch.int8).to(dtype).mul_(scales.to(dtype))


def _rows_of(parts: Sequence[ParamSlice]) -> list[slice]:
    """Return which rows of the blocks hold each part."""
    bounds = accumulate((num_blocks(part.numel) for part in parts), initial=0)
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _owner(parts: Sequence[ParamSlice], num_ranks: int) -> Tensor:
    """Return which rank owns each row."""
    numbers = [torch.arange(num_blocks(part.numel)) + (part.info.first_block + part.begin // BLOCK) for part in parts]
    return torch.cat(numbers) % num_ranks


# --- PowerSGD: gradients approximated by low-rank factors (Vogels et al. 2019, arXiv 1905.13727).
#
# The arithmetic follows PyTorch's ``powerSGD_hook``, with two differences. The residual of a group is what its own
# gradient loses in the projection, as in the paper's Algorithm 2; PyTorch's also holds by how much the gradient differs
# from the others' mean. And state belongs to a parameter, not to a bucket.


class _Matrix(NamedTuple):
    """One gradient in a step of PowerSGD."""

    part: ParamSlice
    here: Tensor  # its elements in the bucket, (numel,)
    values: Tensor  # gradient plus residual, (n, m)
    right: Tensor  # Q of the step before, with orthonormal columns, (m, rank)


class PowerSGDCompressor(Compressor):
    """PowerSGD with warm start. A piece must consist of whole parameters.

    Args:
        options: the user's.
    """

    def __init__(self, options: PowerSGD) -> None:
        super().__init__()
        self._options = options
        self._right: dict[ParameterInfo, Tensor] = {}  # Q of the last step
        self._num_exact: dict[ParameterInfo, int] = {}  # sums of a parameter before `start_step`

    @override
    def start(self, tensor: Tensor, piece: BucketShard, wire: Transport) -> Iterator[None]:
        assert all(part.numel == part.info.numel for part in piece.parts), "a matrix cannot be approximated in parts"
        whole: list[Tensor] = []
        matrices: list[_Matrix] = []
        for part, here in zip(piece.parts, piece.split(tensor), strict=True):
            matrix = self._begin(part, here)
            if matrix is None:
                whole.append(here)
            else:
                matrices.append(matrix)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        # Gradients that are sent whole travel with the first factors: a message fewer.
        lefts, summing = _start_sum([*whole, *(matrix.values @ matrix.right for matrix in matrices)], dtype, wire)
        if matrices:
            complete(summing)  # the second factors follow from the sums of the first
        else:
            yield from summing
        for here, total in zip(whole, lefts[: len(whole)], strict=True):
            here.copy_(total)
        if not matrices:
            return
        lefts = [orthonormal(left) for left in lefts[len(whole) :]]
        own_rights = [matrix.values.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights, summing = _start_sum(own_rights, dtype, wire)
        yield from summing
        for matrix, left, own_right, right in zip(matrices, lefts, own_rights, rights, strict=True):
            self._finish(matrix, left, own_right, right)

    def rank_of(self, info: ParameterInfo) -> int | None:
        """Return the rank of the factors, or None if the gradient is sent whole."""
        shape = info.matrix_shape
        return None if shape is None else self._options.rank_of(*shape)

    def _begin(self, part: ParamSlice, here: Tensor) -> _Matrix | None:
        """Return a gradient that is compressed. None: it is sent whole, always or in the first steps, which count."""
        info = part.info
        shape = info.matrix_shape
        rank = self.rank_of(info)
        if shape is None or rank is None:
            return None
        num_exact = self._num_exact.get(info, 0)
        if num_exact < self._options.start_step:
            self._num_exact[info] = num_exact + 1
            return None
        residual = self.residuals.get(part)
        # A copy: BLAS rounds by the alignment of memory, and a place in the bucket must not change the bits.
        values = here.to(info.dtype, copy=True) if residual is None else residual + here
        right = self._right.get(info)
        if right is None:
            # The same on all ranks, and the same whichever bucket comes first.
            generator = torch.Generator().manual_seed(info.index)
            right = torch.randn(shape[1], rank, dtype=info.dtype, generator=generator)
        return _Matrix(part, here, values.view(shape), orthonormal(right))

    def _finish(self, matrix: _Matrix, left: Tensor, own_right: Tensor, right: Tensor) -> None:
        """Write the low-rank approximation of the sum, ``left @ right.T``; store the local error as residual."""
        info = matrix.part.info
        left_out = torch.addmm(matrix.values, left, own_right.T, alpha=-1) if self._options.error_feedback else None
        matrix.here.copy_((left @ right.T).view(-1))
        if not right.sum().isfinite():
            # Infinite or NaN gradients, on all carriers alike: do not carry them into the next step.
            self.residuals.drop(info)
            self._right.pop(info, None)
            return
        self._right[info] = right
        if left_out is not None:
            self.residuals.keep(matrix.part, left_out.view(-1))

    @override
    def clear(self) -> None:
        super().clear()
        self._right.clear()
        self._num_exact.clear()

    @override
    def keeps_residual(self, info: ParameterInfo) -> bool:
        return self._options.error_feedback and self.rank_of(info) is not None

    @override
    def state_of(self, info: ParameterInfo) -> dict[str, Tensor | int]:
        kept: dict[str, Mapping[ParameterInfo, Tensor | int]] = {"right": self._right, "num_exact": self._num_exact}
        return {name: of_parameters[info] for name, of_parameters in kept.items() if info in of_parameters}

    @override
    def load_state_of(self, info: ParameterInfo, state: dict[str, Tensor | int]) -> None:
        right = state.get("right")
        shape = info.matrix_shape
        # Another rank than before: the factors start from the beginning.
        if isinstance(right, Tensor) and shape is not None and right.shape == (shape[1], self.rank_of(info)):
            self._right[info] = right.to(info.dtype)
        if "num_exact" in state:
            self._num_exact[info] = int(state["num_exact"])


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of ``matrix``, (n, r) with n >= r; any basis where columns vanish."""
    return torch.linalg.qr(matrix)[0]


def _start_sum(tensors: list[Tensor], dtype: torch.dtype, wire: Transport) -> tuple[list[Tensor], Iterator[None]]:
    """Return the sums of several tensors over the ranks, and the one all-reduce of ``dtype`` that fills them."""
    flat = torch.cat([tensor.to(dtype).reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    sums = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return sums, wire.all_reduce(flat, dtype, dtype)


# --- The compressor of each choice.


def make_compressor(compression: Compression) -> Compressor:
    """Return a new compressor for a choice that `check_compression` accepts, other than None."""
    if isinstance(compression, PowerSGD):
        return PowerSGDCompressor(compression)
    if compression == "int8":
        return Int8()
    return SixteenBit(torch.bfloat16 if compression == "bf16" else torch.float16)


# --- Bytes that stand for a gradient in a compressed all-reduce, from the shapes of its parameters.

FLOAT_BYTES = 4


def message_bytes(shapes: Iterable[Sequence[int]], compression: Compression | None) -> int:
    """Return the bytes of one copy of these parameters' gradients, as they travel. Gradients are float32.

    An all-reduce of N carriers sends 2 (N-1)/N of them from each; of more than two, half on the way to the sum and half
    on the way back, compressed both ways. Exact for parameters that are contiguous and not cut into shards.

    Args:
        shapes: of the parameters.
        compression: as `LayeredSGDStrategy` takes it. None: 4 bytes for each element.
    """
    return sum(_parameter_bytes(shape, compression) for shape in shapes)


def _parameter_bytes(shape: Sequence[int], compression: Compression | None) -> int:
    numel = math.prod(shape)
    if compression is None:
        return FLOAT_BYTES * numel
    if compression == "int8":
        return num_blocks(numel) * (BLOCK + SCALE_BYTES)
    if not isinstance(compression, PowerSGD):
        return 2 * numel
    if len(shape) < 2 or numel == 0:
        return FLOAT_BYTES * numel
    rows = shape[0]
    columns = numel // rows
    rank = compression.rank_of(rows, columns)
    return FLOAT_BYTES * (numel if rank is None else (rows + columns) * rank)
