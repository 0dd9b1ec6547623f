"""What a user writes: registered names, keyword arguments, and Fabric."""

from __future__ import annotations

import pytest
from lightning_fabric import Fabric
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import StrategyRegistry

from lightning_dp import KrizhevskyHybridStrategy, LayeredSGDStrategy

STRATEGIES = {"layered_sgd": LayeredSGDStrategy, "krizhevsky_hybrid": KrizhevskyHybridStrategy}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("variant", "start_method"), [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
)
def test_strategies_have_the_variants_of_ddp(name, variant, start_method):
    assert f"ddp{variant}" in StrategyRegistry.available_strategies()
    strategy = Trainer(strategy=name + variant, accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is STRATEGIES[name]
    launcher = strategy.launcher
    assert getattr(launcher, "_start_method", "popen") == start_method
    assert launcher.is_interactive_compatible == (start_method == "fork")


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (
            LayeredSGDStrategy,
            {"gruop_size": 4},
            "LayeredSGDStrategy has no option gruop_size; did you mean group_size?",
        ),
        (LayeredSGDStrategy, {"find_unused_parameter": True}, "did you mean find_unused_parameters?"),
        (KrizhevskyHybridStrategy, {"variable_batches": True}, "did you mean variable_batch?"),
        (
            KrizhevskyHybridStrategy,
            {"xyzzy": 1},
            "KrizhevskyHybridStrategy has no option xyzzy. Its options are its own",
        ),
        (LayeredSGDStrategy, {"module": None}, "has no option module"),
    ],
)
def test_a_misspelt_option_is_refused_at_construction(strategy, options, message):
    with pytest.raises(TypeError) as caught:
        strategy(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_options_of_ddp_are_accepted(strategy):
    strategy(find_unused_parameters=True, bucket_cap_mb=1, start_method="spawn", process_group_backend="gloo")


@pytest.mark.parametrize("strategy", [LayeredSGDStrategy(), KrizhevskyHybridStrategy(), *STRATEGIES])
def test_fabric_refuses_them(strategy):
    with pytest.raises(ValueError, match=r"an instance of `lightning_fabric\.strategies\.Strategy`"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy)
