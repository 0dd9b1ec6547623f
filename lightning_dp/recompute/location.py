"""Where in the model a forward pass is: gives each call of an operator a name, and counts segments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


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
