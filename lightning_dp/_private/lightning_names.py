"""Names that are private in Lightning.

`LayeredSGDStrategy` also overrides a private method, ``_configure_launcher``, because Lightning calls no public one
before it starts processes. It has a contract like the names below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_TIMEOUT = timedelta(minutes=30)


def ddp_options(strategy: Any) -> dict[str, Any]:
    """Return the keyword arguments that a DDPStrategy will pass to DistributedDataParallel.

    Changes to the dictionary count until the strategy wraps its model.
    """
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def wrap_in_ddp(strategy: Any, module: nn.Module) -> DistributedDataParallel:
    """Return ``module`` in a new DistributedDataParallel, with the options of a DDPStrategy. All ranks must call it."""
    wrapped: DistributedDataParallel = strategy._setup_model(module)
    return wrapped


def wrap_within(strategy: Any, context: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Let a DDPStrategy make each DistributedDataParallel within ``context(module)``."""
    wrap = strategy._setup_model

    def wrapped(module: nn.Module) -> DistributedDataParallel:
        with context(module):
            return wrap(module)

    strategy._setup_model = wrapped


def strategy_timeout(strategy: Any) -> timedelta:
    """Return the timeout that the user gave to a strategy, for every process group that is made for it.

    Strategies that take no timeout have the default.
    """
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return DEFAULT_TIMEOUT if timeout is None else timeout


def end_when_stop_check_times_out(trainer: Any) -> Callable[[], None]:
    """Let training end when the broadcast that precedes each batch has timed out. Return what undoes this.

    In it rank 0 tells the others whether the job is to stop. Lightning drops its errors, so that the next collective in
    another group, or over sockets, would wait for the silent rank once more.
    """
    timeout_s = strategy_timeout(trainer.strategy).total_seconds()

    def require_within_timeout(waited_s: float) -> None:
        if waited_s >= timeout_s:
            others = ", ".join(str(rank) for rank in range(trainer.world_size) if rank != trainer.global_rank)
            raise TimeoutError(
                f"rank {trainer.global_rank} has waited {timeout_s:g} s, the strategy's timeout, to begin a batch: one "
                f"of the other ranks ({others}) is stuck or cannot be reached; look at its log first"
            )

    time_stop_checks(trainer, require_within_timeout)
    return lambda: vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)


def time_stop_checks(trainer: Any, add: Callable[[float], None]) -> Callable[[], None]:
    """Call ``add`` with the seconds of each broadcast that precedes a batch. Return what undoes this.

    See `end_when_stop_check_times_out`, which a strategy may have called before. A rank waits for slower ones there.
    """
    loop = trainer.fit_loop.epoch_loop
    check = loop._broadcast_sigterm_tensor
    is_replaced = "_broadcast_sigterm_tensor" in vars(loop)

    def timed() -> None:
        start_s = time.perf_counter()
        check()
        add(time.perf_counter() - start_s)

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)
        if is_replaced:
            loop._broadcast_sigterm_tensor = check

    loop._broadcast_sigterm_tensor = timed
    return undo


def validates_by_clock(trainer: Any) -> bool:
    """Return whether each rank begins a validation by its own clock: ``val_check_interval`` is a duration."""
    return trainer._val_check_time_interval is not None


def begin_next_epoch(trainer: Any) -> None:
    """Go on with the epoch after that of a checkpoint, if it was saved within none. Call it in on_train_start.

    With ``max_steps``, Lightning would go through the epoch that has ended once more, without a batch. Then all later
    epochs and steps had other numbers. So it would with a checkpoint of on_train_epoch_start, and leave that epoch out.
    Of a checkpoint of its last batch, Lightning has counted the epoch as completed, and would not count the next one as
    started: a run that continues from that would repeat an epoch.
    """
    loop = trainer.fit_loop
    epoch = loop.epoch_progress.current
    if loop.restarted_on_epoch_end:
        loop.epoch_progress.increment_completed()
    elif epoch.completed != epoch.ready:
        return
    elif loop.restarted_mid_epoch:
        loop.epoch_loop.batch_progress.increment_completed()
        loop.epoch_loop._batches_that_stepped += 1
    loop.epoch_loop.restarting = False
    loop.epoch_loop.update_restart_stage()
    loop._restarting = False  # the property remains true with max_steps
    if not loop.restarted_on_epoch_start:  # whose epoch is counted as ready
        loop.reset_restart_stage()


def epoch_means(trainer: Any) -> dict[str, Any]:
    """Return what Lightning will log for the epoch that ends. Call it when a checkpoint is saved in on_train_epoch_end.

    All ranks must call it: the means of some metrics are taken over the ranks. ``trainer.logged_metrics`` has metrics
    of validation and of steps as well.
    """
    means: dict[str, Any] = trainer._logger_connector.metrics["log"]
    return {name: value.item() for name, value in means.items()}


def logged_metrics(trainer: Any) -> list[nn.Module]:
    """Return the metrics of torchmetrics that training and validation have given to ``self.log``.

    Lightning resets them at the end of each epoch, after its checkpoint, and of each validation.
    """
    loop = trainer.fit_loop.epoch_loop
    found = [result.value for results in (loop._results, loop.val_loop._results) for result in results.values()]
    return [each for each in found if isinstance(each, nn.Module)]


def validation_batches(trainer: Any) -> dict[int, int]:
    """Return the number of batches that each validation loader has had. Changes to it count.

    Lightning logs what ``validation_step`` logs with ``on_step=True`` under this number, and saves it nowhere.
    """
    seen: dict[int, int] = trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader
    return seen


def epoch_of_validation_loaders(trainer: Any) -> float:
    """Return the epoch from which Lightning counts the epochs until it makes the validation loaders again."""
    epoch: float = trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch
    return epoch


def count_validation_loaders_from(trainer: Any, epoch: float) -> None:
    """Let Lightning count the epochs until it makes the validation loaders again from ``epoch``."""
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epoch


def forget_saved_step(checkpoint: Any) -> None:
    """Let a ModelCheckpoint save, though it has saved at this step before."""
    checkpoint._last_global_step_saved = -1


def modes_in_training(trainer: Any) -> dict[str, bool]:
    """Return which modules train and do not evaluate, by name: during a validation, what each goes back to after it."""
    if trainer.evaluating:
        modes: dict[str, bool] = trainer.fit_loop.epoch_loop.val_loop._module_mode.mode
        return dict(modes)
    return {name: module.training for name, module in trainer.lightning_module.named_modules()}


def restart_loader(trainer: Any, epoch: int, states: Sequence[Any] = ()) -> bool:
    """Let the training loader begin again, with its samplers in ``epoch``; return whether a whole epoch is to come.

    Call it in on_train_start.

    Lightning starts worker processes before it tells the samplers the epoch that a run continues with: they would load
    the images of epoch 0 in its order. Where a whole epoch is to come, let Lightning make the iterator once more, as in
    later epochs: after the loader was reloaded and the hooks of the epoch's start were called.

    Within an epoch, loaders with a state of their own go on from ``states``, those in the checkpoint. Lightning has
    loaded these, but only the next iterator begins there, as with torchdata's loader.
    """
    loop = trainer.fit_loop
    if not loop.epoch_loop.restarting:
        loop._resuming_from_checkpoint = False
        return True
    fetcher = loop._data_fetcher  # of a checkpoint within an epoch
    loaders = fetcher.combined_loader.flattened
    for loader in loaders:
        batch_sampler: Any = getattr(loader, "batch_sampler", None)
        samplers: list[Any] = [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
    stateful = (each for each in loaders if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
    for loader, state in zip(stateful, states, strict=False):
        loader.load_state_dict(state)
    iter(fetcher)
    return False


def count_loader_from(trainer: Any, epoch: float) -> None:
    """Let Lightning count the epochs of ``reload_dataloaders_every_n_epochs`` from one, as if its loader were of it."""
    trainer.fit_loop._last_train_dl_reload_epoch = epoch


def converts_batch_norm(strategy: Any) -> bool:
    """Return whether ``Trainer(sync_batchnorm=True)`` makes this strategy replace batch norm layers."""
    # A default, because strategies for one device do not have the attribute.
    return getattr(strategy, "_layer_sync", None) is not None


def is_compiled_by_lightning(module: nn.Module) -> bool:
    """Return whether ``module`` is a LightningModule that was passed through ``torch.compile``."""
    # A default, because modules that are no LightningModules do not have the attribute.
    return getattr(module, "_compiler_ctx", None) is not None


def pruned_layers(pruning: Any) -> list[nn.Module]:
    """Return the layers of which a ModelPruning callback prunes parameters. It knows them after its ``setup``."""
    return [layer for layer, _ in pruning._parameters_to_prune or ()]


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Return a batch after the hook ``on_before_batch_transfer`` of module or data module."""
    return module._on_before_batch_transfer(batch)


def set_up_process_group(strategy: Any) -> None:
    """Do what a ModelParallelStrategy does in ``setup_environment``, except that it makes no mesh."""
    strategy._setup_distributed()


def give_device_mesh(owner: Any, mesh: Any) -> None:
    """Let the property ``device_mesh`` of a ModelParallelStrategy, or of a LightningModule, return ``mesh``."""
    owner._device_mesh = mesh
