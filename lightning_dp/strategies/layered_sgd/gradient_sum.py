"""The interface between the strategy and its two communicators: one sums on the host, one on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lightning_dp.collectives.compression.stages import CompressedAllReduce

# How long `GradientCommunicator.close` waits for what is under way, in its thread and on the device. With a dead peer
# it need never end.
CLOSE_LIMIT_S = 5.0
WAIT = "wait"
"""The stage in which a thread of the training program waits for a sum; see `OnStage`."""


class Pending(Protocol):
    """What `torch.distributed.Work` offers of a collective that is under way."""

    def wait(self) -> object:
        """Return when its result is there."""

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, immediately."""


class GradientSum(Protocol):
    """The sum of one gradient bucket over all ranks, which may be under way."""

    @property
    def buffer(self) -> Tensor:
        """Flat gradient buffer of the bucket, (numel,), reduced in place."""

    @property
    def has_arrived(self) -> bool:
        """Whether work that is queued after `wait` would not have to wait."""

    def wait(self) -> None:
        """Return when ``buffer`` holds the sum; on a GPU, when work that is queued from now on will see it.

        It issues no collective, so one rank alone may call it.

        Raises:
            RuntimeError: the sum failed.
        """


class GradientCommunicator(Protocol):
    """Sums gradient buckets over all ranks while the rank computes: `Communicator`, or `DeviceCommunicator`."""

    compressed: CompressedAllReduce | None

    def submit(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = (), fills: Sequence[Pending] = ()
    ) -> GradientSum:
        """Begin with a bucket that backward has filled; on a GPU, whose kernels backward has launched.

        All ranks submit the same buckets in the same order.

        Args:
            index: DDP's number of the bucket.
            buffer: (numel,), changed in place.
            parameters: whose gradients lie in the buffer, in its order.
            fills: what is under way and fills the buffer; only in host memory.
        """

    def release(self) -> None:
        """Begin with all buckets that were held back until backward has ended. All ranks call it."""

    def close(self) -> None:
        """Give up what was not released, and free groups and threads."""
