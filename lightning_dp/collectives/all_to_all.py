"""All-to-all exchange of activations, checked, counted and timed in one place. Model parallelism uses it."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp._private.torch_names import backend_name
from lightning_dp.collectives.groups import OnStage, create_groups, dense, needs_host_copy, sends_from_device
from lightning_dp.collectives.point_to_point import Message, Transfer, start_message, wait_for_all
from lightning_dp.collectives.small_all_gather import gather_on_device

HEADER_BYTES = 64
INLINE_BYTES = 960
"""A payload of at most this size travels in one message with its header: for small ones, messages count, not bytes."""
_FRAME_TAG = 0  # of a header, and the payload behind it; payloads of their own have other tags


Finish = Callable[[], Tensor]
"""What is called to wait for messages that are under way, and returns what has become of them."""


class CallMismatchError(RuntimeError):
    """Two ranks are in different exchanges: one of them has made a call that the other has not.

    Nothing of the message that does not fit is used. The channel cannot be used again: later messages would not fit.
    """


class Channel:
    """Asynchronous all-to-all within a group: each rank sends one message directly to each other rank, in one step.

    It is meant for activations, which every rank needs as soon as they are computed. A ring would send as many bytes,
    but in N-1 steps.

    Messages of one channel arrive in the order in which they are started. Every rank must therefore start the same
    exchanges in the same order. Two channels that are in use at once need separate groups.

    Messages in host memory (gloo) carry the name, number and size of their exchange. A rank that receives those of
    another exchange raises `CallMismatchError`, and never takes one message for another. Messages of NCCL carry none;
    there an exchange is one call of the backend, which takes a tenth of the host's time of one call for each message.

    Args:
        group: the ranks.
        on_stage: called for each exchange, from its start to the end of `AllToAll.wait`, and for the wait itself.
        hint: end of the message of `CallMismatchError`: what ranks of this channel most likely did differently.
        host_group: of the same ranks, over gloo, if ``group`` cannot send from host memory.

    Attributes:
        bytes_sent: bytes that this rank has sent so far, without headers, per name of exchange.
        waited_s: seconds that this rank has spent in `AllToAll.wait` so far.
        num_exchanges: number of exchanges started so far. It is the same on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_stage: OnStage | None = None,
        hint: str = "",
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.host_group = host_group
        self.hint = hint
        self.rank = group.rank()
        self.world_size = group.size()
        self.on_stage = on_stage
        self.bytes_sent: Counter[str] = Counter()
        self.waited_s = 0.0
        self.num_exchanges = 0
        self._host = None if host_group is None else Channel(host_group, on_stage, hint)
        self._begun: list[AllToAll] = []  # by `begin`, and not finished

    def all_to_all(self, name: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> AllToAll:
        """Start sending ``sends[r]`` to rank r and receiving ``receives[r]`` from it, for every other rank r.

        The entries of this rank itself are ignored. Empty tensors are not sent. Every rank must call it.

        Args:
            name: name of the exchange, in `bytes_sent`, in the trace, and in the check that all ranks make one call.
            sends: one tensor per rank. They must not change before `AllToAll.wait` returns.
            receives: one contiguous tensor per rank, with the shape and dtype that the rank sends. Filled in place.
        """
        exchange = AllToAll(self, name, sends, receives)
        self.num_exchanges += 1
        return exchange

    def begin(self, name: str, sends: Sequence[Tensor], receives: Sequence[Tensor], result: Finish) -> Finish:
        """Start `all_to_all`, and return what waits for it and returns ``result()``."""
        exchange = self.all_to_all(name, sends, receives)
        self._begun.append(exchange)

        def finish() -> Tensor:
            self._begun.remove(exchange)
            exchange.wait()
            return result()

        return finish

    def finish_begun(self) -> None:
        """Wait for all that `begin` has started and nobody will finish, after an exception on all ranks.

        It would arrive in memory that is free by then, or in the place of a later message.
        """
        while self._begun:
            self._begun.pop(0).wait()

    def all_gather(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` of every rank, in rank order: (N, *shape of ``tensor``). Shape and dtype must be equal."""
        if sends_from_device(tensor, self.group):
            start_s = time.perf_counter()
            self.bytes_sent[name] += (self.world_size - 1) * tensor.nbytes
            self.num_exchanges += 1
            gathered = gather_on_device(tensor, self.group)
            self.record_exchange(name, start_s, start_s, time.perf_counter())
            return gathered
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        gathered[self.rank] = tensor.detach()
        self.all_to_all(name, [tensor] * self.world_size, list(gathered)).wait()
        return gathered

    def gather_integers(self, name: str, values: Sequence[int]) -> list[list[int]]:
        """Return ``values`` of every rank, in rank order, equally many on each. The host does not wait for a GPU."""
        own = torch.tensor(values)
        if self._host is None:
            return self.all_gather(name, own).tolist()
        waited_before_s = self._host.waited_s
        gathered = self._host.all_gather(name, own).tolist()
        self.bytes_sent[name] += (self.world_size - 1) * own.nbytes
        self.waited_s += self._host.waited_s - waited_before_s
        return gathered

    def record_exchange(self, name: str, start_s: float, wait_start_s: float, end_s: float) -> None:
        """Record a finished exchange. Times are in seconds of ``time.perf_counter``. `AllToAll` calls this."""
        self.waited_s += end_s - wait_start_s
        if self.on_stage is not None:
            self.on_stage(name, start_s, end_s)
            self.on_stage(f"wait for {name}", wait_start_s, end_s)


def make_host_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a `Channel.host_group` of all ranks, or None if ``group`` needs none. All ranks must call it."""
    if device.type == "cpu" or backend_name(group, device) == "gloo":
        return None
    return create_groups([list(range(dist.get_world_size()))], dist.get_rank(), timeout, "gloo")


class Call(NamedTuple):
    """The exchange that a message belongs to. Both ends compute it, and the receiver compares."""

    name: str
    number: int
    num_bytes: int

    def __str__(self) -> str:
        return f"exchange {self.number}, {self.name!r} ({self.num_bytes} bytes)"

    @property
    def tag(self) -> int:
        """The label by which gloo matches messages: one of another exchange, or size, stays where it is."""
        return zlib.crc32(str(self).encode()) % (2**31 - 1) + 1

    @property
    def header(self) -> Tensor:
        """The call in words, in `HEADER_BYTES` bytes."""
        return torch.frombuffer(bytearray(str(self).encode()[:HEADER_BYTES].ljust(HEADER_BYTES)), dtype=torch.uint8)


class AllToAll:
    """An all-to-all in flight: the constructor starts all messages. Call `wait` once.

    Args:
        channel: counts the bytes, and records the exchange when it is finished.
        name: name of the exchange.
        sends: see `Channel.all_to_all`.
        receives: see `Channel.all_to_all`.
    """

    def __init__(self, channel: Channel, name: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        self._channel = channel
        self._name = name
        # Each rank starts with its right neighbor. If all started with rank 0, its link would be the bottleneck.
        peers = [(channel.rank + distance) % channel.world_size for distance in range(1, channel.world_size)]
        outgoing: list[Message] = [(self._sendable(dense(sends[peer])), peer) for peer in peers]
        incoming: list[Message] = [(self._buffer(receives[peer]), peer) for peer in reversed(peers)]
        channel.bytes_sent[name] += sum(tensor.nbytes for tensor, _ in outgoing)
        # Pairs of receive tensor and host buffer, to copy after the messages have arrived.
        self._staged = [(receives[peer], buffer) for buffer, peer in incoming if buffer is not receives[peer]]
        self._transfers: list[Transfer] = []
        self._frames: list[tuple[int, Call, Tensor, Transfer]] = []  # peer, expected call, received frame
        self._inline: list[tuple[Tensor, Tensor]] = []  # receive tensor, and the part of a frame with its payload
        self._start_s = time.perf_counter()
        if incoming and sends_from_device(incoming[0][0], channel.group):
            self._start_together(incoming, outgoing)
            return
        # Receives first: a peer that is ready to send finds the buffer waiting.
        for tensor, peer in incoming:
            if tensor.numel():
                self._expect(tensor, peer, Call(name, channel.num_exchanges, tensor.nbytes))
        for tensor, peer in outgoing:
            if tensor.numel():
                self._send(tensor, peer, Call(name, channel.num_exchanges, tensor.nbytes))

    def _sendable(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if needs_host_copy(tensor, self._channel.group) else tensor

    def _buffer(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return torch.empty_like(tensor, device="cpu") if needs_host_copy(tensor, self._channel.group) else tensor

    def _send(self, tensor: Tensor, peer: int, call: Call) -> None:
        group = self._channel.group
        is_inline = call.num_bytes <= INLINE_BYTES
        frame = torch.cat([call.header, _bytes_of(tensor)]) if is_inline else call.header
        self._transfers.append(start_message(group, "send to", (frame, peer), _FRAME_TAG))
        if not is_inline:
            self._transfers.append(start_message(group, "send to", (tensor, peer), call.tag))

    def _start_together(self, incoming: Sequence[Message], outgoing: Sequence[Message]) -> None:
        """Start all messages in one call of the backend. It sends nothing where a tensor is empty."""
        group = self._channel.group
        first, neighbor = incoming[0]
        outputs = [first.new_empty(0)] * group.size()
        inputs = list(outputs)
        for tensor, peer in incoming:
            outputs[peer] = tensor
        for tensor, peer in outgoing:
            inputs[peer] = tensor
        work = dist.all_to_all(outputs, inputs, group=group, async_op=True)
        assert work is not None, "a rank outside the group came here"
        self._transfers.append(Transfer(group, "exchange messages with", (first, neighbor), [work]))

    def _expect(self, tensor: Tensor, peer: int, call: Call) -> None:
        group = self._channel.group
        # Every frame has room for the longest one: gloo ends the process when a message is longer than its buffer, and
        # takes a shorter one without a word.
        frame = torch.empty(HEADER_BYTES + INLINE_BYTES, dtype=torch.uint8)
        self._frames.append((peer, call, frame, start_message(group, "receive from", (frame, peer), _FRAME_TAG)))
        if call.num_bytes <= INLINE_BYTES:
            self._inline.append((tensor, frame[HEADER_BYTES : HEADER_BYTES + call.num_bytes]))
        else:
            # A large payload travels while other work goes on, so its buffer cannot wait for the header to be checked.
            # Its tag keeps any other message out of it.
            self._transfers.append(start_message(group, "receive from", (tensor, peer), call.tag))

    def wait(self) -> None:
        """Block until all messages have arrived. The receive tensors may then be read and the sent ones changed.

        Raises:
            PeerError: a peer has died, or has been silent for longer than the timeout of the group.
            CallMismatchError: a peer has started another exchange in the place of this one.
        """
        wait_start_s = time.perf_counter()
        for peer, call, frame, transfer in self._frames:
            transfer.wait()
            self._require_same(peer, call, frame[:HEADER_BYTES])
        for tensor, received in self._inline:
            _bytes_of(tensor).copy_(received)
        wait_for_all(self._transfers)
        for tensor, buffer in self._staged:
            tensor.copy_(buffer)
        self._channel.record_exchange(self._name, self._start_s, wait_start_s, time.perf_counter())

    def _require_same(self, peer: int, call: Call, header: Tensor) -> None:
        if not torch.equal(header, call.header):
            theirs = bytes(header.tolist()).decode(errors="replace").rstrip()
            hint = f". {self._channel.hint}" if self._channel.hint else ""
            raise CallMismatchError(
                f"rank {self._channel.rank} of the group is in {call}, and rank {peer} in {theirs}: one of them has "
                f"made a call that the other has not. Make the same calls on all ranks, in the same order{hint}"
            )


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes."""
    # A contiguous tensor of one element may have any strides, which `view` would take over, and then refuse.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
