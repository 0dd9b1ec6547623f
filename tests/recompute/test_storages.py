"""What the tape builds on: PyTorch has one Python object for each piece of memory, for as long as that exists."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def test_all_names_of_a_memory_have_the_same_storage_object():
    tensor = torch.randn(4, 4, requires_grad=True) * 1
    storage = tensor.untyped_storage()
    pairs = torch.view_as_complex(tensor.view(4, 2, 2))
    for other in (tensor.view(-1), tensor[1:], tensor.t(), tensor.detach(), tensor.data, pairs, pairs.conj().imag):
        assert other.untyped_storage() is storage
    for other in (tensor.clone(), tensor + 0, tensor.to(torch.float64)):
        assert other.untyped_storage() is not storage


@pytest.mark.ci
def test_the_storage_object_stays_although_nobody_in_python_refers_to_it():
    tensor = torch.randn(4)
    key, reference = id(tensor.untyped_storage()), weakref.ref(tensor.untyped_storage())
    gc.collect()
    others = [torch.randn(4).untyped_storage() for _ in range(8)]  # they would take its place in memory
    assert reference() is tensor.untyped_storage()
    assert id(tensor.untyped_storage()) == key
    assert key not in map(id, others)


@pytest.mark.ci
def test_the_storage_object_is_gone_with_the_memory_and_not_before():
    freed: list[Any] = []
    result = torch.randn(4, requires_grad=True).exp()
    reference = weakref.ref(result.untyped_storage(), freed.append)
    total = result.sum()
    del result
    gc.collect()
    assert not freed, "autograd keeps the result, and no Python object does"
    total.backward()
    assert freed == [reference]
    assert reference() is None


def test_below_autograd_an_operator_has_the_storage_objects_of_its_caller():
    seen: list[int] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.extend(id(tensor.untyped_storage()) for tensor in (args[0], result) if isinstance(tensor, Tensor))
            return result

    tensor = torch.randn(4, requires_grad=True)
    with Mode():
        result = tensor * 2
        view = result[1:]
    storages = [id(each.untyped_storage()) for each in (tensor, result, result, view)]
    assert seen == storages
