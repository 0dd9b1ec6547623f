"""Callbacks that measure training: the parts of a step, images per second, and the time to reach an accuracy."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_dp._lightning import Callback, LightningModule, require_own_trainer
from lightning_dp._private.torch_names import ddp_timing, time_ddp_steps
from lightning_dp.callbacks.adaptive_global_batch_norm import local_batch_size

log = logging.getLogger(__name__)


class _OwnCallback(Callback):
    """A callback that tells in `setup` whether it comes from the Trainer's Lightning package."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that callback and Trainer come from the same Lightning package."""
        require_own_trainer(self, trainer)


class StepTimer(_OwnCallback):
    """Log the time of a training step and its parts: the mean over the steps of each epoch, in seconds.

    The logger receives the times of rank 0. ``trainer.callback_metrics`` of each rank holds those of that rank, so that
    ranks can be compared. They are not averaged over the ranks, and measuring them needs no communication.

    - ``time/step_s``: time from the end of one batch to the end of the next.
    - ``time/data_wait_s``: portion spent waiting for the batch, and on what follows this callback after a step: other
      callbacks, such as a checkpoint within an epoch, and loggers. Also the broadcast with which Lightning begins each
      batch. In it a rank waits for slower ones, unless it has waited for their gradients in the step before: with
      layered SGD or ``accumulate_grad_batches``, a slow rank makes the others' data wait longer.
    - ``time/exposed_communication_s``: portion spent waiting for the network while nothing is computed. For a model in
      DistributedDataParallel it is the time of the reduction minus its overlap with backward, as measured by DDP. (It
      is zero if a communication hook returns a finished future, as that of layered SGD does. Of several backward passes
      in a step of manual optimization it is that of the last, and the others' counts as compute.) A strategy with an
      attribute ``exposed_communication_s``, in seconds since the start of training, adds its own waiting time. It is
      zero for a single process, and not logged for any other strategy.
    - ``time/compute_s``: the rest.

    On a GPU, kernels run after they were launched, and their time appears where the rank waits for them. The callback
    itself never waits for the GPU. DDP does, to read its timers, so there it times only a sample of the steps, as it
    does by default: the first ten, then one in a hundred. ``exposed_communication_s`` and ``compute_s`` are means over
    that sample, and are missing in epochs without any. Messages that a strategy sends itself over NCCL count as
    compute, because no rank waits for them on the host. Use a profiler for the breakdown of a step on a GPU.
    """

    def __init__(self) -> None:
        self._last_end_s = 0.0
        self._begin_s = 0.0
        self._waited_before_s = 0.0
        self._last_reduction: int | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock, and say in the log if the communication of this strategy cannot be timed."""
        # A run that continues within an epoch has no `on_train_epoch_start`.
        self.on_train_epoch_start(trainer, pl_module)
        if self._exposed_s(trainer) is None:
            log.info(f"StepTimer: {type(trainer.strategy).__name__} does not measure how long it waits for the network")

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restart the clock: validation and checkpoints between epochs are not part of a step."""
        self._last_end_s = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the time at which the batch is available, and make DDP time this step."""
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            # Before each step, because a strategy wraps the module in a new DDP when a parameter is unfrozen.
            time_ddp_steps(trainer.strategy.model, self._times_every_step(pl_module.device))
        self._begin_s = time.perf_counter()
        self._waited_before_s = getattr(trainer.strategy, "exposed_communication_s", None) or 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the times of the step."""
        if batch is None:  # Lightning skips it, without `on_train_batch_start`: the next step has waited longer
            return
        end_s = time.perf_counter()
        times = {"step": end_s - self._last_end_s, "data_wait": self._begin_s - self._last_end_s}
        last_reduction = self._last_reduction
        exposed_s = self._exposed_s(trainer)
        is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
        is_sampled = is_ddp and not self._times_every_step(pl_module.device)
        if not is_sampled or self._last_reduction != last_reduction:
            if exposed_s is not None:
                times["exposed_communication"] = exposed_s
            times["compute"] = times["step"] - times["data_wait"] - times.get("exposed_communication", 0.0)
        # With the last two Lightning neither averages over the ranks, which would hide a slow one, nor advises to.
        options: Any = {"on_step": False, "on_epoch": True, "batch_size": 1, "sync_dist": True, "rank_zero_only": True}
        for name, seconds in times.items():
            # Lightning would copy a float to the GPU, and wait until all kernels before that have run.
            pl_module.log(f"time/{name}_s", torch.tensor(seconds), **options)
        self._last_end_s = end_s

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restart the clock: validation within an epoch is not part of a step."""
        self._last_end_s = time.perf_counter()

    def _times_every_step(self, device: torch.device) -> bool:
        return device.type == "cpu"  # to read the timers of a GPU, the host waits

    def _exposed_s(self, trainer: Any) -> float | None:
        """Return the exposed communication time of this step, or None if the strategy does not measure it."""
        strategy = trainer.strategy
        waited_s = getattr(strategy, "exposed_communication_s", None)
        if waited_s is not None:
            waited_s = float(waited_s) - self._waited_before_s
        if isinstance(strategy.model, DistributedDataParallel):
            times_ns = ddp_timing(strategy.model)
            # DDP reports its last reduction. A step that only accumulates gradients must not count it again.
            if times_ns.get("iteration") == self._last_reduction:
                return waited_s or 0.0
            self._last_reduction = times_ns.get("iteration")
            reduction_ns = times_ns.get("backward_comm_time", 0)
            exposed_ns = reduction_ns - times_ns.get("backward_compute_comm_overlap_time", 0)
            return (waited_s or 0.0) + float(exposed_ns) / 1e9
        return 0.0 if waited_s is None and trainer.world_size == 1 else waited_s


# --- Training speed in images per second, beside what the loader alone could deliver.


class ImageRate:
    """Counts the images of each epoch, and the seconds of training on them, validation left out.

    Its hooks are those of a callback. It is none itself: the recipes have a callback of `pytorch_lightning` with them.

    Attributes:
        counts_first_batch: of each epoch. It includes starting the loader's workers.
        train_s: seconds of training on the batches that count, in all epochs.
    """

    counts_first_batch = True

    def __init__(self) -> None:
        self.train_s = 0.0
        self._epoch_s = 0.0
        self._epoch_images = 0
        self._clock_s = 0.0
        self._has_begun = False  # whether the epoch has had a batch

    @property
    def images_per_s(self) -> float | None:
        """Images of all ranks per second in this epoch so far, or None before its first batch whose size is known."""
        return self._epoch_images / self._epoch_s if self._epoch_images else None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock: a run that continues within an epoch has no ``on_train_epoch_start``."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock and the count."""
        self._epoch_s = 0.0
        self._epoch_images = 0
        self._clock_s = time.perf_counter()
        self._has_begun = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the time and the images of a batch. All slices of it are taken to have as many images as this one.

        A batch whose size cannot be told counts no images.
        """
        if batch is None:  # Lightning skips it: the next step has taken longer
            return
        step_s = time.perf_counter() - self._clock_s
        self._clock_s += step_s
        if self._has_begun or self.counts_first_batch:
            self.train_s += step_s
            self._epoch_s += step_s
            with suppress(ValueError):
                self._epoch_images += sum(map(self._num_images, _batches(trainer, batch))) * _num_slices(trainer)
        self._has_begun = True

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock again: validation is no training."""
        self._clock_s = time.perf_counter()

    def _num_images(self, batch: Any) -> int:
        """Return the images of a batch. Raise ValueError if that cannot be told."""
        return local_batch_size(batch)


def _batches(trainer: Any, batch: Any) -> list[Any]:
    """Return the batches of a step: with several training loaders, that of each. One that has ended gives None."""
    loaders = getattr(trainer, "train_dataloader", None)
    if isinstance(loaders, Mapping) and isinstance(batch, Mapping) and batch.keys() == loaders.keys():
        batches = list(batch.values())
    elif isinstance(loaders, list | tuple) and isinstance(batch, list | tuple) and len(batch) == len(loaders):
        batches = list(batch)
    else:
        return [batch]
    return [each for each in batches if each is not None]


def _num_slices(trainer: Any) -> int:
    """Return into how many slices a global batch is divided. Ranks of tensor parallelism have the same one."""
    parts = getattr(trainer.strategy, "distributed_sampler_kwargs", None)  # what Lightning's sampler gets
    return 1 if parts is None else int(parts["num_replicas"])  # None on one device


class ImagesPerSecond(ImageRate, _OwnCallback):
    """Log images per second in each epoch, over all ranks, and print the last ones at the end of training.

    - ``images_per_s/train``: training, without the first batch of an epoch (starting the loader's workers) and without
      validation.
    - ``images_per_s/loader``: what the workers of the loader can read and decode. Only for data modules that measure it
      with a method ``loader_images_per_s()``, such as `lightning_dp.data.ImageNet`. If it is not clearly higher than
      the other, training waits for the loader: use more workers, or more CPU cores.

    Both are those of rank 0 times the number of ranks that have images of their own, so no communication is needed. A
    batch must be a pair of images and labels.
    """

    counts_first_batch = False

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Forget the rates and the count of an earlier fit."""
        self._last = {}
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the rates of the epoch. An epoch of one batch has none."""
        if self.images_per_s is None:
            return
        self._last = {"train": self.images_per_s}
        measure = getattr(trainer.datamodule, "loader_images_per_s", None)
        loader = None if measure is None else measure()
        if loader is not None:
            self._last["loader"] = loader * _num_slices(trainer)
        for name, rate in self._last.items():
            # Both options together: no average over ranks, and no advice of Lightning's to take one.
            pl_module.log(f"images_per_s/{name}", rate, sync_dist=True, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print the rates of the last epoch."""
        if self._last and trainer.is_global_zero:
            loader = f"; the loader alone: {self._last['loader']:,.0f}" if "loader" in self._last else ""
            trainer.print(f"images per second: {self._last['train']:,.0f}{loader}")

    def _num_images(self, batch: Any) -> int:
        return len(batch[1])


# --- How long training takes to reach a given accuracy.


class TimeToAccuracy(_OwnCallback):
    """Print and log the time from the start of training to the first validation with a given accuracy.

    The time includes validation and checkpoints. It does not include what comes before the first step: starting
    processes and building the model. Nor does it include the trial steps of Lightning's finders of learning rate and
    batch size, also where these run between epochs. A resumed run adds the time of the run before, up to its
    checkpoint; a second ``fit`` that goes on with the training adds that of the first, without the time between them.

    Args:
        threshold: accuracy to reach, from 0 to 1. MLPerf's for ResNet-50 on ImageNet is 0.759.
        monitor: name of the metric.

    Attributes:
        reached_s: seconds to the threshold, or None until it is reached. The loggers get it as
            ``time/to_THRESHOLD_s``.

    Raises:
        ValueError: at the first validation, if no such metric was logged.
    """

    def __init__(self, threshold: float = 0.759, monitor: str = "val/acc") -> None:
        self.threshold = threshold
        self.monitor = monitor
        self.reached_s: float | None = None
        self._before_s = 0.0  # of the runs, or the calls of `fit`, that this one continues
        self._start_s: float | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the clock. A new training begins at 0, also if the callback has been in another one."""
        if trainer.global_step == 0:
            self._before_s = 0.0
            self.reached_s = None
        self._start_s = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop the clock: what comes after training is not in a later checkpoint's time."""
        self._before_s = self._elapsed_s()
        self._start_s = None

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop the clock. Lightning does not call `on_train_end` after an exception."""
        self.on_train_end(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print and log the time if the threshold is reached for the first time."""
        if trainer.sanity_checking or self._start_s is None or self.reached_s is not None:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise ValueError(
                f"TimeToAccuracy: monitor={self.monitor!r} was not logged; there are {', '.join(sorted(metrics))}"
            )
        accuracy = float(metrics[self.monitor])
        if not accuracy >= self.threshold:  # NaN is not
            return
        self.reached_s = self._elapsed_s()
        for logger in trainer.loggers:
            logger.log_metrics({f"time/to_{self.threshold:g}_s": self.reached_s}, step=trainer.global_step)
        if trainer.is_global_zero:
            duration = timedelta(seconds=round(self.reached_s))
            trainer.print(
                f"{self.monitor}={accuracy:.4f} reached {self.threshold:g} after {duration} "
                f"({trainer.current_epoch + 1} epochs)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the time so far, for a checkpoint."""
        return {"elapsed_s": self._elapsed_s(), "reached_s": self.reached_s}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the time of a checkpoint."""
        self._before_s = state_dict["elapsed_s"]
        self.reached_s = state_dict["reached_s"]
        if self._start_s is not None:  # Lightning's finders load one within training, after their trial steps
            self._start_s = time.perf_counter()

    def _elapsed_s(self) -> float:
        running_s = 0.0 if self._start_s is None else time.perf_counter() - self._start_s
        return self._before_s + running_s
