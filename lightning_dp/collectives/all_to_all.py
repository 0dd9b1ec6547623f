"""All-to-all exchange of activations, with counts of bytes and waiting time. Model parallelism uses it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.groups import dense, needs_host_copy
from lightning_dp.collectives.point_to_point import Message, Transfer, post
from lightning_dp.collectives.tracing import OnStage


class Channel:
    """Asynchronous all-to-all within a group: each rank sends one message directly to each other rank, in one step.

    It is meant for activations, which every rank needs as soon as they are computed. A ring would send as many bytes,
    but in N-1 steps.

    Messages of one channel arrive in the order in which they are started. Every rank must therefore start the same
    exchanges in the same order. Two channels that are in use at once need separate groups.

    Args:
        group: the ranks.
        on_stage: called for each exchange, from its start to the end of `AllToAll.wait`, and for the wait itself.

    Attributes:
        bytes_sent: bytes that this rank has sent so far, per name of exchange.
        waited_s: seconds that this rank has spent in `AllToAll.wait` so far.
    """

    def __init__(self, group: dist.ProcessGroup, on_stage: OnStage | None = None) -> None:
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.on_stage = on_stage
        self.bytes_sent: Counter[str] = Counter()
        self.waited_s = 0.0

    def all_to_all(self, name: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> AllToAll:
        """Start sending ``sends[r]`` to rank r and receiving ``receives[r]`` from it, for every other rank r.

        The entries of this rank itself are ignored. Empty tensors are not sent. Every rank must call it.

        Args:
            name: name of the exchange in `bytes_sent` and in the trace.
            sends: one tensor per rank. They must not change before `AllToAll.wait` returns.
            receives: one contiguous tensor per rank, with the shape and dtype that the rank sends. Filled in place.
        """
        # Each rank starts with its right neighbor. If all started with rank 0, its link would be the bottleneck.
        peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        outgoing: list[Message] = [(self._sendable(dense(sends[peer])), peer) for peer in peers]
        incoming: list[Message] = [(self._buffer(receives[peer]), peer) for peer in reversed(peers)]
        self.bytes_sent[name] += sum(tensor.nbytes for tensor, _ in outgoing)
        received, sent = post(self.group, incoming, outgoing)
        staged = [(receives[peer], buffer) for buffer, peer in incoming if buffer is not receives[peer]]
        return AllToAll(self, name, [*received, *sent], staged)

    def all_gather(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` of every rank, in rank order: (N, *shape of ``tensor``). Shape and dtype must be equal."""
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        gathered[self.rank] = tensor.detach()
        self.all_to_all(name, [tensor] * self.world_size, list(gathered)).wait()
        return gathered

    def record_exchange(self, name: str, start_s: float, wait_start_s: float, end_s: float) -> None:
        """Record a finished exchange. Times are in seconds of ``time.perf_counter``. `AllToAll` calls this."""
        self.waited_s += end_s - wait_start_s
        if self.on_stage is not None:
            self.on_stage(name, start_s, end_s)
            self.on_stage(f"wait for {name}", wait_start_s, end_s)

    def _sendable(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if needs_host_copy(tensor, self.group) else tensor

    def _buffer(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return torch.empty_like(tensor, device="cpu") if needs_host_copy(tensor, self.group) else tensor


class AllToAll:
    """An all-to-all in flight. Call `wait` once.

    Args:
        channel: records the exchange when it is finished.
        name: name of the exchange.
        transfers: all messages, sent and received.
        staged: pairs (receive tensor, host buffer) to copy after the messages have arrived.
    """

    def __init__(
        self, channel: Channel, name: str, transfers: Sequence[Transfer], staged: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self._channel = channel
        self._name = name
        self._transfers = transfers
        self._staged = staged
        self._start_s = time.perf_counter()

    def wait(self) -> None:
        """Block until all messages have arrived. The receive tensors may then be read and the sent ones changed.

        Raises:
            PeerError: a peer has died, or has been silent for longer than the timeout of the group.
        """
        wait_start_s = time.perf_counter()
        for transfer in self._transfers:
            transfer.wait()
        for tensor, buffer in self._staged:
            tensor.copy_(buffer)
        self._channel.record_exchange(self._name, self._start_s, wait_start_s, time.perf_counter())
