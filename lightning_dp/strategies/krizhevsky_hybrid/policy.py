"""What `KrizhevskyHybridStrategy` can work with: checks without state, each with the remedy in its message."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.lightning_names import is_compiled_by_lightning
from lightning_dp.strategies.compiled import hides_parameter_use
from lightning_dp.strategies.krizhevsky_hybrid.head_layers import divisible_layers
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead

log = logging.getLogger(__name__)

ELEMENTWISE_OPTIMIZERS = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Rprop, optim.ASGD),
)

HEAD_STEP_EXAMPLE = """
    def head_step(self, features, target):  # -> the mean loss of these examples
        logits = self.{head}(features)
        return F.cross_entropy(logits, target)

    def training_step(self, batch, batch_idx):
        x, target = batch
        return self.head_step(self.trunk(x), target)
"""


def find_head(module: LightningModule, name: str, strategy: str) -> nn.Module:
    """Return the submodule called ``name``.

    Raises:
        ValueError: there is none, or it is the whole module.
    """
    if name:
        try:
            return module.get_submodule(name)
        except AttributeError:
            pass
    there_are = [child for child, part in module.named_modules() if child and any(True for _ in part.parameters())]
    raise ValueError(
        f"head={name!r} names no submodule of {type(module).__name__}; {strategy} can be given one of "
        f"{', '.join(there_are) or 'none: it has no parameters'}"
    )


def check_module(
    module: LightningModule, trainer: Any, head: nn.Module, head_name: str, variable_batch: bool, strategy: str
) -> None:
    """Raise ValueError for what cannot work with a head of which a rank holds a part."""
    divisible_layers(head, head_name)
    if variable_batch and not callable(getattr(module, "head_step", None)):
        lines = HEAD_STEP_EXAMPLE.format(head=head_name)
        raise ValueError(
            f"variable_batch=True needs to know where the head begins; give {type(module).__name__} this method, and "
            f"call it in training_step (it stays an ordinary module for every other strategy):\n{lines}"
        )
    owned = {id(parameter) for parameter in head.parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owned and not name.startswith(f"{head_name}."):
            raise ValueError(f"{name} shares a parameter with {head_name!r}, of which ranks hold parts; untie them")
    for callback in trainer.callbacks:
        if any("WeightAveraging" in base.__name__ for base in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} keeps copies of the parameters, of which ranks hold parts of the head; "
                f"remove it, or use another strategy than {strategy}"
            )
    if is_compiled_by_lightning(module) or hides_parameter_use(head):
        raise ValueError(
            f"{strategy} exchanges activations within {head_name!r}, which cannot be compiled; compile the trunk alone"
        )


def check_precision(plugin: Any, variable_batch: bool, strategy: str) -> None:
    """Raise ValueError for a precision that would go wrong."""
    if variable_batch and getattr(plugin, "scaler", None) is not None:
        raise ValueError(
            f"variable_batch=True cannot run with precision={plugin.precision!r}: the gradient scaler decides once a "
            f"step, and {strategy} updates the head several times in it; use precision='bf16-mixed'"
        )


def warn_of_requeue(cluster_environment: Any, strategy: str) -> None:
    """Say that Lightning's requeueing under SLURM saves a checkpoint wherever a rank stands when the signal comes."""
    if getattr(cluster_environment, "requeue_signal", None) and getattr(cluster_environment, "auto_requeue", False):
        log.warning(
            f"{strategy}: a checkpoint is made by all ranks together, and Lightning's requeueing asks for one in the "
            "midst of a step, which ends the job; use plugins=[SLURMEnvironment(auto_requeue=False)] and "
            "ModelCheckpoint(every_n_train_steps=...)"
        )


def check_optimizers(optimizers: list[Optimizer], head: ShardedHead) -> None:
    """Refuse torch's optimizers that look at a parameter as a whole; of others, say what they must be like.

    Raises:
        ValueError: an optimizer would compute something else from parts of a parameter.
    """
    for optimizer in optimizers:
        if not any(head.owns(p) for group in optimizer.param_groups for p in group["params"]):
            continue
        name = type(optimizer).__name__
        if isinstance(optimizer, ELEMENTWISE_OPTIMIZERS):
            continue
        if type(optimizer).__module__.startswith("torch.optim"):
            known = ", ".join(each.__name__ for each in ELEMENTWISE_OPTIMIZERS)
            raise ValueError(f"{name} looks at parameters as a whole, and ranks hold parts of the head's; use {known}")
        if not type(optimizer).__module__.startswith("lightning_dp."):
            log.warning(
                f"{name} updates rows of the head's weights on each rank: it must be elementwise (one that takes norms "
                "of whole layers, as LARS and LAMB do, would compute something else)"
            )
