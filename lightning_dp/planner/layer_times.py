"""The time of each layer's forward in one step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_dp.planner.profile import LayerProfile
from lightning_dp.planner.trace import num_bytes
from lightning_dp.recompute.tensors import tensors_in


class LayerTimes:
    """Times the modules of a model that have parameters of their own, by hooks, while they are in place.

    On a GPU each hook waits for the device, so that times are those of kernels; the step as a whole is slower then.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._begins: dict[int, float] = {}
        self._found: dict[int, LayerProfile] = {}

    def start(self, model: nn.Module) -> None:
        """Put the hooks in place."""
        for name, module in model.named_modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave(name)))

    def stop(self) -> None:
        """Take the hooks off. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def profiles(self) -> tuple[LayerProfile, ...]:
        """Return the layers in the order in which they were first called."""
        return tuple(self._found.values())

    def _enter(self, module: nn.Module, args: Any) -> None:
        _synchronize(module)
        self._begins[id(module)] = time.perf_counter()

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            _synchronize(module)
            forward_s = time.perf_counter() - self._begins[id(module)]
            found = self._found.get(id(module))
            if found is not None:  # called before: its gradients are the same, its time is longer
                self._found[id(module)] = replace(found, forward_s=found.forward_s + forward_s)
                return
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            self._found[id(module)] = LayerProfile(
                name=name,
                num_bytes=sum(map(num_bytes, parameters)),
                forward_s=forward_s,
                is_linear=isinstance(module, nn.Linear),
                input_bytes=sum(map(num_bytes, tensors_in(args))),
                shapes=tuple(tuple(parameter.shape) for parameter in parameters),
            )

        return leave


def _synchronize(module: nn.Module) -> None:
    device = next(module.parameters(recurse=False)).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
