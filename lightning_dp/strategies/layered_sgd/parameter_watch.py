"""The watch: while a parameter waits for its update or gradient, each use of the parameter first completes it.

PyTorch lets a subclass of Tensor see each function that is called with one of its instances (``__torch_function__``).
A watched parameter is an instance of such a subclass for as long as it is watched: `ParameterWatch.add` changes
``parameter.__class__``, `ParameterWatch.remove` changes it back. That is how PyTorch's own lazy parameters become plain
ones. Its identity, storage and attributes stay as they are.

Why not a `torch.overrides.TorchFunctionMode`, which would see everything: a mode sees *all* functions of the thread. It
makes each of them slower for as long as anything is pending, it disables PyTorch's fused inference paths, Dynamo
traces into it, and it sees a single thread. A watched parameter costs a few microseconds once per step.

What PyTorch does not show to ``__torch_function__``: functions made by ``torch.jit``, C++ extensions, aliases of the
storage (a kept ``p.data``), ``torch.tensor(p)`` and other constructors, among them those of sparse tensors, and
arguments that a `torch.func` transform differentiates. The strategy finds most of these when backward delivers a
gradient (`StaleUseDetector`).
"""

from __future__ import annotations

import inspect
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._private.torch_names import LOCAL_PART, next_sequence_number, sequence_number, without_torch_function

Hook = Callable[[Tensor], None]

_GET_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]

# Attributes that do not depend on the value. All others count as a use: `data`, `T`, `mT`, `real`, ...
_HARMLESS_ATTRIBUTES = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "output_nr"),
        *("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad", "_base"),
        *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xla", "is_xpu", "is_sparse", "is_sparse_csr"),
        *("is_quantized", "is_nested", "is_mkldnn", "_backward_hooks", "_post_accumulate_grad_hooks"),
    }
)
_HARMLESS_METHODS = frozenset(
    {
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.get_device),
        *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
    }
)
_FUNCTIONS_OF_TORCH = [
    getattr(kind.__torch_function__, "__func__", kind.__torch_function__) for kind in (Tensor, nn.Parameter)
]
_NEW_PARAMETER = nn.Parameter.__new__.__code__
_ZERO_GRAD = {inspect.unwrap(function).__code__ for function in (Optimizer.zero_grad, nn.Module.zero_grad)}


class ParameterWatch:
    """Calls ``before_use(p)`` before a watched value is used, and ``before_gradient(p)`` before ``p.grad`` is read.

    Both may `remove` the parameter. The function that was called then runs as it would have without the watch.

    Args:
        before_use: must bring the value up to date.
        before_gradient: must bring the gradient up to date.
    """

    def __init__(self, before_use: Hook, before_gradient: Hook) -> None:
        self._before_use = before_use
        self._before_gradient = before_gradient
        self._classes: dict[type[Tensor], type[Tensor]] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters."""
        for parameter in parameters:
            kind = type(parameter)
            if not issubclass(kind, _Watched):
                if kind not in self._classes:
                    members: dict[str, Any] = {"watch": self, "plain": kind, "sees_functions": _sees_functions(kind)}
                    if (slot := getattr(kind, LOCAL_PART, None)) is not None:
                        members[LOCAL_PART] = _watched_slot(slot)
                    self._classes[kind] = type(f"Watched{kind.__name__}", (_Watched, kind), members)
                parameter.__class__ = self._classes[kind]

    def remove(self, parameters: Iterable[Tensor]) -> None:
        """Stop watching these parameters."""
        for parameter in parameters:
            kind = type(parameter)
            if issubclass(kind, _Watched):
                parameter.__class__ = kind.plain

    def before_call(self, func: Any, parameters: list[Tensor]) -> None:
        """Tell of the use before ``func`` is called with these watched parameters, if it uses a value or gradient."""
        if not _is_harmless(func):
            for parameter in parameters:
                self._before_use(parameter)
        elif func == _GET_GRADIENT and not _is_asked_by_zero_grad():
            self._before_gradient(parameters[0])


class _Watched:
    """Base of the classes that watched parameters have for a while."""

    watch: ParameterWatch
    plain: type[Tensor]
    sees_functions: bool  # whether `plain` has a __torch_function__ of its own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameters = _watched_in(args, kwargs)
        cls.watch.before_call(func, parameters)
        # A parameter may still be watched, for example if only its shape was read. Without the watch during the call,
        # this method does not call itself again.
        still_watched = [parameter for parameter in parameters if isinstance(parameter, _Watched)]
        if not still_watched:
            return func(*args, **kwargs)
        if _is_harmless(func) and not cls.sees_functions:
            # An update may be pending. The class stays, because another thread may use the parameter at this moment.
            with without_torch_function():
                return func(*args, **kwargs)
        with _unwatched(still_watched):
            return func(*args, **kwargs)

    def detach(self) -> Any:
        parameter: Any = self
        alias = Tensor.detach(parameter)
        caller = _caller()
        if caller.f_code is _NEW_PARAMETER and caller.f_locals["cls"] is plain_class(type(parameter)):
            # nn.Parameter(p) has seen the watched class, and therefore wants an alias of the class that p has now.
            alias.__class__ = type(parameter)
        return alias

    def as_subclass(self, cls: type[Tensor]) -> Any:
        # PyTorch does not show this method to __torch_function__.
        return self._plainly(lambda parameter: parameter.as_subclass(cls))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Copying looks at the class before it looks at the value.
        return self._plainly(lambda parameter: parameter.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plainly(lambda parameter: parameter.__reduce_ex__(protocol))

    def _plainly(self, act: Callable[[Any], Any]) -> Any:
        parameter: Any = self
        self.watch.before_call(act, [parameter])
        with _unwatched([parameter]):
            return act(parameter)


def _watched_slot(slot: Any) -> property:
    """Return the attribute that holds a DTensor's local part, as one that tells the watch.

    ``to_local`` and FSDP2, when it gathers a parameter, read it in Python, which PyTorch does not show.
    """

    def get(parameter: Any) -> Tensor:
        parameter.watch.before_call(get, [parameter])
        local: Tensor = slot.__get__(parameter)
        return local

    return property(get, slot.__set__)


def _sees_functions(kind: type[Tensor]) -> bool:
    function = kind.__torch_function__
    return getattr(function, "__func__", function) not in _FUNCTIONS_OF_TORCH


def plain_class(kind: type[Tensor]) -> type[Tensor]:
    """Return the class ``kind`` without the watch."""
    return kind.plain if issubclass(kind, _Watched) else kind


def _watched_in(args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Find the watched parameters in nested tuples, lists, sets and mappings; each once, in order."""
    found: dict[int, Tensor] = {}
    to_search: list[Any] = [*args, *kwargs.values()]
    for item in to_search:  # grows while it is iterated
        kind = type(item)
        if kind is Tensor:  # most other arguments; what follows takes longer
            continue
        if issubclass(kind, _Watched):
            found[id(item)] = item
        elif issubclass(kind, (tuple, list, set, frozenset)):
            to_search.extend(item)
        elif issubclass(kind, dict):
            to_search.extend(item.values())
    return list(found.values())


@contextmanager
def _unwatched(parameters: Sequence[Tensor]) -> Iterator[None]:
    with ExitStack() as undo:
        for parameter in parameters:
            undo.callback(setattr, parameter, "__class__", type(parameter))
            parameter.__class__ = plain_class(type(parameter))
        yield


def _is_harmless(func: Any) -> bool:
    """Return whether ``func`` neither reads nor changes the value of its argument."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        attribute = getattr(func, "__self__", None)
        return getattr(attribute, "__name__", "") in _HARMLESS_ATTRIBUTES
    return func in _HARMLESS_METHODS


def _is_asked_by_zero_grad() -> bool:
    """Return whether the caller is ``zero_grad(set_to_none=True)``, which only checks for a gradient to drop.

    It runs before the forward in many training loops, and must not wait there for the reduction.
    """
    caller = _caller()
    return caller.f_code in _ZERO_GRAD and bool(caller.f_locals.get("set_to_none"))


def _caller() -> FrameType:
    """Return the frame that has called into this file."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


# What the watch does not see is found in backward.


class StaleUseError(RuntimeError):
    """The forward used a stale parameter: a use that `ParameterWatch` cannot see."""


class AutogradPosition(NamedTuple):
    """How far a thread has come in making nodes of the autograd graph. Each thread numbers its own nodes."""

    thread: int
    number: int

    @classmethod
    def now(cls) -> AutogradPosition:
        """Return the present position of the calling thread."""
        return cls(threading.get_ident(), next_sequence_number())

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread has been here."""
        return self.thread == threading.get_ident()


class StaleUseDetector:
    """Raises in backward when a parameter gets a gradient although it was used while its update was pending.

    A parameter is a suspect if nodes of the graph were made while its update was pending, and the watch has seen no use
    of it since the update was staged. There are two kinds: parameters whose update is still pending when backward
    begins, and those that were updated in this forward only because another parameter of their bucket was used. If a
    suspect nevertheless gets a gradient, it was used in a function that PyTorch does not show (see `parameter_watch`).

    Not every such use is wrong. A graph may have been built before the update was staged (two losses on one graph, with
    a step between their backward passes), and a use after the update has read the new value. The nodes of the graph
    tell these cases apart, because autograd numbers them in the order in which they are made.

    A parameter that is used unseen first and seen later, in one forward, is no suspect and goes unnoticed. To find it,
    the whole graph would have to be searched in each step.
    """

    def __init__(self) -> None:
        self._suspects: dict[Tensor, range] = {}  # with the numbers of the nodes that may have read the old value

    @property
    def suspects(self) -> Collection[Tensor]:
        """The parameters that may have been used unseen."""
        return self._suspects.keys()

    def note_updated(self, parameters: Iterable[Tensor], staged_at: AutogradPosition) -> None:
        """Remember that ``parameters`` are updated now. A read between ``staged_at`` and now was one too early."""
        now = AutogradPosition.now()
        # Without a node in between there was no such read. So it is if all buckets have arrived when the forward uses
        # its first parameter: then none has to be watched any longer.
        if now.thread == staged_at.thread and now.number > staged_at.number:
            self._suspects.update(dict.fromkeys(parameters, range(staged_at.number, now.number)))

    def note_seen(self, parameter: Tensor) -> None:
        """Do not suspect ``parameter``: its use was seen."""
        self._suspects.pop(parameter, None)

    def begin_forward(self) -> None:
        """Forget what was updated before: a forward that begins now reads up-to-date values."""
        self._suspects.clear()

    @contextmanager
    def watching(self, loss: Tensor, module: nn.Module) -> Iterator[None]:
        """Watch one backward pass. Call it when nothing is pending any more.

        Args:
            loss: that backward starts from.
            module: knows the names of the parameters.

        Raises:
            StaleUseError: out of backward, before the gradient is accumulated or reduced.
        """
        readers = cache(partial(_readers_in_graph, loss))  # searched once, for the first hook that asks
        handles = [
            parameter.register_hook(partial(_require_fresh, parameter, stale, readers, module))
            for parameter, stale in self._suspects.items()
            if parameter.requires_grad
        ]
        self._suspects.clear()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _require_fresh(
    parameter: Tensor, stale: range, readers: Callable[[], Readers], module: nn.Module, gradient: Tensor
) -> None:
    """Raise if a node that was made while the update of ``parameter`` was pending has read it. The hook on it.

    Args:
        parameter: gets a gradient.
        stale: the numbers of the nodes that were made while its update was pending.
        readers: returns which nodes have read which parameters.
        module: knows its name.
        gradient: its gradient.
    """
    numbers = readers().get(parameter, set())
    # Without any node the graph has been changed by somebody: then a gradient is not to be trusted either.
    if numbers and not any(number in stale for number in numbers):
        return
    name = next((name for name, p in module.named_parameters() if p is parameter), "a parameter")
    raise StaleUseError(
        f"{name} was used in this forward without its last update, by a function that PyTorch does not show: "
        "torch.jit.script or trace, a C++ extension, an alias of its storage, or a torch.func transform. Nothing "
        'was updated with that gradient. Use overlap="load", which applies the whole update before the forward'
    )


# Nodes that return an alias and read no value. The value is read by the node that uses their output.
_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|AsStrided|T|Transpose|Permute|Expand|Squeeze|Unsqueeze|Select|Slice|Split"
    r"|SplitWithSizes|Unbind|Alias|Diagonal|Unfold|Movedim|Narrow|Chunk|Unflatten)Backward\d+$"
)


Readers = dict[Tensor, set[float]]
"""The sequence numbers of the nodes of a graph that read the value of each parameter, directly or through views."""


def _readers_in_graph(loss: Tensor) -> Readers:
    """Search the graph that backward from ``loss`` walks through."""
    numbers: Readers = {}
    to_visit: list[tuple[Any, float]] = [(loss.grad_fn, math.inf)]
    seen = set(to_visit)
    while to_visit:
        node, number_of_reader = to_visit.pop()
        if node is None:
            continue
        if not _VIEWS.match(node.name()):
            number_of_reader = sequence_number(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                numbers.setdefault(variable, set()).add(number_of_reader)
            elif following is not None and (following, number_of_reader) not in seen:
                seen.add((following, number_of_reader))
                to_visit.append((following, number_of_reader))
    return numbers
