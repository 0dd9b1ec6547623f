"""See every use of a parameter, and apply its pending update first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dp.strategies.layered_sgd.bucket import BucketReduction
from lightning_dp.strategies.layered_sgd.pending_update import PendingUpdates


class ParameterWatch(TorchFunctionMode):
    """While active, every use of a parameter with a pending update applies that update first.

    PyTorch shows each call of its functions to the active modes before running it, on the thread that activated them.
    Asking a parameter for its shape, dtype and the like is no use; taking its ``data`` or ``T`` is. Reading ``grad``
    first waits for the bucket that carries it.
    """

    _GRADIENT: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]

    # Attributes that tell nothing of the value. All others count as a use: `data`, `T`, `mT`, `real`, ...
    _HARMLESS = frozenset(
        {
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "output_nr"),
            *("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad", "_version", "_base"),
            *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xla", "is_xpu", "is_sparse", "is_sparse_csr"),
            *("is_quantized", "is_nested", "is_mkldnn", "_backward_hooks", "_post_accumulate_grad_hooks"),
        }
    )

    def __init__(self, updates: PendingUpdates, reductions: dict[Tensor, BucketReduction]) -> None:
        super().__init__()
        self._updates = updates
        self._reductions = reductions
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in place of ``func``."""
        if not self.paused and (self._updates or self._reductions):
            self._prepare(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _prepare(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func == self._GRADIENT:
            if args[0] in self._reductions:
                self._reductions[args[0]].wait()
            return
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            attribute = getattr(func, "__self__", None)
            if getattr(attribute, "__name__", "") in self._HARMLESS:
                return
        for argument in (*args, *kwargs.values()):
            for item in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(item, Tensor) and item in self._updates:
                    self._updates.apply_for(item)
