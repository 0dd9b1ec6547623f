"""Values of the forward pass, and how to compute them again from others.

A `Value` is one output of one operator in one forward pass, a `Call` is how it was computed. A value holds its tensor,
or can be computed again from values that do. Backward asks for one value at a time, and only the operators that it
needs run again. No Python code of the model runs a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import TensorWeakRef

from lightning_dp._private.torch_names import version_of
from lightning_dp.recompute.operators import Kind, is_batch_norm, kind_of, rerun

Entries = dict[Any, Any]
"""Values, or weak references to them, by shape: those in one piece of memory."""


class Value:
    """One output of an operator, or a tensor from outside of the forward pass.

    Attributes:
        call: how to compute it again; None for a value that cannot be.
        place: of this output among those of the operator.
        number: of the operator in the forward pass; -1 for a tensor from outside.
        key: of the call of the operator, see `policies.Policy.decide`.
        segment: part of the model in which it was computed.
        num_bytes: size of the tensor.
        num_uses: how often backward will still ask for it.
        num_runs: how often it was computed again.
        is_computable: what it can be computed from within its segment is kept.
        is_copy: holds a copy of the tensor, from which others are computed again.
    """

    __slots__ = (
        *("call", "place", "number", "key", "segment", "num_bytes", "num_uses", "num_runs", "tensor", "device_type"),
        *("_home", "_is_own", "_version", "_weak", "__weakref__", "is_computable", "is_copy"),
    )

    def __init__(
        self, tensor: Tensor, call: Call | None, place: int = 0, number: int = -1, segment: int = 0, key: str = ""
    ) -> None:
        self.call = call
        self.place = place
        self.number = number
        self.key = key
        self.segment = segment
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.device_type = tensor.device.type
        self.num_uses = 0
        self.num_runs = 0
        self.is_computable = False
        self.is_copy = False
        self.tensor: Tensor | None = None
        self._version = 0
        self._is_own = False  # whether `tensor` was computed again, and may be dropped after its last use
        self._weak: TensorWeakRef | None = TensorWeakRef(tensor)
        self._home: tuple[Entries, Any] | None = None

    def enter(self, entries: Entries, key: Any) -> None:
        """Let the tape find the value among ``entries``."""
        entries[key] = self
        self._home = entries, key

    @property
    def is_held(self) -> bool:
        """Whether the value has its tensor."""
        return self.tensor is not None

    @property
    def is_alive(self) -> bool:
        """Whether anybody still has the tensor."""
        return self.tensor is not None or (self._weak is not None and self._weak() is not None)

    def hold(self) -> bool:
        """Keep the tensor from now on, if anybody else still has it; return whether that is so."""
        if self.tensor is None:
            tensor = None if self._weak is None else self._weak()
            if tensor is None:
                return False
            self.hold_tensor(tensor)
        return True

    def hold_tensor(self, tensor: Tensor, stays: bool = False) -> None:
        """Keep ``tensor``, which is this value, from now on.

        Args:
            tensor: the tensor.
            stays: whether the tape keeps the value until the end of the forward pass, even if backward needs it not.
        """
        # A tensor with a graph would keep the graph, and through it itself.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = version_of(tensor)
        self._weak = None
        self.call = None  # which would keep its inputs
        if self._home is not None and not stays:
            # The graph of autograd has the value from now on, and may be freed before the forward pass has ended.
            entries, key = self._home
            if entries.get(key) is self:
                entries[key] = ref(self)
            self._home = None

    def hold_copy(self, tensor: Tensor) -> None:
        """Keep what ``tensor``, which is this value, has in it now."""
        self.hold_tensor(copy_of(tensor))
        self.is_copy = True

    def prepare_for_change(self) -> None:
        """An operator is about to change the tensor in place: keep what it was, if it is needed."""
        if self.tensor is not None:
            self.tensor = copy_of(self.tensor)
            self._version = version_of(self.tensor)
        self._weak = None

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place after the forward pass.
        """
        tensor = self.tensor
        assert tensor is not None
        if version_of(tensor) != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} was modified by an inplace operation between forward and "
                f"backward: it is at version {version_of(tensor)}, expected version {self._version}. Backward needs "
                "it, or recomputes from it; change parameters after backward only, and other tensors in a copy"
            )
        return tensor

    def take(self, compute: Callable[[Value], Tensor]) -> Tensor:
        """Return the tensor, which backward asks for; let ``compute`` compute it again if needed."""
        self.num_uses -= 1
        tensor = self.get() if self.tensor is not None else compute(self)
        if self._is_own and self.num_uses <= 0:
            self.tensor = None
        return tensor

    def keep_own(self, tensor: Tensor) -> None:
        """Keep the result of running the operator again until backward has asked for it."""
        self.tensor = tensor
        self._version = version_of(tensor)
        self._is_own = True


class Call:
    """One call of an operator, with values in place of tensors.

    Attributes:
        inputs: the values among the arguments, each once.
        outputs: references to its values, in order; None for an output that is no tensor. They are weak: a cycle of
            values and calls would keep their tensors until Python's collector comes by.
        statistics: mean and 1 / standard deviation of a batch norm, which stay.
        changed: the value that the operator changes in place, and returns.
    """

    __slots__ = ("_args", "_default_dtype", "_kwargs", "changed", "func", "inputs", "number", "outputs", "statistics")

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], number: int, changed: Value | None
    ) -> None:
        self.func = func
        self.number = number
        self._args = args
        self._kwargs = kwargs
        # Factories and operators on integers compute in it. Lightning's precision "64-true" and others change it for
        # the forward pass alone.
        self._default_dtype = torch.get_default_dtype()
        self.changed = changed
        self.inputs = list(dict.fromkeys(_values_in([*args, *kwargs.values()])))
        self.outputs: list[ReferenceType[Value] | None] = []
        self.statistics: list[Value] = []

    def add_outputs(self, values: Sequence[Value | None]) -> None:
        """Say what the call has computed."""
        self.outputs = [None if value is None else ref(value) for value in values]
        if is_batch_norm(self.func):
            self.statistics = [value for value in values[1:3] if value is not None and value.is_held]

    @property
    def kind(self) -> Kind:
        """Of the operator."""
        return kind_of(self.func)

    def run(self, tensor_of: Callable[[Value], Tensor], may_change: bool) -> list[Any]:
        """Run the operator again; return its outputs.

        Args:
            tensor_of: the tensor of an input.
            may_change: whether the operator may change its input in place, instead of a copy.
        """
        changed = None if may_change else self.changed
        args = [_fill(argument, tensor_of, changed) for argument in self._args]
        kwargs = {name: _fill(value, tensor_of, changed) for name, value in self._kwargs.items()}
        statistics = [value.tensor for value in self.statistics]
        now = torch.get_default_dtype()
        if now is self._default_dtype:
            return outputs_of(rerun(self.func, args, kwargs, statistics))
        torch.set_default_dtype(self._default_dtype)
        try:
            return outputs_of(rerun(self.func, args, kwargs, statistics))
        finally:
            torch.set_default_dtype(now)


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


def _values_in(arguments: Iterable[Any]) -> list[Value]:
    found = []
    for argument in arguments:
        if isinstance(argument, Value):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(_values_in(argument))
    return found


# --- Compute a value again: which operators lead to it, and what stays of what they compute on the way.

Retain = Callable[[Value, int], bool]
"""Whether a value that is computed on the way to another one stays until backward asks for it, too. Its arguments are
the value, which backward may not ask for itself, and the number of operators that would have to run again to compute
it."""


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


def compute(target: Value, retain: Retain) -> Tensor:
    """Compute ``target`` again, and keep what ``retain`` names of the values on the way, until they are asked for."""
    calls, _ = closure(target)
    num_readers: dict[Value, int] = {}  # calls that have not run yet
    for call in calls:
        for value in call.inputs:
            num_readers[value] = num_readers.get(value, 0) + 1
    viewed = {value for call in calls if call.kind is Kind.VIEW for value in call.inputs}
    present: dict[Value, Tensor] = {}
    distance: dict[Value, int] = {}  # how many calls lead to a value from values that stay

    def tensor_of(value: Value) -> Tensor:
        return present[value] if value in present else value.get()

    with torch.no_grad(), torch.autocast(target.device_type, enabled=False):
        for call in calls:
            changed = call.changed
            may_change = (
                changed is not None
                and changed is not target
                and changed in present
                and num_readers[changed] == 1
                # Others may have its memory: whoever asks for it later, and views.
                and not changed.is_held
                and changed not in viewed
                and _owns_memory(changed)
            )
            outputs = call.run(tensor_of, may_change)
            length = 1 + sum(distance.get(value, 0) for value in call.inputs)
            for reference, tensor in zip(call.outputs, outputs, strict=False):
                output = None if reference is None else reference()
                if output is None or output.is_held:
                    continue
                output.num_runs += 1
                is_kept = output.num_uses > 0 if output is target else retain(output, length)
                distance[output] = 0 if is_kept else length
                if is_kept:
                    output.keep_own(tensor)
                if output is target or output in num_readers:
                    present[output] = tensor
            for read in call.inputs:
                num_readers[read] -= 1
                if num_readers[read] == 0 and read is not target:
                    present.pop(read, None)
    return present[target]


def _owns_memory(value: Value) -> bool:
    """Return whether the operator that computes ``value`` again gives it memory of its own."""
    return value.call is not None and value.call.kind is not Kind.VIEW


# --- Which tensors can be recorded, and where they are.

# Statistics, scales and losses: not worth an operator. Batch norm's statistics must stay, see `operators.rerun`.
_SMALL_VECTOR_BYTES = 65536
_SMALL_BYTES = 256


def is_plain(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is its value, and its version tells of each change.

    It is strided, real, no wrapper of another tensor, and was not made in inference mode.
    """
    if is_lazy(tensor):
        return False
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    is_real = tensor.layout is torch.strided and not tensor.dtype.is_complex
    return not is_wrapper and is_real and not tensor.is_inference()


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


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from tensors_in(argument)
    elif isinstance(arguments, dict):
        yield from tensors_in(list(arguments.values()))


def is_small(tensor: Tensor) -> bool:
    """Return whether the tensor is kept in any case."""
    num_bytes = tensor.numel() * tensor.element_size()
    return num_bytes <= (_SMALL_VECTOR_BYTES if tensor.dim() <= 1 else _SMALL_BYTES)
