"""Values of the forward pass, and how to compute them again from others.

A `Value` is what one place in memory held at one version, a `Call` is the operator that computed it. Both know tensors
weakly. What backward needs of a value is a `Saved`: its tensor, or the `Saved` of what it can be computed again from.
Autograd's graph owns these, so that what a graph needs is freed with it. Backward asks for one value at a time, and
only the operators that it needs run again. No Python code of the model runs a second time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import TensorWeakRef

from lightning_dp._private.torch_names import detach_with_version, is_leaf, is_memory_shared, version_of
from lightning_dp.recompute.operators import BackendFlags, Kind, rerun, under_flags

# Two threads may run backward through parts of one graph. Neither may drop what the other is about to read.
_LOCK = threading.RLock()


class Value:
    """What one place in memory held at one version: an output of an operator, or a tensor from outside.

    Attributes:
        call: how to compute it again; None for a value that cannot be, and for one whose tensor is saved.
        number: of the operator in the forward pass; -1 for a tensor from outside.
        segment: part of the model in which it was computed.
        num_bytes: size of the tensor.
        position: in memory and at which version, see `position_of`.
        is_small: not worth an operator.
        is_state: small, in memory from outside, and a leaf, so every reader copies it: a running statistic, which batch
            norm moves without a new version, or a parameter that a hook clamps before backward, such as a scale of
            logits. It may have changed in this forward pass.
    """

    # There are many of them: with a dictionary each, Python would look for garbage more often.
    __slots__ = (
        *("call", "number", "segment", "num_bytes", "device", "is_small", "is_state", "position"),
        *("_weak", "_storage", "_saved", "__weakref__"),
    )

    def __init__(
        self,
        tensor: Tensor,
        position: tuple[Any, ...],
        segment: int,
        call: Call | None = None,
        number: int = -1,
        is_outside: bool = True,
    ) -> None:
        self.call = call
        self.number = number
        self.segment = segment
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.device = tensor.device
        self.is_small = is_small(tensor)
        is_view_of_state: bool = call is not None and call.kind is Kind.VIEW and call.inputs[0].is_state
        self.is_state: bool = is_view_of_state or (is_outside and is_leaf(tensor) and _has_few_bytes(tensor))
        self._weak: TensorWeakRef | None = TensorWeakRef(tensor)
        self._storage = ref(tensor.untyped_storage())
        self.position = position
        self._saved: ReferenceType[Saved] | None = None

    @property
    def saved(self) -> Saved | None:
        """What backward needs of it, if backward needs it."""
        return None if self._saved is None else self._saved()

    @property
    def is_held(self) -> bool:
        """Whether its tensor is saved."""
        saved = self.saved
        return saved is not None and saved.tensor is not None

    def live(self) -> Tensor | None:
        """Return the tensor, if somebody else still has it as it was."""
        tensor = None if self._weak is None else self._weak()
        if tensor is None or position_of(tensor, version_of(tensor)) != self.position:
            return None
        # An assignment to `.data` gives it other memory, and no new version.
        return tensor if tensor.untyped_storage() is self._storage() else None

    def save(self) -> Saved:
        """Return what backward needs of it; without anything in it if nobody has asked before."""
        saved = self.saved
        if saved is None:
            saved = Saved(self)
            self._saved = ref(saved)
        return saved

    def prepare_for_change(self, num_ahead: int = 0) -> None:
        """An operator is about to change the memory: keep what it holds now, if it is needed.

        The memory has ``num_ahead`` of the operator's new versions already.
        """
        self._weak = None
        saved = self.saved
        if saved is not None and saved.tensor is not None and not saved.is_own and saved.is_as_read(num_ahead):
            saved.hold_copy(saved.get(num_ahead))


class Saved:
    """What backward needs of one value. It belongs to the graph, and to the `Saved` that are computed from it.

    Attributes:
        value: None for a tensor that nothing is computed from.
        tensor: None if it must be computed again.
        original: the leaf that ``tensor`` shows, if it is one. Backward gets that, as in plain training.
        needs: what it is computed from.
        num_uses: how often backward will still ask for it.
        is_own: ``tensor`` was computed again, and may be dropped after its last use.
    """

    __slots__ = ("__weakref__", "_version", "is_own", "needs", "num_uses", "original", "tensor", "value")

    def __init__(self, value: Value | None) -> None:
        self.value = value
        self.tensor: Tensor | None = None
        self.original: Tensor | None = None
        self.needs: Sequence[Saved] = ()
        self.num_uses = 0
        self.is_own = False
        self._version = 0

    def hold(self, tensor: Tensor) -> Saved:
        """Keep ``tensor``, which is the value, from now on; return the object itself."""
        is_original = is_leaf(tensor)
        if is_original and (self.value is None or not is_plain(tensor)):
            self._hold(tensor)
        elif is_plain(tensor):
            # A leaf may get other memory, by an assignment to its `.data`: what was computed from it is computed again
            # from the memory of the forward pass.
            self.hold_alias(tensor)
        else:
            self._hold(tensor.detach())
        self.original = tensor if is_original else None
        return self

    def hold_alias(self, tensor: Tensor) -> Saved:
        """Keep an alias of ``tensor``, which has a graph or will have one; return the object itself.

        The graph would keep the tensor, and the tensor the graph.
        """
        return self._hold(detach_with_version(tensor))

    def hold_copy(self, tensor: Tensor) -> Saved:
        """Keep a copy of ``tensor``, which will be changed; return the object itself."""
        return self._hold(copy_of(tensor))

    def _hold(self, tensor: Tensor) -> Saved:
        self.tensor = tensor
        self.original = None
        self._version = version_of(tensor)
        self.is_own = False
        self.needs = ()
        if self.value is not None:
            self.value.call = None  # which would keep its inputs
        return self

    def hold_own(self, tensor: Tensor) -> None:
        """Keep the result of running the operator again until backward has asked for it."""
        self.tensor = tensor
        self.original = None
        self._version = version_of(tensor)
        self.is_own = True

    def is_as_read(self, num_ahead: int = 0) -> bool:
        """Return whether nobody has changed the tensor unseen, as layered SGD updates parameters; else `get` raises.

        See `Value.prepare_for_change`.
        """
        return self.tensor is not None and 0 <= version_of(self.tensor) - self._version <= num_ahead

    def get(self, num_ahead: int = 0) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place, and the tape has not seen that: after the forward pass, or by another
                thread.
        """
        tensor = self.tensor
        assert tensor is not None
        # Kernels do not look at the size: they would read memory that is not there.
        if tensor.numel() > 0 and is_plain(tensor) and tensor.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"the memory of a tensor of shape {list(tensor.shape)} was freed between forward and backward, and "
                "backward recomputes from it. FSDP frees parameters so: use a strategy that keeps them, or "
                "torch.utils.checkpoint in place of recomputation"
            )
        if not self.is_as_read(num_ahead):
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} was modified by an inplace operation between forward and "
                f"backward, or by another thread: it is at version {version_of(tensor)}, expected version "
                f"{self._version}. Backward needs it, or recomputes from it; change parameters after backward only, "
                "and other tensors in a copy"
            )
        return tensor

    def take(self, compute: Callable[[Saved], Tensor]) -> Tensor:
        """Return the tensor, which backward asks for; let ``compute`` compute it again if needed."""
        with _LOCK:
            self.num_uses -= 1
            tensor = self.get() if self.tensor is not None else compute(self)
            if self.original is not None:
                tensor = self.original
            if self.is_own and self.num_uses <= 0:
                self.tensor = None
            return tensor


@dataclass(eq=False, slots=True)
class Call:
    """One call of an operator, with values in place of tensors.

    Attributes:
        func: the operator.
        kind: of the operator.
        flags: of PyTorch's backends in the forward pass.
        number: of the call in the forward pass.
        args: of the operator.
        kwargs: of the operator.
        inputs: the values among the arguments, each once.
        changed: the value that the operator changes in place, and returns.
        owned: small inputs, which nobody else need keep.
        outputs: references to its values, in order; None for an output that it has not computed. They are weak: a cycle
            of values and calls would keep what they need until Python's collector comes by.
        statistics: mean and 1 / standard deviation of a batch norm, which stay.
    """

    func: Any
    kind: Kind
    flags: BackendFlags
    number: int
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Sequence[Value]
    changed: Value | None
    owned: Sequence[Saved]
    outputs: list[ReferenceType[Value] | None] = field(default_factory=list)
    statistics: list[Saved] = field(default_factory=list)

    def add_outputs(self, values: Sequence[Value | None]) -> None:
        """Say what the call has computed."""
        self.outputs = [None if value is None else ref(value) for value in values]

    def run(self, tensor_of: Callable[[Value], Tensor], may_change: bool) -> list[Any]:
        """Run the operator again, under the flags of the forward pass; return its outputs.

        Args:
            tensor_of: the tensor of an input.
            may_change: whether the operator may change its input in place, instead of a copy.
        """
        changed = None if may_change else self.changed
        args = [_fill(argument, tensor_of, changed) for argument in self.args]
        kwargs = {name: _fill(value, tensor_of, changed) for name, value in self.kwargs.items()}
        with under_flags(self.flags, self.kind):
            return outputs_of(rerun(self.func, args, kwargs, [saved.get() for saved in self.statistics]))


def _fill(argument: Any, tensor_of: Callable[[Value], Tensor], to_copy: Value | None) -> Any:
    """Return ``argument`` with tensors in place of values; that of ``to_copy`` is a copy."""
    if isinstance(argument, Value):
        tensor = tensor_of(argument)
        return copy_of(tensor) if argument is to_copy else tensor
    if isinstance(argument, (list, tuple)):
        return type(argument)(_fill(inner, tensor_of, to_copy) for inner in argument)
    return argument


def outputs_of(result: Any) -> list[Any]:
    """Return the outputs of an operator as a list."""
    return list(result) if isinstance(result, (list, tuple)) else [result]


def root_of(value: Value) -> Value:
    """Return the value that ``value`` is a view of, or itself."""
    while value.call is not None and value.call.kind is Kind.VIEW:
        value = value.call.inputs[0]
    return value


# --- Compute a value again: which operators lead to it, and what stays of what they compute on the way.

Retain = Callable[[Saved, int], bool]
"""Whether to keep a recomputed intermediate until backward needs it. Its arguments are the intermediate, which backward
may not ask for itself, and the number of operators that would have to run again to compute it."""


def closure(
    value: Value, stops: Callable[[Value], bool] = lambda value: False, max_calls: int | None = None
) -> tuple[list[Call], list[Value]]:
    """Return what computes ``value`` again: the calls, in order, and the values that must have their tensors.

    Args:
        value: has no tensor.
        stops: whether a value without a tensor is not to be computed again either.
        max_calls: the search ends, incomplete, at one more than that.
    """
    calls: dict[Call, None] = {}
    sources: dict[Value, None] = {}
    to_visit = [value]
    while to_visit:
        at = to_visit.pop()
        if at.is_held or at.call is None or (at is not value and stops(at)):
            sources[at] = None
        elif at.call not in calls:
            calls[at.call] = None
            if max_calls is not None and len(calls) > max_calls:
                break
            to_visit.extend(at.call.inputs)
    return sorted(calls, key=lambda call: call.number), list(sources)


# Long because the calls share what is present, who still reads it, and how far it is from what stays.
def compute(saved: Saved, retain: Retain) -> Tensor:
    """Compute a value again, and keep what ``retain`` names of the values on the way, until they are asked for."""
    target = saved.value
    assert target is not None
    calls, _ = closure(target)
    num_readers = Counter(value for call in calls for value in call.inputs)  # calls that have not run yet
    present: dict[Value, Tensor] = {}
    distance: dict[Value, int] = {}  # how many calls lead to a value from values that stay

    def tensor_of(value: Value) -> Tensor:
        if value in present:
            return present[value]
        held = value.saved
        assert held is not None
        return held.get()

    with torch.no_grad(), _without_autocast(target.device.type):
        for call in calls:
            changed = call.changed
            may_change = (
                changed is not None
                and changed is not target
                and changed in present
                and num_readers[changed] == 1
                # Others may have it, or its memory: what is held, views, and what it is a view of.
                and not changed.is_held
                and not is_memory_shared(present[changed])
            )
            outputs = call.run(tensor_of, may_change)
            length = 1 + sum(distance.get(value, 0) for value in call.inputs)
            for reference, tensor in zip(call.outputs, outputs, strict=False):
                output = None if reference is None else reference()
                if output is None or output.is_held:
                    continue
                needed = output.saved
                is_kept = False
                if needed is not None:
                    is_kept = needed.num_uses > 0 if output is target else retain(needed, length)
                    if is_kept:
                        needed.hold_own(tensor)
                distance[output] = 0 if is_kept else length
                if output is target or output in num_readers:
                    present[output] = tensor
            for read in call.inputs:
                num_readers[read] -= 1
                if num_readers[read] == 0 and read is not target:
                    present.pop(read, None)
    return present[target]


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Let operators run again on what autocast gave them in the forward pass. Some devices have none: "meta"."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


# --- Which tensors can be recorded, and where they are.

# Statistics, scales and losses: not worth an operator. Batch norm's statistics must stay, see `operators.rerun`.
_SMALL_VECTOR_BYTES = 65536
_SMALL_BYTES = 256


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is its value, and its version tells of each change.

    It is strided, real, no wrapper of another tensor, no nested one, and was not made in inference mode.
    """
    if type(tensor) not in _PLAIN_TYPES and (is_lazy(tensor) or _is_wrapper(tensor)):
        return False
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not tensor.dtype.is_complex and not tensor.is_inference()


_PLAIN_TYPES = {Tensor, nn.Parameter}  # a look that is cheaper than those at other types, for each operator


def position_of(tensor: Tensor, version: int) -> tuple[Any, ...]:
    """Return what tells a value from others in the same memory."""
    # Two views of a complex tensor may differ in the sign alone.
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), version


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides. With others, kernels may add in another order."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):  # a copy made in inference mode would have no version
            return copy_of(tensor)
    tensor = tensor.detach()
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or copy.numel() == 0 or tensor.is_neg():
        return copy
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((length,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    _add_tensors([arguments], found)
    return found


def _add_tensors(arguments: Iterable[Any], found: list[Tensor]) -> None:
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            _add_tensors(argument, found)
        elif isinstance(argument, dict):
            _add_tensors(argument.values(), found)


def storages_of(tensors: list[Tensor]) -> list[UntypedStorage]:
    """Return the memory of the tensors; also of those that others wrap."""
    found: list[UntypedStorage] = []
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        if _is_wrapper(tensor):
            if hasattr(tensor, "__tensor_flatten__"):
                names, _ = tensor.__tensor_flatten__()
                found += storages_of([getattr(tensor, name) for name in names])
        elif tensor.layout is torch.strided:
            found.append(tensor.untyped_storage())
    return found


def is_small(tensor: Tensor) -> bool:
    """Return whether the tensor is kept in any case. One that shows a part of a large tensor would keep all of it."""
    return _has_few_bytes(tensor) and tensor.untyped_storage().nbytes() <= _SMALL_VECTOR_BYTES


def _has_few_bytes(tensor: Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes <= (_SMALL_VECTOR_BYTES if tensor.dim() <= 1 else _SMALL_BYTES)


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
