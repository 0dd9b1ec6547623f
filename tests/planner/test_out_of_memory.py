"""Trials that use up the memory."""

from __future__ import annotations

import weakref

import pytest
import torch

from lightning_dp.planner.convolutions.measure import is_out_of_memory, unless_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_about_memory_are_known(error, expected):
    assert is_out_of_memory(error) == expected


def test_what_a_trial_held_is_free_for_the_next_one():
    held = []

    def step():
        activations = [torch.ones(10)]
        activations.append(activations)  # a cycle, as in autograd graphs with hooks
        held.append(weakref.ref(activations[0]))
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert unless_out_of_memory(step) is None
    assert held[0]() is None


def test_other_errors_and_results_pass():
    assert unless_out_of_memory(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="size"):
        unless_out_of_memory(lambda: torch.ones(2) @ torch.ones(3))
