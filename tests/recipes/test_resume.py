from __future__ import annotations

import errno
import fcntl
import json
import logging
import logging.handlers
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import Checkpoint, Timer
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.trainer.connectors import signal_connector
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.distributed.elastic.multiprocessing import SignalException
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running

from lightning_dp.models import Classifier
from lightning_dp.runs import command_line
from lightning_dp.runs import train as training
from lightning_dp.runs.checkpoints import (
    CURVES,
    VERSION,
    ConfigurationInCheckpoint,
    completed_steps,
    differences,
    naming_another_model,
    require_complete,
)
from lightning_dp.runs.command_line import arguments_of_rank, named_run_dir
from lightning_dp.runs.metrics import IMAGES_PER_S, rows_before
from lightning_dp.runs.resume import alone_in, find_checkpoint
from lightning_dp.runs.train import build
from lightning_dp.runs.uninterrupted import BestCheckpoint
from lightning_dp.runs.validation import is_of_validation
from lightning_dp.strategies.complete_files import CompleteFiles
from tests.ranks import RankError, run_processes
from tests.recipes.conftest import TINY, metrics
from tests.recipes.in_process import QUIET, run_script, tiny, train, train_rank
from tests.recipes.pieces import JitterData, Named, SignalOfSlurm, TwoOptimizers

SETTINGS = ("trainer.devices=2", "seed=2", "strategy=layered_sgd_single", "callbacks=agbn")


def last(run_dir):
    return run_dir / "checkpoints" / "last.ckpt"


def continued(whole, cut, end=1, epochs=3):
    """Return folder and options of a whole run, of one that ends with epoch ``end``, and of its continuation."""
    rest = f"trainer.max_epochs={epochs}"
    return [(whole, rest), (cut, f"trainer.max_epochs={end}"), (cut, rest, f"ckpt_path={last(cut)}")]


def weights(run_dir):
    return torch.load(last(run_dir), weights_only=True)["state_dict"]


def test_a_run_that_was_killed_continues_bitwise_as_if_nothing_had_happened(tmp_path):
    """Two ranks, killed by SIGKILL in the second of two epochs of three steps, and continued in the same folder."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected, _ = run_processes(2, train_rank, tiny(whole, *SETTINGS))
    kill = ("+callbacks.kill._target_=tests.recipes.pieces.Kill", "+callbacks.kill.after_steps=5")
    with pytest.raises(RankError, match="died with exit code -9"):
        run_processes(2, train_rank, tiny(cut, *SETTINGS, *kill), grace=5)
    assert torch.load(last(cut), weights_only=True)["global_step"] == 3
    resumed, _ = run_processes(2, train_rank, tiny(cut, *SETTINGS, f"ckpt_path={last(cut)}"))
    assert metrics(cut) == metrics(whole)
    ours, reference = weights(cut), weights(whole)
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
    timeless = {name: value for name, value in expected.items() if not name.startswith("time/")}
    assert {name: resumed[name] for name in timeless} == timeless


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """``begin("ckpt_path=last")``: the command, up to the start of its processes."""
    monkeypatch.setattr(training, "launch", lambda *_, **__: {})

    def begin(*arguments: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *TINY, *arguments])
        handlers, level = list(logging.root.handlers), logging.root.level
        try:
            command_line.run(training.job, "train")
        finally:
            for handler in set(logging.root.handlers) - set(handlers):
                handler.close()
            logging.root.handlers[:], logging.root.level = handlers, level

    return begin


def ended_by(number):
    """What `launch` raises where the agent of several ranks has got a signal."""
    end = SystemExit(128 + number)
    end.__context__ = SignalException("a signal", number)
    return end


@pytest.mark.parametrize(
    ("end", "num_jobs", "status"),
    [
        (SystemExit(0), 2, "error: job 0: RuntimeError: sys.exit(0) was called"),
        (SystemExit("no license"), 2, "error: job 0: RuntimeError: sys.exit('no license') was called"),
        (SIGTERMException(), 1, 128 + signal.SIGTERM),
        (KeyboardInterrupt(), 1, 128 + signal.SIGINT),
        (ended_by(signal.SIGTERM), 1, 128 + signal.SIGTERM),
    ],
)
def test_a_job_that_calls_sys_exit_does_not_end_its_sweep_and_a_signal_does(end, num_jobs, status, begin, monkeypatch):
    launched = Mock(side_effect=[end, {}])
    monkeypatch.setattr(training, "launch", launched)
    with pytest.raises(SystemExit) as raised:
        begin("--multirun", "seed=1,2")
    assert launched.call_count == num_jobs
    assert str(raised.value).splitlines()[0] == str(status)


def test_a_job_that_submitit_has_queued_again_ends_as_submitit_wants_it(begin, monkeypatch):
    handler = {"__name__": "submitit.local.local"}
    exec("import sys\ndef requeue(*_, **__): sys.exit(144)", handler)
    monkeypatch.setattr(training, "launch", handler["requeue"])
    with pytest.raises(SystemExit) as raised:
        begin("--multirun", "seed=1,2")
    assert raised.value.code == 144


@pytest.fixture
def requeue(monkeypatch):
    """A job of SLURM with one task; what Lightning calls to queue it again."""
    job = {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(signal_connector, "call", called := Mock(return_value=0))
    return called


def test_a_job_of_slurm_has_one_command_for_its_start_and_when_it_is_queued_again(
    tmp_path, begin, requeue, monkeypatch
):
    """With one task, too, where the command starts the ranks."""
    begin("ckpt_path=last", "hydra.run.dir=run")
    assert (tmp_path / "run" / ".hydra" / "config.yaml").is_file()
    with pytest.raises(SystemExit, match="has no checkpoints/last.ckpt"):
        begin("ckpt_path=last")  # a folder of its own, in which it would never continue
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    with pytest.raises(SystemExit, match="has no checkpoints/last.ckpt"):
        begin("ckpt_path=last", "hydra.run.dir=other")


@pytest.mark.ci
def test_a_checkpoint_on_the_signal_of_slurm_is_not_what_is_tested(tmp_path, requeue):
    """Lightning looks for it in the run folder, also for a test, and in a run that was started again."""
    whole, queued = tmp_path / "whole", tmp_path / "queued"
    train(tiny(whole))
    train(tiny(queued, "+callbacks.signal._target_=tests.recipes.pieces.SignalOfSlurm"))
    requeue.assert_called_once_with(["scontrol", "requeue", "7"])
    assert metrics(queued) == metrics(whole)


class Preempted(SignalOfSlurm):
    """Gets the signal in the first epoch, and ends soon after, unless the job was queued again."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.ckpt_path is None:
            super().on_train_batch_end(trainer)
            if trainer.global_step == 2:
                raise RuntimeError("preempted")


@pytest.mark.ci
def test_rows_before_the_signal_of_slurm_are_not_lost(tmp_path, requeue):
    """The rate of the first epoch is logged at its start."""
    whole, queued = tmp_path / "whole", tmp_path / "queued"
    train(tiny(whole))
    config = tiny(queued, "ckpt_path=last", f"+callbacks.signal._target_={__name__}.Preempted")
    (queued / ".hydra").mkdir(parents=True)
    (queued / ".hydra" / "config.yaml").touch()
    with pytest.raises(RuntimeError, match="preempted"):
        train(config | {"ckpt_path": find_checkpoint(config, launched=True)})
    found = find_checkpoint(config, launched=True)
    train(config | {"ckpt_path": found and str(found)})
    assert requeue.call_count == 1
    assert [(row["step"], bool(row["lr-SGD"])) for row in metrics(queued)] == [
        (row["step"], bool(row["lr-SGD"])) for row in metrics(whole)
    ]


@pytest.mark.ci
def test_dropout_draws_the_same_after_a_checkpoint_and_continues_in_another_folder(tmp_path):
    first, second, whole = tmp_path / "first", tmp_path / "second", tmp_path / "whole"
    alexnet = ("model=cifar_alexnet", "model.channels_last=false")
    train(tiny(whole, *alexnet))
    train(tiny(first, *alexnet, "trainer.max_epochs=1", "+optim.scheduler.total_steps=6", "test=false"))
    train(tiny(second, *alexnet, f"ckpt_path={last(first)}"))
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(second).items())
    assert [row["train/loss"] for row in metrics(second)] == [row["train/loss"] for row in metrics(whole)]


def whole_and_continued(tmp_path, own, *options, kill_after=5, kill=None):
    """A run that was not interrupted, and one that was killed in its second epoch and continued in the same folder."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ("trainer.max_epochs=3", *options)
    found = train(own(whole, *options))
    config = own(cut, *options)
    kill = kill or {"_target_": "tests.recipes.pieces.Kill", "after_steps": kill_after}
    with pytest.raises(RankError, match="died with exit code -9"):
        run_processes(1, train_rank, config | {"callbacks": config["callbacks"] | {"kill": kill}}, grace=5)
    again = train(config | {"ckpt_path": str(last(cut))})
    assert metrics(cut) == metrics(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())
    assert again.get("test/acc") == found.get("test/acc")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("own", "epoch", "test"), [("tiny", 1, "last"), ("own_loop", 0, "last"), ("own_loop", 2, "false")]
)
def test_the_means_of_an_epoch_are_not_lost_in_a_kill_just_after_its_checkpoint(tmp_path, own, epoch, test):
    """Lightning logs them when the checkpoint has been written. After the last epoch nothing else may be logged."""
    kill = {"_target_": "tests.recipes.pieces.KillAfterCheckpoint", "epoch": epoch}
    whole_and_continued(tmp_path, globals()[own], f"test={test}", kill=kill)
    whole, cut = (
        [{name for name, value in row.items() if value} for row in metrics(tmp_path / run, times=True)]
        for run in ("whole", "cut")
    )
    assert cut == whole, "the times are there, too"


LAST_EPOCH = {"_target_": "tests.recipes.pieces.KillAfterCheckpoint", "epoch": 2}


@pytest.mark.ci
@pytest.mark.parametrize("kill", [None, LAST_EPOCH], ids=["second epoch", "nothing left to train"])
def test_a_run_of_so_many_steps_continues_with_the_next_epoch(tmp_path, kill):
    """Lightning would go through the epoch that has ended again, without a batch, and number all others wrongly.

    With nothing left to train, the test would have the number of the epoch that the last step was in.
    """
    whole_and_continued(tmp_path, tiny, "trainer.max_steps=8", kill=kill)


@pytest.mark.ci
def test_weights_of_64_bits_are_not_rounded_when_they_are_loaded(tmp_path):
    whole_and_continued(tmp_path, tiny, "trainer.precision=64-true")


def own_loop(run_dir, *options):
    config = tiny(run_dir, *options)
    config["data"] = {"_target_": "tests.recipes.pieces.JitterData"}
    config["model"] = {"_target_": "tests.recipes.pieces.TwoOptimizers"}
    return config


@pytest.mark.ci
def test_rows_are_those_before_the_checkpoint_whatever_their_step(tmp_path):
    """Two optimizers step for each batch, rows are logged past the end of an epoch, and images are drawn at random."""
    whole_and_continued(tmp_path, own_loop, kill_after=10)
    assert len([row for row in metrics(tmp_path / "cut") if row["own/seen"]]) == 3


class OwnStep(Classifier):
    """Gives loggers the number of steps as the step of an epoch, which the first row of the next epoch has as well."""

    def on_train_epoch_end(self):
        self.log("step", float(self.global_step))


@pytest.mark.ci
def test_rows_of_the_next_epoch_are_not_kept_where_it_begins_with_the_step_of_the_means(tmp_path):
    whole_and_continued(tmp_path, tiny, f"model._target_={__name__}.OwnStep")


class LogsEachValidation(Classifier):
    """Logs each batch of a validation, with the number of batches that validations have had."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("own/index", float(batch_idx), on_step=True, on_epoch=False)


@pytest.mark.ci
def test_batches_of_validations_are_counted_on_where_a_run_continues(tmp_path):
    whole_and_continued(tmp_path, tiny, f"model._target_={__name__}.LogsEachValidation")
    steps = [int(row["step"]) for row in metrics(tmp_path / "cut") if row["own/index"]]
    assert steps == list(range(len(steps)))
    # Lightning counts those of each loader.
    reload = "+trainer.reload_dataloaders_every_n_epochs=1"
    whole_and_continued(tmp_path / "reload", tiny, f"model._target_={__name__}.LogsEachValidation", reload)


@pytest.mark.ci
def test_batches_of_validations_are_counted_on_where_the_epoch_that_a_run_continues_with_has_none(tmp_path):
    """Lightning makes the loaders of validations late there, when training has begun."""
    options = (f"model._target_={__name__}.LogsEachValidation", "trainer.check_val_every_n_epoch=2")
    kill = {"_target_": "tests.recipes.pieces.KillAfterCheckpoint", "epoch": 1}
    whole_and_continued(tmp_path, tiny, *options, "trainer.max_epochs=4", kill=kill)


@pytest.mark.ci
@pytest.mark.parametrize(("epoch", "max_steps"), [(0, -1), (1, -1), (2, -1), (1, 15), (3, 15)])
def test_batches_of_validations_are_counted_on_between_two_epochs_that_make_the_loaders_again(
    tmp_path, epoch, max_steps
):
    """Lightning counts them from 0 in the epochs 0, 2 and 4. It makes those of a run that continues at its start."""
    options = (f"model._target_={__name__}.LogsEachValidation", "+trainer.reload_dataloaders_every_n_epochs=2")
    end = ("trainer.max_epochs=5", f"trainer.max_steps={max_steps}")
    kill = {"_target_": "tests.recipes.pieces.KillAfterCheckpoint", "epoch": epoch}
    whole_and_continued(tmp_path, tiny, *options, *end, kill=kill)


class CountsValidations(Classifier):
    """Has a validation more in its weights for each that it has begun."""

    def on_validation_epoch_start(self):
        next(self.buffers()).add_(1)


@pytest.mark.ci
def test_a_run_that_continues_does_not_check_its_validation_again(tmp_path):
    """The check would validate once more than the run that was not interrupted."""
    options = (f"model._target_={__name__}.CountsValidations", "trainer.num_sanity_val_steps=1")
    whole_and_continued(tmp_path, tiny, *options)


class KillAfterValidation(Callback):
    def on_validation_end(self, trainer, module):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ci
def test_rows_of_a_validation_that_begin_with_the_step_of_the_means_are_not_kept(tmp_path):
    """Epochs have one step. The first validation comes in the second one, and counts its batches from 0."""
    options = (f"model._target_={__name__}.LogsEachValidation", "trainer.limit_train_batches=1", "test=false")
    every = ("trainer.check_val_every_n_epoch=null", "+trainer.val_check_interval=2", "callbacks.learning_rate=null")
    kill = {"_target_": f"{__name__}.KillAfterValidation"}
    whole_and_continued(tmp_path, tiny, *options, *every, "trainer.num_sanity_val_steps=0", kill=kill)


class LogsAtEnd(Classifier):
    """Writes to its logger when training has ended."""

    def on_train_end(self):
        self.logger.log_metrics({"own/end": 1.0}, self.trainer.fit_loop.epoch_loop._batches_that_stepped - 1)


@pytest.mark.ci
def test_rows_of_the_end_are_kept_where_a_run_that_has_ended_is_started_again(tmp_path):
    options = (f"model._target_={__name__}.LogsAtEnd", "trainer.max_epochs=1")
    train(tiny(tmp_path, *options))
    expected = metrics(tmp_path)
    train(tiny(tmp_path, *options, f"ckpt_path={last(tmp_path)}"))
    assert metrics(tmp_path) == expected


class Drawing(Named):
    """Keeps what it draws for each image."""

    drawn: ClassVar[list[float]] = []

    def __getitem__(self, index):
        number = torch.rand(1)
        self.drawn.append(float(number))
        return self.images[index] + number, index % 10


class DrawingData(JitterData):
    def train_dataloader(self):
        return DataLoader(Drawing(48), 16, shuffle=True)


@pytest.mark.ci
def test_each_batch_is_augmented_by_numbers_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(Drawing, "drawn", [])
    train(own_loop(tmp_path) | {"data": {"_target_": f"{__name__}.DrawingData"}})
    assert len(set(Drawing.drawn)) == len(Drawing.drawn) == 96


@pytest.mark.ci
@pytest.mark.parametrize("knows_epoch", [True, False])
def test_workers_load_the_epoch_that_a_run_continues_with(tmp_path, knows_epoch):
    """Lightning starts them before it tells the sampler the epoch."""
    data = {"_target_": "tests.recipes.pieces.JitterData", "num_workers": 2, "knows_epoch": knows_epoch}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(own_loop(whole, "trainer.max_epochs=3") | {"data": data})
    train(own_loop(cut, "trainer.max_epochs=1") | {"data": data})
    train(own_loop(cut, "trainer.max_epochs=3", f"ckpt_path={last(cut)}") | {"data": data})
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_a_checkpoint_of_the_last_batch_of_an_epoch_continues_with_the_images_of_the_next_one(tmp_path):
    """Three batches make six steps of two optimizers. Lightning counts that epoch as ended, and does not warn."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    data = {"_target_": "tests.recipes.pieces.JitterData", "num_workers": 2}
    for run_dir, *options in continued(whole, cut):
        every = "+callbacks.checkpoint.every_n_train_steps=6"
        train(own_loop(run_dir, every, "test=false", *options) | {"data": data})
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_a_run_continues_twice_from_checkpoints_of_the_last_batches_of_epochs(tmp_path):
    """Lightning would not count the epoch in between as started, and train it once more."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    every = ("+callbacks.checkpoint.every_n_train_steps=3", "optim=sgd_multistep")
    train(tiny(whole, *every, "trainer.max_epochs=4"))
    for end, checkpoint in ((1, "null"), (2, last(cut)), (4, last(cut))):
        train(tiny(cut, *every, f"trainer.max_epochs={end}", f"ckpt_path={checkpoint}"))
    assert metrics(cut) == metrics(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_a_loader_with_a_state_of_its_own_goes_on_within_an_epoch(tmp_path):
    """Of three batches, which make six steps of two optimizers. Lightning has told it where it was."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    data = {"_target_": "tests.recipes.pieces.ResumableData"}
    for run_dir, *options in continued(whole, cut, end=2):
        every = "+callbacks.checkpoint.every_n_train_steps=8"
        train(own_loop(run_dir, every, "test=false", *options) | {"data": data})
    assert completed_steps(last(cut)) == completed_steps(last(whole)) == 16
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


class SaveAtStart(Callback):
    """Saves a checkpoint when the second epoch begins."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.ci
def test_a_checkpoint_of_the_start_of_an_epoch_leaves_none_out(tmp_path):
    """Lightning would take the batches of the epoch before for those of the one that has begun."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    path = whole / "checkpoints" / "start.ckpt"
    config = tiny(whole, "trainer.max_epochs=3")
    config["callbacks"]["save"] = {"_target_": f"{__name__}.SaveAtStart", "path": str(path)}
    train(config)
    train(tiny(cut, "trainer.max_epochs=3", f"ckpt_path={path}"))
    assert completed_steps(last(cut)) == completed_steps(last(whole))
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_a_generator_of_its_own_goes_on_where_it_was(tmp_path, num_workers, caplog):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    data = {"_target_": "tests.recipes.pieces.GeneratorData", "num_workers": num_workers}
    for run_dir, *options in continued(whole, cut):
        train(own_loop(run_dir, "test=false", *options) | {"data": data})
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())
    assert "may differ" not in caplog.text


class WithBest(TwoOptimizers):
    def __init__(self):
        super().__init__()
        self.best, self.kept = MaxMetric(), MaxMetric()
        self.range, self.by_epoch = MinMaxMetric(MeanMetric()), MetricTracker(MeanMetric(), maximize=True)
        self.window = Running(MeanMetric())
        for metric in (self.kept, self.range, self.window):
            metric.persistent(True)


@pytest.mark.ci
def test_a_metric_that_is_kept_over_epochs_is_warned_of_where_it_is_in_no_checkpoint(tmp_path, caplog):
    for options in (["trainer.max_epochs=1"], ["trainer.max_epochs=2", f"ckpt_path={last(tmp_path)}"]):
        assert "may differ" not in caplog.text
        train(own_loop(tmp_path, "test=false", *options) | {"model": {"_target_": f"{__name__}.WithBest"}})
    (found,) = [record.message for record in caplog.records if "may differ" in record.message]
    assert found.endswith(
        ": best begins again without persistent(True); range begins again, also with persistent(True); by_epoch begins "
        "again, also with persistent(True); window fills from its first place on"
    )


class KeepsSums(TwoOptimizers):
    """Counts over epochs, each rank in steps of its own."""

    def __init__(self):
        super().__init__()
        self.kept = SumMetric()
        self.kept.persistent(True)

    def on_train_epoch_end(self):
        self.kept.update(1 + 10 * self.global_rank)
        self.log("own/kept", self.kept.compute())


@pytest.mark.ci
def test_each_rank_gets_its_part_of_a_metric_that_is_kept_over_epochs(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *options in continued(whole, cut):
        config = own_loop(run_dir, "test=false", "trainer.devices=2", *options)
        run_processes(2, train_rank, config | {"model": {"_target_": f"{__name__}.KeepsSums"}})
    kept = [[float(row["own/kept"]) for row in metrics(run_dir) if row["own/kept"]] for run_dir in (whole, cut)]
    assert kept == [[12, 24, 36], [12, 24, 36]]


class LogsMetrics(Classifier):
    """Lets Lightning log metrics that checkpoints hold. It resets them when the checkpoint has been written."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained = MetricCollection({"of_training": SumMetric()})
        self.validated, self.kept = SumMetric(), SumMetric()
        for metric in (self.trained, self.validated, self.kept):
            metric.persistent(True)

    def training_step(self, batch, batch_idx):
        self.trained.update(1)
        self.kept.update(1)
        self.log_dict(self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.update(1)
        self.log("of_validation", self.validated, on_step=False, on_epoch=True)
        self.log("kept", self.kept.compute())
        super().validation_step(batch, batch_idx)


@pytest.mark.ci
@pytest.mark.parametrize("at_end_of_epoch", [True, False])
def test_a_metric_of_an_epoch_begins_again_where_a_run_continues_from_a_checkpoint_that_holds_it(
    tmp_path, at_end_of_epoch
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *options in continued(whole, cut):
        saved = f"callbacks.checkpoint.save_on_train_epoch_end={at_end_of_epoch}"
        train(tiny(run_dir, "optim=sgd_multistep", f"model._target_={__name__}.LogsMetrics", saved, *options))
    for name in ("of_training", "of_validation", "kept"):
        of_runs = [[row[name] for row in metrics(run_dir) if row.get(name)] for run_dir in (whole, cut)]
        assert len(of_runs[0]) == 3
        assert of_runs[1][-2:] == of_runs[0][-2:], name


@pytest.mark.ci
def test_parts_of_a_metric_of_other_ranks_are_warned_of(tmp_path, caplog):
    model = {"model": {"_target_": f"{__name__}.KeepsSums"}}
    run_processes(2, train_rank, own_loop(tmp_path, "test=false", "trainer.devices=2", "trainer.max_epochs=1") | model)
    train(own_loop(tmp_path, "test=false", "trainer.max_epochs=2", f"ckpt_path={last(tmp_path)}") | model)
    assert "has the metrics kept of 2 ranks: with 1 ranks each goes on from those of rank 0" in caplog.text


@pytest.mark.ci
def test_the_mean_of_the_weights_has_the_statistics_of_rank_0_where_a_run_continues(tmp_path):
    """A validation between the batches of a step: there DDP does not send rank 0's statistics to the others."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *options in continued(whole, cut):
        every = ("trainer.accumulate_grad_batches=3", "+trainer.val_check_interval=2")
        config = tiny(run_dir, "trainer.devices=2", "strategy=ddp", *every, *options)
        config["callbacks"]["mean"] = {"_target_": "pytorch_lightning.callbacks.EMAWeightAveraging", "decay": 0.5}
        config["model"]["scheduler"]["total_steps"] = 9
        run_processes(2, train_rank, config)
    assert [row["val/loss"] for row in metrics(cut)] == [row["val/loss"] for row in metrics(whole)]


class OutOfOrder(torch.nn.Module):
    """Has its layers in another order than their gradients come in."""

    def __init__(self):
        super().__init__()
        self.last, self.first = torch.nn.Linear(37, 10), torch.nn.Linear(192, 41)
        self.middle = torch.nn.Linear(41, 37)

    def forward(self, x):
        return self.last(self.middle(self.first(x.flatten(1)).tanh()).tanh())


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=ddp"],
        ["strategy=ddp", "trainer.limit_train_batches=1"],
        ["strategy=layered_sgd_single", "strategy.overlap=step"],
    ],
)
def test_gradients_of_three_ranks_are_added_up_in_the_same_order_where_a_run_continues(tmp_path, options):
    """DDP does so by buckets, which it makes again after its first step."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *parts in continued(whole, cut):
        ranks = ("trainer.devices=3", "data.batch_size=12", "data.shape=[3,8,8]")
        config = tiny(run_dir, *ranks, "optim=sgd_multistep", "test=false", *options, *parts)
        config["model"]["model"] = {"_target_": f"{__name__}.OutOfOrder"}
        run_processes(3, train_rank, config)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_gradients_of_three_ranks_are_added_up_in_the_same_order_from_a_checkpoint_of_shards(tmp_path):
    """Such a checkpoint is loaded when DDP has been made."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shards = ("strategy=krizhevsky_hybrid", "strategy.state_dict_type=sharded", "test=false")
    for run_dir, *options in continued(whole, cut):
        ranks = ("trainer.devices=3", "data.batch_size=12", "optim=sgd_multistep")
        run_processes(3, train_rank, tiny(run_dir, *ranks, *shards, *options))
    losses = [[row["train/loss"] for row in metrics(run_dir) if row["train/loss"]] for run_dir in (whole, cut)]
    assert len(losses[0]) == 3
    assert losses[1] == losses[0]


class ReplacesHead(Classifier):
    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.model.head = torch.nn.Linear(64, 10)
            self.optimizers().add_param_group({"params": list(self.model.head.parameters())})


def test_a_module_may_replace_a_layer_between_two_checkpoints(tmp_path):
    """DDP does not know the new one, and still has a bucket for the one of before."""
    options = ("strategy=ddp", "+strategy.find_unused_parameters=true", "optim=sgd_multistep", "optim.scheduler=null")
    assert "test/acc" in train(tiny(tmp_path, *options, f"model._target_={__name__}.ReplacesHead"))


class HasStatistics(TwoOptimizers):
    """Manual optimization with batch norm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(192)

    def loss(self, batch):
        return super().loss([self.norm(batch[0].flatten(1)), batch[1]])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["ddp", "layered_sgd_single"])
def test_statistics_are_those_of_rank_0_where_a_run_with_manual_optimization_continues(tmp_path, strategy):
    """DDP sends rank 0's to the others at the first batch of a process only."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *options in continued(whole, cut):
        config = tiny(run_dir, "data.shape=[3,8,8]", "trainer.devices=2", f"strategy={strategy}", *options)
        run_processes(2, train_rank, config | {"model": {"_target_": f"{__name__}.HasStatistics"}})
    losses = [[row["val/loss"] for row in metrics(run_dir) if row["val/loss"]] for run_dir in (whole, cut)]
    assert len(losses[0]) == 3
    assert losses[1] == losses[0]


class Observes(torch.nn.Linear):
    """Scales by what it has seen, also in validation, as the observers of quantization do."""

    def __init__(self):
        super().__init__(192, 10)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("own", torch.zeros(0), persistent=False)

    def forward(self, x):
        if not self.training:
            self.own = torch.zeros(dist.get_rank() + 2)  # of another size on each rank
        self.seen = self.seen.lerp(x.abs().mean(), 0.5)  # a new tensor, which DDP does not know
        return super().forward(x.flatten(1) / self.seen)


class Moves(Classifier):
    """Changes a buffer between epochs, and so after a validation."""

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.model.seen = self.model.seen + 1 + self.global_rank

    def on_train_epoch_start(self):
        super().on_train_epoch_start()
        self.model.seen = self.model.seen + 1 + self.global_rank


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=ddp"],
        ["strategy=ddp", f"model._target_={__name__}.Moves"],
        ["strategy=layered_sgd_single", "+trainer.val_check_interval=1"],
        ["strategy=layered_fsdp"],
        ["strategy=layered_fsdp", "trainer.limit_val_batches=0"],
    ],
    ids=" ".join,
)
def test_buffers_that_a_validation_changes_are_those_of_rank_0_after_it(tmp_path, options):
    """DDP does not send them to the others at the first batch after a validation, and FSDP at none."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *parts in continued(whole, cut):
        ranks = ("trainer.devices=2", "data.shape=[3,8,8]", "optim=sgd_multistep", "test=false")
        config = tiny(run_dir, *ranks, *options, *parts)
        config["model"]["model"] = {"_target_": f"{__name__}.Observes"}
        run_processes(2, train_rank, config)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_what_no_checkpoint_holds_is_warned_of_where_a_run_continues(tmp_path, caplog):
    data = {"_target_": "tests.recipes.pieces.GeneratorData", "with_numpy": True}
    pruning = {"_target_": "pytorch_lightning.callbacks.ModelPruning", "pruning_fn": "l1_unstructured", "amount": 0.5}
    for run_dir, *options in (
        (tmp_path, "trainer.max_epochs=1"),
        (tmp_path, "trainer.max_epochs=2", f"ckpt_path={last(tmp_path)}"),
    ):
        assert "may differ" not in caplog.text
        config = own_loop(run_dir, "test=false", *options) | {"data": data}
        config["callbacks"]["pruning"] = pruning
        train(config)
    (found,) = [record.message for record in caplog.records if "may differ" in record.message]
    assert "Jitter.drawn begins from its seed; ModelPruning has no masks until it prunes again" in found
    assert "DataLoader.generator" not in found


@pytest.mark.ci
@pytest.mark.parametrize("model", ["WithBackbone", "Unfreezes", "Thaws"])
@pytest.mark.parametrize("end", [1, 2, 3])
def test_a_backbone_that_was_unfrozen_is_trained_where_a_run_continues(tmp_path, end, model):
    """Before, in and after the epoch in which Lightning's callback, or the module, unfreezes it."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finetuning = {"_target_": "pytorch_lightning.callbacks.BackboneFinetuning", "unfreeze_backbone_at_epoch": 1}
    for run_dir, *options in continued(whole, cut, end, epochs=4):
        config = own_loop(run_dir, "test=false", *options) | {"model": {"_target_": f"tests.recipes.pieces.{model}"}}
        if model == "WithBackbone":
            config["callbacks"] |= {"finetuning": finetuning}
        train(config)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


class Fails(Checkpoint):
    """Ends the run when the checkpoint of an epoch is there."""

    def on_train_epoch_end(self, *_):
        raise RuntimeError("failed")


@pytest.mark.ci
def test_rows_of_before_are_not_lost_in_a_run_that_has_logged_none_itself(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    model = {"model": {"_target_": "tests.recipes.pieces.WithBackbone"}}
    train(own_loop(first, "test=false", "trainer.max_epochs=1") | model)
    silent = ("callbacks.learning_rate=null", "callbacks.throughput=null")
    config = own_loop(second, "test=false", f"ckpt_path={last(first)}", *silent) | model
    config["callbacks"] |= {"fails": {"_target_": f"{__name__}.Fails"}}
    with pytest.raises(RuntimeError, match="failed"):
        train(config)
    rows = [{name: row[name] for name in row if name != IMAGES_PER_S} for row in rows_before(last(first))]
    assert rows_before(last(second)) == rows != []


def warned_of(rank, run_dir, *options):
    """Two ranks, whose loaders keep a generator."""
    handler = logging.handlers.BufferingHandler(1000)
    logging.getLogger("train").addHandler(handler)
    config = own_loop(run_dir, "test=false", "trainer.devices=2", *options)
    train(config | {"data": {"_target_": "tests.recipes.pieces.GeneratorData"}})
    return [record.getMessage() for record in handler.buffer if "may differ" in record.getMessage()]


@pytest.mark.ci
def test_generators_of_several_ranks_are_warned_of(tmp_path):
    assert run_processes(2, warned_of, tmp_path, "trainer.max_epochs=1") == [[], []]
    (found,), others = run_processes(2, warned_of, tmp_path, "trainer.max_epochs=2", f"ckpt_path={last(tmp_path)}")
    assert "DataLoader.generator begins from its seed" in found
    assert others == []


class Draws(Callback):
    def on_train_epoch_start(self, trainer, module):
        torch.rand(trainer.current_epoch + 1)


@pytest.mark.ci
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("reload", [0, 1])
def test_what_a_callback_draws_when_an_epoch_begins_leaves_the_order_of_the_images(tmp_path, num_workers, reload):
    """The loader, which may be made again, begins the epoch after the callback's turn, also in a continued run."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    data = {"_target_": "tests.recipes.pieces.JitterData", "num_workers": num_workers}
    for run_dir, *options in continued(whole, cut, epochs=2):
        config = own_loop(run_dir, *options, f"+trainer.reload_dataloaders_every_n_epochs={reload}") | {"data": data}
        config["callbacks"]["draws"] = {"_target_": f"{__name__}.Draws"}
        train(config)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


class DrawingModule(TwoOptimizers):
    """Its hooks come after those of all callbacks."""

    def on_train_start(self):
        torch.rand(1)

    def on_train_epoch_end(self):
        torch.rand(2)


class OfRate(Classifier):
    """Has a rate that Lightning's search sets."""

    lr = 0.1


@pytest.mark.ci
def test_the_rate_is_not_searched_again_where_a_run_continues(tmp_path):
    """Lightning's search would leave the weights of the checkpoint, and epoch 0."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *options in continued(whole, cut):
        config = tiny(run_dir, "optim=sgd_multistep", "data.batch_size=2", "data.shape=[3,8,8]", *options)
        config["model"]["_target_"] = f"{__name__}.OfRate"
        search = {"_target_": "pytorch_lightning.callbacks.LearningRateFinder", "num_training_steps": 15}
        config["callbacks"]["search"] = search
        train(config)
    assert completed_steps(last(cut)) == completed_steps(last(whole))
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())
    assert {row["lr-SGD"] for row in metrics(whole) if row["lr-SGD"]} != {"0.1"}, "another rate was found"


@pytest.mark.ci
def test_a_batch_size_is_not_searched_again_where_a_run_continues(tmp_path):
    """Lightning would forget all of the checkpoint but the weights, and begin with epoch 0."""
    train(tiny(tmp_path, "trainer.max_epochs=1"))
    config = tiny(tmp_path, f"ckpt_path={last(tmp_path)}")
    config["callbacks"]["search"] = {"_target_": "pytorch_lightning.callbacks.BatchSizeFinder", "max_val": 16}
    config["trainer"]["strategy"] = "auto"  # the callback refuses those for several ranks
    with pytest.raises(ValueError, match=r"last\.ckpt: BatchSizeFinder would search again.* set the batch size"):
        train(config)


@pytest.mark.ci
def test_what_a_module_draws_between_epochs_leaves_the_images_of_a_loader_that_is_made_again(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run_dir, *options in continued(whole, cut):
        config = own_loop(run_dir, *options, "+trainer.reload_dataloaders_every_n_epochs=1")
        train(config | {"model": {"_target_": f"{__name__}.DrawingModule"}})
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
@pytest.mark.parametrize("optim", ["sgd_onecycle", "goyal"])  # only the first asks for the loader before the epoch
@pytest.mark.parametrize(("end", "reload"), [(2, 1), (1, 2), (3, 2), (4, 3)])
def test_a_loader_that_is_made_again_every_few_epochs_is_made_in_the_same_ones(tmp_path, end, reload, optim):
    """What makes it divides the images at random."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    every = f"+trainer.reload_dataloaders_every_n_epochs={reload}"
    for run_dir, *options in continued(whole, cut, end, epochs=5):
        config = tiny(run_dir, *options, every, f"optim={optim}", "trainer.limit_val_batches=0", "test=false")
        config["model"]["scheduler"]["total_steps"] = 15
        train(config | {"data": {"_target_": "tests.recipes.pieces.DrawnData", "has_own": False}})
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_a_run_does_not_begin_with_what_was_saved_on_an_exception(tmp_path):
    """It is of another run, or of a part of the first epoch. Lightning's fit without a checkpoint continues from it."""
    whole, other, run, saved = (tmp_path / name for name in ("whole", "other", "run", "saved"))
    train(tiny(whole, "trainer.max_epochs=2"))
    train(tiny(other, "trainer.max_epochs=1", "seed=5"))
    saved.mkdir()
    shutil.copy(last(other), saved / "on_exception.ckpt")
    config = tiny(run, "trainer.max_epochs=2")
    config["callbacks"]["saves"] = {"_target_": "tests.recipes.pieces.SavesOnException", "dirpath": str(saved)}
    train(config)
    assert metrics(run) == metrics(whole)
    assert all(torch.equal(mine, weights(whole)[name]) for name, mine in weights(run).items())
    assert (saved / "stages").read_text() == "fit\ntest\n", "the callback takes part in the run"
    assert not (saved / "on_exception.ckpt").exists(), "Lightning removes it at the end"


@pytest.mark.ci
def test_the_mean_of_the_weights_is_tested_of_a_run_that_has_ended(tmp_path):
    config = tiny(tmp_path, "trainer.max_epochs=1")
    config["callbacks"]["mean"] = {"_target_": "pytorch_lightning.callbacks.EMAWeightAveraging", "decay": 0.5}
    found = train(config)
    again = train(config | {"ckpt_path": str(last(tmp_path))})
    assert again["test/loss"] == found["test/loss"]
    assert train(config | {"ckpt_path": str(last(tmp_path)), "train": False})["test/loss"] == found["test/loss"]


@pytest.mark.ci
@pytest.mark.parametrize("end", [["trainer.max_epochs=1"], ["trainer.max_epochs=-1", "trainer.max_steps=2"]])
@pytest.mark.parametrize("ends", ["callbacks", "model"])
def test_what_ones_own_on_train_end_does_is_tested_of_a_run_that_has_ended(tmp_path, ends, end, caplog):
    """Such as a mean of the weights. Lightning calls no hook of training where no step is left, and has no metrics."""
    config = tiny(tmp_path, *end)
    config["callbacks"]["reports"] = {"_target_": "tests.recipes.pieces.Reports"}
    if ends == "model":
        config["model"]["_target_"] = "tests.recipes.pieces.HalvedModel"
    else:
        config["callbacks"]["halves"] = {"_target_": "tests.recipes.pieces.Halves"}
    found = train(config)
    again = train(config | {"ckpt_path": str(last(tmp_path))})
    assert again["test/loss"] == found["test/loss"]
    assert "Reports.on_train_end of a run that has ended raised KeyError: 'train/loss'" in caplog.text
    assert train(config | {"ckpt_path": str(last(tmp_path)), "train": False})["test/loss"] != found["test/loss"]


@pytest.mark.ci
@pytest.mark.parametrize("model", ["cifar_alexnet", "resnet20"])
def test_stochastic_weight_averaging_has_a_mean_that_is_tested_of_a_run_that_has_ended(tmp_path, model):
    """No epoch is left, so that no hook of training puts it into the module. With batch norm the checkpoint has it."""
    config = tiny(tmp_path, f"model={model}")
    swa = "pytorch_lightning.callbacks.StochasticWeightAveraging"
    config["callbacks"]["mean"] = {"_target_": swa, "swa_lrs": 0.5, "swa_epoch_start": 1}
    found = train(config)
    again = train(config | {"ckpt_path": str(last(tmp_path))})
    assert again["test/loss"] == found["test/loss"]


@pytest.mark.ci
def test_stochastic_weight_averaging_ends_with_the_mean_where_no_validation_follows_the_last_step(tmp_path):
    """A validation sets gradients to None. Without, the epoch for batch norm steps with those of the last batch."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    config = tiny(whole, "test=false", "trainer.limit_val_batches=0", "optimized_metric=null", "optim=sgd_multistep")
    swa = "pytorch_lightning.callbacks.StochasticWeightAveraging"
    config["callbacks"]["mean"] = {"_target_": swa, "swa_lrs": 0.5, "swa_epoch_start": 1}
    config["callbacks"]["all"] = {
        "_target_": "pytorch_lightning.callbacks.ModelCheckpoint",
        **{"dirpath": str(tmp_path / "all"), "filename": "{epoch}", "save_top_k": -1},
    }
    train(config)
    (mean,) = [
        state["average_model_state"]
        for state in torch.load(last(whole), weights_only=True)["callbacks"].values()
        if "average_model_state" in state
    ]
    parameters = [name for name in mean if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(weights(whole)[name], mean[name]) for name in parameters)
    checkpoint = str(tmp_path / "all" / "epoch=1.ckpt")
    again = tiny(cut, "test=false", "trainer.limit_val_batches=0", "optimized_metric=null", "optim=sgd_multistep")
    train(again | {"callbacks": again["callbacks"] | {"mean": config["callbacks"]["mean"]}, "ckpt_path": checkpoint})
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_the_last_checkpoint_knows_the_best_ones_of_its_epoch(tmp_path):
    config = tiny(tmp_path, "test=false", "trainer.max_epochs=1")
    config["callbacks"]["top"] = {
        "_target_": "pytorch_lightning.callbacks.ModelCheckpoint",
        **{"dirpath": str(tmp_path / "top"), "monitor": "val/acc", "mode": "max"},
    }
    train(config)
    (file,) = (tmp_path / "top").iterdir()
    states = torch.load(last(tmp_path), weights_only=True)["callbacks"].values()
    assert str(file) in [state.get("best_model_path") for state in states]


@pytest.mark.ci
def test_a_second_callback_keeps_the_checkpoint_of_each_epoch(tmp_path):
    """Lightning refuses two whose states it cannot tell apart, and the recipes' counts epochs, too."""
    config = tiny(tmp_path, "test=false", "trainer.max_epochs=2", "optim=sgd_multistep")
    config["callbacks"]["all"] = {
        "_target_": "pytorch_lightning.callbacks.ModelCheckpoint",
        **{"dirpath": str(tmp_path / "all"), "filename": "{epoch}", "save_top_k": -1},
    }
    train(config)
    longer = tiny(tmp_path, "test=false", "trainer.max_epochs=3", "optim=sgd_multistep", f"ckpt_path={last(tmp_path)}")
    train(longer | {"callbacks": config["callbacks"]})
    assert {path.name for path in (tmp_path / "all").iterdir()} == {f"epoch={epoch}.ckpt" for epoch in range(3)}
    assert torch.load(last(tmp_path), weights_only=True)["epoch"] == 2


@pytest.mark.ci
def test_to_test_an_epoch_again_leaves_the_rows_of_later_ones(tmp_path):
    steps = "+optim.scheduler.total_steps=6"
    train(tiny(tmp_path, "trainer.max_epochs=1", steps))
    first = shutil.copy(last(tmp_path), tmp_path / "checkpoints" / "first.ckpt")
    train(tiny(tmp_path, f"ckpt_path={last(tmp_path)}", "trainer.max_epochs=2", steps))
    rows, hyperparameters = metrics(tmp_path), (tmp_path / "hparams.yaml").read_text()
    train(tiny(tmp_path, f"ckpt_path={first}", "train=false"))
    assert metrics(tmp_path)[:-1] == rows
    assert (tmp_path / "hparams.yaml").read_text() == hyperparameters


@pytest.mark.ci
def test_to_test_a_run_that_has_not_ended_leaves_it_unfinished(tmp_path):
    """A comparison of the sweep would take the test of these weights for the result of the job."""
    train(tiny(tmp_path, "trainer.max_epochs=1"))
    (tmp_path / CURVES).unlink()  # as of a run that was killed in a later epoch
    train(tiny(tmp_path, f"ckpt_path={last(tmp_path)}", "train=false"))
    assert not (tmp_path / CURVES).exists()


def find(requested, run_dir, in_sweep=False, launched=False, **values):
    of_run = {"ckpt_path": requested, "run_dir": str(run_dir), "name": "tiny"}
    config = {"train": True, "test": "last", "trainer": {}, "callbacks": {}, **of_run, **values}
    return find_checkpoint(config, in_sweep, launched)


WHOLE = {"state_dict": {}, "loops": {}, "optimizer_states": [], "lr_schedulers": [], VERSION: "2.6.6"}


def save(run_dir, num_steps=1, age_s=0):
    last(run_dir).parent.mkdir(parents=True)
    torch.save(WHOLE | {"global_step": num_steps}, last(run_dir))
    os.utime(last(run_dir), (1e9 - age_s, 1e9 - age_s))
    return last(run_dir)


def test_last_is_that_of_the_run_folder_or_else_of_the_newest_run(tmp_path):
    new = tmp_path / "runs" / "tiny" / "new"
    with pytest.raises(FileNotFoundError, match="nor has another run named tiny beside it"):
        find("last", new)
    save(tmp_path / "runs" / "tiny" / "older", age_s=10)
    newest = save(tmp_path / "runs" / "tiny" / "old")
    assert find("last", new) == newest
    assert find(str(newest), new) == newest
    assert find(None, new) is None
    own = save(new, age_s=20)
    assert find("last", new) == own


def test_last_of_a_name_with_a_slash_is_that_of_its_newest_run(tmp_path):
    group = tmp_path / "runs" / "project" / "tiny"
    newest = save(group / "old")
    assert find("last", group / "new", name="project/tiny") == newest
    with pytest.raises(FileNotFoundError, match="nor has another run named other/tiny"):
        find("last", group / "new", name="other/tiny")


def test_another_folder_is_not_taken_for_a_run_of_that_name(tmp_path):
    save(tmp_path / "somewhere" / "old")
    with pytest.raises(FileNotFoundError, match=r"hydra\.run\.dir=FOLDER"):
        find("last", tmp_path / "somewhere" / "new")


def test_a_job_of_an_interrupted_sweep_continues_itself_or_starts(tmp_path):
    sweep = tmp_path / "sweep"
    with pytest.raises(FileNotFoundError, match=r"0 has no checkpoints/last.ckpt; .*hydra\.sweep\.dir="):
        find("last", sweep / "0", in_sweep=True)
    (sweep / "0").mkdir(parents=True)
    (sweep / "0" / "metrics.csv").touch()
    assert find("last", sweep / "0", in_sweep=True) is None, "killed in its first epoch"
    own = save(sweep / "0")
    assert find("last", sweep / "0", in_sweep=True) == own
    assert find("last", sweep / "1", in_sweep=True) is None, "not the weights of another job"
    with pytest.raises(FileNotFoundError, match=r"1 has no checkpoints/last.ckpt"):
        find("last", sweep / "1", in_sweep=True, train=False)


def test_a_job_in_a_folder_of_a_folder_of_its_sweep_starts(tmp_path):
    """As with ``hydra.sweep.subdir='${data.fold}/${seed}'``."""
    (tmp_path / "0" / "1").mkdir(parents=True)
    (tmp_path / "0" / "1" / "metrics.csv").touch()
    with pytest.raises(FileNotFoundError, match=r"0 has no checkpoints/last.ckpt; .*hydra\.sweep\.dir="):
        find("last", tmp_path / "1" / "0", in_sweep=True)
    (tmp_path / "multirun.yaml").touch()  # Hydra writes it first
    assert find("last", tmp_path / "1" / "0", in_sweep=True) is None


def test_a_job_whose_folder_is_named_by_its_overrides_is_not_started_again_in_another_one(tmp_path):
    """With hydra.sweep.subdir=${hydra.job.override_dirname}, the name has also what continues the job."""
    save(tmp_path / "seed=1")
    assert find("last", tmp_path / "seed=1", in_sweep=True) == last(tmp_path / "seed=1")
    with pytest.raises(ValueError, match=r"into the name of the job's folder.*exclude_keys=\[ckpt_path\]"):
        find("last", tmp_path / "ckpt_path=last,seed=1", in_sweep=True)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts(tmp_path):
    run = tmp_path / "somewhere" / "run"
    run.mkdir(parents=True)
    (run / "metrics.csv").touch()
    assert find("last", run) is None
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.ckpt").touch()
    assert find("last", run) is None, "killed between the best and the last"
    for result in (CURVES, "checkpoints/epoch=3.ckpt"):
        (run / result).touch()
        for options in ({}, {"launched": True}, {"in_sweep": True}):
            with pytest.raises(FileNotFoundError, match=r"run has no checkpoints/last.ckpt beside .*ckpt_path=PATH"):
                find("last", run, **options)
        (run / result).unlink()


def test_a_run_whose_checkpoints_were_deleted_is_not_told_to_continue_from_them(tmp_path):
    """Beside another run of the same options, whose weights would replace its own."""
    save(tmp_path / "tiny" / "other")
    run = tmp_path / "tiny" / "run"
    run.mkdir()
    for left in ("metrics.csv", CURVES):
        (run / left).touch()
    for options in ({}, {"train": False}):
        with pytest.raises(FileNotFoundError, match=r"run has no checkpoints/last.ckpt beside the results"):
            find("last", run, **options)


def test_checkpoints_elsewhere_are_not_replaced_by_those_of_another_run(tmp_path):
    """Nor by a run that begins again, because its own folder has none."""
    run, new = tmp_path / "run", tmp_path / "new"
    run.mkdir()
    path = save(tmp_path / "other")
    there = {"callbacks": {"checkpoint": {"dirpath": str(path.parent)}}}
    message = rf"dirpath: {path.parent} holds the last.ckpt of a run, .* ckpt_path={path}, or name"
    for requested in (None, str(save(tmp_path / "third"))):
        with pytest.raises(ValueError, match=message):
            find(requested, new, **there)
    for left in ("metrics.csv", CURVES):
        (run / left).touch()
        with pytest.raises(ValueError, match=message):
            find("last", run, **there)
    with pytest.raises(ValueError, match=r"would replace; name another folder$"):
        find(str(path), run, **there)
    assert find(str(path), new, **there) == path
    assert find(None, new, **there, trainer={"fast_dev_run": True}) is None
    (run / "checkpoints").symlink_to(path.parent)
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").touch()
    assert find("last", run, **there) == run / "checkpoints" / "last.ckpt"


def test_a_run_that_was_killed_before_its_first_row_starts(tmp_path):
    """With the same options, another run beside it would be taken for it."""
    run = tmp_path / "runs" / "tiny" / "run"
    save(tmp_path / "runs" / "tiny" / "other")
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("ckpt_path: null\ntrain: true\n")
    assert find("last", run) is None
    with pytest.raises(FileNotFoundError, match=r"run has no checkpoints/last\.ckpt to test, because its run ended"):
        find("last", run, train=False)


def test_a_test_of_the_newest_run_is_repeated_in_its_folder(tmp_path):
    """It may have been killed, and has no weights of its own."""
    newest, test = save(tmp_path / "tiny" / "old"), tmp_path / "tiny" / "test"
    (test / ".hydra").mkdir(parents=True)
    (test / ".hydra" / "config.yaml").write_text(f"ckpt_path: {newest}\ntrain: false\n")
    assert find("last", test, train=False) == newest


@pytest.mark.ci
def test_a_continued_run_that_was_killed_before_its_first_checkpoint_begins_where_it_began(tmp_path):
    """It would start from the beginning, or by the command of before be taken for another run."""
    first, whole, cut = tmp_path / "first", tmp_path / "whole", tmp_path / "cut"

    def run(run_dir, *options):
        command = (*TINY, *QUIET, "optim=sgd_multistep", f"hydra.run.dir={run_dir}", *options)
        ((status, output),) = run_processes(1, run_script, "train.py", tmp_path, *command, grace=5)
        assert status is None, (status, output)

    run(whole)
    run(first, "trainer.max_epochs=1", "test=false")
    kill = ("+callbacks.kill._target_=tests.recipes.pieces.Kill", "+callbacks.kill.after_steps=4")
    for given in (last(first), last(first), "last"):
        with pytest.raises(RankError, match="died with exit code -9"):
            run(cut, *kill, f"ckpt_path={given}")
    run(cut, "ckpt_path=last")
    assert metrics(cut) == metrics(whole)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(cut).items())


@pytest.mark.ci
def test_to_test_a_run_again_leaves_its_configuration(tmp_path, monkeypatch):
    """Of which `compare` makes its rows, and with which `evaluate` tests."""
    path = save(tmp_path / "run")
    file = tmp_path / "run" / ".hydra" / "overrides.yaml"
    file.parent.mkdir()
    file.write_text("as it was")
    monkeypatch.setattr(training, "launch", lambda *_, **__: {"test/acc": 0.5})
    handlers, level = list(logging.root.handlers), logging.root.level
    for run_dir in ("elsewhere", "run"):
        arguments = ("trainer=cpu", "train=false", f"ckpt_path={path}", f"hydra.run.dir={tmp_path / run_dir}")
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        training.main()
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert "train=false" in (tmp_path / "elsewhere" / ".hydra" / "overrides.yaml").read_text()
    assert file.read_text() == "as it was"


def test_a_sharded_checkpoint_that_was_being_replaced_is_the_last(tmp_path):
    path = save(tmp_path / "run")
    aside = path.rename(path.with_name("last-being-replaced.ckpt"))
    for launched in (False, True):
        assert find("last", tmp_path / "run", launched=launched) == aside
    assert find(str(path), tmp_path / "run") == aside


def test_a_damaged_checkpoint_of_another_run_does_not_stop_this_one(tmp_path):
    runs = tmp_path / "tiny"
    mine = save_as(tiny(runs / "mine"), age_s=10)
    save(runs / "other").write_bytes(b"damaged")
    assert find_checkpoint(tiny(runs / "new", "ckpt_path=last")) == mine


@pytest.mark.parametrize(
    ("schedule", "name"), [([], "OneCycleLR"), (["model=cifar_alexnet", "optim=krizhevsky"], "krizhevsky_schedule")]
)
def test_more_epochs_than_the_schedule_has_are_refused_before_the_run_folder_changes(tmp_path, schedule, name):
    """Where other options count the steps as well, the module says so when it knows the data."""
    train(tiny(tmp_path, *schedule, "trainer.max_epochs=1", "test=false"))

    def longer(path, *options):
        return find_checkpoint(tiny(tmp_path, *schedule, "trainer.max_epochs=2", f"ckpt_path={path}", *options))

    for path in ("last", last(tmp_path)):
        with pytest.raises(ValueError, match=rf"trainer.max_epochs=2: .*{name} ends.*keep trainer.max_epochs=1"):
            longer(path)
    other = "optim.scheduler._target_=torch.optim.lr_scheduler.MultiStepLR"
    allowed = ("data.batch_size=32", "trainer.max_steps=3", "+optim.scheduler.total_steps=6", other)
    for option in allowed:
        assert longer(last(tmp_path), option)
    assert longer(last(tmp_path), "train=false")


def test_what_differs_is_said_where_it_is_continued_on_purpose(tmp_path, caplog):
    other = save_as(tiny(tmp_path / "other", "seed=7"))
    find_checkpoint(tiny(tmp_path / "new", f"ckpt_path={other}"))
    assert "is of a run with seed=7, not 0" in caplog.text


@pytest.mark.ci
def test_the_learning_rate_is_that_of_the_checkpoint_and_a_warning_says_so(tmp_path, caplog):
    """Lightning loads it with the state of the optimizer."""
    before = tiny(tmp_path / "before", "optim=sgd_multistep", "trainer.max_epochs=1", "test=false")
    train(before)
    path = last(tmp_path / "before")
    options = ("optim=sgd_multistep", "optim.lr=0.01", "test=false", f"ckpt_path={path}")
    config = tiny(tmp_path / "after", *options)
    find_checkpoint(config)
    assert "go on with their values in the checkpoint: optim.lr=0.1, not 0.01" in caplog.text
    train(config)
    assert {row["lr-SGD"] for row in metrics(tmp_path / "after") if row["lr-SGD"]} == {"0.1"}


def test_a_rate_that_follows_the_batch_size_is_that_of_the_checkpoint_too(tmp_path, caplog):
    """The groups of optim=goyal take the size from the data, whose other values are the new ones."""
    path = save_as(tiny(tmp_path / "other", "optim=goyal"))
    torch.save(torch.load(path) | {"lr_schedulers": [{"lr_lambdas": [None]}]}, path)
    find_checkpoint(tiny(tmp_path / "new", "optim=goyal", "data.batch_size=24", f"ckpt_path={path}"))
    assert caplog.text.count("data.batch_size=16, not 24") == 1
    assert "with their values in the checkpoint: model.parameter_groups.batch_size=16, not 24\n" in caplog.text


def test_values_of_a_schedule_without_a_state_are_the_new_ones(tmp_path, caplog):
    """That of a LambdaLR is its step and its rates, and not its function."""
    config = tiny(tmp_path / "new", "optim=goyal", "+optim.scheduler.warmup=0.5", "optim.interval=epoch")
    for name, state in (("lambda", {"lr_lambdas": [None]}), ("other", {"gamma": 0.1})):
        path = save_as(tiny(tmp_path / name, "optim=goyal"))
        torch.save(torch.load(path) | {"lr_schedulers": [state]}, path)
        find_checkpoint(config | {"ckpt_path": str(path)})
    (kept,) = [each.message for each in caplog.records if "go on with their values" in each.message]
    assert kept.endswith("in the checkpoint: model.scheduler.warmup=nothing, not 0.5")


def test_a_schedule_of_another_kind_is_the_new_one(tmp_path, caplog):
    """Lightning loads the state of the other into it: the step, and values that both have."""
    path = save_as(tiny(tmp_path / "other", "optim=sgd_onecycle"))
    torch.save(torch.load(path) | {"lr_schedulers": [{"total_steps": 6}]}, path)
    find_checkpoint(tiny(tmp_path / "new", "optim=sgd_multistep", "optim.optimizer.momentum=0", f"ckpt_path={path}"))
    assert "model.scheduler._target_=torch.optim.lr_scheduler.OneCycleLR, not torch" in caplog.text
    (kept,) = [each.message for each in caplog.records if "go on with their values" in each.message]
    assert kept.endswith("in the checkpoint: model.optimizer.momentum=0.9, not 0")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("before", "options", "named"),
    [
        ("sgd_multistep", ("optim=lars",), "lr_lambdas"),
        ("sgd_multistep", ("optim=goyal",), "different number of parameter groups"),
        ("sgd_multistep", ("optim.optimizer._target_=torch.optim.Adam", "~optim.optimizer.momentum"), "step"),
        ("sgd_multistep", ("optim=sgd_onecycle",), "max_lr"),
    ],
)
def test_the_state_of_an_optimizer_or_schedule_that_does_not_fit_is_named(tmp_path, before, options, named):
    """torch names a key or a size, and no file. The first error comes where the state is loaded, or in a step."""
    short = ("trainer.max_epochs=1", "test=false", f"optim={before}")
    train(tiny(tmp_path / "before", *short))
    path = last(tmp_path / "before")
    config = tiny(tmp_path / "after", "test=false", f"optim={before}", *options, f"ckpt_path={path}")
    with pytest.raises(ValueError, match=rf"last.ckpt holds the state of another optimizer .*{named}.*; give the opt"):
        train(config)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_other_errors_are_not_taken_for_those_of_another_optimizer(tmp_path):
    """That a schedule has ended, for example, or a key that the user's code looks for."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    for _ in range(2):
        schedule.step()
    with pytest.raises(ValueError, match="^Tried to step"), naming_another_model(tmp_path):
        schedule.step()
    with pytest.raises(KeyError, match="mine"), naming_another_model(tmp_path):
        optimizer.param_groups[0]["mine"]
    optimizer.param_groups[0].clear()
    with pytest.raises(KeyError), naming_another_model(None):  # of a run from the beginning
        optimizer.step()


def hold(run_dir, connection):
    with alone_in(run_dir, "hydra.run.dir"):
        connection.send("held")
        connection.recv()


@contextmanager
def forked(function, run_dir):
    """Run ``function`` with one end of a pipe in another process, and yield the other end. The process is killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=function, args=(run_dir, theirs))
    other.start()
    try:
        yield ours
    finally:
        other.kill()
        other.join()


def test_a_folder_has_one_run_at_a_time(tmp_path):
    with forked(hold, tmp_path) as other:
        assert other.recv() == "held"
        with (
            pytest.raises(ValueError, match=r"hydra\.run\.dir: .* is in use by a run"),
            alone_in(tmp_path, "hydra.run.dir"),
        ):
            pass
    with alone_in(tmp_path, "hydra.run.dir"):
        assert [path.name for path in tmp_path.rglob("*")] == [".hydra", "lock"]


def hold_late(run_dir, connection):
    """Lock the file that was there while another run held it."""
    with open(run_dir / ".hydra" / "lock", "r+") as file:
        connection.send("opened")
        connection.recv()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        connection.send("held")
        connection.recv()


def test_a_folder_has_one_run_though_another_one_has_just_ended(tmp_path):
    with ExitStack() as stack:
        with alone_in(tmp_path, "hydra.run.dir"):
            other = stack.enter_context(forked(hold_late, tmp_path))
            assert other.recv() == "opened"
        other.send("go on")
        assert other.recv() == "held"
        with (
            pytest.raises(ValueError, match=r"hydra\.run\.dir: .* is in use by a run"),
            alone_in(tmp_path, "hydra.run.dir"),
        ):
            pass


def test_the_run_folder_of_a_command_line_is_that_of_all_ranks(tmp_path):
    assert named_run_dir(["seed=1"]) is None
    assert named_run_dir(["hydra.run.dir='my runs/a'", "--cfg", "job"]) == str(tmp_path / "my runs" / "a")
    assert named_run_dir(["hydra.run.dir=runs/${name}"]) is None


def test_a_launcher_tests_no_random_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoints/last.ckpt"):
        find("last", tmp_path / "tiny" / "new", launched=True, train=False)


def test_under_a_launcher_a_run_without_a_checkpoint_starts(tmp_path):
    save(tmp_path / "tiny" / "old")
    assert find("last", tmp_path / "tiny" / "new", launched=True) is None, "not that of another run"
    own = save(tmp_path / "tiny" / "new")
    assert find("last", tmp_path / "tiny" / "new", launched=True) == own


def test_every_rank_of_a_launcher_looks_in_the_folder_of_rank_0(tmp_path):
    arguments = ["ckpt_path=last", f"hydra.run.dir={tmp_path / 'run'}"]
    assert arguments_of_rank(arguments, 0, "/elsewhere") == arguments
    assert arguments_of_rank(arguments, 1, "/elsewhere")[2:] == [
        "hydra.run.dir=/elsewhere",
        "hydra/job_logging=none",
        f"run_dir='{tmp_path / 'run'}'",
    ]


def save_as(config, age_s=0):
    """A checkpoint of a run with this configuration."""
    path = save(Path(config["run_dir"]), age_s=age_s)
    keeper = ConfigurationInCheckpoint(config)
    callbacks = {keeper.state_key: keeper.state_dict()}
    torch.save(WHOLE | {"global_step": 1, "callbacks": callbacks}, path)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


@pytest.mark.ci
def test_last_continues_only_a_run_of_the_same_configuration(tmp_path):
    runs = tmp_path / "tiny"
    mine = save_as(tiny(runs / "mine"), age_s=10)
    other = save_as(tiny(runs / "other", "optim.lr=0.25", "seed=7"))
    assert find_checkpoint(tiny(runs / "new", "ckpt_path=last")) == mine, "the newest one is another experiment"
    quiet = ("trainer.enable_progress_bar=true", "data.num_workers=1", "logger=tensorboard", "test=false")
    assert find_checkpoint(tiny(runs / "new", "ckpt_path=last", *quiet)) == mine
    message = rf"is of a run with seed=7, not 0, optim\.lr=0\.25, not 0\.1, .*same options, .*ckpt_path={other}"
    with pytest.raises(ValueError, match=message):
        find_checkpoint(tiny(other.parents[1], "ckpt_path=last"))
    assert find_checkpoint(tiny(runs / "new", f"ckpt_path={other}")) == other, "on purpose"
    with pytest.raises(ValueError, match=r"trainer\.max_epochs=2, not 3"):
        find_checkpoint(tiny(runs / "new", "ckpt_path=last", "trainer.max_epochs=3"))


def test_a_run_on_other_data_is_not_taken_for_that_of_this_name(tmp_path):
    """Folds of a data set may differ in their folder only. In the run's own folder the data may have been moved."""
    runs = tmp_path / "tiny"
    first, other = (save_as(on(runs / fold, fold), age) for fold, age in (("first", 10), ("other", 0)))
    assert find_checkpoint(on(runs / "new", "first")) == first
    with pytest.raises(ValueError, match=r"is of a run with data\.root=\w+, not third; give the same options"):
        find_checkpoint(on(runs / "new", "third"))
    assert find_checkpoint(on(runs / "other", "moved")) == other


def test_a_list_may_name_the_run_folder(tmp_path):
    """Another run of the same configuration, or one whose folder was moved, has another one."""

    def writing(run_dir):
        config = tiny(run_dir, "ckpt_path=last")
        own = {"_target_": "mine.Own", "files": [f"{run_dir}/a", 1]}
        return config | {"callbacks": config["callbacks"] | {"own": own}}

    saved = save_as(writing(tmp_path / "tiny" / "old"))
    assert find_checkpoint(writing(tmp_path / "tiny" / "new")) == saved


def on(run_dir, fold):
    config = tiny(run_dir, "ckpt_path=last")
    return config | {"data": config["data"] | {"root": fold}}


@pytest.mark.ci
def test_a_run_puts_its_configuration_into_its_checkpoints(tmp_path):
    config = tiny(tmp_path / "run", "trainer.max_epochs=1", "test=false")
    train(config)
    assert differences(last(tmp_path / "run"), config) == []
    assert differences(last(tmp_path / "run"), config | {"seed": 5}) == ["seed=0, not 5"]


@pytest.mark.parametrize("left", ["metrics.csv", "checkpoints/best.ckpt"])
@pytest.mark.parametrize("trained", [True, False])
def test_the_results_of_a_run_are_not_replaced(tmp_path, left, trained):
    run = tmp_path / "run"
    for name in (left, ".hydra/config.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    (run / ".hydra" / "config.yaml").write_text(f"train: {str(trained).lower()}\n")
    goes_on = trained or ".ckpt" in left  # a test of another run's weights has nothing to continue
    remedy = "continue that with ckpt_path=last, or name another folder" if goes_on else "name another folder"
    for requested in (None, save(tmp_path / "elsewhere")):
        with pytest.raises(ValueError, match=rf"hydra\.run\.dir: .*run holds the results of a run.*; {remedy}$"):
            find(requested, run)
    own = run / "checkpoints" / "last.ckpt"
    own.parent.mkdir(exist_ok=True)
    torch.save(WHOLE | {"global_step": 1}, own)
    assert find(str(own), run) == own


def test_best_is_the_best_checkpoint_of_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ckpt_path=best: .*has no checkpoints/best\.ckpt.*test=best keeps"):
        find("best", tmp_path / "tiny" / "new")
    best = save(tmp_path / "tiny" / "old").with_name("best.ckpt")
    torch.save(WHOLE | {"global_step": 1}, best)
    assert find("best", tmp_path / "tiny" / "new") == best


# The first epoch has the highest loss, so its weights are the best by this measure.
BEST = ("test=best", "optimized_metric=train/loss", "optimized_mode=max", "seed=1")


@pytest.mark.ci
def test_the_best_of_all_epochs_is_tested_after_a_continuation(tmp_path):
    whole = train(tiny(tmp_path / "whole", *BEST))
    expected = {name: value for name, value in whole.items() if name.startswith("test/")}
    train(tiny(tmp_path / "same", *BEST, "trainer.max_epochs=1", "+optim.scheduler.total_steps=6"))
    for folder in ("other", "same"):
        continued = train(tiny(tmp_path / folder, *BEST, f"ckpt_path={last(tmp_path / 'same')}"))
        assert {name: continued[name] for name in expected} == expected
        ours, reference = (
            torch.load(tmp_path / run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
            for run in (folder, "whole")
        )
        assert all(torch.equal(value, reference[name]) for name, value in ours.items())


class OfItsRank(Classifier):
    """Logs a value of its own on each rank, as where ``sync_dist=True`` is forgotten."""

    def on_validation_epoch_end(self):
        values = ((1.0, 3.0, 2.0), (3.0, 1.0, 2.0))
        self.log("val/own", values[self.global_rank][self.current_epoch])


@pytest.mark.ci
def test_the_best_is_that_of_rank_0_whose_values_are_logged(tmp_path):
    own = (f"model._target_={__name__}.OfItsRank", "test=best", "optimized_metric=val/own", "trainer.devices=2")
    run_processes(2, train_rank, tiny(tmp_path, *own, "trainer.max_epochs=3"))
    assert torch.load(last(tmp_path).with_name("best.ckpt"), weights_only=True)["epoch"] == 1


@pytest.mark.ci
def test_a_best_checkpoint_that_later_epochs_were_not_compared_with_is_refused(tmp_path):
    run = tmp_path / "run"
    options = (*BEST, "trainer.max_epochs=1", "+optim.scheduler.total_steps=6")
    train(tiny(run, *options))
    again = tiny(run, *options, "train=false", "ckpt_path=best")
    best = run / "checkpoints" / "best.ckpt"
    assert find_checkpoint(again) == best
    train(tiny(run, *options, "test=last", "trainer.max_epochs=2", f"ckpt_path={last(run)}"))
    with pytest.raises(ValueError, match=r"best\.ckpt is the best of its first epochs only.*test=last.*=last, or take"):
        find_checkpoint(again)
    assert find_checkpoint(again | {"ckpt_path": str(best)}) == best
    last(run).write_bytes(b"damaged")
    assert find_checkpoint(again) == best


def test_a_best_that_is_not_known_is_refused(tmp_path):
    config = tiny(tmp_path / "run", *BEST)
    path = save(tmp_path / "before")
    with pytest.raises(ValueError, match="did not keep its best weights by max optimized_metric=train/loss.*test=last"):
        find_checkpoint(config | {"ckpt_path": str(path)})


def test_a_best_that_is_gone_is_an_error_before_the_run_is_taken_for_an_unfinished_one(tmp_path):
    """It belongs beside the checkpoint, also if the folder had another name."""
    config = tiny(tmp_path / "run", *BEST)
    state = {"best_model_path": str(tmp_path / "before" / "best.ckpt"), "best_model_score": torch.tensor(0.5)}
    path = save(tmp_path / "run")
    torch.save(WHOLE | {"global_step": 1, "callbacks": {BestCheckpoint(config).state_key: state}}, path)
    with pytest.raises(FileNotFoundError, match=f"are gone; put {path.with_name('best.ckpt')} back"):
        find_checkpoint(config | {"ckpt_path": str(path)})


def test_the_best_of_a_run_whose_folder_was_moved_is_in_that_folder(tmp_path):
    config = {"run_dir": str(tmp_path), "optimized_metric": "val/acc", "optimized_mode": "max"}
    own = save(tmp_path).with_name("best.ckpt")
    shutil.copy(last(tmp_path), own)
    state = BestCheckpoint(config).state_dict() | {"best_model_path": "/where/it/was/checkpoints/best.ckpt"}
    callback = BestCheckpoint(config)
    callback.load_state_dict(state)
    assert callback.best_model_path == str(own)


def test_the_best_that_was_being_replaced_is_that_of_the_last_checkpoint(tmp_path):
    """It is written before last.ckpt, which still names the one of before."""
    config = {"run_dir": str(tmp_path), "optimized_metric": "val/acc", "optimized_mode": "max"}
    aside = save(tmp_path).rename(last(tmp_path).with_name("best-being-replaced.ckpt"))
    callback = BestCheckpoint(config)
    state = BestCheckpoint(config).state_dict() | {"best_model_path": str(aside.with_name("best.ckpt"))}
    callback.load_state_dict(state)
    assert callback.best_model_path == str(aside)


@pytest.mark.ci
def test_the_best_of_a_run_whose_folder_was_moved_is_tested_by_one_that_continues_it_elsewhere(tmp_path):
    """It is beside the checkpoint."""
    steps = "+optim.scheduler.total_steps=9"
    found = train(tiny(tmp_path / "first", *BEST, steps))
    moved = last((tmp_path / "first").rename(tmp_path / "moved"))
    more = (*BEST, steps, "trainer.max_epochs=3", f"ckpt_path={moved}")
    assert train(tiny(tmp_path / "second", *more))["test/loss"] == found["test/loss"]


def test_the_best_of_a_run_that_went_on_meanwhile_is_not_taken_for_that_of_this_one(tmp_path):
    config = tiny(tmp_path / "new", *BEST)
    path = save(tmp_path / "before")
    callbacks = {BestCheckpoint(config).state_key: {"best_model_score": torch.tensor(0.75)}}
    torch.save(WHOLE | {"global_step": 9, "callbacks": callbacks}, path)
    state = BestCheckpoint(config).state_dict() | {"best_model_path": str(path)}
    with pytest.raises(FileNotFoundError, match="last.ckpt is now of a later epoch; continue in the folder of"):
        BestCheckpoint(config).load_state_dict(state | {"best_model_score": torch.tensor(0.5)})
    BestCheckpoint(config).load_state_dict(state | {"best_model_score": torch.tensor(0.75)})


@pytest.mark.ci
def test_the_best_of_later_epochs_is_not_tested_by_a_run_that_is_taken_back(tmp_path):
    """It has one epoch after that, fewer than before; with as many, it would write the same best weights again."""
    options = (*BEST, "optimized_metric=train/loss", "optimized_mode=min")
    first = tmp_path / "checkpoints" / "first.ckpt"
    train(tiny(tmp_path, *options, "trainer.max_epochs=3", f"+callbacks.save._target_={__name__}.SaveAtStart",
               f"+callbacks.save.path={first}"))  # fmt: skip
    with pytest.raises(FileNotFoundError, match="best.ckpt is now of a later epoch; .* with its options"):
        train(tiny(tmp_path, *options, "trainer.max_epochs=2", f"ckpt_path={first}"))


class FailAfter(Callback):
    """Ends a run by an error after a number of steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            raise ValueError("the end")


@pytest.mark.ci
def test_a_run_that_is_taken_back_and_killed_before_its_next_checkpoint_goes_on_from_there(tmp_path):
    """Its last.ckpt would be that of the epochs which it was taken back from."""
    run = tmp_path / "run"
    first = run / "checkpoints" / "first.ckpt"
    options = ("+optim.scheduler.total_steps=9", "test=false")
    train(tiny(run, *options, f"+callbacks.save._target_={__name__}.SaveAtStart", f"+callbacks.save.path={first}"))
    ends = (f"+callbacks.end._target_={__name__}.FailAfter", "+callbacks.end.steps=4")
    for others, num_steps in ((("callbacks.checkpoint=null", "trainer.enable_checkpointing=false"), 6), ((), 3)):
        with pytest.raises(ValueError, match="the end"):
            train(tiny(run, *options, *ends, f"ckpt_path={first}", *others))
        assert completed_steps(last(run)) == num_steps, "without checkpoints, nothing may replace it"


@pytest.mark.ci
def test_a_run_that_is_taken_back_to_its_last_epoch_has_the_weights_of_that_epoch(tmp_path):
    """It trains nothing: its rows are those up to that epoch, and last.ckpt would be that of later ones."""
    options = ("+optim.scheduler.total_steps=9", "test=false")
    each = "+callbacks.each._target_=pytorch_lightning.callbacks.ModelCheckpoint +callbacks.each.save_top_k=-1"
    train(tiny(tmp_path, *options, *each.split(), f"+callbacks.each.dirpath={tmp_path}/checkpoints"))
    assert completed_steps(last(tmp_path)) == 6
    first = tmp_path / "checkpoints" / "epoch=0-step=3.ckpt"
    train(tiny(tmp_path, *options, "trainer.max_epochs=1", f"ckpt_path='{first}'"))
    assert completed_steps(last(tmp_path)) == 3
    assert {row["epoch"] for row in metrics(tmp_path)} <= {"0", ""}


STOPS = ("+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping", "+callbacks.stop.monitor=val/loss")


@pytest.mark.ci
@pytest.mark.parametrize(
    "options", [(), (*STOPS, "+callbacks.stop.patience=1", "+callbacks.stop.min_delta=9")], ids=["epochs", "stopped"]
)
def test_a_finished_run_that_is_continued_in_a_new_folder_has_its_last_weights_there(tmp_path, options):
    """It trains nothing, and so Lightning writes no checkpoint."""
    first, second = tmp_path / "tiny" / "first", tmp_path / "second" / "tiny" / "second"
    options = ("trainer.max_epochs=3", *options)
    expected = train(tiny(first, *options))
    train(tiny(second, *options, f"ckpt_path={last(first)}"))
    first.rename(tmp_path / "elsewhere")
    config = tiny(second, *options, "ckpt_path=last")
    config["ckpt_path"] = str(find_checkpoint(config))
    assert train(config)["test/loss"] == expected["test/loss"]


@pytest.mark.ci
def test_the_speed_of_another_run_is_not_that_of_one_which_begins_from_its_checkpoint(tmp_path):
    steps = ("+optim.scheduler.total_steps=12", "test=false")
    train(tiny(tmp_path / "first", *steps))
    train(tiny(tmp_path / "second", *steps, "trainer.max_epochs=3", f"ckpt_path={last(tmp_path / 'first')}"))
    train(tiny(tmp_path / "second", *steps, "trainer.max_epochs=4", f"ckpt_path={last(tmp_path / 'second')}"))
    rows = [row for row in metrics(tmp_path / "second", times=True) if row["time/train_s"]]
    assert [bool(row["time/images_per_s"]) for row in rows] == [False, False, True, True]


class GoesOn(Callback):
    """Replaces a file, as the first run does if it goes on meanwhile."""

    def __init__(self, new, file):
        self.new, self.file = new, file

    def on_train_epoch_start(self, trainer, module):
        shutil.copy(self.new, self.file)


@pytest.mark.ci
def test_the_best_weights_of_before_are_kept_where_the_first_run_goes_on_meanwhile(tmp_path):
    first, steps = tmp_path / "first", "+optim.scheduler.total_steps=9"
    found = train(tiny(first, *BEST, steps))
    config = tiny(tmp_path / "second", *BEST, steps, "trainer.max_epochs=3", f"ckpt_path={last(first)}")
    later, best = shutil.copy(last(first), tmp_path / "later.ckpt"), last(first).with_name("best.ckpt")
    config["callbacks"]["meanwhile"] = {"_target_": f"{__name__}.GoesOn", "new": str(later), "file": str(best)}
    assert train(config)["test/loss"] == found["test/loss"]


@pytest.mark.ci
def test_checkpoints_on_another_disk_belong_to_the_run_folder_that_has_a_link_to_it(tmp_path):
    """Compute centers have a large disk for them."""
    run_dir, other, disk = tmp_path / "run", tmp_path / "other", tmp_path / "disk"
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "config.yaml").touch()
    disk.mkdir()
    (run_dir / "checkpoints").symlink_to(disk)
    train(tiny(run_dir, "trainer.max_epochs=1"))
    config = tiny(run_dir, "trainer.max_epochs=1", "ckpt_path=last")
    assert find_checkpoint(config) == last(run_dir)
    rows = [row for row in metrics(run_dir) if not row["test/acc"]]
    train(tiny(other, "trainer.max_epochs=1", f"ckpt_path={last(run_dir)}"))
    assert [{name: row[name] for name in rows[0]} for row in metrics(other)[: len(rows)]] == rows


def test_the_best_of_a_copied_run_folder_is_in_the_copy(tmp_path):
    """The first run may have gone on meanwhile, and have another best."""
    config = tiny(tmp_path / "copy", *BEST)
    own, others = (save(tmp_path / run).with_name("best.ckpt") for run in ("copy", "first"))
    for path, score in ((own, 0.5), (others, 0.75)):
        callbacks = {BestCheckpoint(config).state_key: {"best_model_score": torch.tensor(score)}}
        torch.save(WHOLE | {"global_step": 9, "callbacks": callbacks}, path)
    state = BestCheckpoint(config).state_dict() | {"best_model_path": str(others)}
    callback = BestCheckpoint(config)
    callback.load_state_dict(state | {"best_model_score": torch.tensor(0.5)})
    assert callback.best_model_path == str(own)


def with_score(path, config, steps, score):
    """Write a checkpoint, and return the state of BestCheckpoint in it."""
    state = BestCheckpoint(config).state_dict()
    state |= {"best_model_path": str(path.with_name("best.ckpt")), "best_model_score": torch.tensor(score)}
    torch.save(WHOLE | {"global_step": steps, "callbacks": {BestCheckpoint(config).state_key: state}}, path)
    return state


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("steps", "expected"), [(9, 0.75), (12, 0.5)])
def test_a_validation_just_after_the_checkpoint_counts_because_it_is_not_repeated(tmp_path, steps, expected, is_first):
    """One of later steps is: its best.ckpt is written again."""
    path = save(tmp_path)
    config = tiny(tmp_path, *BEST, f"ckpt_path={path}")
    state = with_score(path, config, 9, 0.5)
    if is_first:
        state = BestCheckpoint(config).state_dict()
    with_score(path.with_name("best.ckpt"), config, steps, 0.75)
    callback = BestCheckpoint(config)
    callback.load_state_dict(state)
    assert callback.best_model_score == (None if is_first and steps > 9 else expected)
    assert callback.best_model_path == ("" if is_first and steps > 9 else str(path.with_name("best.ckpt")))


class Told(Classifier):
    """Logs what a file says of the epochs."""

    def on_validation_epoch_end(self):
        values = json.loads(Path(self.trainer.default_root_dir, "told.json").read_text())
        self.log("val/told", values[self.current_epoch])


def told_and_killed(monkeypatch, run_dir, every_n_steps):
    """Kill a run in its third epoch. The second was its best. Return the configuration that continues it."""
    values = (f"model._target_={__name__}.Told", "test=best", "optimized_metric=val/told", "trainer.max_epochs=3")
    config = tiny(run_dir, *values, f"+callbacks.checkpoint.every_n_train_steps={every_n_steps}")
    config["callbacks"]["kill"] = {"_target_": "tests.recipes.pieces.Kill", "after_steps": 7}
    (run_dir / "told.json").write_text("[0.5, 0.9, 0.1]")
    with pytest.raises(RankError, match="died with exit code -9"):
        run_processes(1, train_rank, config, grace=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # it is not killed again
    return config | {"ckpt_path": str(last(run_dir))}


@pytest.mark.ci
def test_the_best_is_not_lost_where_a_run_continues_from_the_last_batch_of_its_epoch(tmp_path, monkeypatch):
    """The third would be the best of those that are validated after the kill."""
    config = told_and_killed(monkeypatch, tmp_path, 3)
    (tmp_path / "told.json").write_text("[0.5, 0.9, 0.6]")
    train(config)
    assert completed_steps(last(tmp_path).with_name("best.ckpt")) == 6


@pytest.mark.ci
def test_weights_that_are_not_the_best_of_a_run_are_not_tested_for_them(tmp_path, monkeypatch):
    """They are of before the kill. Then the second epoch was trained again in part, and the best was the first."""
    config = told_and_killed(monkeypatch, tmp_path, 4)
    (tmp_path / "told.json").write_text("[0.5, 0.4, 0.3]")
    with pytest.raises(
        ValueError, match=r"test=best: the best weights are gone: .*best.ckpt is of an epoch .*test=last"
    ):
        train(config)


@pytest.mark.ci
def test_validation_that_counts_steps_need_not_come_in_the_first_epoch(tmp_path):
    every = ("trainer.check_val_every_n_epoch=null", "+trainer.val_check_interval=4", "test=best")
    assert "test/acc" in train(tiny(tmp_path, *every))


class Validations(Callback):
    """Remembers the step and the loss of each."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, module):
        self.seen.append((trainer.global_step, trainer.callback_metrics["val/loss"].item()))

    def state_dict(self):
        return {"seen": self.seen}


@pytest.mark.ci
def test_the_best_weights_are_those_that_a_validation_within_an_epoch_has_measured(tmp_path):
    """After two and four of its five steps."""
    by_loss = ("test=best", "optimized_metric=val/loss", "optimized_mode=max")
    config = tiny(tmp_path, *by_loss, "data.num_train=80", "+trainer.val_check_interval=0.5")
    config["callbacks"]["seen"] = {"_target_": f"{__name__}.Validations"}
    train(config)
    best, at_the_end = (torch.load(last(tmp_path).with_name(f"{name}.ckpt")) for name in ("best", "last"))
    step, loss = max(at_the_end["callbacks"]["Validations"]["seen"], key=lambda each: each[1])
    assert best["global_step"] == step
    keeper = BestCheckpoint(config).state_key
    assert best["callbacks"][keeper]["best_model_score"].item() == loss


@pytest.mark.ci
def test_a_run_continues_from_the_best_weights_that_a_validation_has_measured(tmp_path):
    """They are of the end of an epoch, of which nothing is left but its end."""
    every = ("trainer.check_val_every_n_epoch=2", "test=best")
    train(tiny(tmp_path / "first", *every))
    best = last(tmp_path / "first").with_name("best.ckpt")
    assert "test/acc" in train(tiny(tmp_path / "second", *every, f"ckpt_path={best}"))


@pytest.mark.ci
def test_the_best_weights_are_tested_where_a_run_goes_on_for_less_than_an_epoch(tmp_path):
    """Lightning does not validate such an epoch, here the third, so the metric is not logged again."""
    whole_and_continued(tmp_path, tiny, "trainer.max_steps=8", "test=best", kill_after=7)


class FirstIsBest(Callback):
    """Logs in each validation the number of steps before it, by a name as a user's module may have it."""

    def on_validation_epoch_end(self, trainer, module):
        module.log("val_steps", float(trainer.global_step))


@pytest.mark.ci
def test_a_metric_of_validation_need_not_be_named_as_ours(tmp_path):
    by_steps = ("test=best", "optimized_metric=val_steps", "optimized_mode=min", "+trainer.val_check_interval=2")
    config = tiny(tmp_path, *by_steps)
    config["callbacks"]["first"] = {"_target_": f"{__name__}.FirstIsBest"}
    train(config)
    assert completed_steps(last(tmp_path).with_name("best.ckpt")) == 2


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("val/acc", True), ("val_loss", True), ("valid.f1", True), ("validation-acc", True), ("val", True)]
    + [(name, False) for name in ("value_loss", "validity", "train/val", "loss")],
)
def test_metrics_of_validation_are_known_by_their_names(metric, expected):
    assert is_of_validation(metric) == expected


@pytest.mark.ci
@pytest.mark.parametrize("patience", [0, 1])
def test_a_run_that_stopped_early_has_ended(tmp_path, patience):
    config = tiny(tmp_path, "trainer.max_epochs=5", "seed=1")
    early = {"monitor": "val/loss", "patience": patience, "min_delta": 99.0}
    config["callbacks"]["early"] = {"_target_": "pytorch_lightning.callbacks.EarlyStopping", **early}
    found = train(config)
    rows = metrics(tmp_path)
    again = train(config | {"ckpt_path": str(last(tmp_path))})
    assert metrics(tmp_path) == rows
    assert torch.load(last(tmp_path), weights_only=True)["epoch"] == 1, "it stopped"
    assert again["test/acc"] == found["test/acc"]


@pytest.mark.ci
def test_a_run_that_stopped_in_its_first_epoch_has_ended(tmp_path):
    """Lightning's number of the epoch in which it stopped is then that of a run that has not stopped."""
    config = tiny(tmp_path, "trainer.max_epochs=3")
    early = {"monitor": "val/loss", "stopping_threshold": 99.0}
    config["callbacks"]["early"] = {"_target_": "pytorch_lightning.callbacks.EarlyStopping", **early}
    found = train(config)
    again = train(config | {"ckpt_path": str(last(tmp_path))})
    assert completed_steps(last(tmp_path)) == 3, "one epoch"
    assert again["test/acc"] == found["test/acc"]


class TakesASecond(Timer):
    """A limit of the time that counts a second for each batch."""

    num_batches = 0

    def time_elapsed(self, stage=RunningStage.TRAINING):
        return self._offset + self.num_batches

    def on_train_batch_end(self, trainer, *args):
        self.num_batches += 1
        super().on_train_batch_end(trainer, *args)


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    [
        ("ddp",),
        ("layered_fsdp",),
        ("layered_fsdp", "strategy.save_distributed_checkpoint=true"),
        ("krizhevsky_hybrid", "strategy.state_dict_type=sharded"),
    ],
    ids=" ".join,
)
def test_a_run_whose_time_was_up_has_ended(tmp_path, strategy):
    """Lightning asks for the time before it loads a checkpoint of shards, and would train a step more each time."""
    timer = (f"+callbacks.timer._target_={__name__}.TakesASecond", "+callbacks.timer.duration=00:00:00:04")
    name, *options = strategy
    config = tiny(tmp_path, "trainer.max_epochs=3", "test=false", f"strategy={name}", *options, *timer)
    train(config)
    rows = metrics(tmp_path)
    assert completed_steps(last(tmp_path)) == 4, "of three epochs of 3 steps"
    train(config | {"ckpt_path": str(last(tmp_path))})
    assert completed_steps(last(tmp_path)) == 4
    assert metrics(tmp_path) == rows


@pytest.mark.ci
def test_an_epoch_that_early_stopping_ends_before_its_first_step_is_in_the_last_checkpoint(tmp_path):
    """Its batches have changed the statistics of batch norm. Lightning saves no checkpoint twice at one step."""
    steps = ("trainer.accumulate_grad_batches=3", "trainer.limit_train_batches=2", "+trainer.val_check_interval=0.5")
    stops = ("+callbacks.stop.patience=2", "+callbacks.stop.min_delta=99.0")
    config = tiny(tmp_path, "trainer.max_epochs=3", *steps, *STOPS, *stops)
    found = train(config)
    assert torch.load(last(tmp_path), weights_only=True)["epoch"] == 1, "its first batch"
    assert completed_steps(last(tmp_path)) == 1
    again = train(config | {"ckpt_path": str(last(tmp_path))})
    assert again["test/loss"] == found["test/loss"]


class Worse(Callback):
    """Logs a loss that is best in the first epoch."""

    def on_validation_epoch_end(self, trainer, module):
        module.log("worse", float(trainer.current_epoch))


@pytest.mark.ci
def test_a_continued_run_keeps_the_best_weights_that_are_also_its_last_checkpoint(tmp_path):
    """The epochs after the checkpoint are not better. Lightning would write last.ckpt at their end all the same."""
    config = tiny(tmp_path, "trainer.max_epochs=3")
    config["callbacks"]["checkpoint"] |= {"monitor": "worse", "save_top_k": 1, "save_last": True}
    config["callbacks"]["worse"] = {"_target_": f"{__name__}.Worse"}
    train(config)
    assert completed_steps(last(tmp_path)) == 3, "Lightning writes it with the best weights only"
    rows = metrics(tmp_path)
    train(config | {"ckpt_path": str(last(tmp_path))})
    assert completed_steps(last(tmp_path)) == 3
    assert metrics(tmp_path) == rows


class NumpyState(Callback):
    def state_dict(self):
        return {"score": np.float64(0.5)}


@pytest.mark.ci
def test_a_state_that_no_run_can_continue_from_is_warned_of_when_it_is_saved(tmp_path, caplog):
    config = tiny(tmp_path, "test=false")
    config["callbacks"]["mine"] = {"_target_": f"{__name__}.NumpyState"}
    train(config)
    (record,) = [record for record in caplog.records if "no run can continue" in record.message]
    assert "holds an object of numpy" in record.message


def test_a_metric_that_is_not_logged_ends_the_first_epoch(tmp_path):
    with pytest.raises(ValueError, match="optimized_metric=val/acx is not logged; use one of .*val/acc"):
        train(tiny(tmp_path, "test=best", "optimized_metric=val/acx"))
    assert len(metrics(tmp_path)) < 5, "not after all epochs"


# --- how a checkpoint is written ---


def save_elsewhere(io, folder, monkeypatch):
    """Two saves to the same path, where temporary files are on another file system. Return what the old file holds."""

    def rename(source, target):
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return os.replace(source, target)

    monkeypatch.setattr(os, "rename", rename)
    io.save_checkpoint({"step": 1}, folder / "last.ckpt")
    os.link(folder / "last.ckpt", folder / "old.ckpt")
    io.save_checkpoint({"step": 2}, folder / "last.ckpt")
    assert torch.load(folder / "last.ckpt")["step"] == 2
    return torch.load(folder / "old.ckpt")["step"]


def test_a_checkpoint_is_never_written_over(tmp_path, monkeypatch):
    trainer, _, _ = build(tiny(tmp_path))
    assert save_elsewhere(trainer.strategy.checkpoint_io, tmp_path, monkeypatch) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "old.ckpt"}


def test_lightning_writes_over_it(tmp_path, monkeypatch):
    """Shows that the test before can fail."""
    assert save_elsewhere(TorchCheckpointIO(), tmp_path, monkeypatch) == 2


def save_interrupted(rank, fault, path):
    CompleteFiles().save_checkpoint({"step": 1}, path)
    if fault == "killed":
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    CompleteFiles().save_checkpoint({"step": 2, "weights": torch.ones(100000)}, path)


@pytest.mark.parametrize(
    ("fault", "error", "num_files"), [("killed", "exit code -9", 2), ("full", "written: File too large", 1)]
)
def test_an_interrupted_save_leaves_the_checkpoint_before(tmp_path, fault, error, num_files):
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match=error):
        run_processes(1, save_interrupted, fault, path)
    assert torch.load(path)["step"] == 1
    assert len(list(tmp_path.iterdir())) == num_files
    CompleteFiles().save_checkpoint({"step": 3}, path)
    assert {file.name for file in tmp_path.iterdir()} == {"last.ckpt"}


@pytest.mark.parametrize("rest", ["0,1.", "0,1.1,1"])
def test_a_row_that_was_cut_is_left_out(tmp_path, rest):
    (tmp_path / "metrics.csv").write_text(f"epoch,loss,step\n0,1.5,0\n0,1.2,1\n{rest}")
    assert rows_before(save(tmp_path, num_steps=2)) == [
        {"epoch": "0", "loss": "1.5", "step": "0"},
        {"epoch": "0", "loss": "1.2", "step": "1"},
    ]


def test_a_folder_that_fsdp2_has_written_is_a_checkpoint_of_a_run(tmp_path):
    """PyTorch keeps in ``meta.pt`` what all ranks share, and weights and optimizer states in other files."""
    torch.save({"global_step": 3, "loops": {}, "lr_schedulers": [], VERSION: "2.6.0"}, tmp_path / "meta.pt")
    require_complete(tmp_path)
    assert completed_steps(tmp_path) == 3


def test_a_checkpoint_in_no_folder_has_no_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "global_step": 0}, "last.ckpt")
    assert rows_before(Path("last.ckpt")) == []


def test_rows_that_are_lost_are_warned_of(tmp_path, caplog):
    """A checkpoint may have been copied without them, or a disk have lost them."""
    rows = {"RowsInCheckpoint": {"num_rows": 2, "steps": [2, -1], "means": {}}}
    torch.save(WHOLE | {"global_step": 3, "callbacks": rows}, path := save(tmp_path))
    assert rows_before(path) == []
    assert "metrics.csv has 0 of the 2 rows before" in caplog.text


def test_rows_are_those_of_the_run_of_a_checkpoint_whose_name_has_a_slash(tmp_path):
    """As Lightning writes ``filename="{epoch}-{val/acc}"``: to a folder below checkpoints/."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").touch()
    (tmp_path / "metrics.csv").write_text("epoch,loss,step\n0,1.5,0\n0,1.2,1\n")
    path = save(tmp_path, num_steps=1).parent / "epoch=0-val" / "acc=0.5.ckpt"
    path.parent.mkdir()
    last(tmp_path).rename(path)
    assert rows_before(path) == [{"epoch": "0", "loss": "1.5", "step": "0"}]


def train_apart(rank, config):
    """As on machines of which only the first sees the run folder."""
    return train(config if rank == 0 else config | {"ckpt_path": None})


@pytest.mark.ci
def test_a_machine_that_does_not_see_the_run_folder_is_named(tmp_path):
    """There ``ckpt_path=last`` finds no checkpoint, and DDP gives its rank the weights of rank 0, but no momentum."""
    steps = "+optim.scheduler.total_steps=6"
    train(tiny(tmp_path, "trainer.max_epochs=1", "test=false", steps))
    config = tiny(tmp_path, "trainer.devices=2", "test=false", steps, f"ckpt_path={last(tmp_path)}")
    with pytest.raises(RankError, match="rank 1 would continue after 0 steps, but rank 0 after 3: all machines must"):
        run_processes(2, train_apart, config, grace=5)


def test_a_checkpoint_without_its_version_is_refused(tmp_path):
    """Lightning reads none, also to test its weights."""
    save(tmp_path)
    torch.save({"state_dict": {}, "global_step": 0}, last(tmp_path))
    with pytest.raises(ValueError, match="has no pytorch-lightning_version, so Lightning cannot read it"):
        find(str(last(tmp_path)), tmp_path / "new", train=False)


def train_with_seeds(rank, config):
    """As by a command on each machine, of which one has another option."""
    return train(config | {"seed": rank})


@pytest.mark.ci
def test_a_machine_with_other_options_is_named(tmp_path):
    """Its rank would train other weights, or wait for batches that others do not have."""
    with pytest.raises(RankError, match="rank 1 has seed=1, but rank 0 0; start all machines with the same command"):
        run_processes(2, train_with_seeds, tiny(tmp_path, "trainer.devices=2", "test=false"), grace=5)


@pytest.mark.parametrize("name", ["root", "cache"])
def test_machines_may_have_files_in_folders_of_their_own(tmp_path, name):
    first, second = (tiny(tmp_path / rank) for rank in "01")
    first["data"][name], second["data"][name] = "/local/0", "/local/1"
    rank = Mock(global_rank=1, strategy=Mock(broadcast=lambda _: first))
    ConfigurationInCheckpoint(second).setup(rank, Mock(), "fit")
    second["optim"]["lr"] = 7
    with pytest.raises(ValueError, match="rank 1 has optim.lr=7, but rank 0 0.1"):
        ConfigurationInCheckpoint(second).setup(rank, Mock(), "fit")
