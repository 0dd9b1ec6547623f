from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pytorch_lightning import LightningModule
from pytorch_lightning.utilities.rank_zero import rank_zero_module

from lightning_dp.runs.command_line import arguments_of_rank
from lightning_dp.runs.hydra_versions import VERSION_BASE, instantiate
from lightning_dp.runs.validation import (
    check_arguments,
    check_together,
    count_processes,
    fits,
    make_callbacks,
    naming_keys,
    shown,
    targets,
    validate,
)
from tests.recipes.conftest import ROOT
from tests.recipes.in_process import composed


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_gpus", "expected"),
    [
        ("cpu", 2, 8, 2),
        ("cpu", "auto", 8, 1),
        ("cpu", "3", 0, 3),
        ("gpu", 4, 8, 4),
        ("gpu", "auto", 8, 8),
        ("gpu", -1, 8, 8),
        ("gpu", [1, 5], 8, 2),
        ("auto", 2, 8, 2),
        ("auto", "auto", 8, 8),
        ("auto", 2, 0, 2),
    ],
)
def test_processes_are_counted_as_the_trainer_counts_devices(accelerator, devices, num_gpus, expected):
    assert count_processes(accelerator, devices, num_gpus=num_gpus, num_cores=4) == expected


@pytest.mark.parametrize(
    ("accelerator", "devices", "num_gpus", "message"),
    [
        ("gpu", 1, 0, "no GPU"),
        ("gpu", 9, 8, "trainer.devices=9, but there are 8 GPUs; use at most 8"),
        ("gpu", [0, 8], 8, "there are 8 GPUs"),
        ("auto", 9, 8, "there are 8 GPUs"),
        ("cpu", 33, 8, "4 CPU cores; use at most 32 ranks"),
        ("cpu", 0, 8, "must be 1 or more"),
        ("cpu", [0, 1], 8, "must be 1 or more"),
        ("cpu", 1.5, 8, "must be 1 or more"),
    ],
)
def test_devices_that_do_not_exist_are_refused(accelerator, devices, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        count_processes(accelerator, devices, num_gpus=num_gpus, num_cores=4)


def test_more_ranks_than_cores_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert count_processes("cpu", 5, num_gpus=0, num_cores=4) == 5
    assert "5 ranks share 4 CPU cores" in caplog.text


def test_the_check_leaves_nothing_in_the_log_of_another_run(tmp_path, caplog, monkeypatch):
    # Where `lightning.pytorch` is imported late, Lightning's messages go on to the root logger.
    monkeypatch.setattr(rank_zero_module, "log", logging.getLogger("of_a_test"))
    with caplog.at_level(logging.INFO):
        validate(composed(tmp_path, "trainer=cpu"))
        assert caplog.text == ""
        logging.getLogger("of_a_test").info("later")
    assert "later" in caplog.text


@pytest.mark.ci
def test_every_object_of_every_configuration_exists_and_accepts_its_arguments():
    conf = ROOT / "conf"
    options = {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in conf.iterdir()}
    checked = set()
    with initialize_config_dir(str(conf), **VERSION_BASE):
        for group, names in options.items():
            for name in names if group not in ("hydra", "hparams_search") else ():
                config = compose("train", [f"{group}={name}", "run_dir=here"])
                for path, node in targets(OmegaConf.to_container(config, resolve=True)):
                    check_arguments(path, node)
                    checked.add(node["_target_"])
    assert {
        "lightning_dp.LayeredSGDStrategy",
        "lightning_dp.AdaptiveGlobalBatchNorm",
        "lightning_dp.Plateau",
    } <= checked


def test_what_is_no_mistake_is_taken(tmp_path):
    config = composed(tmp_path, "trainer.devices=-1", "name=5", "trainer=cpu")
    assert config["trainer"]["devices"] == "auto", "Lightning takes -1 on GPUs only"
    assert config["name"] == "5"
    arguments = arguments_of_rank(["logger=null", "callbacks=null", "experiment=null", "seed=1"], None, "")
    config = composed(tmp_path, *arguments)
    assert (config["logger"], config["callbacks"], config["seed"]) == ({}, {}, 1)


@pytest.mark.parametrize(
    ("option", "model"), [("+optim.scheduler.total_steps=9", {}), ("seed=0", {"_target_": f"{__name__}.OwnModule"})]
)
def test_a_run_without_end_may_have_a_schedule_that_is_told_its_end(tmp_path, option, model):
    """By the configuration, or by a module of the user's."""
    config = composed(tmp_path, "trainer.max_epochs=-1", option)
    config["model"] |= model
    check_together(config)


def test_an_argument_may_be_an_object_of_a_class_in_c(tmp_path):
    timeout = ("+strategy.timeout._target_=datetime.timedelta", "+strategy.timeout.minutes=2")
    config = composed(tmp_path, "trainer=cpu", *timeout)
    validate(config)
    assert instantiate(config["strategy"]["timeout"]) == timedelta(minutes=2)


def test_a_seed_that_is_written_as_a_float_is_the_whole_number(tmp_path):
    config = composed(tmp_path, "trainer=cpu", "seed=1e3")
    validate(config)
    assert (repr(config["seed"]), repr(config["data"]["seed"])) == ("1000", "1000")


@pytest.mark.parametrize(
    ("value", "annotation", "accepted"),
    [
        (5, int, True),
        (5, float, True),
        (1e5, int, True),
        (0.5, int, False),
        ("5", int, False),
        (True, int, False),
        (1, bool, True),
        (2, bool, False),
        (None, int, False),
        (None, int | None, True),
        (None, Optional[int], True),  # noqa: UP045  as other packages write it
        ([1], int, False),
        ([1], int | list[int], True),
        ({"_target_": "a.B"}, int, True),
        ("fast", float | torch.Tensor, False),
        ("a", Literal["b", "c"], True),
        (3, Literal["b", "c"], False),
        ("a", Path, True),
        ({"_target_": "pathlib.Path"}, Path, True),
        (2024, str | Path, False),
        ("a", Any, True),
    ],
)
def test_only_plain_values_of_the_wrong_type_are_refused(value, annotation, accepted):
    assert fits(value, annotation) is accepted


@pytest.mark.parametrize(
    ("value", "text"),
    [("16", "'16', a text,"), ("-1e3", "'-1e3', a text,"), ("True", "'True', a text,"), (1, "1"), ("x1", "x1")],
)
def test_a_text_that_looks_like_another_value_is_shown_as_a_text(value, text):
    """As environment variables are, in ``${oc.env:...}``."""
    assert shown(value) == text


def test_null_leaves_a_switch_of_the_trainer_at_its_default(tmp_path):
    config = composed(tmp_path, "trainer=cpu", "trainer.enable_checkpointing=null", "test=best")
    validate(config)
    assert "checkpoint" in make_callbacks(config)
    config["trainer"]["enable_checkpointing"] = False
    assert "checkpoint" not in make_callbacks(config)


def test_a_trainer_without_the_switch_keeps_the_best_weights(tmp_path):
    config = composed(tmp_path, "trainer=cpu", "~trainer.enable_checkpointing", "test=best")
    validate(config)


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        assert self.weight.device.type == "cpu"


def test_a_model_of_the_users_is_not_made_before_the_run(tmp_path):
    config = composed(tmp_path, "trainer=cpu", f"model.model._target_={__name__}.Net", "~model.model.num_classes")
    validate(config)
    net = config["model"]["model"]
    config["model"]["model"] = {"_target_": "lightning_dp.models.TrunkAndHead", "trunk": net, "head": net}
    validate(config)


def groups(model):
    return [{"params": list(model.parameters()), "is_matrix": True}]


def of_groups(params):
    assert all(group["is_matrix"] for group in params)


class OwnModule(LightningModule):
    def __init__(self, optimizer, **options) -> None:
        raise AssertionError("it is not made before the run")


OF_GROUPS, GROUPS = ({"_target_": f"{__name__}.{name}", "_partial_": True} for name in ("of_groups", "groups"))


@pytest.mark.parametrize(
    "model",
    [
        {"optimizer": {"_target_": "torch.optim.Muon", "_partial_": True}},
        {"optimizer": OF_GROUPS, "parameter_groups": GROUPS},
        {"_target_": f"{__name__}.OwnModule", "optimizer": OF_GROUPS, "parameter_groups": ["weight", "bias"]},
    ],
)
def test_an_optimizer_may_take_matrices_or_groups_only(tmp_path, model):
    """Muon, and those that combine it with another one. What an own module gives its optimizer is not known."""
    config = composed(tmp_path, "trainer=cpu", "test=false")
    validate(config | {"model": config["model"] | model})


class Picky:
    def __init__(self, max_size: int = 1, crop: str = "", num_classes: int = 0) -> None:
        raise RuntimeError(f"max_size={max_size}: use more, or crop=all; max_size, a crop, num_classes=2, max_size.txt")


def test_an_error_of_an_object_names_the_keys(tmp_path):
    config = composed(tmp_path) | {"data": {"_target_": f"{__name__}.Picky", "max_size": 3}}
    with pytest.raises(ValueError, match="RuntimeError: data.max_size=3") as caught, naming_keys("data", config):
        instantiate(config["data"])
    assert "data.max_size=3: use more, or data.crop=all; data.max_size, a crop, num_classes=2, max_size.txt" in str(
        caught.value
    )


class ReadsOptions:
    def __init__(self, options: Any) -> None:
        self.max_size = options.max_size


def test_an_object_that_reads_a_missing_key_of_its_options_is_named(tmp_path):
    """The error of OmegaConf names that key in a line of its own, as Hydra's does the object's."""
    config = composed(tmp_path) | {"data": {"_target_": f"{__name__}.ReadsOptions", "options": {"size": 3}}}
    message = "^data: ConfigAttributeError: Missing key max_size; add it, or write _convert_: all beside the _target_"
    with pytest.raises(ValueError, match=message), naming_keys("data", config):
        instantiate(config["data"])


def test_a_schedule_may_have_a_list_of_rates(tmp_path):
    """torch takes a list of OmegaConf for one rate of all groups, and fails where it counts with it."""
    config = composed(tmp_path, "trainer=cpu", "optim.scheduler.max_lr=[0.1]")
    validate(config)
    made = instantiate(config["model"]["scheduler"])(torch.optim.SGD([torch.zeros(1)], 0.1), total_steps=10)
    assert made.optimizer.param_groups[0]["max_lr"] == 0.1


def test_a_slurm_job_with_one_task_may_start_several_processes(tmp_path, monkeypatch):
    for name, value in {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NAME": "submitit"}.items():
        monkeypatch.setenv(name, value)
    assert validate(composed(tmp_path, "trainer=cpu", "trainer.devices=2")) == 2


@pytest.mark.parametrize("value", ["1e2", "100"])
def test_a_whole_number_may_be_written_with_an_exponent(tmp_path, value):
    config = composed(tmp_path, "trainer=cpu", f"data.batch_size={value}", "trainer.max_epochs=1e1")
    validate(config)
    assert repr(config["data"]["batch_size"]) == "100"
    assert repr(config["trainer"]["max_epochs"]) == "10"


def test_a_logger_may_not_write_the_metrics_file_of_the_run(tmp_path):
    """The rows of both would go into one file, each with columns of its own."""
    own = (
        "trainer=cpu",
        "+logger.own._target_=pytorch_lightning.loggers.CSVLogger",
        f"+logger.own.save_dir={tmp_path}",
    )
    validate(composed(tmp_path, *own))
    with pytest.raises(ValueError, match=r"logger\.own would write .*metrics\.csv, .*logger\.own\.name="):
        validate(composed(tmp_path, *own, "+logger.own.name=''", "+logger.own.version=''"))
