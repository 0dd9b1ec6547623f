"""Whether a module is compiled or scripted, which both strategies must know."""

from __future__ import annotations

import torch
from torch.nn import Module

from lightning_dp._private.lightning_names import is_compiled_by_lightning
from lightning_dp._private.torch_names import OptimizedModule, has_compiled_forward


def hides_parameter_use(module: Module) -> bool:
    """Whether any part of ``module`` is compiled or scripted: `ParameterWatch` cannot see it read its parameters."""
    return is_compiled_by_lightning(module) or any(
        isinstance(part, (torch.jit.ScriptModule, OptimizedModule)) or has_compiled_forward(part)
        for part in module.modules()
    )
