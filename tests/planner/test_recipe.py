"""recipes/plan.py: the configuration composes, a run writes its files, and mistakes are refused before it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_dp.runs import plan as recipe
from tests.docs.pages import ROOT

TINY = ("data=synthetic", "data.num_train=48", "data.num_val=20", "data.num_test=21", "data.batch_size=8")


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("plan", [*TINY, "trainer=cpu", "run_dir=run", "callbacks=agbn", *overrides])
    return OmegaConf.to_container(config, resolve=True)


def test_a_run_says_what_to_use_and_leaves_its_files(tmp_path):
    config = composed(
        "plan.gbit_per_s=1",
        "plan.world_size=4",
        "plan.num_steps=1",
        "plan.memonger=false",
        "trainer.enable_progress_bar=false",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = recipe.measure(config, None)
    assert "Simulated, 4 ranks:" in text
    assert (tmp_path / "run" / "plan.md").read_text() == f"{text}\n"
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert plan["overrides"][0].startswith("strategy=")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"plan.md", "plan.yaml", "plan.png"}


def test_a_network_is_made_from_the_configuration():
    config = composed("plan.gbit_per_s=2", "plan.ranks_per_node=2", "plan.world_size=8", "plan.latency_s=0.001")
    callback = recipe.make_callback(config)
    assert callback._network.inter.bytes_per_s == pytest.approx(2.5e8)
    assert callback._network.inter.latency_s == 0.001
    assert callback._network.num_nodes(8) == 4
    assert recipe.make_callback(composed())._network is None


def test_a_method_is_asked_for_and_memonger_left_out():
    callback = recipe.make_callback(composed("plan.method=layered_sgd_step_int8", "plan.memonger=false"))
    assert (callback._method, callback._memonger) == ("layered_sgd_step_int8", False)
    assert recipe.make_callback(composed())._memonger


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.gbit_per_s=-1", "bytes_per_s=-125000000.0"),
        ("plan.num_steps=0", "num_steps=0"),
        ("plan.max_s=-2", "max_s=-2"),
        ("plan.world_size=0", "world_size=0"),
        ("plan.method=zero", "method='zero' is unknown: no plan can be for it; use one of ddp, "),
        (
            "plan.method=ddp_bf16",
            "method='ddp_bf16' is no method of the recipes: no plan can be for it; use one of ddp, ",
        ),
    ],
)
def test_mistakes_are_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        recipe.make_callback(composed(override))


def test_a_key_that_nothing_reads_is_refused(tmp_path):
    command = [sys.executable, str(ROOT / "recipes" / "plan.py"), "+ckpt_pth=a.ckpt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: nothing reads the key ckpt_pth; did you mean ckpt_path?"
    assert not list(tmp_path.iterdir())


def test_callbacks_that_change_training_are_measured_and_those_that_watch_it_are_not(monkeypatch):
    seen = {}

    def stop(config: dict[str, Any]) -> None:
        seen.update(config["callbacks"])
        raise InterruptedError

    monkeypatch.setattr(recipe, "build", stop)
    with pytest.raises(InterruptedError):
        recipe.measure(composed(), None)
    assert "checkpoint" not in seen
    assert [node["_target_"] for node in seen.values()] == ["lightning_dp.AdaptiveGlobalBatchNorm"]
