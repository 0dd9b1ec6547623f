"""recipes/plan.py: the configuration composes, a run writes its files, and mistakes are refused before it."""

from __future__ import annotations

import itertools
import json
import logging
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_dp.planner import Diagnose
from lightning_dp.runs import plan as recipe
from lightning_dp.runs.hydra_versions import VERSION_BASE, instantiate
from tests.docs.pages import ROOT
from tests.ranks import run_processes
from tests.recipes.in_process import run_script

TINY = ("data=synthetic", "data.num_train=48", "data.num_val=20", "data.num_test=21", "data.batch_size=8")


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        config = compose("plan", [*TINY, "trainer=cpu", "run_dir=run", "callbacks=agbn", *overrides])
    return OmegaConf.to_container(config, resolve=True)


def made(config: dict[str, Any]) -> Diagnose:
    return instantiate(config["plan"], config["run_dir"])


@pytest.mark.ci
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
    assert "Simulated, 4 ranks" in text
    assert (tmp_path / "run" / "plan.md").read_text() == f"{text}\n"
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    assert plan["overrides"][0].startswith("strategy=")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"plan.md", "plan.yaml", "plan.png"}


@pytest.mark.ci
def test_a_schedule_may_need_a_metric_of_validation():
    config = composed("data.batch_size=24", "plan.num_steps=1", "plan.memonger=false")
    config["trainer"] |= {"enable_progress_bar": False}
    plateau = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True}
    config["model"] |= {"scheduler": plateau, "interval": "epoch"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "One rank needs no network" in recipe.measure(config, None)


@pytest.mark.ci
def test_a_module_may_write_to_its_logger():
    """A run always has one."""
    config = composed("data.batch_size=24", "callbacks=none", "plan.num_steps=1", "plan.memonger=false")
    config["data"] = {"_target_": "tests.recipes.pieces.JitterData"}
    config["model"] = {"_target_": "tests.recipes.pieces.TwoOptimizers"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "One rank needs no network" in recipe.measure(config, None)


def test_a_network_is_made_from_the_configuration():
    config = composed("plan.gbit_per_s=2", "plan.ranks_per_node=2", "plan.world_size=8", "plan.latency_s=0.001")
    callback = made(config)
    assert callback._network.inter.bytes_per_s == pytest.approx(2.5e8)
    assert callback._network.inter.latency_s == 0.001
    assert callback._network.num_nodes(8) == 4
    assert made(composed())._network is None


def test_a_method_is_asked_for_and_memonger_left_out():
    callback = made(composed("plan.method=layered_sgd_step_int8", "plan.memonger=false"))
    assert (callback._method, callback._memonger) == ("layered_sgd_step_int8", False)
    assert made(composed())._memonger


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.gbit_per_s=-1", "plan.gbit_per_s=-1 must be finite"),
        ("plan.gbit_per_s=fast", "plan.gbit_per_s=fast must be a number or null"),
        ("plan.intra_gbit_per_s=0", "plan.intra_gbit_per_s=0 must be finite"),
        ("plan.intra_latency_s=-1", "plan.intra_latency_s=-1 must be finite"),
        ("plan.latency_s=null", "plan.latency_s=None must be a number"),
        ("plan.num_steps=0", "plan.num_steps=0 is too small"),
        ("plan.num_steps=few", "plan.num_steps=few must be a whole number"),
        ("plan.memonger=maybe", "plan.memonger=maybe must be true or false"),
        ("plan.max_s=-2", "plan.max_s=-2 must be finite"),
        ("plan.world_size=0", "plan.world_size=0 is too small"),
        ("plan.method=zero", "plan.method='zero' is unknown: no plan can be for it; use one of ddp, "),
        (
            "plan.method=ddp_bf16",
            "plan.method='ddp_bf16' is no method of the recipes: no plan can be for it; use one of ddp, ",
        ),
        ("+plan.methods=ddp", "plan.methods is not an argument of lightning_dp.runs.plan.make_callback; there are "),
        ("+plan.run_dir=here", "plan: TypeError: .* multiple values for argument 'run_dir'"),
        ("~plan.max_s", "plan: TypeError: .* missing 1 required positional argument: 'max_s'"),
        ("plan.latency_s=1e-3", "plan.latency_s has no effect on a network that is measured; give plan.gbit_per_s"),
    ],
)
def test_mistakes_are_refused_by_the_keys_of_the_command_line(override, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        recipe.check_plan(composed(override), [override.partition("=")[0]])


def test_a_last_node_that_is_not_full_is_refused_by_the_keys_of_the_command_line():
    config = composed("plan.gbit_per_s=1", "plan.ranks_per_node=2", "plan.world_size=3")
    with pytest.raises(ValueError, match="^plan.world_size=3 is not a multiple of plan.ranks_per_node=2"):
        recipe.check_plan(config, [])


@pytest.mark.parametrize(
    ("overrides", "num_processes", "message"),
    [
        (("plan.world_size=4",), 1, "plan.world_size=4 has no effect on one rank, which has no network to measure; "),
        (("plan.gbit_per_s=1",), 1, "plan.gbit_per_s=1 has no effect on one rank; give plan.world_size as well"),
        (("plan.world_size=6",), 4, "6 ranks do not fill the last node of 4; give plan.world_size a multiple of it"),
        (("plan.gbit_per_s=1", "plan.ranks_per_node=4"), 6, "6 ranks do not fill the last node of 4; "),
    ],
)
def test_ranks_that_cannot_be_predicted_for_are_refused_before_a_step_is_measured(overrides, num_processes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        recipe.check_ranks(composed(*overrides), num_processes)
    recipe.check_ranks(composed("plan.gbit_per_s=1", "plan.world_size=4"), num_processes)
    recipe.check_ranks(composed(), num_processes)


def test_a_key_that_nothing_reads_is_refused(tmp_path):
    ((status, _),) = run_processes(1, run_script, "plan.py", tmp_path, "+ckpt_pth=a.ckpt")
    assert status.splitlines()[-1] == "error: nothing reads the key ckpt_pth; did you mean ckpt_path?"
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_steps_of_the_plan_are_run_beside_those_of_the_present_configuration(monkeypatch):
    monkeypatch.setattr(recipe, "ROUNDS", 1)
    monkeypatch.setattr(recipe, "NUM_STEPS", 1)
    command_line = ["data.num_workers=0", "trainer.max_epochs=2", "trainer.enable_progress_bar=false"]
    overrides = ["trainer.accumulate_grad_batches=2", "data.batch_size=4"]
    # As Hydra composes the plan, but for what the plan sets itself.
    kept = recipe.without([*command_line, "data.batch_size=8"], overrides)
    assert kept == command_line
    sides = {recipe.PRESENT: composed(*command_line), recipe.PLANNED: composed(*kept, *overrides)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = recipe.time_steps(sides, None)
    assert [len(values) for values in times.values()] == [1, 1]
    assert all(value > 0 for values in times.values() for value in values)
    plan = {"method": "ddp", "step_ms": 40.0, "error": 0.1, "measured_ms": {"compute": 30.0, "loading": 20.0}}
    text = recipe.verified_text({"present": [0.05, 0.06, 0.04], "plan": [0.05]}, sides, plan)
    assert "| present | 50.0 | 50.0 (40.0 to 60.0) | +0% |" in text
    assert "| plan | 40.0 | 50.0 (50.0 to 50.0) | -20% |" in text
    # Both have 8 images in a step.
    assert text.endswith("Images/s of the plan over those at present: 1.00, predicted 1.25.")
    # A method that accumulates is predicted for as many images as the present step has.
    accumulating = {**plan, "method": "ddp_accumulate_4", "step_ms": 10.0}
    assert recipe.verified_text({"present": [0.05], "plan": [0.05]}, sides, accumulating).endswith("predicted 1.25.")
    # Without a batch size in the configuration, which no plan changes, steps have as many images.
    for side in sides.values():
        del side["data"]["batch_size"]
        side["trainer"]["accumulate_grad_batches"] = 1
    assert "present: 1.00, predicted 1.25." in recipe.verified_text({"present": [0.05], "plan": [0.05]}, sides, plan)
    disturbed = recipe.verified_text({"present": [0.04], "plan": [0.04]}, sides, plan)
    assert disturbed.endswith("other work has disturbed one of the two: run it again.")


def test_options_of_the_present_file_of_a_group_go_with_it():
    given = ["strategy=layered_sgd", "strategy.group_size=1", "~strategy.overlap", "data.num_workers=1", "seed=3"]
    assert recipe.without(given, ["strategy=ddp", "data.num_workers=2"]) == ["seed=3"]
    added = "+strategy.find_unused_parameters=true"
    assert recipe.without([added, "strategy.group_size=1"], ["strategy=layered_sgd"]) == [added]


@pytest.mark.ci
def test_the_diagnosis_is_printed_before_it_is_verified(tmp_path, monkeypatch, capsys):
    """It must not be lost where the plan cannot be run."""
    sides: list[dict[str, Any]] = []

    def launched(function: Any, config: dict[str, Any], *_: Any, **__: Any) -> str:
        if function is recipe.measure:
            (tmp_path / "run" / "plan.yaml").write_text(json.dumps({"version": 1, "overrides": ["strategy=ddp"]}))
            return "what was measured"
        sides.append(config)
        raise ConnectionError("a rank is gone")

    monkeypatch.setattr(recipe, "launch", launched)
    arguments = (*TINY, "trainer=cpu", "trainer.devices=2", "strategy=layered_sgd", "strategy.group_size=1")
    monkeypatch.setattr("sys.argv", ["plan.py", *arguments, "verify=true", "hydra.run.dir=run"])
    handlers, level = list(logging.root.handlers), logging.root.level
    with pytest.raises(SystemExit, match="a rank is gone"):
        recipe.main()
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert "what was measured" in capsys.readouterr().out
    assert {name: side["strategy"]["_target_"].rpartition(".")[2] for name, side in sides[0].items()} == {
        "present": "LayeredSGDStrategy",
        "plan": "DDPStrategy",
    }


@pytest.mark.ci
def test_a_plan_that_an_earlier_run_has_left_is_not_verified(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.yaml").write_text(json.dumps({"version": 1, "overrides": ["strategy=ddp"]}))
    launched = []

    def launch(function: Any, *_: Any, **__: Any) -> str:
        launched.append(function)
        return "there is no plan"

    monkeypatch.setattr(recipe, "launch", launch)
    monkeypatch.setattr("sys.argv", ["plan.py", *TINY, "trainer=cpu", "verify=true", "hydra.run.dir=run"])
    handlers, level = list(logging.root.handlers), logging.root.level
    recipe.main()
    for handler in set(logging.root.handlers) - set(handlers):
        handler.close()
    logging.root.handlers[:], logging.root.level = handlers, level
    assert launched == [recipe.measure]
    assert capsys.readouterr().out == "there is no plan\n"
    assert not (tmp_path / "run" / "plan.yaml").exists()


def test_runs_that_are_verified_share_one_process_group(monkeypatch):
    """A second group in the same processes would find the addresses of the first one in the launcher's store."""
    was_there = []

    def run_steps(config: dict[str, Any], clock: recipe.StepClock) -> None:
        was_there.append(dist.is_initialized())
        if not was_there[-1]:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        clock._ends_s = [float(step) for step in range(recipe.WARM_UP + 3)]

    monkeypatch.setattr(recipe, "run_steps", run_steps)
    times = recipe.time_steps({"present": {"seed": 0}, "plan": {"seed": 0}}, None)
    assert was_there == [False] + (2 * recipe.ROUNDS - 1) * [True]
    assert times == {"present": recipe.ROUNDS * [1.0], "plan": recipe.ROUNDS * [1.0]}
    assert not dist.is_initialized()


def test_a_validation_is_no_part_of_a_step_that_is_verified(monkeypatch):
    now_s = itertools.count()  # each look at the clock takes a second
    monkeypatch.setattr(recipe.time, "perf_counter", lambda: float(next(now_s)))
    clock = recipe.StepClock()
    for step in range(1, recipe.WARM_UP + 3):
        clock.on_train_batch_end(Mock(global_step=step))
        clock.on_validation_start()
        for _ in range(5):
            recipe.time.perf_counter()
        clock.on_validation_end()
    assert clock.step_s == 2.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.gbit_per_s=1", "verify=true runs the plan on these 1 ranks and their own network"),
        ("plan.world_size=4", "leave out plan.gbit_per_s and plan.world_size"),
        ("verify=often", "verify='often' must be true or false"),
    ],
)
def test_a_plan_for_another_job_is_not_verified(override, message):
    with pytest.raises(ValueError, match=message):
        recipe.check_verify(composed("verify=true", override), 1)
    recipe.check_verify(composed("verify=true"), 1)
    recipe.check_verify(composed("plan.world_size=4"), 1)


def test_callbacks_that_change_training_are_measured_and_those_that_watch_it_are_not(monkeypatch):
    seen = {}

    def stop(config: dict[str, Any]) -> None:
        seen.update(config["callbacks"])
        raise InterruptedError

    monkeypatch.setattr(recipe, "build", stop)
    of_lightning = "{_target_:pytorch_lightning.callbacks."
    with pytest.raises(InterruptedError):
        recipe.measure(
            composed(
                f"+callbacks.accumulate={of_lightning}GradientAccumulationScheduler,scheduling:{{0:4}}}}",
                f"+callbacks.average={of_lightning}EMAWeightAveraging}}",
                f"+callbacks.stop={of_lightning}EarlyStopping,monitor:val/acc}}",
            ),
            None,
        )
    assert set(seen) == {"adaptive_global_batch_norm", "accumulate", "average"}
