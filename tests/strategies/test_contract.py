"""What the strategies take for granted in Lightning, held against the installed version."""

from __future__ import annotations

import inspect

import pytest
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.strategies import LayeredSGDStrategy

OVERRIDES = [
    "_configure_launcher",
    "lightning_module_state_dict",
    "on_exception",
    "on_train_end",
    "on_train_start",
    "on_validation_end",
    "on_validation_start",
    "optimizer_state",
    "optimizer_step",
    "post_backward",
    "pre_backward",
    "setup",
    "teardown",
    "training_step",
]


def test_the_docstring_and_this_list_name_every_override():
    own = {name for name, value in vars(LayeredSGDStrategy).items() if callable(value) and hasattr(DDPStrategy, name)}
    own = {name for name in own if not name.startswith("__")}
    assert own == set(OVERRIDES)
    for name in OVERRIDES:
        assert f"``{name}``" in LayeredSGDStrategy.__doc__


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_takes_what_lightning_passes(name):
    theirs = inspect.signature(getattr(DDPStrategy, name)).parameters
    ours = inspect.signature(getattr(LayeredSGDStrategy, name)).parameters
    assert list(ours) == list(theirs)


def test_the_attributes_that_are_used_exist():
    strategy = DDPStrategy(bucket_cap_mb=1)
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 1}
    assert strategy._timeout is not None
