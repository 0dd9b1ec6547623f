"""Compression as a communication hook of `DistributedDataParallel`, on CPU.

    model = DistributedDataParallel(module)
    model.register_comm_hook(CompressionState("int8"), compression_hook)

All ranks are carriers then: the sum is compressed between all of them, not only between groups.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, and would find strings.

import torch
import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from lightning_dp.collectives.bucket_queue import BucketQueue
from lightning_dp.collectives.compression.choice import make_compressor
from lightning_dp.collectives.compression.options import Compression, check_compression
from lightning_dp.collectives.compression.parameters import ParameterTable, whole_piece
from lightning_dp.collectives.compression.wire import Wire


class CompressionState(BucketQueue):
    """State of `compression_hook`: the compressor with its residuals, a process group, and the queue of buckets.

    It belongs to one model, and is not in checkpoints.

    Args:
        compression: ``"bf16"``, ``"fp16"``, ``"int8"`` or an instance of `PowerSGD`.
        group: as in `BucketQueue`.

    Raises:
        ValueError: the compressor is not known.
    """

    def __init__(self, compression: Compression, group: dist.ProcessGroup | None = None) -> None:
        check_compression(compression)
        if compression is None:
            raise ValueError("compression=None has nothing for a hook to do; register none, and DDP sums exactly")
        super().__init__(group, "compression_hook")
        self.compression = compression
        self._compressor = make_compressor(compression)
        self._parameters = ParameterTable()
        self._wire: Wire | None = None
        self._wire_group: dist.ProcessGroup | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return 0 if self._wire is None else self._wire.bytes_sent

    @override
    def _average(self, buffer: torch.Tensor, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        if self._wire is None or self._wire_group is not group:
            self._wire = Wire(group)
            self._wire_group = group
        buffer.div_(group.size())  # before the sum, so that 16-bit sums do not overflow
        piece = whole_piece([self._parameters(parameter) for parameter in parameters])
        self._compressor.all_reduce(buffer, piece, self._wire)


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of ``bucket`` over the ranks, compressed, while backward continues.

    Pass it to ``DistributedDataParallel.register_comm_hook(state, compression_hook)``. With Lightning's `DDPStrategy`,
    which ignores communication hooks on CPU, register it on ``trainer.strategy.model`` in ``on_train_start``.

    Args:
        state: a `CompressionState` of this model.
        bucket: gradients of one floating-point dtype, in host memory. Changed in place.

    Returns:
        A future of the bucket's buffer. ``backward()`` raises the errors of the worker thread.

    Raises:
        TypeError: ``state`` is not a `CompressionState`.
        ValueError: the gradients are not on the CPU.
    """
    if not isinstance(state, CompressionState):
        raise TypeError(f"the state of compression_hook is {state!r}; use CompressionState(compression)")
    buffer = bucket.buffer()
    if buffer.device.type != "cpu":
        raise ValueError(
            f"compression_hook sends messages from host memory, and these gradients are on {buffer.device}; use "
            "LayeredSGDStrategy(compression=...), which copies them, or PyTorch's own hooks"
        )
    return state.submit(buffer, bucket.parameters())
