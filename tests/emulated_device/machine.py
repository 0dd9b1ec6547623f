"""Asynchronous devices for tests, in a CPU build: what CUDA promises about streams and events, and nothing more.

Calls queue work on streams and return. Two machines differ in when the work runs:

- ``Machine()`` runs it as late as the rules allow: only what a thread waits for, and what that depends on.
- ``Machine(seed)`` also runs a random part of the work that may run, at each call.

So code with a missing wait computes with values that are not there yet: always on the first machine, and with some seed
on the second. `Machine.install` puts a machine in place of `lightning_dp.collectives.streams`.

What is emulated besides: each thread has a current device, which is device 0 at first; a call creates a context on the
thread's current device (`contexts`). Memory whose last reference goes is overwritten, where another stream still uses
it and nobody has told the allocator (`reused_too_early`). Page-locked memory starts as NaN.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_dp.collectives import streams
from tests.emulated_device.futures import LazyFuture


class WaitsForEver(AssertionError):
    """A thread waits for work that depends on itself, or on a collective that a peer has not issued."""


class Op:
    """One piece of queued work: what it does, the streams' positions that it waits for, the memory that it uses."""

    def __init__(self, run: Callable[[], None], waits: Sequence[Event] = (), uses: Sequence[Any] = ()) -> None:
        self.run = run
        self.waits = waits
        self.uses = uses
        self.meeting: Meeting | None = None
        self.is_demanded = False


class Meeting:
    """A collective: it runs when all members have come to it."""

    def __init__(self, name: str, num_members: int, run: Callable[[Meeting], None]) -> None:
        self.name = name
        self.num_members = num_members
        self.run = run
        self.places: dict[int, tuple[Stream, int]] = {}
        self.tensors: dict[int, tuple[Any, ...]] = {}


class Stream:
    def __init__(self, machine: Machine, index: int) -> None:
        self.machine = machine
        self.device = torch.device("cuda", index)
        self.ops: list[Op] = []
        self.done = 0
        machine.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.machine.queue(self, Op(lambda: None, waits=[event]))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event(other, blocking=False))

    def synchronize(self) -> None:
        self.machine.block_on(self, len(self.ops))

    def query(self) -> bool:
        return Event(self, blocking=False).query()


class Event:
    def __init__(self, stream: Stream, blocking: bool) -> None:
        self.stream = stream
        self.position = len(stream.ops)
        self.blocking = blocking

    @property
    def has_passed(self) -> bool:
        return self.stream.done >= self.position

    def query(self) -> bool:
        self.stream.machine.enter()
        return self.has_passed

    def synchronize(self) -> None:
        assert self.blocking, "a thread that waits for this event keeps a core busy"
        self.stream.machine.block_on(self.stream, self.position)


class Machine:
    """See the head of this module.

    Attributes:
        contexts: indices of the devices on which some thread has created a context.
        host_waits: how often each thread, by name, has waited for a device.
        copied_to_host: number of elements, by index of the device.
        reused_too_early: numbers of elements of freed memory that was in use.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.contexts: set[int] = set()
        self.host_waits: Counter[str] = Counter()
        self.copied_to_host: Counter[int] = Counter()
        self.reused_too_early: list[int] = []
        self._random = None if seed is None else random.Random(seed)
        self._defaults: dict[int, Stream] = {}
        self._of_thread = threading.local()

    # --- in place of lightning_dp.collectives.streams ---

    def install(self, monkeypatch: Any) -> None:
        for name in ("set_device", "new_stream", "current_stream", "on_stream", "record_event", "keep_until_done"):
            monkeypatch.setattr(streams, name, getattr(self, name))
        monkeypatch.setattr(streams, "pinned_like", self.pinned_like)
        monkeypatch.setattr(streams, "new_future", lambda device: LazyFuture(self, device))

    def set_device(self, device: torch.device) -> None:
        self._of_thread.index = device.index
        self.contexts.add(device.index)

    def new_stream(self, device: torch.device, urgent: bool = False) -> Stream:
        self.enter()
        return Stream(self, device.index)

    def current_stream(self, device: torch.device) -> Stream:
        with self.lock:
            default = self._defaults.get(device.index) or Stream(self, device.index)
            self._defaults[device.index] = default
        return getattr(self._of_thread, f"stream{device.index}", default)

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = getattr(self._of_thread, "index", 0)
        stream_before = self.current_stream(stream.device)
        self.set_device(stream.device)
        setattr(self._of_thread, f"stream{stream.device.index}", stream)
        try:
            yield
        finally:
            setattr(self._of_thread, f"stream{stream.device.index}", stream_before)
            self.set_device(torch.device("cuda", before))

    def record_event(self, stream: Stream, blocking: bool = False) -> Event:
        self.enter()
        return Event(stream, blocking)

    def keep_until_done(self, tensor: Any, stream: Stream) -> None:
        self.enter()
        tensor.memory.recorded.append(Event(stream, blocking=False))

    def pinned_like(self, tensor: Any) -> torch.Tensor:
        self.enter()
        return torch.full(tuple(tensor.shape), float("nan"), dtype=tensor.dtype)

    # --- running ---

    def enter(self) -> None:
        """Note a call of the runtime, and let the devices go on for a while."""
        self.contexts.add(getattr(self._of_thread, "index", 0))
        with self.lock:
            if self._random is not None:
                for _ in range(self._random.randrange(4)):
                    self._run_any(self._random)

    def queue(self, stream: Stream, op: Op) -> None:
        with self.lock:
            stream.ops.append(op)
        self.enter()

    def block_on(self, stream: Stream, position: int) -> None:
        """Let the calling thread wait until ``stream`` has come to ``position``."""
        self.enter()
        self.host_waits[threading.current_thread().name] += 1
        with self.lock:
            self._complete(stream, position)

    def finish(self) -> None:
        """Run everything that was queued, on the newest stream first: it is the one that others may fail to await."""
        with self.lock:
            for stream in reversed(self.streams):
                self._complete(stream, len(stream.ops))

    def _complete(self, stream: Stream, position: int) -> None:
        while stream.done < position:
            op = stream.ops[stream.done]
            if op.is_demanded:
                raise WaitsForEver("work waits for itself")
            op.is_demanded = True
            try:
                for event in op.waits:
                    self._complete(event.stream, event.position)
                self._come_together(op)
            finally:
                op.is_demanded = False
            if stream.ops[stream.done : stream.done + 1] == [op]:  # a collective may have been run for another member
                self._run_head(stream)

    def _come_together(self, op: Op) -> None:
        """Bring all members of a collective to it."""
        meeting = op.meeting
        if meeting is None:
            return
        if len(meeting.places) < meeting.num_members:
            raise WaitsForEver(f"{meeting.name}: only ranks {sorted(meeting.places)} have issued it")
        for stream, position in meeting.places.values():
            if stream.ops[position] is not op:
                self._complete(stream, position)

    def _run_head(self, stream: Stream) -> None:
        op = stream.ops[stream.done]
        if op.meeting is None:
            op.run()
            stream.done += 1
            return
        op.meeting.run(op.meeting)
        for member, position in op.meeting.places.values():
            assert member.done == position
            member.done += 1

    def _run_any(self, choice: random.Random) -> None:
        able = [stream for stream in self.streams if stream.done < len(stream.ops) and self._may_run(stream)]
        if able:
            self._run_head(choice.choice(able))

    def _may_run(self, stream: Stream) -> bool:
        op = stream.ops[stream.done]
        meeting = op.meeting
        if meeting is None:
            return all(event.has_passed for event in op.waits)
        places = meeting.places.values()
        return len(places) == meeting.num_members and all(member.done == position for member, position in places)

    # --- memory ---

    def free(self, memory: Any) -> None:
        """Hand memory to the next allocation on its stream; called when its last reference has gone."""
        with self.lock:
            if self._is_in_use(memory):
                self.reused_too_early.append(memory.data.numel())
                # The next owner uses it after the work of the allocation's stream, and before that of all others.
                self._complete(memory.stream, len(memory.stream.ops))
                memory.data.fill_(float("nan"))

    def _is_in_use(self, memory: Any) -> bool:
        """Return whether work uses the memory that the allocator does not know of: not before its stream's next op."""
        known: dict[Stream, int] = {}
        to_follow = [Event(memory.stream, blocking=False), *memory.recorded]
        while to_follow:
            event = to_follow.pop()
            begin = max(known.get(event.stream, 0), event.stream.done)
            if begin < event.position:
                known[event.stream] = event.position
                for op in event.stream.ops[begin : event.position]:
                    to_follow.extend(op.waits)
        return any(
            memory in op.uses for stream in self.streams for op in stream.ops[max(stream.done, known.get(stream, 0)) :]
        )
