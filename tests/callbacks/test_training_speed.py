"""Images per second, and time to an accuracy, on a clock that the tests turn."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_dp import ImagesPerSecond, StepTimer, TimeToAccuracy
from lightning_dp.callbacks import timers
from lightning_dp.runs.progress import Throughput, TQDMBar
from tests.ranks import run_processes

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers, "time", clock)
    return clock


class Net(pl.LightningModule):
    """A training step takes 2 s and a validation step 10 s. Accuracy rises by 0.25 in each epoch."""

    def __init__(self, clock: Clock, accuracies: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)) -> None:
        super().__init__()
        self.clock = clock
        self.accuracies = accuracies
        self.lr = 0.1
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        self.clock.now += 2
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.clock.now += 10
        self.log("val/acc", self.accuracies[self.current_epoch], sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(num_images: int = 12) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(num_images, 2), torch.zeros(num_images)), batch_size=3)


def trainer(*callbacks, **options) -> pl.Trainer:
    defaults = {"max_epochs": 4, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet = {"accelerator": "cpu", "enable_model_summary": False, "log_every_n_steps": 1}
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **quiet, **options})


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}])
def test_images_per_second_leave_out_the_first_batch_and_validation(clock, capsys, options):
    runner = trainer(ImagesPerSecond(), max_epochs=2, **options)
    runner.fit(Net(clock), loader(), loader(3))
    assert runner.callback_metrics["images_per_s/train"].item() == pytest.approx(9 / 6)
    assert "images_per_s/loader" not in runner.callback_metrics
    assert capsys.readouterr().out.count("images per second: 2\n") == 1


class Measured(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(3)

    def loader_images_per_s(self):
        return 1234.0


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_loaders_images_per_second_stand_beside(clock, capsys):
    runner = trainer(ImagesPerSecond(), max_epochs=1)
    runner.fit(Net(clock), datamodule=Measured())
    assert runner.callback_metrics["images_per_s/loader"] == 1234
    assert "images per second: 2; the loader alone: 1,234" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_an_epoch_of_one_batch_has_no_rate(clock, capsys):
    callback = ImagesPerSecond()
    trainer(callback, max_epochs=1).fit(Net(clock), loader(), loader(3))
    assert capsys.readouterr().out.count("images per second") == 1
    runner = trainer(callback, max_epochs=1)
    runner.fit(Net(clock), loader(3), loader(3))
    assert "images_per_s/train" not in runner.callback_metrics
    assert "images per second" not in capsys.readouterr().out, "those of the fit before"


class OfSeveral(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(next(iter(batch.values() if isinstance(batch, dict) else batch)), batch_idx)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("loaders", "rate"),
    [
        ({"labeled": loader(), "unlabeled": loader(24)}, 6 / 2),
        ([loader(), loader(24)], 6 / 2),
        (CombinedLoader({"long": loader(24), "short": loader()}, "max_size"), 36 / 16),
    ],
)
def test_the_images_of_all_loaders_count(clock, loaders, rate):
    runner = trainer(Throughput(), max_epochs=1)
    runner.fit(OfSeveral(clock), loaders, loader(3))
    assert runner.callback_metrics["time/images_per_s"].item() == pytest.approx(rate)


class Divided(Net):
    """A network whose layers a strategy may divide among ranks."""

    def configure_model(self):
        pass


def two_ranks(rank, strategy="ddp"):
    warnings.filterwarnings("ignore", message=".*(treespec, LeafSpec|does not have many workers|sync_dist)")
    clock = Clock()
    timers.time = clock
    callback = ImagesPerSecond()
    runner = trainer(callback, max_epochs=1, devices=2, strategy=strategy)
    runner.fit(Divided(clock), loader(), loader(6))
    return callback._last, "images_per_s/train" in runner.callback_metrics


def test_images_of_all_ranks_count():
    (first, logged), _ = run_processes(2, two_ranks)
    assert first == {"train": pytest.approx(2 * 3 / 2)}
    assert logged


def test_images_of_ranks_that_share_a_layer_count_once():
    """Tensor parallelism gives both the same images."""
    for measured, _ in run_processes(2, two_ranks, pl.strategies.ModelParallelStrategy(1, 2)):
        assert measured == {"train": pytest.approx(3 / 2)}


class Computes(Divided):
    """Logs a mean over the ranks, and computes a metric of the ranks before Lightning reduces that."""

    def __init__(self):
        super().__init__(Clock())
        self.sum = SumMetric()

    def training_step(self, batch, batch_idx):
        self.sum.update(self.global_rank + 1.0)
        self.log("mean", self.global_rank + 1.0, on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.found = self.sum.compute().item()


def train_with_bar(rank):
    warnings.filterwarnings("ignore", message=".*(treespec, LeafSpec|does not have many workers|sync_dist)")
    module = Computes()
    runner = trainer(TQDMBar(), max_epochs=1, devices=2, strategy="ddp", enable_progress_bar=True)
    runner.fit(module, loader(), loader(6))
    return module.found, runner.callback_metrics["mean"].item()


def test_the_bar_reduces_nothing_on_one_rank_alone():
    assert run_processes(2, train_with_bar) == [(6.0, 1.5)] * 2


class SavesWithin(pl.Callback):
    """Saves after two of the four batches of an epoch."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path, weights_only=False)


WITHIN = {
    StepTimer: {"time/step_s": 2.0, "time/data_wait_s": 0.0, "time/compute_s": 2.0},
    ImagesPerSecond: {"images_per_s/train": 3 / 2},
    Throughput: {"time/images_per_s": 3 / 2, "time/train_s": 8.0},
}


@pytest.mark.filterwarnings("ignore:.*(does not have many workers|resuming from a checkpoint that ended before)")
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("kind", WITHIN)
def test_a_run_that_continues_within_an_epoch_counts_from_there(clock, tmp_path, kind, is_new):
    """Lightning calls no ``on_train_epoch_start`` in it."""
    path = tmp_path / "within.ckpt"
    callback = kind()
    trainer(callback, SavesWithin(path), max_epochs=1).fit(Net(clock), loader(), loader(3))
    clock.now += 1000
    runner = trainer(kind() if is_new else callback, max_epochs=1)
    runner.fit(Net(clock), loader(), loader(3), ckpt_path=path)
    logged = {name: value.item() for name, value in runner.callback_metrics.items()}
    assert {name: logged[name] for name in WITHIN[kind]} == WITHIN[kind]


@pytest.mark.filterwarnings("ignore:.*(does not have many workers|yielded None)")
@pytest.mark.parametrize("kind", [StepTimer, ImagesPerSecond, Throughput])
def test_a_batch_that_is_none_is_left_out(clock, kind):
    """As a collate function returns it that finds no sample to use. Lightning goes on with the next one."""
    batches = iter([None, *[torch.utils.data.default_collate] * 2, None, torch.utils.data.default_collate])

    def collate(samples):
        clock.now += 0.5
        chosen = next(batches)
        return None if chosen is None else chosen(samples)

    clock.now = 1000.0
    runner = trainer(kind(), max_epochs=1, num_sanity_val_steps=0)
    runner.fit(Net(clock), DataLoader(loader(15).dataset, batch_size=3, collate_fn=collate), loader(3))
    logged = {name: value.item() for name, value in runner.callback_metrics.items()}
    if kind is StepTimer:
        assert logged["time/compute_s"] == 2.0
        assert logged["time/data_wait_s"] == pytest.approx(5 * 0.5 / 3)
    elif kind is ImagesPerSecond:
        assert logged["images_per_s/train"] == pytest.approx(6 / (2 * 2 + 3 * 0.5))
    else:
        assert logged["time/images_per_s"] == pytest.approx(9 / (3 * 2 + 5 * 0.5))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_time_to_an_accuracy_is_printed_and_logged_once(clock, capsys, tmp_path):
    callback = TimeToAccuracy(0.4)
    runner = trainer(callback, logger=CSVLogger(tmp_path, name="", version=""))
    runner.fit(Net(clock), loader(), loader(3))
    assert callback.reached_s == 3 * (4 * 2 + 10)
    assert capsys.readouterr().out.count("val/acc=0.5000 reached 0.4 after 0:00:54 (3 epochs)") == 1
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("time/to_0.4_s")
    assert [row.split(",")[column] for row in rows[1:] if row.split(",")[column]] == ["54.0"]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("accuracy", [0.75, math.nan])
def test_a_threshold_that_is_not_reached_leaves_no_time(clock, capsys, accuracy):
    callback = TimeToAccuracy(0.9)
    trainer(callback, max_epochs=1).fit(Net(clock, (accuracy,)), loader(), loader(3))
    assert callback.reached_s is None
    assert "reached" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_resumed_run_adds_the_time_before_its_checkpoint(clock, tmp_path):
    first = trainer(TimeToAccuracy(0.4), max_epochs=2)
    first.fit(Net(clock), loader(), loader(3))
    first.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    clock.now += 1000
    callback = TimeToAccuracy(0.4)
    trainer(callback).fit(Net(clock), loader(), loader(3), ckpt_path=tmp_path / "last.ckpt")
    assert callback.reached_s == 54


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_time_between_two_fits_of_a_training_does_not_count(clock, tmp_path):
    callback = TimeToAccuracy(0.4)
    runner, net = trainer(callback, max_epochs=2), Net(clock)
    runner.fit(net, loader(), loader(3))
    clock.now += 1000
    runner.validate(Net(clock, (1.0, 1.0, 1.0)), loader(3), verbose=False)
    assert callback.reached_s is None, "no training has reached it"
    runner.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    resumed = TimeToAccuracy(0.4)
    trainer(resumed).fit(Net(clock), loader(), loader(3), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.reached_s == 54
    runner.fit_loop.max_epochs = 4
    runner.fit(net, loader(), loader(3))
    assert callback.reached_s == 54


class FindsRate(LearningRateFinder):
    """Searches before the second and the third epoch, as in Lightning's documentation."""

    def on_fit_start(self, trainer, pl_module):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in (1, 2):
            self.lr_find(trainer, pl_module)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_search_between_epochs_does_not_count(clock, tmp_path):
    callback = TimeToAccuracy(0.4)
    runner = trainer(callback, FindsRate(num_training_steps=3, update_attr=False), default_root_dir=tmp_path)
    runner.fit(Net(clock), loader(), loader(3))
    assert callback.reached_s == 3 * (4 * 2 + 10)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_new_training_begins_at_zero(clock):
    callback = TimeToAccuracy(0.2)
    trainer(callback).fit(Net(clock), loader(), loader(3))
    assert callback.reached_s == 36
    trainer(callback).fit(Net(clock, (0.0, 0.0, 0.3, 0.3)), loader(), loader(3))
    assert callback.reached_s == 54


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_metric_that_is_not_logged_is_named(clock):
    with pytest.raises(ValueError, match="monitor='val/accuracy' was not logged; there are val/acc"):
        trainer(TimeToAccuracy(monitor="val/accuracy")).fit(Net(clock), loader(), loader(3))


def test_sanity_checks_do_not_count(clock):
    callback = TimeToAccuracy(0.0)
    callback.on_validation_end(SimpleNamespace(sanity_checking=True), None)
    assert callback.reached_s is None
