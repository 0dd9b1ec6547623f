"""The tape of a forward pass: what each operator computed, and from what.

A `Tape` is a dispatch mode, so it sees each operator below autograd, autocast and the model's Python code. It is also
a pair of saved-tensor hooks, so it decides what autograd keeps for backward: a tensor, or what it can be computed
again from. That is planned in `_save` and `_save_sources`, each time that autograd saves a tensor.

The tape knows each piece of memory, and every value in it: what a place (offset, shape, strides, type) held at one
version. Tensors that show the same place at the same version are one value, whatever made them. Before an operator
changes a piece of memory, all values in it are prepared: copied if backward needs them, forgotten otherwise. A change
that the tape does not see, by another thread, makes a new version, so that no value is taken for another.

The tape refers weakly to tensors. It keeps none that nobody needs, and outlives no forward pass: what backward needs
belongs to autograd's own graph, and is freed with it.

Why not `torch.utils.checkpoint` with `create_selective_checkpoint_contexts`: it runs the model's Python code twice, so
batch norm moves its running statistics twice (torch issue #96136) and a global batch norm gathers twice. It keeps the
input of each block. And what it caches inside of an outer checkpoint is not dropped by the outer one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import override

from lightning_dp._private.torch_names import (
    TorchDispatchMode,
    is_in_backward,
    is_in_declared_forward,
    is_in_function_forward,
    is_in_operator,
    is_leaf,
    mutated_arguments,
    version_of,
)
from lightning_dp.recompute.operators import (
    Kind,
    arguments_moved_unseen,
    arguments_to_keep,
    backend_flags,
    is_batch_norm,
    kind_of,
)
from lightning_dp.recompute.policies import Policy
from lightning_dp.recompute.profile import Profiler
from lightning_dp.recompute.values import (
    Call,
    Saved,
    Value,
    closure,
    compute,
    is_plain,
    is_small,
    outputs_of,
    position_of,
    root_of,
    storages_of,
    tensors_in,
)

_Memories = WeakKeyDictionary[UntypedStorage, dict[Any, Value]]
"""The values in each piece of memory, by place and version. PyTorch has one storage object for a piece of memory."""


class _Pause(threading.local):
    """A context in which this thread is not recorded. Others go on: one may run backward while another records."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Tape(TorchDispatchMode):
    """Records one forward pass.

    Args:
        policy: what is kept.
        model: knows the names of its modules.
        segment_ends: the modules at whose end a new segment of the model begins.
        profiler: is told of each operator, and each value that autograd asks for.
    """

    def __init__(
        self, policy: Policy, model: nn.Module, segment_ends: frozenset[nn.Module], profiler: Profiler | None = None
    ) -> None:
        super().__init__()
        self._location = Location(model, segment_ends)
        self._policy = policy
        self._profiler = profiler
        self._memories: _Memories = WeakKeyDictionary()
        self._outside: WeakSet[UntypedStorage] = WeakSet()  # there before, and none of the arguments
        self._number = 0
        self._pause = _Pause()
        self._planned: list[Saved] = []  # what a plan keeps, until autograd has it
        self.was_asked = False
        """Whether autograd has asked for anything."""
        self.dropped_bytes = 0
        """What autograd has asked for and is not kept."""
        self._source_bytes = 0
        """What autograd has not asked for, and is kept because something is computed from it."""
        self.met_compiled = False
        """Whether a function that `torch.compile` made was called, which then runs without being compiled."""

    @contextmanager
    def recording(self, arguments: Any) -> Iterator[None]:
        """Record what runs inside: a method with these arguments."""
        self._memories.update((storage, {}) for storage in storages_of(tensors_in(arguments)))
        try:
            with self._location.followed(), saved_tensors_hooks(self._pack, self._unpack), self:
                self.met_compiled = False  # entering the mode asks, too
                yield
        finally:
            self._memories = WeakKeyDictionary()
            self._outside.clear()
            self._planned.clear()

    # What runs, operator by operator.

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._pause.depth or not hasattr(func, "overloadpacket"):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() or (is_in_backward() and not torch.is_grad_enabled()):
            self._prepare_changes(func, args, kwargs)
            return func(*args, **kwargs)
        kind = kind_of(func)
        key = self._location.next_key(func)
        keeps = self._policy.keeps(kind, key)
        tensors = tensors_in([args, kwargs])
        for storage in storages_of(tensors):
            if storage not in self._memories:
                self._outside.add(storage)
        is_kept = keeps or kind is Kind.FIXED or (kind is not Kind.VIEW and is_in_function_forward())
        call = None if is_kept else self._make_call(func, kind, args, kwargs, tensors)
        profiler = self._profiler
        inputs = [] if profiler is None else [self._find(tensor) for tensor in tensors]
        changed = self._prepare_changes(func, args, kwargs)
        if profiler is None:
            result = func(*args, **kwargs)
        else:
            result, time_s = profiler.run(func, args, kwargs)
        results = outputs_of(result)
        outputs = self._add_outputs(func, args, results, call, changed)
        if is_kept and kind is not Kind.VIEW and not changed and self._policy.plans_to_keep(key):
            # The model may drop it before autograd asks for something that the plan computes from it.
            self._planned += [
                value.save().hold_alias(tensor)
                for value, tensor in zip(outputs, results, strict=True)
                if value is not None and not value.is_small
            ]
        if profiler is not None:
            # What the tape cannot run again, a plan must not count on. A view costs nothing in any case.
            runs_again = kind is Kind.VIEW or call is not None or (keeps and not is_in_function_forward())
            known = kind if runs_again else Kind.FIXED
            profiler.on_call(key, known, inputs, outputs, time_s)
        self._number += 1
        return result

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # a class method there
        """Return False: Dynamo asks, when it meets a compiled function, whether to compile it in spite of the mode."""
        self.met_compiled = True
        return False

    def _make_call(self, func: Any, kind: Kind, args: Any, kwargs: Any, tensors: list[Tensor]) -> Call | None:
        """Return how to run the operator again, or None if that is not known."""
        changed = mutated_arguments(func)
        if not all(map(is_plain, tensors)):
            return None
        if changed and (changed[0] != 0 or self._find(args[0]) is None):
            return None  # a buffer, which must not change a second time, or an operator that changes another argument
        if self._is_copy_of_state(func, args, kwargs) or (kind is not Kind.VIEW and self._is_target(tensors)):
            return None
        inputs: dict[Value, None] = {}
        owned: list[Saved] = []
        call_args = [self._with_values(argument, inputs, owned) for argument in arguments_to_keep(func, args)]
        call_kwargs = {name: self._with_values(value, inputs, owned) for name, value in kwargs.items()}
        # It returns what it changes, and can be made to change a copy.
        changed_value = call_args[0] if changed else None
        flags = backend_flags(kind)
        return Call(func, kind, flags, self._number, call_args, call_kwargs, list(inputs), changed_value, owned)

    def _is_copy_of_state(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether something is cloned that no operator of this forward pass computes.

        That is done because the original changes: spectral normalization moves its vectors at each forward pass, also
        at those between this one and its backward. A copy with a memory format is one of `contiguous`, unless it is a
        vector.
        """
        if func is not torch.ops.aten.clone.default or (kwargs and args[0].dim() != 1):
            return False
        original = self._find(args[0])
        return original is None or root_of(original).call is None

    def _is_target(self, tensors: list[Tensor]) -> bool:
        """Return whether tensors from outside are read without a graph, as by a teacher that computes targets.

        Autograd keeps the targets alone, so a hook may move the teacher before backward, wherever it is kept. The
        arguments of the recorded method stay as they are, and `_with_values` copies what is small.
        """
        if not any(tensor.untyped_storage() in self._outside and not self._is_copied(tensor) for tensor in tensors):
            return False
        has_graph = any(tensor.requires_grad for tensor in tensors)
        return not (has_graph and (torch.is_grad_enabled() or is_in_declared_forward()))

    def _is_copied(self, tensor: Tensor) -> bool:
        value = self._find(tensor)
        return is_small(tensor) if value is None else value.is_small or value.is_state

    def _with_values(self, argument: Any, inputs: dict[Value, None], owned: list[Saved]) -> Any:
        """Return ``argument`` with values in place of tensors.

        ``inputs`` gets these values, and ``owned`` what the call must keep of them.
        """
        if isinstance(argument, Tensor):
            value = self._value_of(argument)
            if value.is_small or value.is_state:
                # Computing it again would bring in what it was computed from, which may be large.
                saved = value.save()
                if saved.tensor is None or saved.is_own:
                    # What has no graph may change before backward, as a running mean does.
                    is_copied = value.is_state or is_leaf(argument)
                    (saved.hold_copy if is_copied else saved.hold_alias)(argument)
                owned.append(saved)
            inputs[value] = None
            return value
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._with_values(inner, inputs, owned) for inner in argument)
        return argument

    def _add_outputs(
        self, func: Any, args: Any, results: list[Any], call: Call | None, changed: set[UntypedStorage]
    ) -> list[Value | None]:
        """Return the values that an operator has computed; None for what is a value already, or none at all."""
        outputs: list[Value | None] = []
        # Below autograd a view does not have the version yet that it shares with its base, and what was changed in
        # place not the version that it gets.
        base = args[0] if args and func.is_view else None  # a number, where a function of numbers is one of tensors
        view_version = version_of(base) if isinstance(base, Tensor) and not base.is_inference() else None
        for tensor in results:
            if not isinstance(tensor, Tensor) or not is_plain(tensor):
                outputs.append(None)
                continue
            version = version_of(tensor) if view_version is None else view_version
            version += tensor.untyped_storage() in changed
            values, position = self._values_at(tensor), position_of(tensor, version)
            if position in values:
                outputs.append(None)
                continue
            is_outside = tensor.untyped_storage() in changed and tensor.untyped_storage() in self._outside
            value = Value(tensor, position, self._location.segment, call, self._number, is_outside)
            values[position] = value
            if changed or view_version is not None:
                value.is_small = False  # a plan counts it: what it is a view of, or was changed from, may be large
            outputs.append(value)
        if call is not None:
            call.add_outputs(outputs)
            if is_batch_norm(func):
                statistics = [(outputs[at], results[at]) for at in (1, 2)]
                call.statistics = [
                    value.save().hold_alias(tensor)
                    for value, tensor in statistics
                    if value is not None and value.is_small
                ]
        return outputs

    # Which values are where in memory.

    def _find(self, tensor: Tensor) -> Value | None:
        """Return the value that ``tensor`` is, or None if the tape has not seen it."""
        if not is_plain(tensor):
            return None
        values = self._memories.get(tensor.untyped_storage())
        return None if values is None else values.get(position_of(tensor, version_of(tensor)))

    def _value_of(self, tensor: Tensor) -> Value:
        """Return the value that a plain tensor is: one from outside, if the tape has not seen it."""
        values, position = self._values_at(tensor), position_of(tensor, version_of(tensor))
        value = values.get(position)
        if value is None:
            value = values[position] = Value(tensor, position, self._location.segment)
        return value

    def _values_at(self, tensor: Tensor) -> dict[Any, Value]:
        return self._memories.setdefault(tensor.untyped_storage(), {})

    def _prepare_changes(self, func: Any, args: Any, kwargs: Any) -> set[UntypedStorage]:
        """Save what the operator is about to overwrite, where it is needed, and forget the values in that memory.

        Return the memory that gets a new version.
        """
        places, moved_places = mutated_arguments(func), arguments_moved_unseen(func)
        if not (places or moved_places):
            return set()
        arguments = [kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None for at in places]
        written = storages_of(tensors_in(arguments))
        changed = set(written)
        moved = [args[at] for at in moved_places if at < len(args)]
        # Those of `torch.library.custom_op` give what they change its new version before they run.
        may_be_ahead = func.namespace not in ("aten", "c10d")
        for storage in (*changed, *storages_of(tensors_in(moved))):
            for value in self._memories.pop(storage, {}).values():
                value.prepare_for_change(written.count(storage) if may_be_ahead else 0)
        return changed

    # What autograd keeps. This is where a recomputation is planned.

    def _pack(self, tensor: Tensor) -> Saved:
        """Return what autograd keeps in place of ``tensor``."""
        is_foreign = not is_in_operator() and not _is_saved_by_own_function()
        self.was_asked = True
        with self._pause:
            saved = self._save(tensor, is_foreign)
            saved.num_uses += 1
            if self._profiler is not None and saved.value is not None:
                self._profiler.on_pack(saved.value, self._location.segment)
                if is_foreign:
                    self._profiler.on_keep(root_of(saved.value))
            return saved

    def _save(self, tensor: Tensor, is_foreign: bool) -> Saved:
        value = self._find(tensor)
        # Autograd itself gets the original of a running statistic: it tells of changes, as in plain training.
        if (not is_plain(tensor) or is_small(tensor)) if value is None else root_of(value).is_state:
            return Saved(None).hold(tensor)
        value = value or self._value_of(tensor)
        saved = value.saved
        if saved is not None and saved.tensor is not None:
            if saved.num_uses == 0:  # held for others until now
                self._source_bytes -= value.num_bytes
            return saved
        was_dropped = saved is not None and saved.num_uses > 0
        if is_foreign or (self._policy.has_segments and value.segment != self._location.segment):
            saved = None
        elif saved is None:
            saved = self._save_sources(value, tensor)
        if saved is None:
            if was_dropped:
                self.dropped_bytes -= self._bytes_beside([tensor], _is_held)
            return self._keep(value, root_of(value), tensor)
        self.dropped_bytes += self._bytes_beside([tensor], _is_asked)
        return saved

    def _save_sources(self, value: Value, tensor: Tensor) -> Saved | None:
        """Save what ``value`` can be computed again from; None if it is to be kept itself."""
        if value.call is None:
            return None
        has_segments, max_calls = self._policy.has_segments, self._policy.max_calls
        # Without a limit, each value of a long loop would walk back to the start of the loop.
        calls, sources = closure(
            value,
            lambda at: (max_calls is None and at.saved is not None) or (has_segments and at.segment != value.segment),
            max_calls,
        )
        if max_calls is not None and len(calls) > max_calls:
            return None
        # Held here: a dead graph that the garbage collector frees meanwhile may be the only owner.
        saved = {at: at.saved for at in sources}
        to_hold = [at for at in sources if not (at.is_held or (saved[at] is not None and at.segment == value.segment))]
        found = [(source, live) for source in to_hold if (live := source.live()) is not None]
        if len(found) < len(to_hold):
            return None
        # Memory, and not values: a view holds all of what it is a view of.
        num_bytes = self._bytes_beside((live for _, live in found), _is_held)
        if num_bytes > 0:
            kept_bytes = self._bytes_beside([tensor], _is_held)
            spare_bytes = self.dropped_bytes - self._source_bytes
            if not self._policy.holds(num_bytes, kept_bytes, spare_bytes):
                return None
        self._source_bytes += num_bytes
        return self._connect(value, calls, dict(found))

    def _bytes_beside(self, tensors: Iterable[Tensor], is_there: Callable[[Value], bool]) -> int:
        """Return the bytes of the memory of ``tensors``, without memory of which a value ``is_there``."""
        return sum(
            storage.nbytes()
            for storage in set(storages_of(list(tensors)))
            if not any(map(is_there, self._memories.get(storage, {}).values()))
        )

    def _keep(self, value: Value, root: Value, tensor: Tensor) -> Saved:
        """Keep ``tensor``, or the tensor that it is a view of: others may need that as well."""
        of_root = root.saved  # as in `_save_sources`
        is_held = of_root is not None and root.is_held
        base = None if root is value or is_held else root.live()
        if root is value or not (is_held or base is not None):
            return value.save().hold(tensor)
        calls, _ = closure(value, lambda at: at is root)
        return self._connect(value, calls, {} if base is None else {root: base})

    def _connect(self, value: Value, calls: list[Call], tensors: dict[Value, Tensor]) -> Saved:
        """Return what backward needs of ``value``, with all that it is computed from by way of ``calls``.

        Args:
            value: has not been saved, or has been for others.
            calls: that lead to it, in order.
            tensors: of those sources that are not saved yet.
        """
        connected = {source: source.save().hold(tensor) for source, tensor in tensors.items()}

        def add(at: Value) -> Saved:
            saved = at.saved
            if saved is None:
                saved = at.save()
                assert at.call is not None
                saved.needs = [connected[source] for source in at.call.inputs]
            return saved

        for call in calls:
            for read in call.inputs:
                if read not in connected:
                    connected[read] = add(read)
        return add(value)

    def _unpack(self, saved: Saved) -> Tensor:
        with self._pause:  # backward may run within the forward pass
            return saved.take(lambda target: compute(target, self._policy.retain))


def _is_held(value: Value) -> bool:
    return value.is_held


def _is_asked(value: Value) -> bool:
    saved = value.saved
    return saved is not None and (saved.num_uses > 0 or saved.tensor is not None)


# What somebody's `autograd.Function` saves and computes is kept: its forward may have overwritten a tensor by a kernel
# that PyTorch does not know. Those of this package do not (`declare_no_unseen_changes`).


def _is_saved_by_own_function() -> bool:
    """Return whether a function of this package called the ``apply`` that calls the hook that calls this."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001
    if frame is not None and frame.f_globals.get("__name__") == torch.autograd.function.__name__:
        frame = frame.f_back  # until torch 2.14, apply itself is written in Python
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == __name__.partition(".")[0]


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
        with (
            register_module_forward_pre_hook(self._enter),
            # Also after an exception, which the model may catch.
            register_module_forward_hook(self._leave, always_call=True),
        ):
            yield

    @property
    def module(self) -> str:
        """The name of the module whose forward runs."""
        return self._path[-1]

    def next_key(self, func: Any) -> str:
        """Return the key of a call of ``func``, the same in each forward pass."""
        name = f"{self.module}:{func.name()}"
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return f"{name}:{count}"

    # The hooks see the modules that other threads run, too.

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._modules and threading.get_ident() == self._thread:
            self._path.append(self._modules[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._modules and threading.get_ident() == self._thread:
            self._path.pop()
            self.segment += module in self._segment_ends
