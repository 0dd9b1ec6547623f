"""Every experiment goes with every strategy, as the command line puts them together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_dp import Memonger
from lightning_dp.planner.report import overrides_of
from lightning_dp.runs.hydra_versions import VERSION_BASE, instantiate
from lightning_dp.strategies import PowerSGD
from tests.planner.test_rows import PROFILE

CONF = Path(__file__).parents[2] / "conf"


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def bases() -> list[str]:
    """The experiments that are no variant of another one: a variant does not change what a strategy needs."""
    found = names("experiment")
    return [name for name in found if not any(name.startswith(f"{other}_") for other in found)]


@pytest.mark.parametrize("strategy", names("strategy"))
@pytest.mark.parametrize("experiment", bases())
def test_an_experiment_takes_any_strategy(experiment, strategy):
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", [f"experiment={experiment}", f"strategy={strategy}"])
    alone = instantiate(config.strategy)
    assert not getattr(alone, "_ddp_kwargs", {}).keys() - {"gradient_as_bucket_view"}


# What an experiment sets of a callback, the group without callbacks does not have. The others show little more.
@pytest.mark.parametrize(
    "callbacks", [pytest.param(name, marks=() if name == "none" else pytest.mark.slow) for name in names("callbacks")]
)
@pytest.mark.parametrize("experiment", names("experiment"))
def test_an_experiment_takes_any_callbacks(experiment, callbacks):
    """No experiment sets options of a callback that another group does not have."""
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", [f"experiment={experiment}", f"callbacks={callbacks}"])
    assert all("_target_" in node for node in config.callbacks.values())


def test_the_demo_has_two_groups():
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", ["experiment=digits_resnet20"])
    assert instantiate(config.strategy).topology_of(1, config.trainer.devices).num_groups == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("null", None),
        ("int8", "int8"),
        ("{_target_:lightning_dp.strategies.PowerSGD,rank:2}", PowerSGD(rank=2)),
    ],
)
def test_compression_is_an_option_of_layered_sgd(override, expected):
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", ["experiment=digits_resnet20", f"strategy.compression={override}"])
    assert instantiate(config.strategy)._options.compression == expected


def test_gpus_are_used_as_fast_as_they_are():
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", ["experiment=cifar10_resnet20", "trainer=gpu", "trainer.devices=2"])
        on_cpu = compose("train", ["experiment=digits_resnet20"])
        exact = compose("train", ["experiment=cifar10_resnet20", "trainer=gpu", "trainer.precision=32-true"])
    assert (config.trainer.accelerator, config.trainer.devices, config.trainer.max_steps) == ("gpu", 2, 64000)
    assert (config.trainer.precision, config.trainer.benchmark, config.matmul_precision) == ("bf16-mixed", True, "high")
    assert config.model.channels_last
    assert "trainer" not in config.trainer
    assert (on_cpu.trainer.precision, on_cpu.matmul_precision) == ("32-true", "highest")
    assert "benchmark" not in on_cpu.trainer
    assert exact.trainer.precision == "32-true"


def test_a_plan_adds_global_batch_norm_as_its_group_has_it_and_keeps_the_jobs_callbacks():
    overrides = overrides_of("ddp_global_batch_norm", PROFILE, 2)
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", ["experiment=digits_resnet20", "callbacks=memonger", *overrides])
        group = compose("train", ["experiment=digits_resnet20", "callbacks=agbn"]).callbacks
    assert set(config.callbacks) > {"memonger", "checkpoint"}
    added, ours = (instantiate(each.adaptive_global_batch_norm) for each in (config.callbacks, group))
    assert vars(added.convergence) == vars(ours.convergence)
    options = ("max_batch_size", "global_phase", "group_size")
    assert [getattr(added, name) for name in options] == [getattr(ours, name) for name in options]


def test_memonger_is_an_option_of_every_run():
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        config = compose("train", ["experiment=digits_resnet20", "callbacks=memonger"])
    memonger = instantiate(config.callbacks.memonger)
    assert (type(memonger), memonger.policy) == (Memonger, "cheap")
    assert set(config.callbacks) > {"memonger", "checkpoint"}
