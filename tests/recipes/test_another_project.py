"""In another Hydra project, our options exist, and its own come first. (tests/test_wheel.py runs it, installed.)"""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException

from lightning_dp.runs.hydra_versions import VERSION_BASE
from tests.recipes.conftest import ROOT

PROJECT = ROOT / "docs" / "examples" / "hydra_project" / "configs"


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))  # an installation puts it beside the package
    from hydra_plugins.lightning_dp_search_path import LightningDpSearchPath

    # Hydra looks for plugins once. In a process of its own it finds this one; see test_wheel.py.
    Plugins.instance().register(LightningDpSearchPath)
    return LightningDpSearchPath


def project(*overrides: str):
    with initialize_config_dir(str(PROJECT), **VERSION_BASE):
        return compose("train", list(overrides))


def test_callbacks_are_added_to_the_projects_own(plugin):
    callbacks = project("callbacks=agbn").callbacks
    assert set(callbacks) == {"model_summary", "adaptive_global_batch_norm"}, "its default, not ours"


def test_a_strategy_goes_to_its_trainer(plugin):
    trainer = project("+strategy@trainer.strategy=layered_sgd_single").trainer
    assert trainer.strategy._target_ == "lightning_dp.LayeredSGDStrategy"
    assert trainer.strategy.group_size == 1
    assert project("+strategy=krizhevsky_hybrid").strategy.head == "model.head"


def test_what_neither_has_is_missing(plugin):
    with pytest.raises(MissingConfigException, match="strategy/nope"):
        project("+strategy=nope")


def test_the_plugin_adds_one_folder_at_the_end(plugin):
    class Recorded(list):
        def append(self, provider: str, path: str, anchor: object = None) -> None:
            super().append((provider, path))

    assert issubclass(ConfigSearchPath, object)
    found = Recorded()
    plugin().manipulate_search_path(found)
    assert found == [("lightning-dp", f"file://{ROOT / 'conf'}")]
