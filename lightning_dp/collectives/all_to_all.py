"""Direct messages between all pairs of ranks: what model parallelism sends, counted and timed in one place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.groups import needs_host_copy
from lightning_dp.collectives.point_to_point import Message, Transfer, post
from lightning_dp.collectives.tracing import OnStage


class Channel:
    """A group's ranks, each of which sends to each other one directly: one message a pair, one step.

    For activations, which every rank needs as soon as they are there: a ring would send as many bytes in N-1 steps.

    Args:
        group: the ranks. Messages of one channel arrive in the order in which they are started, so every rank must
            start the same exchanges in the same order. Two channels that are in use at once need a group each.
        on_stage: told of each exchange, from its start to the end of the wait for it, and of the wait itself.
    """

    def __init__(self, group: dist.ProcessGroup, on_stage: OnStage | None = None) -> None:
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.on_stage = on_stage
        self.bytes_sent: Counter[str] = Counter()  # of this rank, by what was sent
        self.waited_s = 0.0  # in all

    def all_to_all(self, what: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> AllToAll:
        """Send ``sends[r]`` to rank r and receive ``receives[r]`` from it, all at once; own entries are ignored.

        Args:
            what: a name for the counts and the trace.
            sends: a tensor a rank, which must not change before the end of the exchange. Empty ones are not sent.
            receives: a contiguous tensor a rank, of the shape and dtype that the rank sends.
        """
        own, world_size = self.rank, self.world_size
        # Each rank begins with its right neighbour, so that they do not all send to the same one at once.
        to = [(own + distance) % world_size for distance in range(1, world_size)]
        outgoing: list[Message] = [(self._sendable(sends[peer].detach().contiguous()), peer) for peer in to]
        arriving: list[Message] = [(self._buffer(receives[peer]), peer) for peer in reversed(to)]
        self.bytes_sent[what] += sum(tensor.nbytes for tensor, _ in outgoing)
        transfers = post(self.group, arriving, outgoing)
        staged = [(receives[peer], buffer) for buffer, peer in arriving if buffer is not receives[peer]]
        return AllToAll(self, what, [*transfers[0], *transfers[1]], staged)

    def all_gather(self, what: str, tensor: Tensor) -> Tensor:
        """Return (N, *shape of ``tensor``): that of each rank, in rank order. Shape and dtype must be equal."""
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        gathered[self.rank] = tensor.detach()
        self.all_to_all(what, [tensor] * self.world_size, list(gathered)).wait()
        return gathered

    def _sendable(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if needs_host_copy(tensor, self.group) else tensor

    def _buffer(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return torch.empty_like(tensor, device="cpu") if needs_host_copy(tensor, self.group) else tensor


class AllToAll:
    """Messages on their way; `wait` once."""

    def __init__(
        self, channel: Channel, what: str, transfers: Sequence[Transfer], staged: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self._channel, self._what, self._transfers, self._staged = channel, what, transfers, staged
        self._start_s = time.perf_counter()

    def wait(self) -> None:
        """Return when everything has arrived and may be used, and what was sent may be changed.

        Raises:
            PeerError: a peer is gone, or silent for longer than the group's timeout.
        """
        begin_s = time.perf_counter()
        for transfer in self._transfers:
            transfer.wait()
        for tensor, buffer in self._staged:
            tensor.copy_(buffer)
        end_s = time.perf_counter()
        channel = self._channel
        channel.waited_s += end_s - begin_s
        if channel.on_stage is not None:
            channel.on_stage(self._what, self._start_s, end_s)
            channel.on_stage(f"wait for {self._what}", begin_s, end_s)
