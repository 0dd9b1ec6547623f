"""What `lightning_dp._private.lightning_names` relies on."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

from lightning_dp._lightning import FRAMEWORK, Callback, DDPStrategy, LightningModule, ModelParallelStrategy, Trainer
from lightning_dp._private import lightning_names
from tests.private_names.contract import contract
from tests.private_names.torch_contracts import CPU, in_one_process

ModelCheckpoint = importlib.import_module(FRAMEWORK + ".callbacks").ModelCheckpoint
ModelPruning = importlib.import_module(FRAMEWORK + ".callbacks").ModelPruning
Precision = importlib.import_module(FRAMEWORK + ".plugins.precision").Precision
Strategy = importlib.import_module(FRAMEWORK + ".strategies").Strategy


def trainer(**options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", **{**quiet, **options})


@contract(DDPStrategy, "_ddp_kwargs")
def check_ddp_gets_the_options_as_they_were_changed() -> None:
    def check() -> None:
        strategy = DDPStrategy(parallel_devices=[CPU], find_unused_parameters=False)
        options = lightning_names.ddp_options(strategy)
        assert options == {"find_unused_parameters": False}
        options["find_unused_parameters"] = True
        strategy.model = LightningModule()
        strategy.model.layer = nn.Linear(1, 1)
        strategy.configure_ddp()
        assert strategy.model.find_unused_parameters

    in_one_process(check)


@contract(DDPStrategy, "_setup_model")
def check_a_module_is_wrapped_with_the_options_of_the_strategy() -> None:
    def check() -> None:
        strategy = DDPStrategy(parallel_devices=[CPU], find_unused_parameters=True)
        module = nn.Linear(1, 1)
        wrapped = lightning_names.wrap_in_ddp(strategy, module)
        assert isinstance(wrapped, DistributedDataParallel)
        assert wrapped.module is module
        assert wrapped.find_unused_parameters
        seen = []
        lightning_names.wrap_within(strategy, lambda each: nullcontext(seen.append(each)))
        assert isinstance(lightning_names.wrap_in_ddp(strategy, module), DistributedDataParallel)
        assert seen == [module]
        # Layered SGD overrides it.
        strategy.model = LightningModule()
        strategy._setup_model = lambda model: ("wrapped", type(model))
        strategy.configure_ddp()
        assert strategy.model == ("wrapped", LightningModule)

    in_one_process(check)


@contract(DDPStrategy, "_timeout")
def check_a_strategy_tells_its_timeout() -> None:
    assert lightning_names.strategy_timeout(DDPStrategy(timeout=timedelta(seconds=5))) == timedelta(seconds=5)
    assert lightning_names.strategy_timeout(DDPStrategy(timeout=None)) == lightning_names.DEFAULT_TIMEOUT


@contract(Strategy, "_layer_sync")
def check_the_conversion_of_batch_norm_is_seen() -> None:
    for converts in (True, False):
        strategy = trainer(strategy="ddp", devices=2, sync_batchnorm=converts).strategy
        assert lightning_names.converts_batch_norm(strategy) == converts


@contract(LightningModule, "_compiler_ctx")
def check_a_compiled_lightning_module_is_recognized() -> None:
    from_compiled = importlib.import_module(FRAMEWORK + ".utilities.compile").from_compiled
    assert not lightning_names.is_compiled_by_lightning(LightningModule())
    assert lightning_names.is_compiled_by_lightning(from_compiled(torch.compile(LightningModule(), backend="eager")))


@contract(ModelPruning, "_parameters_to_prune")
def check_pruning_knows_its_layers_after_setup() -> None:
    module = LightningModule()
    module.first, module.second = nn.Linear(1, 1), nn.Linear(1, 1)
    chosen = ModelPruning("l1_unstructured", parameters_to_prune=[(module.first, "weight")])
    assert lightning_names.pruned_layers(chosen) == [module.first]
    everything = ModelPruning("l1_unstructured", use_lottery_ticket_hypothesis=False)
    everything.setup(trainer(), module, "fit")
    assert {*lightning_names.pruned_layers(everything)} == {module.first, module.second}


@contract(Trainer, "_val_check_time_interval")
def check_a_validation_by_the_clock_is_seen() -> None:
    assert lightning_names.validates_by_clock(trainer(val_check_interval="00:00:01:00"))
    assert not lightning_names.validates_by_clock(trainer(val_check_interval=1000, check_val_every_n_epoch=None))


@contract(LightningModule, "_on_before_batch_transfer")
def check_a_batch_goes_through_the_hook_before_its_transfer() -> None:
    class Doubling(LightningModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return 2 * batch

    assert lightning_names.before_batch_transfer(Doubling(), 3) == 6


@contract(DDPStrategy, "_configure_launcher")
def check_a_trainer_configures_the_launcher_when_it_is_made() -> None:
    class Recording(DDPStrategy):
        configured = False

        def _configure_launcher(self) -> None:
            super()._configure_launcher()
            self.configured = True

    assert trainer(strategy=Recording(), devices=2).strategy.configured


@contract(ModelParallelStrategy, "_setup_distributed")
def check_a_strategy_has_a_process_group_and_no_mesh() -> None:
    def check() -> None:
        strategy = ModelParallelStrategy()
        strategy.accelerator = importlib.import_module(FRAMEWORK + ".accelerators").CPUAccelerator()
        strategy.parallel_devices = [CPU]
        strategy.cluster_environment = importlib.import_module(
            FRAMEWORK + ".plugins.environments"
        ).LightningEnvironment()
        lightning_names.set_up_process_group(strategy)
        assert strategy.process_group_backend == "gloo"
        with pytest.raises(RuntimeError, match="device mesh"):
            _ = strategy.device_mesh

    in_one_process(check)


@contract(ModelParallelStrategy, "_device_mesh")
def check_a_strategy_shows_the_mesh_that_it_was_given() -> None:
    strategy = ModelParallelStrategy()
    lightning_names.give_device_mesh(strategy, "mesh")
    assert strategy.device_mesh == "mesh"


@contract(LightningModule, "_device_mesh")
def check_a_module_shows_the_mesh_that_it_was_given() -> None:
    module = LightningModule()
    lightning_names.give_device_mesh(module, "mesh")
    assert module.device_mesh == "mesh"


EpochLoop = importlib.import_module(FRAMEWORK + ".loops.training_epoch_loop")._TrainingEpochLoop
EvaluationLoop = importlib.import_module(FRAMEWORK + ".loops.evaluation_loop")._EvaluationLoop


@contract(EpochLoop, "_broadcast_sigterm_tensor")
def check_the_broadcast_before_a_batch_can_be_replaced_and_drops_its_errors() -> None:
    made = trainer(strategy=DDPStrategy(timeout=timedelta(0)), devices=2, fast_dev_run=True)
    undo = lightning_names.end_when_stop_check_times_out(made)
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0 s.* one of the other ranks \(1\) is stuck"):
        made.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    undo()
    made.fit_loop.epoch_loop._broadcast_sigterm_tensor()  # there is no default group, so it fails
    loop, taken = made.fit_loop.epoch_loop, []
    for begin in (lambda: None, lambda: lightning_names.end_when_stop_check_times_out(made)):
        begin()
        before = vars(loop).get("_broadcast_sigterm_tensor")
        undo = lightning_names.time_stop_checks(made, taken.append)
        with suppress(TimeoutError):
            loop._broadcast_sigterm_tensor()
        undo()
        assert vars(loop).get("_broadcast_sigterm_tensor") == before
    assert len(taken) == 1, "the second raised"


Loop = importlib.import_module(FRAMEWORK + ".loops.loop")._Loop
STEPPED = "_batches_that_stepped"


class Epochs(Callback):
    """Notes epoch and step of each batch. Saves checkpoints in the last batch, at the end and after the first epoch."""

    def __init__(self, folder: str) -> None:
        self.path, self.of_batch, self.of_start = (f"{folder}/{name}.ckpt" for name in ("first", "batch", "start"))
        self.seen: list[tuple[int, int]] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        lightning_names.begin_next_epoch(trainer)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.of_start)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append((trainer.current_epoch, trainer.global_step))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.of_batch)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contract(EpochLoop, STEPPED, lambda patch: patch.setattr(EpochLoop, STEPPED, property(), raising=False))
@contract(Loop, "_restarting")
def check_a_training_of_so_many_steps_continues_with_the_next_epoch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, *others = (Epochs(folder) for _ in range(4))
        for epochs, path in zip((whole, *others), (None, whole.path, whole.of_batch, whole.of_start), strict=True):
            made = trainer(max_steps=6, callbacks=[epochs])
            made.fit(Net(), torch.ones(2, 1, 1), ckpt_path=path)
            progress = made.fit_loop.epoch_progress.total
            assert (progress.ready, progress.started, progress.processed, progress.completed) == (3, 3, 3, 3)
            assert made.fit_loop.epoch_loop._batches_that_stepped == 6
            assert made.fit_loop.epoch_loop.batch_progress.total.completed == 6
    assert whole.seen == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert [each.seen for each in others] == 3 * [whole.seen[2:]]


class Logging(Net):
    def __init__(self):
        super().__init__()
        self.means: dict[str, Any] = {}

    def training_step(self, batch, batch_idx):
        self.log("index", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch)

    def on_train_epoch_end(self):
        self.means = lightning_names.epoch_means(self.trainer)


@contract(Trainer, "_logger_connector")
def check_the_means_of_an_epoch_are_known_before_they_are_logged() -> None:
    module = Logging()
    trainer(max_epochs=1).fit(module, torch.ones(2, 1, 1))
    assert module.means == {"index_epoch": 0.5}


class LogsMetrics(Net):
    """Logs metrics of training and validation, and notes which are known at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.trained, self.validated, self.kept = SumMetric(), SumMetric(), SumMetric()
        self.found: list[Any] = []

    def training_step(self, batch, batch_idx):
        self.trained.update(1)
        self.kept.update(1)
        self.log_dict({"trained": self.trained, "kept": self.kept.compute()}, on_step=False, on_epoch=True)
        return super().training_step(batch)

    def validation_step(self, batch, batch_idx):
        self.validated.update(1)
        self.log("validated", self.validated)

    def on_train_epoch_end(self):
        self.found = lightning_names.logged_metrics(self.trainer)


@contract(EpochLoop, "_results")
def check_the_metrics_that_lightning_resets_are_known() -> None:
    module = LogsMetrics()
    trainer(max_epochs=1).fit(module, torch.ones(2, 1, 1), torch.ones(2, 1, 1))
    assert [id(each) for each in module.found] == [id(module.trained), id(module.validated)]


class Modes(Callback):
    """Notes the modes of training when a batch and a validation end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, bool]] = []

    def note(self, trainer: Any, *_: Any) -> None:
        self.seen.append(lightning_names.modes_in_training(trainer))

    on_train_batch_end = on_validation_end = note


class Frozen(Net):
    def on_train_start(self):
        self.layer.eval()

    def validation_step(self, batch):
        assert not self.training


MODES = "_module_mode"


@contract(EvaluationLoop, MODES, lambda patch: patch.setattr(EvaluationLoop, MODES, property(), raising=False))
def check_the_modes_of_training_are_known_in_a_validation() -> None:
    modes = Modes()
    made = trainer(max_epochs=1, callbacks=[modes], num_sanity_val_steps=0)
    made.fit(Frozen(), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert modes.seen == 2 * [{"": True, "layer": False}]


SEEN = "_seen_batches_per_dataloader"


@contract(EvaluationLoop, SEEN, lambda patch: patch.setattr(EvaluationLoop, SEEN, property(), raising=False))
def check_the_batches_of_validations_are_counted() -> None:
    made = trainer(max_epochs=2)
    made.fit(Frozen(), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
    assert lightning_names.validation_batches(made) == {0: 2}, "without those of the sanity check"


LOADED = "_last_val_dl_reload_epoch"
OF_NO_EPOCH = property(lambda loop: -math.inf, lambda loop, value: None)


@contract(EvaluationLoop, LOADED, lambda patch: patch.setattr(EvaluationLoop, LOADED, OF_NO_EPOCH, raising=False))
def check_the_loaders_of_validations_are_made_again_so_many_epochs_after_those_of_the_last_one() -> None:
    made = []

    class Makes(Frozen):
        def val_dataloader(self) -> DataLoader:
            made.append(self.trainer.current_epoch)
            return DataLoader(torch.ones(1, 1))

    class Counts(Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                assert lightning_names.epoch_of_validation_loaders(trainer) == 0
                lightning_names.count_validation_loaders_from(trainer, -1)

    counted = trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2, callbacks=[Counts()])
    counted.fit(Makes(), torch.ones(1, 1, 1))
    assert made == [0, 1, 3]


class NoSteps(Net):
    """Makes no step: each epoch ends at step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        pass


class ForgetsStep(Callback):
    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        lightning_names.forget_saved_step(trainer.checkpoint_callback)


SAVED = "_last_global_step_saved"
IS_SAVED = property(lambda callback: 0, lambda callback, value: None)


@contract(ModelCheckpoint, SAVED, lambda patch: patch.setattr(ModelCheckpoint, SAVED, IS_SAVED, raising=False))
def check_a_step_is_saved_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        made = trainer(max_epochs=2, callbacks=[ForgetsStep(), saves], enable_checkpointing=True)
        made.fit(NoSteps(), torch.ones(1, 1, 1))
        assert sorted(os.listdir(folder)) == ["epoch=0.ckpt", "epoch=1.ckpt"]


class Restarts(Callback):
    """Lets the loader begin again in epoch 1, and saves a checkpoint within epoch 0 and one at its end."""

    def __init__(self, folder: str) -> None:
        self.within, self.at_end = f"{folder}/within.ckpt", f"{folder}/end.ckpt"

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        lightning_names.restart_loader(trainer, 1)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.within)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.at_end)


def epochs_in_which_a_loader_begins(checkpoint: str) -> list[int]:
    """Continue from a checkpoint of `Restarts` for one epoch."""
    images = torch.ones(2, 1)
    loader = DataLoader(images, sampler=DistributedSampler(images, 1, 0))
    begun = []
    get_iterator = loader._get_iterator
    loader._get_iterator = lambda: begun.append(loader.sampler.epoch) or get_iterator()  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        restarts = Restarts(folder)
        trainer(max_epochs=1, callbacks=[restarts]).fit(Net(), torch.ones(2, 1, 1))
        path = getattr(restarts, checkpoint)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            trainer(max_epochs=2, callbacks=[restarts]).fit(Net(), loader, ckpt_path=path)
    return begun


FitLoop = type(trainer().fit_loop)


@contract(FitLoop, "_data_fetcher", lambda patch: patch.setattr(FitLoop, "_data_fetcher", property(), raising=False))
def check_a_loader_begins_again_in_the_epoch_of_a_checkpoint() -> None:
    assert epochs_in_which_a_loader_begins("within")[:2] == [0, 1]


RELOAD = "_last_train_dl_reload_epoch"
OF_FIRST = property(lambda loop: 0, lambda loop, value: None)


@contract(FitLoop, RELOAD, lambda patch: patch.setattr(FitLoop, RELOAD, OF_FIRST, raising=False))
def check_a_loader_is_made_again_so_many_epochs_after_that_of_the_last_one() -> None:
    made = []

    class Makes(Net):
        def train_dataloader(self) -> DataLoader:
            made.append(self.trainer.current_epoch)
            return DataLoader(torch.ones(2, 1))

    class Counts(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            lightning_names.count_loader_from(trainer, -1)

    trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2, callbacks=[Counts()]).fit(Makes())
    assert made == [0, 1, 3]


STILL_RESUMES = property(lambda loop: True, lambda loop, value: None)


@contract(
    Loop,
    "_resuming_from_checkpoint",
    lambda patch: patch.setattr(Loop, "_resuming_from_checkpoint", STILL_RESUMES, raising=False),
    is_needed=hasattr(Loop, "is_resuming"),  # without it, Lightning lets the loader begin again anyway
)
def check_a_loader_begins_again_in_the_epoch_after_a_checkpoint() -> None:
    assert epochs_in_which_a_loader_begins("at_end") == [0, 1]
