"""The interface between the strategy and its two communicators: one sums on the host, one on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_dp.collectives.compression.stages import CompressedAllReduce

# How long `GradientCommunicator.close` waits for what is under way, in its thread and on the device. With a dead peer
# it need never end.
CLOSE_LIMIT_S = 5.0


class GradientSum(Protocol):
    """The sum of one gradient bucket over all ranks, which may be under way."""

    @property
    def buffer(self) -> Tensor:
        """The bucket's gradients, (numel,), in place of which the sum is put."""

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
    issue_order: IssueOrder | None
    """What is to be told of the parameters' uses in a forward, until it has been measured."""

    def submit(self, index: int, buffer: Tensor, parameters: Sequence[Tensor] = ()) -> GradientSum:
        """Begin with a bucket that backward has filled; on a GPU, whose kernels backward has launched.

        All ranks submit the same buckets in the same order.

        Args:
            index: DDP's number of the bucket.
            buffer: (numel,), changed in place.
            parameters: whose gradients lie in the buffer, in its order.
        """

    def release(self) -> None:
        """Begin with all buckets that were held back until backward has ended. All ranks call it."""

    def close(self) -> None:
        """Give up what was not released, and free groups and threads."""


# --- The order in which sums are issued that had to wait for the end of backward: that of rank 0's second forward.


class IssueOrder:
    """Sorts buckets by the first use of their parameters, as rank 0 has seen it once.

    In the hook, the order is that in which backward fills the buckets. After backward all of them are there, and the
    next forward needs first what backward has filled last. All ranks must issue in one order, and ranks may use other
    parameters in other orders. So rank 0's order counts: it is measured in the forward after the first backward, sent
    to all ranks once, and not changed any more.

    Args:
        parameters: of the module, in one order on all ranks.
        broadcast: replaces a tensor by rank 0's, on all ranks. Each rank calls it at the same place in its program.
        device: of that tensor.
    """

    def __init__(self, parameters: Iterable[Tensor], broadcast: Callable[[Tensor], None], device: torch.device) -> None:
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._broadcast = broadcast
        self._device = device
        self._uses: dict[Tensor, int] = {}
        self._num_sorted = 0
        self._places: list[int] = []  # of each parameter; those that rank 0 has not seen come last

    @property
    def is_measured(self) -> bool:
        """Whether nothing more has to be noted."""
        return bool(self._places)

    def note_use(self, parameter: Tensor) -> None:
        """Note that the forward uses ``parameter``. Only the first use counts."""
        if not self.is_measured:
            self._uses.setdefault(parameter, len(self._uses))

    def sort(self, buckets: Sequence[tuple[int, Sequence[Tensor]]]) -> list[int]:
        """Return the positions of ``buckets`` in the order in which they are to be issued.

        All ranks must call it with the same buckets. The second call sends rank 0's order to all ranks.

        Args:
            buckets: index and parameters of each. Among those that rank 0 has not seen in use, the highest index comes
                first: DDP gives it to the layers nearest the input.
        """
        self._num_sorted += 1
        if self._num_sorted == 2:
            self._agree()
        return sorted(range(len(buckets)), key=lambda position: self._key(*buckets[position]))

    def _agree(self) -> None:
        last = len(self._numbers)
        places = torch.tensor([self._uses.get(parameter, last) for parameter in self._numbers], device=self._device)
        self._broadcast(places)
        self._places = places.tolist()
        self._uses.clear()

    def _key(self, index: int, parameters: Sequence[Tensor]) -> tuple[int, int]:
        last = len(self._numbers)
        places = [self._places[self._numbers[p]] for p in parameters if p in self._numbers] if self._places else []
        return min(places, default=last), -index
