"""``debug=smoke`` runs every part of every experiment in seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_dp.runs.hydra_versions import VERSION_BASE
from lightning_dp.runs.train import train
from lightning_dp.runs.validation import validate
from tests.commands import run_command
from tests.recipes.test_compose import CONF, names

QUICK = {"digits_resnet20", "imagenet_resnet50"}  # the others take longer, or differ from these in a few values
SMALL = ("imagenet_resnet50",)  # experiments whose networks take images of any size


def config_of(experiment: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        arguments = [f"experiment={experiment}", "debug=smoke", f"run_dir={run_dir}", *overrides]
        return OmegaConf.to_container(compose("train", arguments), resolve=True)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about small batches and missing parts
@pytest.mark.parametrize(
    "experiment",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names("experiment")],
)
def test_an_experiment_runs_in_seconds(experiment, tmp_path):
    small = ("data.image_size=64",) if experiment.startswith(SMALL) else ()
    config = config_of(experiment, tmp_path, *small)
    assert validate(config) == 1
    metrics = train(config, None)
    assert metrics.keys() >= {"train/loss", "test/acc", "test/loss"}
    assert not list(tmp_path.rglob("*.ckpt"))


# Not the hybrid: it needs a head with several linear layers.
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [("ddp",), ("layered_sgd_single",), ("layered_fsdp",), ("layered_fsdp", "strategy.group_size=1")],
    ids=str,
)
def test_a_strategy_runs_in_seconds(strategy, tmp_path):
    name, *options = strategy
    command = [sys.executable, CONF.parent / "recipes" / "train.py", "experiment=digits_resnet20", "debug=smoke"]
    command += [f"strategy={name}", *options, "trainer.devices=2", f"hydra.run.dir={tmp_path}"]
    result = run_command(command)
    assert result.returncode == 0, result.stderr
    assert "test/acc=" in result.stdout


def variant(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return OmegaConf.to_container(compose("train", [*overrides, "run_dir=runs"]), resolve=True)


@pytest.mark.ci
def test_the_variants_of_resnet50_differ_in_what_they_are_named_for():
    base, budget, lars, agbn, memonger = (
        variant(f"experiment=imagenet_resnet50{suffix}") for suffix in ("", "_budget", "_lars", "_agbn", "_memonger")
    )
    assert base["optim"]["scheduler"]["_target_"] == "lightning_dp.optim.multistep_with_warmup"
    assert budget["optim"]["scheduler"]["power"] == 1.0
    assert (budget["trainer"]["max_epochs"], budget["trainer"]["precision"]) == (16, "bf16-mixed")
    assert (budget["data"]["start_image_size"], budget["data"]["eval_image_size"]) == (160, 256)
    assert lars["optim"]["optimizer"]["_target_"] == "lightning_dp.optim.LARS"
    assert "parameter_groups" not in lars["optim"]
    assert "adaptive_global_batch_norm" in agbn["callbacks"]
    assert "memonger" in memonger["callbacks"]
    for config in (base, budget, lars, agbn, memonger):
        assert config["callbacks"]["time_to_accuracy"]["threshold"] == 0.759
        assert config["model"]["model"] == {
            "_target_": "lightning_dp.models.ResNet50",
            "num_classes": 1000,
            "zero_init": True,
        }
    assert base["trainer"]["max_epochs"] == lars["trainer"]["max_epochs"] == 90


def test_the_learning_rate_follows_the_batch_size():
    config = variant("experiment=imagenet_resnet50", "data.batch_size=8192")
    assert config["optim"]["parameter_groups"]["batch_size"] == 8192
    assert variant("experiment=imagenet_resnet50", "data=synthetic_imagenet")["data"]["num_workers"] == 0


@pytest.mark.parametrize("experiment", [name for name in names("experiment") if name.startswith("imagenet")])
def test_every_experiment_on_imagenet_takes_shards(experiment):
    folders = variant(f"experiment={experiment}")["data"]
    pattern = "imagenet-train-{000000..001281}.tar"
    shards = variant(f"experiment={experiment}", "data=imagenet_shards", f"data.train_shards='{pattern}'")["data"]
    assert shards.pop("_target_") == "lightning_dp.data.ImageNetShards"
    assert (shards.pop("train_shards"), shards.pop("val_shards"), shards.pop("index_dir")) == (pattern, None, None)
    assert shards == {key: value for key, value in folders.items() if key != "_target_"}


HYBRID = ("strategy=krizhevsky_hybrid", "strategy.scheme=b")


@pytest.mark.parametrize(("num_gpus", "head"), [(2, "optim.head_batch_scale={}"), (8, "strategy.variable_batch=true")])
def test_rows_of_table_1_compose(num_gpus, head):
    options = (
        f"trainer.devices={num_gpus}",
        f"data.batch_size={128 * num_gpus}",
        f"optim.trunk_batch_scale={num_gpus}",
    )
    config = variant("experiment=imagenet_alexnet", *HYBRID, *options, head.format(num_gpus))
    assert config["data"]["crop"] == "square"
    assert config["strategy"]["scheme"] == "b"


@pytest.mark.ci
def test_headers_give_commands_that_compose():
    """Every command in the header of an experiment on ImageNet, up to its continuation."""
    for path in sorted((CONF / "experiment").glob("imagenet_*.yaml")):
        text = path.read_text().replace(" \\\n#  ", "")
        lines = [line for line in text.splitlines() if "recipes/train.py experiment=" in line and "..." not in line]
        for line in lines:
            arguments = line.partition("recipes/train.py ")[2].split()
            variant(*(argument for argument in arguments if "=" in argument))
