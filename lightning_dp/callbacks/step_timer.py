"""Where a training step's time goes: waiting for data, computing, waiting for the network."""

from __future__ import annotations

import logging
import time
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_dp._lightning import Callback, LightningModule, require_own_trainer
from lightning_dp._private.torch_names import ddp_timing, enable_ddp_timing

log = logging.getLogger(__name__)


class StepTimer(Callback):
    """Log the parts of a step, the mean of each epoch, in seconds, as this rank sees them.

    - ``time/step_s``: from one batch's end to the next one's end.
    - ``time/data_wait_s``: of it, until the batch is there.
    - ``time/exposed_communication_s``: of it, waiting for the network while nothing is computed. Of a model in
      DistributedDataParallel it is the reduction less its overlap with backward, by DDP's own timers (where a hook ends
      the reduction at once, as layered SGD's does, that is nothing). A strategy with an attribute
      ``exposed_communication_s`` (seconds so far) adds what it waits for itself. Of a single process it is zero; of
      anything else it is left out.
    - ``time/compute_s``: the rest.

    The time that a GPU works on after its kernels were launched shows where the rank waits for it; for the breakdown of
    a step on a GPU use a profiler.
    """

    def __init__(self) -> None:
        self._last_end_s = 0.0
        self._begin_s = 0.0
        self._waited_before_s = 0.0
        self._last_reduction: int | None = None

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that the Trainer is of our framework; Lightning calls this."""
        require_own_trainer(self, trainer)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Have DDP time every step; Lightning calls this."""
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            enable_ddp_timing(trainer.strategy.model)
        if self._exposed_s(trainer) is None:
            log.info(f"StepTimer: {type(trainer.strategy).__name__} does not say how long it waits for the network")

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Validation and checkpoints between epochs are no part of a step; Lightning calls this."""
        self._last_end_s = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The batch is there; Lightning calls this."""
        self._begin_s = time.perf_counter()
        self._waited_before_s = getattr(trainer.strategy, "exposed_communication_s", None) or 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step; Lightning calls this."""
        end_s = time.perf_counter()
        times = {"step": end_s - self._last_end_s, "data_wait": self._begin_s - self._last_end_s}
        exposed_s = self._exposed_s(trainer)
        if exposed_s is not None:
            times["exposed_communication"] = exposed_s
        times["compute"] = times["step"] - times["data_wait"] - times.get("exposed_communication", 0.0)
        for name, seconds in times.items():
            pl_module.log(f"time/{name}_s", seconds, on_step=False, on_epoch=True, batch_size=1)
        self._last_end_s = end_s

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Validation in mid-epoch is no part of a step; Lightning calls this."""
        self._last_end_s = time.perf_counter()

    def _exposed_s(self, trainer: Any) -> float | None:
        """Of this step, as far as the strategy tells; DDP's timers tell of the last complete one."""
        strategy = trainer.strategy
        waited_s = getattr(strategy, "exposed_communication_s", None)
        if waited_s is not None:
            waited_s = float(waited_s) - self._waited_before_s
        if isinstance(strategy.model, DistributedDataParallel):
            times_ns = ddp_timing(strategy.model)
            if times_ns.get("iteration") == self._last_reduction:  # this step accumulates, and reduces nothing
                return waited_s or 0.0
            self._last_reduction = times_ns.get("iteration")
            reduction_ns = times_ns.get("backward_comm_time", 0)
            exposed_ns = reduction_ns - times_ns.get("backward_compute_comm_overlap_time", 0)
            return (waited_s or 0.0) + float(exposed_ns) / 1e9
        return 0.0 if waited_s is None and trainer.world_size == 1 else waited_s
