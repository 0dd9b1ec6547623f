"""Tensors on an emulated device: their values are in host memory, and each operation on them is queued on a stream."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tests.emulated_device.machine import Event, Machine, Op, Stream

_IN_PLACE = {getattr(torch.Tensor, name) for name in ("copy_", "add_", "mul_", "div_", "fill_")}
_VIEWS = {getattr(torch.Tensor, name) for name in ("__getitem__", "view", "detach", "tensor_split")}
_HARMLESS = {getattr(torch.Tensor, name) for name in ("numel", "is_complex", "size", "dim", "__len__")}


class Memory:
    """What the allocator hands out: it knows the stream that asked for it, and those that it was told of."""

    def __init__(self, data: torch.Tensor, stream: Stream) -> None:
        self.data = data
        self.stream = stream
        self.recorded: list[Event] = []


class _Reference:
    """Held by a tensor and its views. When it goes, the memory is freed."""


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    machine: Machine
    memory: Memory
    place: torch.device
    reference: _Reference

    is_cuda = property(lambda self: True)
    device = property(lambda self: self.place)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _IN_PLACE:
            return _queue_in_place(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _VIEWS:
                views = func(*args, **kwargs)
                several = isinstance(views, tuple)
                return tuple(_like(view, args[0]) for view in views) if several else _like(views, args[0])
            if func in _HARMLESS or getattr(func, "__name__", "") == "__get__":
                return func(*args, **kwargs)
        raise NotImplementedError(f"{func} on the emulated device")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a plain tensor on the same memory. A view would keep the memory from being freed."""
    with torch._C.DisableTorchFunctionSubclass():
        same = torch.empty(0, dtype=tensor.dtype)
        return same.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _like(values: torch.Tensor, owner: DeviceTensor) -> DeviceTensor:
    with torch._C.DisableTorchFunctionSubclass():
        tensor = values.as_subclass(DeviceTensor)
    for name in ("machine", "memory", "place", "reference"):
        setattr(tensor, name, getattr(owner, name))
    return tensor


def _queue_in_place(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    on_device = [each for each in args if isinstance(each, DeviceTensor)]
    to_or_from_host = any(isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor) for each in args)
    does_not_block = kwargs.pop("non_blocking", False)
    machine = on_device[0].machine
    stream = machine.current_stream(on_device[0].device)
    plain = [raw(each) if isinstance(each, torch.Tensor) else each for each in args]
    machine.queue(stream, Op(lambda: func(*plain, **kwargs), uses=[each.memory for each in on_device]))
    if not isinstance(args[0], DeviceTensor):
        machine.copied_to_host[on_device[0].device.index] += args[0].numel()
    if to_or_from_host and not does_not_block:
        stream.synchronize()
    return args[0]


def allocate(machine: Machine, device: torch.device, numel: int, dtype: torch.dtype = torch.float64) -> DeviceTensor:
    """Return uninitialized memory of the current stream: NaN."""
    data = torch.full((numel,), float("nan"), dtype=dtype)
    with torch._C.DisableTorchFunctionSubclass():
        tensor = data.view(-1).as_subclass(DeviceTensor)
    tensor.machine = machine
    tensor.place = device
    tensor.memory = Memory(data, machine.current_stream(device))
    tensor.reference = _Reference()
    weakref.finalize(tensor.reference, machine.free, tensor.memory).atexit = False
    return tensor


def full(machine: Machine, device: torch.device, numel: int, value: float) -> DeviceTensor:
    """Return a tensor that the current stream fills with ``value``."""
    tensor = allocate(machine, device, numel)
    tensor.fill_(value)
    return tensor
