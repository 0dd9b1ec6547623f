"""Checks of numbers on a GPU, with the CPU in the GPU's place."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.strategies.krizhevsky_hybrid import deferred_checks
from lightning_dp.strategies.krizhevsky_hybrid.deferred_checks import DeferredChecks


class OnGPU(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda:0")


class Event:
    """Stands for the GPU: what it computes is there when the host has waited for it."""

    awaited = 0

    def __init__(self, blocking: bool) -> None:
        assert blocking, "the host must not spin"

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        Event.awaited += 1


@pytest.fixture
def on_gpu(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(Event, "awaited", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    # Page-locked memory that nobody has written to.
    monkeypatch.setattr(
        deferred_checks.torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options).fill_(torch.nan)
    )
    return lambda number: torch.full((2,), number).as_subclass(OnGPU)


def refuse_2(numbers):
    if numbers.tolist() == [2.0, 2.0]:
        raise ValueError("2")


def test_numbers_on_the_cpu_are_checked_at_once():
    checks = DeferredChecks()
    checks.add(torch.full((2,), 1.0), refuse_2)
    with pytest.raises(ValueError, match="2"):
        checks.add(torch.full((2,), 2.0), refuse_2)
    checks.finish()


def test_numbers_on_a_gpu_are_checked_later(on_gpu):
    checks = DeferredChecks()
    for number in (1.0, 2.0, 3.0):
        checks.add(on_gpu(number), refuse_2)
    assert Event.awaited == 0, "the host has waited for the GPU"
    with pytest.raises(ValueError, match="2"):
        checks.finish()
    assert Event.awaited == 2
    checks.finish()  # nothing is left
    assert Event.awaited == 2
