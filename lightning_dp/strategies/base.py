"""What the strategies have in common: DDPStrategy, and what it does not refuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import Module
from typing_extensions import override

from lightning_dp._lightning import DDPStrategy, OwnTrainerOnly
from lightning_dp._private.lightning_names import is_compiled_by_lightning
from lightning_dp._private.torch_names import OptimizedModule, has_compiled_forward, without_torch_function


class BaseStrategy(OwnTrainerOnly, DDPStrategy):
    """Refuses a job with another number of ranks than the Trainer knows of: groups and samplers are made for those.

    Lightning's own environment takes the number of ranks from the Trainer. Others, like Ray's, take it from the job and
    say nothing where the Trainer's is another one.

    Raises:
        ValueError: in the Trainer's constructor.
    """

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        assert self.cluster_environment is not None
        known, actual = self.num_nodes * self.num_processes, self.cluster_environment.world_size()
        if actual != known:
            raise ValueError(
                f"num_nodes={self.num_nodes} with {self.num_processes} devices each make {known} ranks, but the job "
                f"has {actual}. Give num_nodes= and devices= as the job was started (as many ranks on each node), or "
                "start that many ranks (SLURM: srun --ntasks-per-node); in an interactive SLURM job, "
                "plugins=[LightningEnvironment()]"
            )


# --- Whether a module is compiled or scripted, which both strategies must know.


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


# --- Parameters that are different objects and share memory, for example after ``p.data = q.data``.


def overlapping_parameters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of each two parameters that share memory.

    A flat buffer that holds one parameter after the other, as cuDNN's for an LSTM, is no such case.
    """
    with without_torch_function():  # layered SGD watches some parameters, and an address is no use
        places = sorted(
            (parameter.data_ptr(), parameter.data_ptr() + _span_bytes(parameter), name)
            for name, parameter in module.named_parameters()
            if parameter.device.type != "meta" and parameter.numel()
        )
    still_open: list[tuple[int, str]] = []  # end and name of those that reach beyond the begin of the present one
    for begin, end, name in places:
        still_open = [(last, other) for last, other in still_open if last > begin]
        yield from ((other, name) for _, other in still_open)
        still_open.append((end, name))


def _span_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
