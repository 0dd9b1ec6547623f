"""Whether a module is compiled or scripted, which both strategies must know."""

from __future__ import annotations

import torch
from torch.nn import Module

from lightning_dp._private.lightning_names import is_compiled_by_lightning
from lightning_dp._private.torch_names import OptimizedModule, has_compiled_forward


def is_compiled(module: Module) -> bool:
    """Whether ``module`` itself, parts aside, is compiled or scripted."""
    compiled_forward = isinstance(module, (torch.jit.ScriptModule, OptimizedModule)) or has_compiled_forward(module)
    return compiled_forward or is_compiled_by_lightning(module)


def hides_parameter_use(module: Module) -> bool:
    """Whether any part of ``module`` is compiled or scripted: `ParameterWatch` cannot see it read its parameters."""
    return any(is_compiled(part) for part in module.modules())


def compiled_parts_around(module: Module, part: Module) -> list[str]:
    """Return the names of the compiled or scripted submodules of ``module`` that contain ``part``, or lie in it."""
    inside = set(part.modules())
    return [
        name or type(module).__name__
        for name, child in module.named_modules()
        if is_compiled(child) and (child in inside or any(inner is part for inner in child.modules()))
    ]
