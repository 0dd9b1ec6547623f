"""`FindBatchSize`: a callback that tries batch sizes before training, under any strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_dp._lightning import Callback, LightningModule, require_own_trainer
from lightning_dp.planner.candidates import resized
from lightning_dp.planner.checks import require_count
from lightning_dp.planner.trace import num_bytes
from lightning_dp.planner.trials import BatchSizeTrials, try_batch_sizes
from lightning_dp.planner.unchanged import unchanged

log = logging.getLogger(__name__)

SIZES = tuple(2**power for power in range(3, 13))


class FindBatchSize(Callback):
    """Try batch sizes when training is set up, and set the fastest one that fits on all ranks.

    Lightning's ``BatchSizeFinder`` refuses distributed strategies. This one runs ``training_step`` and backward on each
    rank alone, before the strategy wraps the model, so no collective is in a trial: a rank that runs out of memory
    cannot leave another waiting. The ranks agree after each trial, see `try_batch_sizes`. What a strategy and the
    optimizer will hold beside is reserved meanwhile.

    Parameters, buffers, gradients, metrics and random numbers are put back. The first batch of the data module is used
    for all trials, its rows repeated.

    Args:
        batch_sizes: per rank, to be tried from the smallest on.
        optimizer_copies: numbers that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.
        is_global: whether the data module's ``batch_size`` is that of all ranks together, as in `lightning_dp.data`.
        repeats: steps that are timed for each size.

    Attributes:
        trials: the result, None before it is there.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int] = SIZES,
        optimizer_copies: int = 2,
        is_global: bool = False,
        repeats: int = 3,
    ) -> None:
        for size in batch_sizes:
            require_count("batch_sizes", size)
        require_count("optimizer_copies", optimizer_copies, least=0)
        require_count("repeats", repeats)
        self.trials: BatchSizeTrials | None = None
        self._batch_sizes = tuple(batch_sizes)
        self._repeats = repeats
        self._optimizer_copies = optimizer_copies
        self._is_global = is_global

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Find the batch size, before the loaders of training are made.

        Raises:
            ValueError: the data module has no ``batch_size``, or no size fits.
        """
        require_own_trainer(self, trainer)
        if stage != "fit":
            return
        data = trainer.datamodule
        if not isinstance(getattr(data, "batch_size", None), int):
            raise ValueError(
                f"FindBatchSize sets batch_size of the data module, and {type(data).__name__} has none that is an "
                "integer; pass fit(datamodule=...) with such an attribute, which its train_dataloader uses"
            )
        device = trainer.strategy.root_device
        batch = pl_module.transfer_batch_to_device(next(iter(data.train_dataloader())), device, 0)
        pl_module.to(device)
        with alone(pl_module), self._reserved(trainer, pl_module, device):

            def step(batch_size: int) -> None:
                pl_module.zero_grad()
                with trainer.precision_plugin.train_step_context():  # autocast, if training will have it
                    loss: Any = pl_module.training_step(resized(batch, batch_size), 0)
                (loss["loss"] if isinstance(loss, dict) else loss).backward()

            self.trials = try_batch_sizes(step, self._batch_sizes, device, repeats=self._repeats)
        data.batch_size = self.trials.batch_size * (trainer.world_size if self._is_global else 1)
        if trainer.is_global_zero:
            log.info(f"FindBatchSize: {self.trials.batch_size} images per rank\n{self.trials.table()}")

    @contextmanager
    def _reserved(self, trainer: Any, pl_module: LightningModule, device: torch.device) -> Iterator[None]:
        """Hold as much memory as optimizer and gradient buckets will."""
        copies = self._optimizer_copies + (1 if trainer.world_size > 1 else 0)
        total = copies * sum(num_bytes(p) for p in pl_module.parameters() if p.requires_grad)
        held = torch.empty(total, dtype=torch.uint8, device=device)
        yield
        del held


@contextmanager
def alone(module: LightningModule) -> Iterator[None]:
    """Let ``training_step`` run outside of a training: nothing is logged, nothing is sent, nothing stays changed."""
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    mode = module.training
    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_messages(module))
        for name in ("log", "log_dict"):
            setattr(module, name, lambda *args, **kwargs: None)
            stack.callback(delattr, module, name)
        try:
            module.train()
            yield
        finally:
            module.train(mode)
            for parameter, grad in grads:
                parameter.grad = grad


@contextmanager
def _without_messages(module: nn.Module) -> Iterator[None]:
    """Keep batch norm layers from gathering statistics of other ranks, which may be out of memory."""
    switched = [part for part in module.modules() if getattr(part, "is_global", False) is True]
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise ValueError(
            "FindBatchSize cannot try a model with torch.nn.SyncBatchNorm layers, which wait for other ranks; use "
            "Trainer(sync_batchnorm=True), which puts them in later, or AdaptiveGlobalBatchNorm"
        )
    for part in switched:
        part.is_global = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in switched:
            part.is_global = True  # type: ignore[assignment]
