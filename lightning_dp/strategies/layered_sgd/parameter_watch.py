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
gradient (`stale_use.StaleUseDetector`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._private.torch_names import without_torch_function

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
                    members = {"watch": self, "plain": kind, "sees_functions": _sees_functions(kind)}
                    self._classes[kind] = type(f"Watched{kind.__name__}", (_Watched, kind), members)
                parameter.__class__ = self._classes[kind]

    def remove(self, parameters: Iterable[Tensor]) -> None:
        """Stop watching these parameters."""
        for parameter in parameters:
            kind = type(parameter)
            if issubclass(kind, _Watched):
                parameter.__class__ = kind.plain

    def prepare(self, func: Any, parameters: list[Tensor]) -> None:
        """Do what must be done before ``func`` is called with these watched parameters."""
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
        cls.watch.prepare(func, parameters)
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
        self.watch.prepare(act, [parameter])
        with _unwatched([parameter]):
            return act(parameter)


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
    classes = [type(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.__class__ = plain_class(type(parameter))
    try:
        yield
    finally:
        for parameter, kind in zip(parameters, classes, strict=True):
            parameter.__class__ = kind


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


def is_watched(parameter: Tensor) -> bool:
    """Return whether `ParameterWatch.add` was called for ``parameter`` and `ParameterWatch.remove` was not."""
    return isinstance(parameter, _Watched)
