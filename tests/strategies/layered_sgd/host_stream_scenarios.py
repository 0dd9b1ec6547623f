"""Small trainings on an emulated device whose buckets are summed on the host. Each raises if a sum is wrong.

Buckets are filled on one stream, and used on two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lightning_dp.strategies.layered_sgd import host_communicator
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator
from tests.emulated_device.machine import Machine
from tests.emulated_device.tensors import full, raw

SIZES = (7, 1, 10)
STEPS = 3
DEVICE = torch.device("cuda", 1)


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


class LazyWork:
    """A collective of gloo's that has its effect when somebody waits for it."""

    def __init__(self, effect: Callable[[], object]) -> None:
        self._effect: Callable[[], object] | None = effect

    def is_completed(self) -> bool:
        return self._effect is None

    def wait(self) -> None:
        if self._effect is not None:
            self._effect()
            self._effect = None


class Stages:
    """In place of `HierarchicalAllReduce`: multiplies by 2, 3 and 5. Notes the order, and holds until let go."""

    FACTOR = 30
    reduces_on_device = False

    def __init__(self) -> None:
        self.may_reduce = threading.Event()
        self.may_cross = threading.Event()
        self.order: list[int] = []

    def let_go(self) -> None:
        self.may_reduce.set()
        self.may_cross.set()

    def intra_group_reduce(self, buffer: torch.Tensor) -> list[LazyWork]:
        self.may_reduce.wait(10)
        return [LazyWork(lambda: buffer.mul_(2))]

    def inter_group_all_reduce(self, buffer: torch.Tensor) -> None:
        self.may_cross.wait(10)
        buffer.mul_(3)

    def intra_group_broadcast(self, buffer: torch.Tensor) -> list[LazyWork]:
        return [LazyWork(lambda: buffer.mul_(5))]

    def describe(self, stage: str) -> str:
        return stage

    def close(self) -> None:
        pass


class LateBroadcast:
    """In place of ``dist``, for the order of the buckets: what rank 0 sends is there when it is waited for."""

    def new_group(self, **_: Any) -> object:
        return object()

    def broadcast(self, tensor: torch.Tensor, **_: Any) -> LazyWork:
        value = tensor.clone()
        tensor.fill_(-7)
        return LazyWork(lambda: tensor.copy_(value))

    def destroy_process_group(self, group: object) -> None:
        pass


def announce_wait(bucket: Any, announce: Callable[[], None]) -> None:
    """Let the collectives go when somebody waits for ``bucket``: who does not wait is too early."""
    wait = bucket._wait_until_ended

    def announced(timeout_s: float | None = 10) -> bool:
        announce()
        return wait(timeout_s)

    bucket._wait_until_ended = announced


def make_communicator(machine: Machine, monkeypatch: Any, stages: Stages, prioritized: bool) -> Communicator:
    machine.install(monkeypatch)
    machine.set_device(DEVICE)
    monkeypatch.setattr(host_communicator, "dist", LateBroadcast())
    return Communicator(stages, prioritized, timedelta(seconds=1), DEVICE, on_host=True)


def sum_on_the_host(machine: Machine, monkeypatch: Any, prioritized: bool) -> None:
    stages = Stages()
    communicator = make_communicator(machine, monkeypatch, stages, prioritized)
    stages.may_reduce.set()
    try:
        _sum_on_the_host(machine, communicator, stages)
        check(machine.contexts == {1}, f"contexts on devices {machine.contexts}")
        blocked = machine.host_waits[threading.current_thread().name]
        check(blocked == 0, "the training thread has waited for the device")
    finally:
        stages.let_go()
        communicator.close()


def _sum_on_the_host(machine: Machine, communicator: Communicator, stages: Stages) -> None:
    main, other = machine.current_stream(DEVICE), machine.new_stream(DEVICE)
    buffers = [full(machine, DEVICE, size, 0.0) for size in SIZES]
    parameters = [[full(machine, DEVICE, size, 0.0) for size in SIZES] for _ in range(2)]
    other.wait_stream(main)
    for step in range(STEPS):
        sums = []
        for index, buffer in enumerate(buffers):
            buffer.fill_(float(10 * step + index))
            sums.append(communicator.submit(index, buffer))
            if not stages.may_cross.is_set():
                announce_wait(sums[-1], stages.may_cross.set)
        communicator.release()
        for index in reversed(range(len(SIZES))):
            for stream, own in zip((main, other), parameters, strict=True):
                with machine.on_stream(stream):
                    sums[index].wait()
                    own[index].add_(buffers[index])
        main.wait_stream(other)  # which has read the buffers that are filled again
    machine.finish()
    for own in parameters:
        for index, parameter in enumerate(own):
            expected = Stages.FACTOR * sum(10 * step + index for step in range(STEPS))
            check(bool((raw(parameter) == expected).all()), f"{raw(parameter)} is not {expected}")


def free_what_is_copied_back(machine: Machine, monkeypatch: Any) -> None:
    """A sum is used on another stream than the one that the bucket was allocated on; then the bucket is dropped."""
    stages = Stages()
    stages.let_go()
    communicator = make_communicator(machine, monkeypatch, stages, False)
    buffer = full(machine, DEVICE, 5, 1.0)
    bucket = communicator.submit(0, buffer)
    communicator.release()
    with machine.on_stream(machine.new_stream(DEVICE)):
        bucket.wait()
    communicator.close()
    del buffer, bucket
    check(not machine.reused_too_early, "memory was handed out while the sum was copied into it")


def wait_for_copies_in_turn(machine: Machine, monkeypatch: Any) -> None:
    """Bucket 3 has the highest priority, but is not computed yet: hooks run when backward's kernels are launched.

    For a machine that is as late as it may be: on another one the copy could arrive by itself.
    """
    stages = Stages()
    monkeypatch.setattr(Stages, "inter_group_all_reduce", lambda self, tensor: self.order.append(int(tensor[0]) // 2))
    communicator = make_communicator(machine, monkeypatch, stages, True)
    try:
        buckets = [communicator.submit(index, full(machine, DEVICE, 1, float(index))) for index in range(4)]
        buckets[2].wait_for_copy()  # copies finish in order, so that of bucket 1 has arrived as well
        stages.let_go()
        for bucket in buckets:
            bucket.wait()
    finally:
        stages.let_go()
        communicator.close()
    # The thread may have taken bucket 0 before the others were there.
    check([index for index in stages.order if index != 0] == [2, 1, 3], f"the order is {stages.order}")
