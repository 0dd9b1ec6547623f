"""Keys of a run: refused or left out before any process starts."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from lightning_dp.runs.train import build, make_loggers, result_line
from lightning_dp.runs.validation import check_given_optim, check_top_level, make_callbacks, resolved, validate
from tests.recipes.conftest import metrics
from tests.recipes.in_process import composed, tiny, train


def test_a_key_that_nobody_reads_is_refused():
    with pytest.raises(ValueError, match="nothing reads the key ckpt_pth; did you mean ckpt_path"):
        check_top_level(OmegaConf.create({"ckpt_pth": "a.ckpt", "seed": 0}))
    with pytest.raises(ValueError, match="nothing reads the key xyzzy; there are callbacks, ckpt_path, data"):
        check_top_level(OmegaConf.create({"xyzzy": 1}))
    with pytest.raises(ValueError, match="nothing reads the key plan"):
        check_top_level(OmegaConf.create({"plan": {}}))
    check_top_level(OmegaConf.create({"plan": {}}), "plan")
    check_top_level(OmegaConf.create({"width": 8, "model": {"_target_": "a.B", "width": "${width}"}}))
    check_top_level(OmegaConf.create({"size": 8, "model": {"width": "${oc.select:size,3}"}}))


@pytest.mark.parametrize("group", ["experiment", "debug", "hparams_search"])
def test_a_file_that_would_override_nothing_is_refused_with_the_line_that_it_lacks(group):
    with pytest.raises(ValueError, match=f"the file of {group}=NAME lacks its first line, # @package _global_"):
        check_top_level(OmegaConf.create({group: {"seed": 1}}))


@pytest.mark.parametrize("group", ["callbacks", "logger"])
def test_objects_without_names_are_refused(group):
    objects = {name: {"_target_": "a.B"} for name in ("data", "model", "strategy", "trainer")}
    with pytest.raises(ValueError, match=rf"{group} is a list; give each .* a name: {group}\.NAME\._target_=CLASS"):
        resolved(OmegaConf.create({**objects, group: [{"_target_": "a.B"}]}))


def test_an_option_of_optim_that_nobody_reads_is_refused():
    """The group is no object, and only what interpolations name comes from it."""
    config = OmegaConf.create(
        {
            "optim": {"lr": 0.1, "weight_decay": 0, "momentum": 0.5, "optimizer": {"lr": "${..lr}", "momentum": 0.9}},
            "model": {"optimizer": "${optim.optimizer}"},
        }
    )
    check_given_optim(config, ["optim", "optim.lr", "optim.optimizer.momentum", "data.weight_decay", "optim.gone"])
    for name in ("weight_decay", "momentum"):
        with pytest.raises(ValueError, match=rf"nothing reads optim\.{name}; .* write \+\+optim\.optimizer\.{name}="):
            check_given_optim(config, ["seed", f"optim.{name}"])
    config.model.optim = "${optim}"
    check_given_optim(config, ["optim.weight_decay"])


def test_a_learning_rate_that_the_schedule_replaces_is_refused():
    optim = {"lr": 0.1, "optimizer": {"lr": 0.1}, "scheduler": {"max_lr": "${optim.lr}"}}
    model = {"optimizer": "${optim.optimizer}", "scheduler": "${optim.scheduler}"}
    config = OmegaConf.create({"optim": optim, "model": model})
    with pytest.raises(ValueError, match=r"optim\.optimizer\.lr has no effect, because .* write optim\.lr"):
        check_given_optim(config, ["optim.optimizer.lr"])
    check_given_optim(config, ["optim.lr"])
    config.optim.scheduler = None
    check_given_optim(config, ["optim.optimizer.lr"])


@pytest.mark.parametrize("option", ["lr=7", "weight_decay=0.5"])
def test_an_option_that_each_group_of_parameters_has_is_no_option_of_the_optimizer(option, tmp_path):
    key = f"optim.{option.partition('=')[0]}"
    with pytest.raises(ValueError, match=f"optim.optimizer.{option} has no effect.* write {key}="):
        validate(tiny(tmp_path, "optim=goyal", f"++optim.optimizer.{option}"))
    validate(tiny(tmp_path, "optim=goyal", f"optim.{option}"))
    validate(tiny(tmp_path, "optim=lars", f"optim.optimizer.{option}"))


@pytest.mark.parametrize(
    ("option", "left_out"),
    [
        ("enable_progress_bar", {"progress_bar"}),
        ("enable_checkpointing", {"checkpoint"}),
        ("enable_model_summary", set()),
    ],
)
def test_what_the_trainer_switches_off_is_left_out_of_the_callbacks(option, left_out, tmp_path):
    config = composed(tmp_path)
    switched = composed(tmp_path, f"trainer.{option}=false")
    assert set(config["callbacks"]) - set(make_callbacks(switched)) == left_out
    assert set(make_callbacks(config)) == set(config["callbacks"])


@pytest.mark.ci
def test_a_run_without_progress_bar_and_checkpoints_trains(tmp_path):
    train(tiny(tmp_path / "run", "trainer.max_epochs=1", "trainer.enable_checkpointing=false"))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"curves.png", "hparams.yaml", "metrics.csv"}


@pytest.mark.slow
def test_the_best_weights_are_tested_and_then_tested_again_alone(tmp_path):
    """By the least validation accuracy, so that they are not the last."""
    best = tmp_path / "checkpoints" / "best.ckpt"
    other = "+callbacks.other={_target_:pytorch_lightning.callbacks.ModelCheckpoint,monitor:val/acc,every_n_epochs:2}"
    found = train(tiny(tmp_path, "test=best", "optimized_mode=min", "trainer.max_epochs=3", "seed=1", other))
    again = train(tiny(tmp_path / "again", "train=false", f"ckpt_path={best}"))
    tested = {name: value for name, value in found.items() if name.startswith("test/")}
    assert tested == again
    at_the_end = train(tiny(tmp_path / "last", "train=false", f"ckpt_path={best.with_name('last.ckpt')}"))
    assert at_the_end != again
    assert not (tmp_path / "again" / "checkpoints").exists()


@pytest.mark.ci
def test_every_logger_gets_the_whole_configuration_and_curves_are_drawn(tmp_path):
    target = ("logger=tensorboard", "logger.tensorboard._target_=tests.recipes.pieces.Recorder")
    config = tiny(tmp_path, "trainer.max_epochs=1", *target)
    config["logger"] = {"csv": None, "mine": {"_target_": "tests.recipes.pieces.Recorder", "path": f"{tmp_path}/mine"}}
    train(config)
    logged = json.loads((tmp_path / "mine").read_text())
    assert logged == config
    assert (tmp_path / "curves.png").exists()
    assert "optim" in OmegaConf.load(tmp_path / "hparams.yaml")
    assert "train/loss" in (tmp_path / "mine.metrics").read_text()


def test_the_logger_of_a_module_is_the_chosen_one(tmp_path):
    """As a module that calls ``self.logger.experiment.add_image`` expects."""
    config = tiny(tmp_path)
    config["logger"] = {"csv": None, "mine": {"_target_": "tests.recipes.pieces.Recorder", "path": f"{tmp_path}/mine"}}
    trainer, _, _ = build(config, make_loggers(config, []))
    assert [type(each).__name__ for each in trainer.loggers] == ["Recorder", "MetricsFile"]


@pytest.mark.parametrize("loggers", ["csv", "tensorboard", "[csv,tensorboard]", "[wandb,mlflow]"])
def test_loggers_are_chosen_by_name_one_or_several(loggers, tmp_path):
    assert set(composed(tmp_path, f"logger={loggers}")["logger"]) == set(loggers.strip("[]").split(","))


@pytest.mark.ci
def test_each_job_of_a_sweep_has_a_run_of_weights_and_biases(tmp_path, monkeypatch):
    """Lightning's logger takes the run that is on in this process, as that of the job before would be."""
    wandb, runs, statuses = Mock(run=None), [], []

    def init(**given):
        runs.append(given)
        wandb.run = Mock()
        return wandb.run

    def finish(exit_code):
        statuses.append(exit_code)
        wandb.run = None

    wandb.init, wandb.finish = init, finish
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", True)
    for name in ("wandb", "wandb.sdk.lib", "wandb.wandb_run"):
        monkeypatch.setitem(sys.modules, name, wandb if name == "wandb" else Mock(Run=Path, RunDisabled=Path))
    for job, model in enumerate(("alexnet", "resnet20")):  # the images are too small for AlexNet
        with pytest.raises(RuntimeError) if model == "alexnet" else nullcontext():
            train(tiny(tmp_path / str(job), "logger=wandb", f"model={model}", "trainer.max_epochs=1", "test=false"))
    assert [(run["group"], run["dir"]) for run in runs] == [("tiny", f"{tmp_path}/{job}") for job in range(2)]
    assert statuses == [1, 0]


@pytest.mark.ci
def test_images_per_second_are_logged_and_shown(tmp_path, capsys):
    found = train(tiny(tmp_path, "trainer.max_epochs=1", "trainer.enable_progress_bar=true", "test=false"))
    assert found["time/images_per_s"] > 0
    assert "images/s" in capsys.readouterr().out
    (row,) = [row for row in metrics(tmp_path, times=True) if row["time/images_per_s"]]
    assert float(row["time/train_s"]) == pytest.approx(48 / float(row["time/images_per_s"]))


def test_the_result_is_the_best_known_metric():
    assert result_line({"test/acc": 0.5, "val/acc": 1.0}, "runs/a") == "test/acc=0.5000  run_dir=runs/a"
    assert result_line({"val/acc": 1.0}, "runs/a") == "val/acc=1.0000  run_dir=runs/a"
    loaders = {"test/acc/dataloader_idx_1": 0.25, "test/acc/dataloader_idx_0": 0.5}
    both = "test/acc/dataloader_idx_0=0.5000  test/acc/dataloader_idx_1=0.2500  run_dir=runs/a"
    assert result_line({"val/acc": 1.0, **loaders}, "runs/a") == both
    assert result_line({}, "runs/a") == "done  run_dir=runs/a"


def test_a_run_in_the_working_folder_is_named(tmp_path, monkeypatch):
    """As with hydra.job.chdir=true."""
    monkeypatch.chdir(tmp_path)
    assert result_line({}, str(tmp_path)) == f"done  run_dir={tmp_path}"
