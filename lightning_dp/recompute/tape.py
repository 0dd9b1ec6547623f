"""The tape of a forward pass: what each operator computed, and from what.

A `Tape` is a dispatch mode, so it sees each operator below autograd, autocast and the model's Python code. It is also
a pair of saved-tensor hooks, so it decides what autograd keeps for backward: a tensor, or the `Value` that can be
computed again. The tape refers weakly to what it has seen. It keeps no tensor that nobody needs, and outlives no
forward pass: what backward needs is reachable from autograd's own graph, and is freed with it.

Why not `torch.utils.checkpoint` with `create_selective_checkpoint_contexts`: it runs the model's Python code twice, so
batch norm moves its running statistics twice (torch issue #96136) and a global batch norm gathers twice. It keeps the
input of each block. And what it caches inside of an outer checkpoint is not dropped by the outer one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import override

from lightning_dp._private.torch_names import TorchDispatchMode, detach_with_version, is_in_backward, mutated_arguments
from lightning_dp.recompute.operators import Kind, arguments_to_keep, kind_of
from lightning_dp.recompute.policies import Policy
from lightning_dp.recompute.values import (
    Call,
    Entries,
    Value,
    closure,
    compute,
    is_plain,
    is_small,
    outputs_of,
    root_of,
    tensors_in,
)

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _Storage(NamedTuple):
    """A piece of memory, and the values in it by shape. The weak reference keeps its address from being used again."""

    reference: StorageWeakRef
    values: Entries


class Tape(TorchDispatchMode):
    """Records one forward pass.

    Args:
        policy: what is kept.
        model: knows the names of its modules.
        segment_ends: the modules at whose end a new segment of the model begins.
        observer: is told of each operator, and each value that autograd asks for.
    """

    def __init__(
        self, policy: Policy, model: nn.Module, segment_ends: frozenset[nn.Module], observer: Observer | None = None
    ) -> None:
        super().__init__()
        self._location = Location(model, segment_ends)
        self._key = ""
        self._policy = policy
        self._observer = observer
        self._storages: dict[int, _Storage] = {}
        self._number = 0
        self._is_paused = False
        self._is_recording = False
        self._has_run_backward = False
        self.dropped_bytes = 0
        """What autograd has asked for and is not kept."""
        self.met_compiled = False
        """Whether a function that `torch.compile` made was called, which then runs without being compiled."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        try:
            with self._location.followed(), saved_tensors_hooks(self._pack, self._unpack), self:
                self._is_recording = True  # not earlier: entering the mode asks, too
                yield
        finally:
            self._forget()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or not hasattr(func, "overloadpacket"):
            return func(*args, **kwargs)
        if self._is_in_backward() or torch.is_inference_mode_enabled():
            self._prepare_changes(func, args, kwargs)
            return func(*args, **kwargs)
        kind = kind_of(func)
        self._key = self._location.next_key(func)
        decision = self._policy.decide(kind, self._key)
        call = None if decision in _SAVES or kind is Kind.FIXED else self._make_call(func, args, kwargs)
        observer = self._observer
        inputs = [] if observer is None else [self._find(tensor) for tensor in tensors_in([args, kwargs])]
        self._prepare_changes(func, args, kwargs)
        if observer is None:
            result = func(*args, **kwargs)
        else:
            result, time_s = observer.run(func, args, kwargs)
        results = outputs_of(result)
        # What an operator changes in place gets its new version after it has returned, so it cannot be held yet.
        may_hold = not mutated_arguments(func) and kind is not Kind.VIEW
        outputs = [self._add(result, call, place, may_hold) for place, result in enumerate(results)]
        if call is not None:
            call.add_outputs(outputs)
        if observer is not None:
            observer.on_call(Seen(self._number, self._key, func, kind, inputs, outputs, self._location.segment, time_s))
        self._number += 1
        return result

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # a class method there
        """Return False: Dynamo asks, when it meets a compiled function, whether to compile it in spite of the mode."""
        self.met_compiled = self._is_recording
        return False

    def _is_in_backward(self) -> bool:
        """Return whether a part of the recorded code runs backward. What came before is forgotten after it."""
        if is_in_backward():
            self._has_run_backward = True
            return not torch.is_grad_enabled()
        if self._has_run_backward:
            self._has_run_backward = False
            self._forget()
        return False

    def _forget(self) -> None:
        """Forget all values, which would hold what a backward has freed. Autograd's graph has those that it needs."""
        for storage in self._storages.values():
            storage.values.clear()  # values refer to it: else they and their tensors would wait for the collector
        self._storages.clear()

    def _make_call(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """Return how to run the operator again, or None if that is not known."""
        changed = mutated_arguments(func)
        if not all(map(is_plain, tensors_in([args, kwargs]))) or "out" in kwargs:
            return None
        if changed and (changed[0] != 0 or self._find(args[0]) is None):
            return None  # a buffer, which must not change a second time, or an operator that changes another argument
        if self._is_copy_of_state(func, args):
            return None
        call_args = [self._with_values(argument) for argument in arguments_to_keep(func, args)]
        call_kwargs = {name: self._with_values(value) for name, value in kwargs.items()}
        # It returns what it changes, and can be made to change a copy.
        changed_value = call_args[0] if changed else None
        return Call(func, call_args, call_kwargs, self._number, changed_value)

    def _is_copy_of_state(self, func: Any, args: Any) -> bool:
        """Return whether a vector is copied that no operator of this forward pass computes.

        That is done because the original changes: spectral normalization moves its vectors at each forward pass, also
        at those between this one and its backward.
        """
        if func is not torch.ops.aten.clone.default or args[0].dim() != 1:
            return False
        original = self._find(args[0])
        return original is None or original.call is None

    def _with_values(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._find(argument) or self._add_outside(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(self._with_values, argument))
        return argument

    def _find(self, tensor: Tensor) -> Value | None:
        """Return the value that ``tensor`` is, or None if the tape has not seen it."""
        if not is_plain(tensor):
            return None
        storage = self._storages.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return None if storage is None else _followed(storage.values.get(_shape_of(tensor)))

    def _add_outside(self, tensor: Tensor) -> Value:
        """Return a value for a tensor that the tape has not seen: a parameter, an input, a constant."""
        value = Value(tensor, None, segment=self._location.segment)
        value.enter(self._values_at(tensor), _shape_of(tensor))
        if is_small(tensor) and not tensor.requires_grad:
            # It may be a running statistic, which batch norm moves without a new version, or which the next forward
            # pass moves before the backward of this one.
            value.hold_copy(tensor)
        else:
            value.hold_tensor(tensor if tensor.is_leaf else detach_with_version(tensor))
        return value

    def _add(self, tensor: Any, call: Call | None, place: int, may_hold: bool) -> Value | None:
        """Return a value for an output of the present operator."""
        if not isinstance(tensor, Tensor) or not is_plain(tensor):
            return None
        value = Value(tensor, call, place, self._number, self._location.segment, self._key)
        value.enter(self._values_at(tensor), _shape_of(tensor))
        if may_hold and is_small(tensor):
            value.hold_tensor(detach_with_version(tensor), stays=True)
        return value

    def _values_at(self, tensor: Tensor) -> Entries:
        reference = StorageWeakRef(tensor.untyped_storage())
        return self._storages.setdefault(reference.cdata, _Storage(reference, {})).values

    def _prepare_changes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Save what the operator is about to overwrite, where it is needed, and forget the values in that memory."""
        for place in mutated_arguments(func):
            argument = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in filter(is_plain, tensors_in([argument])):
                storage = self._storages.get(StorageWeakRef(tensor.untyped_storage()).cdata)
                if storage is not None:
                    for value in filter(None, map(_followed, storage.values.values())):
                        value.prepare_for_change()
                    storage.values.clear()

    def _pack(self, tensor: Tensor) -> Value:
        """Return what autograd keeps in place of ``tensor``."""
        with self._paused():
            value = self._find(tensor)
            # Of a copy, autograd itself gets the original: it tells of changes, as in plain training.
            is_copy = value is not None and root_of(value).is_copy
            if value is None or is_copy:
                value = Value(tensor, None, segment=self._location.segment)
                if is_plain(tensor) and not is_copy:
                    value.enter(self._values_at(tensor), _shape_of(tensor))
            if not value.is_held:
                is_dropped = self._can_be_computed(value)
                was_dropped = value.num_uses > 0
                if not root_of(value).is_held:
                    self.dropped_bytes += (is_dropped - was_dropped) * value.num_bytes
                if not is_dropped:
                    self._keep(value, tensor)
            value.num_uses += 1
            if self._observer is not None:
                self._observer.on_pack(value, self._location.segment)
            return value

    def _keep(self, value: Value, tensor: Tensor) -> None:
        """Keep ``tensor``, or the tensor that it is a view of: others may need that as well."""
        root = root_of(value)
        if root is value or not root.hold():
            value.hold_tensor(tensor)

    def _can_be_computed(self, value: Value) -> bool:
        """Return whether a value need not be kept. What it is computed from is kept from now on."""
        has_segments = self._policy.has_segments
        if value.call is None or (has_segments and value.segment != self._location.segment):
            return False
        # Otherwise each value of a long loop would walk back to the start of the loop.
        knows = self._policy.max_calls is None and not self._policy.compares_bytes
        calls, sources = closure(
            value,
            lambda at: (knows and at.is_computable) or (has_segments and at.segment != value.segment),
            self._policy.max_calls,
        )
        if self._policy.max_calls is not None and len(calls) > self._policy.max_calls:
            return False
        to_hold = [at for at in sources if not (at.is_held or (at.is_computable and at.segment == value.segment))]
        if self._policy.compares_bytes and sum(source.num_bytes for source in to_hold) >= value.num_bytes > 0:
            return False
        if not all(source.is_alive for source in to_hold):
            return False
        for source in to_hold:
            source.hold()
        for call in calls:
            for read in call.inputs:
                read.is_computable = True
        value.is_computable = True
        return True

    def _unpack(self, value: Value) -> Tensor:
        with self._paused():  # backward may run within the forward pass
            return value.take(lambda target: compute(target, self._policy.retain))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused


def _followed(entry: Any) -> Value | None:
    """Return the value that an entry of the tape is, or refers to."""
    return entry() if isinstance(entry, ReferenceType) else entry


def _shape_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells a tensor from others in the same memory."""
    # Two views of a complex tensor may differ in the sign alone.
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


# --- What a tape tells others while it records: to measure operators, and to compare them with a plan.


class Seen(NamedTuple):
    """One call of an operator, as an observer is told of it."""

    number: int
    key: str
    func: Any
    kind: Kind
    inputs: list[Value | None]
    outputs: list[Value | None]
    segment: int
    time_s: float


class Observer(ABC):
    """Is told what a tape sees."""

    @abstractmethod
    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Run an operator; return its result and its time (s)."""

    @abstractmethod
    def on_call(self, seen: Seen) -> None:
        """An operator has run."""

    @abstractmethod
    def on_pack(self, value: Value, segment: int) -> None:
        """Autograd keeps a value for the backward of something in ``segment``."""


class OutputSizes(Observer):
    """Adds up what each call of an operator computes.

    Attributes:
        by_key: bytes of the outputs that are not small, by the key of the call. A view has none.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, int] = {}

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **kwargs), 0.0

    @override
    def on_call(self, seen: Seen) -> None:
        outputs = [value for value in seen.outputs if value is not None and not value.is_held]
        self.by_key[seen.key] = 0 if seen.kind is Kind.VIEW else sum(value.num_bytes for value in outputs)

    @override
    def on_pack(self, value: Value, segment: int) -> None:
        pass


# --- Where in the model a forward pass is: gives each call of an operator a name, and counts segments.


class Location:
    """Follows one forward pass, in the thread that makes the object.

    Attributes:
        segment: how many of ``segment_ends`` have run.

    Args:
        model: knows the names of its modules.
        segment_ends: the modules at whose end a new segment of the model begins.
    """

    def __init__(self, model: nn.Module, segment_ends: frozenset[nn.Module]) -> None:
        self.segment = 0
        self._modules = {module: name for name, module in model.named_modules()}
        self._segment_ends = segment_ends
        self._path = [""]
        self._counts: dict[str, int] = {}
        self._thread = threading.get_ident()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what runs inside."""
        # Hooks on all modules, not on those of the model: they leave nothing behind in them.
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def next_key(self, func: Any) -> str:
        """Return the key of a call of ``func``, the same in each forward pass."""
        name = f"{self._path[-1]}:{func.name()}"
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return f"{name}:{count}"

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._modules and threading.get_ident() == self._thread:
            self._path.append(self._modules[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return  # the hooks see the modules that other threads run, too
        name = self._modules.get(module)
        if name in self._path[1:]:
            while self._path.pop() != name:
                pass  # modules that were left by an exception, which somebody has caught
        if module in self._segment_ends:
            self.segment += 1
