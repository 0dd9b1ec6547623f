"""Parameters that become trainable while fitting: taken into the reduction, which DistributedDataParallel does not do.

DDP looks at ``requires_grad`` once, when it wraps the module. Whatever is unfrozen later (BaseFinetuning and other
fine-tuning callbacks do that) is trained by each rank on its own data, and the ranks' weights drift apart silently:
https://github.com/Lightning-AI/pytorch-lightning/issues/20340. Here the module is wrapped in a new DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_dp._lightning import BaseFinetuning
from lightning_dp._private.torch_names import release_reducer, without_torch_function

log = logging.getLogger(__name__)

# DDP forms its final buckets in the forward after the first backward. As many exact sums as PyTorch asks for.
_EXACT_STEPS = 2


class ReducedParameters:
    """The parameters of a module whose gradients DDP reduces, and those that have become trainable since.

    Args:
        module: the module that DDP wraps. All its trainable parameters are reduced.
        others: parameters that somebody else takes care of.
    """

    def __init__(self, module: nn.Module, others: Collection[Tensor] = ()) -> None:
        self._module = module
        left_out = set(others)
        own = [parameter for parameter in module.parameters() if parameter not in left_out]
        self._reduced = [parameter for parameter in own if parameter.requires_grad]
        self._frozen = [parameter for parameter in own if not parameter.requires_grad]

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters that have become trainable. Cheap enough to be called in each step."""
        with without_torch_function():  # layered SGD watches some of its parameters
            # Not those that are computed: an average that was made in place, with gradients enabled, is no leaf.
            unfrozen = {parameter for parameter in self._frozen if parameter.requires_grad and parameter.is_leaf}
        if not unfrozen:
            return []
        return [name for name, parameter in self._module.named_parameters() if parameter in unfrozen]

    def require_none_unfrozen(self) -> None:
        """Raise, before backward, for a parameter that has become trainable since the step began.

        Raises:
            RuntimeError: the gradient of a parameter would not be averaged over the ranks.
        """
        if unfrozen := self.unfrozen():
            raise RuntimeError(
                f"{unfrozen[0]} has become trainable within training_step, so its gradient would not be averaged over "
                "the ranks; unfreeze parameters in on_train_epoch_start or on_train_batch_start"
            )

    def wrap_again(
        self, wrapped: DistributedDataParallel, wrap: Callable[[], DistributedDataParallel], keep_hooks: bool = True
    ) -> DistributedDataParallel:
        """Return the module in a new DDP, which reduces the unfrozen parameters too. All ranks must call it.

        Parameters that were reduced and are frozen at this moment (a GAN toggles them) stay in the reduction.

        Args:
            wrapped: the present DDP; it is of no use afterwards.
            wrap: wraps the module.
            keep_hooks: register the communication hooks of ``wrapped`` again, also a callback's.
        """
        comm_hooks = release_reducer(wrapped)  # its hooks on the parameters would reduce each gradient a second time
        with trainable(self._reduced):
            wrapper = wrap()
        self._reduced += [parameter for parameter in self._frozen if parameter.requires_grad]
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        for hook, state in comm_hooks if keep_hooks else ():
            _forget_buckets(state)
            wrapper.register_comm_hook(state, hook)
        return wrapper


def _forget_buckets(state: object) -> None:
    """Drop what PowerSGD's state has kept of the buckets, which hold other parameters from now on.

    It keeps by the bucket's number: residuals would go to other parameters, or have another size. A hook of the user's
    that does so must look for itself: DDP gives buckets other parameters in any training, after the first backward.
    """
    if isinstance(state, PowerSGDState):
        for of_buckets in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            of_buckets.clear()
        log.info("PowerSGD forgets its residuals, because a parameter has become trainable; the next sums are exact")
        state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + _EXACT_STEPS)


@contextmanager
def trainable(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let these parameters require gradients within the context. Those that are frozen are frozen again after it."""
    with ExitStack() as undo:
        for parameter in parameters:
            if not parameter.requires_grad:
                undo.callback(parameter.requires_grad_, False)
                parameter.requires_grad_(True)
        yield


def restore_groups(trainer: Any) -> None:
    """Let fine-tuning callbacks give the optimizers the parameter groups of a checkpoint, before its states are loaded.

    They do so in ``on_fit_start``. Where a checkpoint is loaded after set-up, Lightning has called that already.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning):
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)
