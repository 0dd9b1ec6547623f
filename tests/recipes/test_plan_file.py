"""``plan=FILE`` on the command line stands for the overrides in a plan."""

from __future__ import annotations

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lightning_dp.planner.report import PLAN_VERSION, WITH_PLAN, overrides_of
from lightning_dp.runs import command_line
from lightning_dp.runs.hydra_versions import VERSION_BASE, instantiate
from lightning_dp.strategies import PowerSGD
from tests.planner.test_rows import PROFILE
from tests.recipes.conftest import ROOT


@pytest.fixture
def plan(tmp_path):
    def write(*overrides: str) -> str:
        path = tmp_path / "plan.yaml"
        path.write_text(json.dumps({"version": PLAN_VERSION, "overrides": overrides}))
        return f"plan={path}"

    return write


def test_the_overrides_take_its_place_and_a_line_names_them(plan):
    argument = plan("strategy=layered_sgd", "strategy.overlap=load")
    arguments, line = command_line.with_plan(["seed=1", argument, "--multirun", "+strategy.group_size=1"])
    assert arguments == [
        "seed=1",
        "--multirun",
        "+strategy.group_size=1",
        "strategy=layered_sgd",
        "strategy.overlap=load",
    ]
    assert line == f"{argument}: strategy=layered_sgd strategy.overlap=load"
    assert command_line.with_plan(["seed=1", "experiment=digits_resnet20"]) == (
        ["seed=1", "experiment=digits_resnet20"],
        None,
    )


@pytest.mark.parametrize("method", WITH_PLAN)
def test_what_the_planner_writes_composes(plan, method):
    overrides = overrides_of(method, PROFILE, world_size=2)
    arguments, _ = command_line.with_plan([plan(*overrides)])
    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        config = compose("train", arguments)
    parser = OverridesParser.create()
    for override in map(parser.parse_override, overrides):
        if "." in override.key_or_group:
            assert OmegaConf.select(config, override.key_or_group) == override.value()


def test_a_plan_with_factors_makes_the_compressor(plan):
    arguments, _ = command_line.with_plan([plan(*overrides_of("layered_sgd_step_power_sgd", PROFILE, 2))])
    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        config = compose("train", arguments)
    assert instantiate(config.strategy.compression) == PowerSGD(rank=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("strategy=ddp",), "sets strategy=layered_sgd, and so does the command line; leave out one of the two"),
        (("+strategy.overlap=step",), "sets strategy.overlap=load, and so does the command line"),
        (("plan=other.yaml",), "give one plan"),
        (("++callbacks.memonger.policy=cheap",), "sets .*callbacks.memonger=.*, and so does the command line"),
    ],
)
def test_contradictions_are_refused(plan, arguments, message):
    overrides = ("strategy=layered_sgd", "strategy.overlap=load", "++callbacks.memonger={policy:budget}")
    with pytest.raises(ValueError, match=message):
        command_line.with_plan([plan(*overrides), *arguments])


def test_the_line_says_for_which_job_the_plan_was_made(tmp_path):
    path = tmp_path / "plan.yaml"
    values = {"version": PLAN_VERSION, "overrides": ["strategy=ddp"], "world_size": 4}
    path.write_text(json.dumps(values))
    assert command_line.with_plan([f"plan={path}"])[1] == f"plan={path}, made for 4 ranks: strategy=ddp"
    path.write_text(json.dumps({**values, "images_per_rank": 32}))
    assert command_line.with_plan([f"plan={path}"])[1] == f"plan={path}, made for 4 ranks of 32 images: strategy=ddp"


@pytest.mark.parametrize("quote", ["'", '"'])
def test_its_name_may_have_the_quotes_of_other_values(plan, quote):
    name, _, file = plan("strategy=ddp").partition("=")
    assert command_line.with_plan([f"{name}={quote}{file}{quote}"])[0] == ["strategy=ddp"]


@pytest.mark.parametrize("sign", ["+", "++"])
def test_it_may_have_the_signs_of_other_overrides(plan, sign):
    assert command_line.with_plan([sign + plan("strategy=ddp")])[0] == ["strategy=ddp"]
