"""What the strategies share: DDPStrategy with additional checks, and the optimizers that are elementwise."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dp._lightning import DDPStrategy
from lightning_dp._private.lightning_names import is_compiled_by_lightning, wrap_in_ddp
from lightning_dp._private.torch_names import is_compiled, local_part, without_torch_function
from lightning_dp.collectives.point_to_point import naming_backend_errors
from lightning_dp.strategies.complete_files import (
    is_plain_file,
    naming_checkpoint,
    require_file,
    write_complete_files,
)
from lightning_dp.strategies.unfreezing import ReducedParameters

log = logging.getLogger(__name__)


class BaseStrategy(DDPStrategy):
    """DDPStrategy with additional checks, complete checkpoints, and the reduction of unfrozen parameters.

    It refuses options that neither it nor DistributedDataParallel has. They would find out in the ranks, long after.

    Overrides of DDPStrategy, and why:

    - ``set_world_ranks``: refuses a job with another number of ranks than the Trainer knows of: groups and samplers are
      made for those. Lightning's own environment takes the number of ranks from the Trainer. Others, like Ray's, take
      it from the job and say nothing where the Trainer's is another one.
    - ``setup``: refuses a module that an earlier fit has left sharded. Lets `CompleteFiles` write checkpoints: one that
      was complete stays until the next one is.
    - ``load_checkpoint``: an error names the checkpoint that is read, and what to do with a folder.
    - ``on_train_batch_start``, ``pre_backward``, ``teardown``: gradients of parameters that become trainable while
      fitting are reduced, too; see `ReducedParameters`.

    Args:
        **options: options of DDPStrategy and DistributedDataParallel.

    Raises:
        TypeError: neither of them has such an option.
        ValueError: in the Trainer's constructor, the number of ranks differs. In a run, the module is sharded.
    """

    lightning_module: Any  # Lightning sets it before it calls any hook
    _reduced: ReducedParameters | None = None  # only while fitting

    def __init__(self, **options: Any) -> None:
        known = {*_parameters(type(self)), *_parameters(DDPStrategy), *_parameters(DistributedDataParallel)}
        known -= {"self", "module", "device_ids"}
        for name in options.keys() - known:
            similar = difflib.get_close_matches(name, sorted(known), n=1)
            suggestion = f"; did you mean {similar[0]}?" if similar else "."
            raise TypeError(
                f"{type(self).__name__} has no option {name}{suggestion} Its options are its own and those of "
                "DDPStrategy and DistributedDataParallel"
            )
        super().__init__(**options)

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

    @override
    def setup(self, trainer: Any) -> None:
        for name, parameter in self.lightning_module.named_parameters():
            if local_part(parameter) is not parameter:  # a DTensor, with which DDP fails in an operator of PyTorch
                raise ValueError(
                    f"{name} is sharded over ranks, as LayeredFSDPStrategy and FSDP2 leave it after a run, and "
                    f"{type(self).__name__} needs whole parameters; build the module again, and load a checkpoint"
                )
        write_complete_files(self)
        super().setup(trainer)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if is_plain_file(self.checkpoint_io, checkpoint_path):
            require_file(checkpoint_path)
        with naming_checkpoint(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Before Lightning enters `no_sync` of the present DDP, for a batch to which the gradients of others are added.
        self._reduce_unfrozen()
        super().on_train_batch_start(batch, batch_idx)

    def _reduce_unfrozen(self) -> None:
        """Let DDP also reduce the parameters that have become trainable since it wrapped the module.

        A strategy calls it in ``training_step`` again: an ``optimizer_step`` of the user may have unfrozen some.
        """
        if self._reduced is not None and (names := self._reduced.unfrozen()):
            self._wrap_again(self._reduced, names)

    def _wrap_again(self, reduced: ReducedParameters, names: list[str], keep_hooks: bool = True) -> None:
        """Wrap the module in a new DDP, which reduces the unfrozen parameters, ``names``, too."""
        log.info(f"{type(self).__name__}: {len(names)} parameters have become trainable, {names[0]} first")
        module = self.lightning_module
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        with naming_backend_errors(
            lambda: f"taking {names[0]}, which has become trainable, into the reduction, with all ranks,"
        ):
            if isinstance(self.model, DistributedDataParallel):
                self.model = reduced.wrap_again(self.model, lambda: wrap_in_ddp(self, module), keep_hooks)
            else:  # all were frozen, and there was nothing to reduce
                self.configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if not self.model.broadcast_buffers:  # its constructor has sent rank 0's all the same (`forward_sync_buffers`)
            for buffer, own in buffers:
                buffer.data.copy_(own)

    @override
    @torch.compiler.disable  # a compiled training_step may call this method
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._reduced is not None:
            self._reduced.require_none_unfrozen()
        super().pre_backward(closure_loss)

    @override
    def teardown(self) -> None:
        self._reduced = None
        super().teardown()


def _parameters(of: type) -> list[str]:
    """Return the names of a constructor's arguments, except ``**kwargs``."""
    parameters = inspect.signature(of.__init__).parameters  # type: ignore[misc]
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]


# --- Callbacks that the strategies know. Both Lightning packages have such classes, so they are known by their names.

AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")
"""Callbacks that copy parameters, which a strategy that shards them refuses."""


def is_a(callback: object, *names: str) -> bool:
    """Return whether a class of ``callback`` has one of these names."""
    return any(base.__name__ in names for base in type(callback).__mro__)


# --- Optimizers that update a part of a parameter as they would update it within the whole.

ELEMENTWISE_OPTIMIZERS = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Rprop, optim.ASGD),
)

LAYERWISE_OPTIMIZERS = ("lars", "lamb", "novograd", "shampoo", "soap", "muon", "adafactor", "lbfgs", "sam")
"""Names, in lower case, of optimizers from any library that compute with whole parameters, such as their norms."""


def is_layerwise(kind: type[optim.Optimizer]) -> bool:
    """Return whether an optimizer is known to compute with whole parameters. Some LARS implementations extend SGD."""
    return any(base.__name__.lower() in LAYERWISE_OPTIMIZERS for base in kind.__mro__)


def is_elementwise(kind: type[optim.Optimizer]) -> bool:
    """Return whether an optimizer is known to be elementwise. The exact type: a subclass may take norms of layers."""
    is_known = kind in ELEMENTWISE_OPTIMIZERS or kind.__module__.startswith("lightning_dp.")
    return is_known and not is_layerwise(kind)


# --- Whether a module is compiled or scripted, which both strategies must know.


def _is_compiled(module: Module) -> bool:
    return is_compiled(module) or is_compiled_by_lightning(module)


def hides_parameter_use(module: Module) -> bool:
    """Whether any part of ``module`` is compiled or scripted: `ParameterWatch` cannot see it read its parameters."""
    return any(_is_compiled(part) for part in module.modules())


def compiled_parts_around(module: Module, part: Module) -> list[str]:
    """Return the names of the compiled or scripted submodules of ``module`` that contain ``part``, or lie in it."""
    inside = set(part.modules())
    return [
        name or type(module).__name__
        for name, child in module.named_modules()
        if _is_compiled(child) and (child in inside or any(inner is part for inner in child.modules()))
    ]


# --- Parameters that are different objects and share memory, for example after ``p.data = q.data``.


def overlapping_parameters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of each two parameters that share memory.

    A flat buffer that holds one parameter after the other, as cuDNN's for an LSTM, is no such case.
    """
    with without_torch_function():  # layered SGD watches some parameters, and an address is no use
        parts = [(name, local_part(parameter)) for name, parameter in module.named_parameters()]
        places = sorted(
            (part.data_ptr(), part.data_ptr() + _span_bytes(part), name)
            for name, part in parts
            if part.device.type != "meta" and part.numel()
        )
    still_open: list[tuple[int, str]] = []  # end and name of those that reach beyond the begin of the present one
    for begin, end, name in places:
        still_open = [(last, other) for last, other in still_open if last > begin]
        yield from ((other, name) for _, other in still_open)
        still_open.append((end, name))


def _span_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
