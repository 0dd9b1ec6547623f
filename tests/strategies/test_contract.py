"""What the strategies take for granted in Lightning, held against the installed version."""

from __future__ import annotations

import inspect

import pytest
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from lightning_dp.strategies.base import BaseStrategy
from lightning_dp.strategies.layered_sgd.hooks import PostponedUpdates

OVERRIDES = {
    BaseStrategy: [
        "load_checkpoint",
        "on_train_batch_start",
        "pre_backward",
        "set_world_ranks",
        "setup",
        "teardown",
    ],
    LayeredSGDStrategy: [
        "_configure_launcher",
        "_setup_model",
        "lightning_module_state_dict",
        "load_checkpoint",
        "on_exception",
        "on_train_end",
        "on_validation_start",
        "optimizer_state",
        "optimizer_step",
        "post_backward",
        "pre_backward",
        "save_checkpoint",
        "setup",
        "teardown",
        "training_step",
    ],
    KrizhevskyHybridStrategy: [
        "backward",
        "configure_ddp",
        "lightning_module_state_dict",
        "load_checkpoint",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "model_to_device",
        "on_validation_start",
        "optimizer_state",
        "save_checkpoint",
        "setup",
        "teardown",
        "tensor_init_context",
        "training_step",
        "validation_step",
    ],
}
EACH = [(strategy, name) for strategy, names in OVERRIDES.items() for name in names]


@pytest.mark.parametrize("strategy", OVERRIDES)
def test_the_docstring_and_this_list_name_every_override(strategy):
    classes = [kind for kind in (strategy, PostponedUpdates) if issubclass(strategy, kind)]
    members = {name: value for kind in classes for name, value in vars(kind).items() if not name.startswith("__")}
    own = {name for name, value in members.items() if callable(value) and hasattr(DDPStrategy, name)}
    assert own == set(OVERRIDES[strategy])
    for name in own:
        assert any(f"``{name}``" in kind.__doc__ for kind in classes)


@pytest.mark.parametrize(("strategy", "name"), EACH)
def test_an_override_takes_what_lightning_passes(strategy, name):
    theirs = inspect.signature(getattr(DDPStrategy, name)).parameters
    ours = inspect.signature(getattr(strategy, name)).parameters
    assert list(ours) == list(theirs)


def test_the_attributes_that_are_used_exist():
    strategy = DDPStrategy(bucket_cap_mb=1)
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 1}
    assert strategy._timeout is not None


def test_what_wraps_a_module_again_exists():
    assert callable(DDPStrategy._setup_model)


def test_what_is_replaced_in_precision_plugins_exists():
    """Hybrid parallelism clips by the norm over all ranks, and takes fp16's decision on all of them."""
    assert list(inspect.signature(Precision.clip_grad_by_norm).parameters) == ["self", "optimizer", "clip_val"]
    assert MixedPrecision("16-mixed", "cpu").scaler is not None
