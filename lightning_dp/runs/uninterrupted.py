"""What makes a run that continues from a checkpoint end as if it had not been interrupted.

`CompleteFiles` writes the checkpoints, so that one is complete at every moment; `RowsInCheckpoint` keeps the metrics.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from pytorch_lightning.utilities import CombinedLoader
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MaxMetric, Metric, MinMetric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from lightning_dp._private.lightning_names import (
    begin_next_epoch,
    count_loader_from,
    count_validation_loaders_from,
    epoch_of_validation_loaders,
    forget_saved_step,
    logged_metrics,
    modes_in_training,
    restart_loader,
    validation_batches,
    wrap_within,
)
from lightning_dp._private.torch_names import BatchNorm, local_part, next_buckets, wrapped_with_buckets
from lightning_dp.data.loading import derive_seed
from lightning_dp.runs.checkpoints import FOLDER, OF_A_RUN, completed_steps, differences, is_of, read_checkpoint
from lightning_dp.runs.validation import Config, is_of_validation
from lightning_dp.strategies.complete_files import copy, existing
from lightning_dp.trial_run import generators_of

log = logging.getLogger("train")


class SeedEachEpoch(Callback):
    """Seed the generators of PyTorch, NumPy and Python from the run's seed and the epoch, the same on all ranks.

    A checkpoint does not hold the state of these generators. With this callback, a run that continues from the end of
    an epoch draws what the uninterrupted run draws, for example in dropout.

    On one rank it also puts the states of the training loaders' own generators into checkpoints, as of
    ``DataLoader(generator=...)``. On several each rank may have another state, and a checkpoint is that of one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: dict[str, torch.Generator] = {}  # those that are put into checkpoints
        self._saved: dict[str, torch.Tensor] = {}  # of the checkpoint that this run continues from
        self._of_loaders: list[Any] = []  # the states of loaders in it

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Called by Lightning."""
        return {name: generator.get_state() for name, generator in self._own.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until the loaders have been made. Called by Lightning."""
        self._saved = state_dict

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states of loaders, which Lightning forgets. A checkpoint to test may have weights only."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._of_loaders = loop.get("state_dict", {}).get("combined_loader", [])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the generators before the loader is made, for epoch 0 also in a run that continues.

        What makes the loader may draw from them, as `random_split` does. So does its iterator: the seed of its workers,
        and the order of a RandomSampler; then the dataset draws for the first batch.
        """
        self._seed_generators(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the iterator of a run that continues be made again: it was made for epoch 0. Seed before each loader."""
        found = _own_generators(trainer)
        is_kept = trainer.world_size == 1 and not trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        self._own = {name: each for name, each in found.items() if is_kept and isinstance(each, torch.Generator)}
        every = trainer.reload_dataloaders_every_n_epochs or 1  # type: ignore[attr-defined]

        def epoch_of_loader() -> int:
            """A run that continues between two of these epochs has the loader of the one before."""
            return trainer.current_epoch - trainer.current_epoch % every

        if trainer.current_epoch > 0:
            for name in self._own.keys() & self._saved.keys():
                self._own[name].set_state(self._saved[name])
            _warn_of_what_starts_over(trainer, sorted(found.keys() - (self._own.keys() & self._saved.keys())))
            self._seed_generators(trainer.current_epoch)
            if restart_loader(trainer, trainer.current_epoch, self._of_loaders) and epoch_of_loader() > 0:
                count_loader_from(trainer, -math.inf)  # this one was made as that of epoch 0
        # With reload_dataloaders_every_n_epochs, what makes the loader of an epoch draws, and so do its workers. No
        # hook is right before it: the module's `on_train_start` and `on_train_epoch_end` follow those of callbacks.
        loop: Any = trainer.fit_loop
        set_up_data = loop.setup_data

        def seed_and_set_up() -> None:
            if trainer.current_epoch > 0:
                self._seed_generators(epoch_of_loader())
            set_up_data()
            count_loader_from(trainer, epoch_of_loader())

        loop.setup_data = seed_and_set_up

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the same in later epochs. That of epoch 0 has been made by now."""
        if trainer.current_epoch > 0:
            self._seed_generators(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed the generators at the first batch of an epoch: not all epochs draw as much before it."""
        if batch_idx == 0:
            # By another seed: the first batch has been drawn by that of the epoch, and the second would be as it is.
            # -1, because `TrainingSampler` has seeds for the numbers of batches.
            self._seed_generators(trainer.current_epoch, -1)

    def _seed_generators(self, *numbers: int) -> None:
        seed = derive_seed(self._seed, *numbers)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _own_generators(trainer: Any) -> dict[str, Any]:
    """Return the generators of the training loaders. Without those that each epoch's workers have a new copy of."""
    found: dict[str, Any] = {}
    for number, loader in enumerate(CombinedLoader(trainer.train_dataloader).flattened):
        is_copied = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)
        of_dataset = generators_of(getattr(loader, "dataset", None)) if is_copied else {}
        for name, generator in generators_of(loader).items():
            if not any(generator is each for each in of_dataset.values()):
                found[f"{name} of training loader {number}" if number else name] = generator
    return found


def _warn_of_what_starts_over(trainer: Trainer, generators: list[str]) -> None:
    """Warn once, on rank 0, of what the checkpoint does not hold: a continued run may end with other weights."""
    lost = [f"{name} begins from its seed" for name in generators]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            lost.append(f"{type(callback).__name__} has no masks until it prunes again")
    for name, module in trainer.lightning_module.named_modules():
        # What users keep over epochs, such as the best accuracy. Other metrics are of an epoch.
        if isinstance(module, MaxMetric | MinMetric) and not module.state_dict():
            lost.append(f"{name} begins again without persistent(True)")
        # What these keep is no state of a metric: two extremes, copies, the place in the window.
        elif isinstance(module, MinMaxMetric | MetricTracker):
            lost.append(f"{name} begins again, also with persistent(True)")
        elif isinstance(module, Running) and module.state_dict():
            lost.append(f"{name} fills from its first place on")
    if lost and trainer.is_global_zero:
        log.warning("this run may differ from one that was not interrupted: %s", "; ".join(lost))


class PartsOfRanks(Callback):
    """Takes care of what each rank has of its own: of that a checkpoint has the part of rank 0.

    - Metrics that are kept over epochs by ``metric.persistent(True)``: each rank gets its part back. With rank 0's on
      all of them, a sum would be wrong. Those that Lightning resets after the checkpoint begin again.
    - Averaged models, as of ``WeightAveraging``: they get rank 0's buffers with each checkpoint. DDP sends those of the
      module, but not those of a copy. Validations of a run that continues would differ.
    - The module's buffers, such as batch norm's statistics: DDP does not send rank 0's at the first batch after a
      validation, with manual optimization at the first batch of a process only, and FSDP in no training step. So ranks
      get them after a validation, and as an epoch begins.
    """

    def __init__(self) -> None:
        self._metrics: list[dict[str, Any]] = []  # of the checkpoint, by rank

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the metrics of all ranks, and send rank 0's buffers of averages. Called by Lightning on all ranks."""
        if trainer.interrupted:  # after an exception other ranks may not come to the collectives
            return
        kept = _kept_metrics(pl_module)
        are_reset = {id(each) for metric in logged_metrics(trainer) for each in metric.modules()}
        of_epochs = {name: each for name, each in kept.items() if id(each) not in are_reset}
        own = {name: move_data_to_device(each.state_dict(), "cpu") for name, each in of_epochs.items()}
        if kept:
            by_rank: list[Any] = [own]
            if trainer.world_size > 1:
                by_rank *= trainer.world_size
                dist.all_gather_object(by_rank, own)
            checkpoint["callbacks"][self.state_key] = {"metrics": by_rank}
        for callback in trainer.callbacks if trainer.world_size > 1 else []:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):  # one of the user's may have a copy on some ranks only
                averages = [each for each in vars(callback).values() if isinstance(each, AveragedModel)]
                _send_buffers(trainer, [buffer for each in averages for buffer in each.module.buffers()])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the metrics until training begins. Called by Lightning."""
        self._metrics = state_dict["metrics"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give this rank its part back, if there are as many ranks. Each has rank 0's by now, also of what is reset."""
        parts, self._metrics = self._metrics, []
        if not parts:
            return
        found = _kept_metrics(pl_module)
        for name in found.keys() - parts[0].keys():
            found[name].reset()
        if len(parts) == trainer.world_size:
            for name, state in parts[trainer.global_rank].items():
                if name in found:
                    found[name].load_state_dict(move_data_to_device(state, found[name].device), strict=False)
        elif parts[0] and trainer.is_global_zero:
            log.warning(
                "the checkpoint has the metrics %s of %d ranks: with %d ranks each goes on from those of rank 0",
                ", ".join(parts[0]),
                len(parts),
                trainer.world_size,
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send rank 0's buffers. Called by Lightning.

        At the start of an epoch, and not with a checkpoint, so that it does not matter which checkpoints are saved.
        """
        _send_buffers(trainer, _buffers_of_rank_0(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let DDP send them again, as in a process that continues: the module's hooks may have changed them."""
        if batch_idx == 0 and isinstance(trainer.strategy.model, DistributedDataParallel):
            trainer.strategy.model.require_forward_param_sync = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Send rank 0's buffers, which a validation may have changed. Called by Lightning."""
        _send_buffers(trainer, _buffers_of_rank_0(trainer))


def _buffers_of_rank_0(trainer: Trainer) -> list[torch.Tensor]:
    """Return the buffers that a strategy takes from rank 0, at least in validation."""
    model = trainer.strategy.model
    if trainer.world_size == 1 or model is None:
        return []
    if isinstance(model, DistributedDataParallel):
        # Not those that it knows: a module may have put new tensors in their places.
        named = model.module.named_buffers() if model.broadcast_buffers else ()
        return [buffer for name, buffer in named if name not in model.parameters_to_ignore]
    is_sharded = isinstance(trainer.strategy, ModelParallelStrategy)
    return [buffer for buffer in model.buffers() if local_part(buffer) is buffer] if is_sharded else []


class SameBuckets(Callback):
    """Lets DDP begin with the buckets that it would have had if the run had gone on.

    Where in a bucket a gradient lies decides in which order three or more ranks are added up, and DDP makes its buckets
    again after its first step: that of a run that continues would have other sums.

    Args:
        checkpoint: that this rank continues from, or None.
    """

    def __init__(self, checkpoint: str | None) -> None:
        self._checkpoint = checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare that. Called by Lightning before DDP is made.

        The file is read here, because Lightning loads one of the hybrid's shards later. Older files have no buckets.
        """
        if stage == "fit" and self._checkpoint is not None and isinstance(trainer.strategy, DDPStrategy):
            states = read_checkpoint(Path(self._checkpoint)).get("callbacks", {})
            buckets = states.get(self.state_key, {}).get("buckets", [])  # names of parameters
            wrap_within(trainer.strategy, lambda module: wrapped_with_buckets(module, buckets))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the buckets. Called by Lightning on all ranks, but after an exception."""
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and not trainer.interrupted:
            checkpoint["callbacks"][self.state_key] = {"buckets": next_buckets(model)}


def _send_buffers(trainer: Trainer, buffers: list[torch.Tensor]) -> None:
    """Give all ranks the values of rank 0. All ranks must call it."""
    if not buffers:
        return
    first = trainer.strategy.broadcast([buffer.cpu() for buffer in buffers])
    for buffer, value in zip(buffers, first, strict=True):
        if buffer.shape == value.shape:  # else each rank has one of its own on purpose, such as a list of hard examples
            buffer.copy_(value)


def _kept_metrics(module: LightningModule) -> dict[str, Metric]:
    """Return the metrics that checkpoints hold, by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, Metric) and each.state_dict()}


class ContinuesAfterCheckpoint(Callback):
    """Continues with the epoch after that of the checkpoint, or not at all where EarlyStopping or time had stopped it.

    With ``max_steps`` Lightning would go through the epoch that has ended again, and after EarlyStopping train another.
    The callback comes before the others, so that they see the right epoch.

    Args:
        checkpoint: that this rank continues from, or None.
        run_dir: the folder of the run.
    """

    def __init__(self, checkpoint: str | None, run_dir: str) -> None:
        self._checkpoint = checkpoint
        self._run_dir = Path(run_dir)
        self._has_trained = self._has_batches = False
        self._at_start: dict[str, bool] = {}  # see `_switches`
        self._switched: dict[str, bool] = {}  # what the run of the checkpoint had changed
        self._validated: dict[int, int] = {}  # see `validation_batches`
        self._loaded_in = -math.inf  # the epoch of the checkpoint's validation loaders

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what has been frozen or unfrozen since training began, and what was validated. Called by Lightning.

        Not what the module's constructor has: a run may continue on purpose with a part frozen.
        """
        now = _switches(trainer).items()
        switched = {name: value for name, value in now if value != self._at_start.get(name, value)}
        validated = dict(validation_batches(trainer))
        state = {"switched": switched, "validated": validated, "loaded_in": epoch_of_validation_loaders(trainer)}
        checkpoint["callbacks"][self.state_key] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep that until training begins. Called by Lightning. Files of before lack all but the first."""
        self._switched = state_dict["switched"]
        self._validated = state_dict.get("validated", {})
        self._loaded_in = state_dict.get("loaded_in", -math.inf)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ValueError if this rank continues from elsewhere than rank 0: its momentum and images would be others.

        A machine that does not see the run folder finds no ``ckpt_path=last`` there, and would start. Also raise it for
        a search for the batch size, of which no checkpoint has the result.
        """
        if stage != "fit":
            return
        steps = 0 if self._checkpoint is None else completed_steps(Path(self._checkpoint))
        first = trainer.strategy.broadcast(steps)
        if steps != first:
            raise ValueError(
                f"rank {trainer.global_rank} would continue after {steps} steps, but rank 0 after {first}: all "
                "machines must see one run folder; name one that they share with hydra.run.dir=FOLDER"
            )
        if self._checkpoint is not None:
            of: Any = trainer
            of.num_sanity_val_steps = 0  # the run has done that when it began, and modules may count validations
            # The optimizer's state has the rate that was found. After a search at the start, Lightning has forgotten
            # all of the checkpoint but the weights, and would begin with epoch 0.
            search = LearningRateFinder.on_fit_start
            of.callbacks = [each for each in of.callbacks if type(each).on_fit_start is not search]
            if any(type(each).on_fit_start is BatchSizeFinder.on_fit_start for each in of.callbacks):
                raise ValueError(
                    f"ckpt_path={self._checkpoint}: BatchSizeFinder would search again, and Lightning then begins with "
                    "epoch 0; leave it out, and set the batch size that it has found"
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the loop. Called by Lightning when the checkpoint has been loaded."""
        self._has_trained = True
        self._take_back(trainer)
        begin_next_epoch(trainer)
        if self._checkpoint is not None:
            # Lightning has just made these, and with max_steps in the epoch of the checkpoint. They count as those of
            # the checkpoint, and are made again where those would be.
            count_validation_loaders_from(trainer, self._loaded_in)
        self._count_validations_on(trainer)
        self._at_start = {}
        # The epoch does not tell that it stopped in the first one, nor the reason that another rank had one.
        running = EarlyStoppingReason.NOT_STOPPED
        if any(each.stopped_epoch > 0 or each.stopping_reason != running for each in trainer.early_stopping_callbacks):
            trainer.should_stop = True
        if trainer.strategy.restore_checkpoint_after_setup:
            for each in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(each, Timer):  # has asked before the checkpoint was loaded whether the time is up
                    each.on_fit_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count on here, too. Called by Lightning.

        If the first epoch has no validation, Lightning makes the loaders now, and forgets what on_train_start has set.
        """
        self._count_validations_on(trainer)

    def _count_validations_on(self, trainer: Trainer) -> None:
        """Begin with the number of the checkpoint, unless the loaders are due to be made again: that resets it.

        The loaders that this run had to make count as those of the checkpoint.
        """
        seen, every = validation_batches(trainer), trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if not seen and (not every or trainer.current_epoch - self._loaded_in < every):
            seen.update(self._validated)
            count_validation_loaders_from(trainer, self._loaded_in)

    def _writes(self, trainer: Trainer) -> bool:
        """Return whether this is the rank that writes last.ckpt, in a run that began from a checkpoint and has one."""
        saves = bool(trainer.checkpoint_callbacks) and not trainer.fast_dev_run  # type: ignore[attr-defined]
        return self._checkpoint is not None and trainer.is_global_zero and saves

    def _take_back(self, trainer: Trainer) -> None:
        """Replace last.ckpt by an earlier checkpoint of its run, or that would be continued if this run is killed."""
        path, last = Path(self._checkpoint or ""), self._run_dir / OF_A_RUN["last"]
        is_own = self._writes(trainer) and last.exists() and is_of(self._run_dir, path)
        if is_own and path.resolve() != last.resolve():
            copy(path, last)

    def _keep_copy(self, trainer: Trainer) -> None:
        """Copy the checkpoint of a run that has no batch left: last.ckpt would be missing, or that of later epochs."""
        path, last = Path(self._checkpoint or ""), self._run_dir / OF_A_RUN["last"]
        # After EarlyStopping, training has begun without a batch.
        # A path that is gone was put aside when a run was killed between two renames, and last.ckpt has replaced it.
        is_another = self._writes(trainer) and path.exists() and path.resolve() != last.resolve()
        if is_another and not self._has_batches:
            copy(path, last)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze and unfreeze what the run before had, after all hooks of the start and before those of the epoch.

        Lightning restores neither: after the epoch that unfreezes a part, it would stay frozen to the end.
        """
        _drop_gradients_before_averaging(trainer)
        self._at_start = self._at_start or _switches(trainer)
        owners = {**dict(pl_module.named_parameters()), **dict(pl_module.named_modules())}
        for key, value in self._switched.items():
            name, _, switch = key.rpartition(".")
            if name in owners:
                setattr(owners[name], switch, value)
        self._switched = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Do the same in a run that continues within an epoch."""
        self._has_batches = True
        if not self._at_start:
            self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let each epoch be in last.ckpt: EarlyStopping may end one before its first step.

        Lightning saves no checkpoint twice at one step. But the epoch's batches have changed the statistics of batch
        norm.
        """
        for each in trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint) and each.filename == OF_A_RUN["last"].stem:
                forget_saved_step(each)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a last.ckpt that was written before this run continued.

        Lightning does not know of it any more, and would write it again, with other weights if a monitored metric has
        not improved since.
        """
        for each in trainer.checkpoint_callbacks:
            # With filename: last, one file is both, and a kill between the two writes leaves it known as the best only.
            if isinstance(each, ModelCheckpoint) and (each.last_model_path or each.kth_best_model_path):
                each.save_last = False

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the epoch of a checkpoint as completed, also if no step was left: then no hook of training was called.

        Lightning does so itself for ``max_epochs``, not for ``max_steps``. The test is logged with this number. The
        mean of the weights, which is tested, is put into the module when training ends.
        """
        epoch: Any = trainer.fit_loop.epoch_progress.current
        epoch.completed = epoch.processed
        self._keep_copy(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            # SWA's epoch for batch norm ends with the mean in the module, and so in the checkpoint.
            has_mean = isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch > callback.swa_end + 1
            is_averaging = isinstance(callback, WeightAveraging | StochasticWeightAveraging)
            if is_averaging and not has_mean and not self._has_trained:
                callback.on_train_end(trainer, pl_module)
        if not self._has_trained:
            _begin_and_end_training(trainer, pl_module)


def _begin_and_end_training(trainer: Trainer, pl_module: LightningModule) -> None:
    """Call on_train_start and on_train_end of the user's callbacks and module, as Lightning does after EarlyStopping.

    It calls neither where no step is left. They may put weights into the module, such as a mean, that are to be tested.
    They may also look at metrics, which a run without a step does not have: that must not keep it from its test.
    """
    averaging = (WeightAveraging, StochasticWeightAveraging)
    callbacks = [each for each in trainer.callbacks if not isinstance(each, averaging)]  # type: ignore[attr-defined]
    for each in filter(_ends_training, [*callbacks, pl_module]):
        for hook in (each.on_train_start, each.on_train_end):
            try:
                with _rows_dropped(trainer.loggers):  # those of the end are there
                    hook(*(() if each is pl_module else (trainer, pl_module)))
            except Exception as error:
                text = "%s of a run that has ended raised %s: %s; a test may be of other weights than before"
                log.warning(text, hook.__qualname__, type(error).__name__, error)


@contextmanager
def _rows_dropped(loggers: list[Any]) -> Iterator[None]:
    """Let the loggers take no rows in the meantime."""
    for logger in loggers:
        logger.log_metrics = lambda *_, **__: None
    try:
        yield
    finally:
        for logger in loggers:
            del logger.log_metrics


def _ends_training(hooked: Callback | LightningModule) -> bool:
    """Return whether its on_train_end is the user's."""
    return type(hooked).on_train_end.__module__.partition(".")[0] not in ("lightning_dp", "pytorch_lightning")


def _drop_gradients_before_averaging(trainer: Any) -> None:
    """Set gradients to None before the epoch in which StochasticWeightAveraging updates batch norm.

    That epoch has a step, but no backward: Lightning would change the mean by the gradients of the batch before, unless
    a validation has set them to None. A run that continues has none, and would end with other weights.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch == callback.swa_end + 1:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()


def _switches(trainer: Trainer) -> dict[str, bool]:
    """Return what fine-tuning switches and no state_dict has: of parameters, batch norms and all modules, by name."""
    module = trainer.lightning_module
    norms = {name: each for name, each in module.named_modules() if isinstance(each, BatchNorm)}
    found = {f"{name}.requires_grad": each.requires_grad for name, each in module.named_parameters()}
    found |= {f"{name}.track_running_stats": each.track_running_stats for name, each in norms.items()}
    return found | {f"{name}.training": mode for name, mode in modes_in_training(trainer).items()}


# --- the last and the best weights ---


class LastCheckpoint(ModelCheckpoint):
    """Writes last.ckpt beside a ModelCheckpoint of the user's that counts alike, such as one that keeps every epoch.

    In a checkpoint Lightning tells the states of two by their class and by what they count, and refuses equal ones.
    """


class BestCheckpoint(ModelCheckpoint):
    """Keeps the weights with the best ``optimized_metric`` of all epochs or validations in checkpoints/best.ckpt.

    It is a class of its own so that its state in a checkpoint is never that of a user's ModelCheckpoint. It must come
    before the callback that writes last.ckpt. Else last.ckpt would hold the best of the epochs before.
    """

    def __init__(self, config: Config) -> None:
        metric = config["optimized_metric"]
        super().__init__(
            dirpath=Path(config["run_dir"], FOLDER),
            filename="best",
            monitor=metric,
            mode=config["optimized_mode"],
            # None: right after a validation, if not each epoch ends with one. Later weights are not those it measured.
            save_on_train_epoch_end=None if is_of_validation(metric) else True,
            enable_version_counter=False,
        )
        self._config = config
        self._has_batches = False  # in this epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the best weights of before: the run that they are of may go on, and replace them."""
        super().on_train_start(trainer, pl_module)
        self.keep_copy(trainer)

    def keep_copy(self, trainer: Trainer) -> None:
        """Copy the best weights to the folder of this run, if the best epoch was before it continued there."""
        path, own = Path(self.best_model_path), Path(self.dirpath or "", OF_A_RUN["best"].name)
        if not self.best_model_path or path.resolve() == own.resolve():
            return
        if trainer.is_global_zero:
            copy(path, own)
        trainer.strategy.barrier()
        assert self.best_model_score is not None
        self.best_k_models = {str(own): self.best_model_score}
        self.best_model_path = self.kth_best_model_path = str(own)

    def on_train_batch_start(self, *_: Any) -> None:
        """Note that the epoch has a batch. Called by Lightning."""
        self._has_batches = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the weights if they are the best.

        Raises:
            ValueError: the metric is not logged.
        """
        every = trainer.check_val_every_n_epoch  # None: val_check_interval counts steps, over epochs
        # A run that continues from the checkpoint of a validation at the end of an epoch has nothing of that epoch, and
        # Lightning does not validate an epoch that max_steps ends before its last batch.
        is_whole = self._has_batches and trainer.is_last_batch
        is_validated = is_whole and every is not None and (trainer.current_epoch + 1) % every == 0
        self._has_batches = False
        if is_validated and self.monitor not in trainer.callback_metrics:
            there_are = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"test=best: optimized_metric={self.monitor} is not logged; use one of {there_are}")
        if self.monitor in trainer.callback_metrics:  # else Lightning would warn that it is never logged
            super().on_train_epoch_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Let rank 0 decide, whose values are in metrics.csv and in the checkpoint. All ranks must call it.

        Without ``sync_dist=True`` each rank has a value of its own. Lightning saves where it is better on all ranks:
        not always the best of metrics.csv, nor the same one in a run that continues, with the best of rank 0 on all.
        """
        is_better = current is not None
        if current is not None and self.best_k_models:
            best = self.best_k_models[self.kth_best_model_path]
            is_better = bool(current < best if self.mode == "min" else current > best)
        return trainer.strategy.broadcast(is_better)

    def require_measured(self, trainer: Trainer) -> None:
        """Raise ValueError if the file is of before a kill, and the epoch had another result when it was trained again.

        So it is from a checkpoint within an epoch. The weights that were the best before that epoch are gone.
        """
        path = Path(self.best_model_path)
        if not trainer.strategy.broadcast(_best_score(path, self) == self.best_model_score):
            raise ValueError(
                f"test=best: the best weights are gone: {path} is of an epoch that was trained again after a kill, "
                "with another result; use test=last"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the best of the epochs before, also if the run continues in another folder.

        Raises:
            FileNotFoundError: its weights are gone.
        """
        path, own = state_dict["best_model_path"], Path(self.dirpath or "", OF_A_RUN["best"].name)
        best_score = state_dict.get("best_model_score")
        # A kill may have left the one of before put aside.
        beside, own = existing(Path(self._config.get("ckpt_path") or own).with_name(own.name)), existing(own)
        for moved in (beside, own):  # the folder of the run has been moved, or copied
            if path and moved.exists() and (not Path(path).exists() or _best_score(moved, self) == best_score):
                path = str(moved)
        if path and not Path(path).exists():
            raise FileNotFoundError(f"test=best: the best weights so far are gone; put {beside} back, or use test=last")
        is_elsewhere = path and Path(path).resolve().parent != Path(self.dirpath or "").resolve()
        # In its own folder, a run that was killed between the two files writes the same best weights again. With other
        # values, such as fewer epochs, it may write none, and test those of the epochs that it was taken back from.
        is_another = path and (is_elsewhere or differences(Path(path), self._config))
        if is_another and _best_score(Path(path), self) != best_score:
            raise FileNotFoundError(
                f"test=best: the best weights so far are gone: {path} is now of a later epoch; continue in the folder "
                "of that run and with its options, or use test=last"
            )
        if not is_elsewhere and self._is_of_same_step(own):
            # A validation just after the checkpoint has measured the same weights. At the end of an epoch it is not
            # repeated.
            state_dict, path = _state_in(own, self), str(own)
        # Without its scores, the best of the remaining epochs would be taken for the best of all.
        super().load_state_dict(state_dict | {"dirpath": self.dirpath, "best_model_path": path})

    def _is_of_same_step(self, best: Path) -> bool:
        """Return whether the best weights are of as many steps as the checkpoint that the run continues from."""
        start = Path(self._config.get("ckpt_path") or "")
        is_known = bool(start.name) and start.exists() and best.exists() and bool(_state_in(best, self))
        return is_known and completed_steps(start) == completed_steps(best)


def _state_in(path: Path, keeper: BestCheckpoint) -> dict[str, Any]:
    state: dict[str, Any] = read_checkpoint(path)["callbacks"].get(keeper.state_key, {})
    return state


def _best_score(path: Path, keeper: BestCheckpoint) -> Any:
    return _state_in(path, keeper).get("best_model_score")
