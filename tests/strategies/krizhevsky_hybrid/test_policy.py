"""What hybrid parallelism refuses, with the name of the culprit and the remedy."""

from __future__ import annotations

import logging

import pytest
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import nn

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp._lightning import StrategyRegistry
from lightning_dp.strategies.krizhevsky_hybrid.head_layers import divisible_layers
from lightning_dp.strategies.krizhevsky_hybrid.policy import check_module, check_optimizers, check_precision, find_head
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet
from tests.strategies.modules import trainer


def check(module, head="head", variable_batch=False, callbacks=()):
    runner = trainer("auto", 1, callbacks=list(callbacks))
    check_module(module, runner, find_head(module, head, "Strategy"), head, variable_batch, "Strategy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "d"}, "scheme='d' is not known; use one of 'a', 'b', 'c'"),
        ({"scheme": "a", "variable_batch": True}, "scheme='a' has one; use scheme 'b' or 'c'"),
        ({"model_averaging_period": 3}, "model_averaging_period cannot be given"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        KrizhevskyHybridStrategy(**arguments)


def test_it_is_registered():
    assert isinstance(StrategyRegistry.get("krizhevsky_hybrid"), KrizhevskyHybridStrategy)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Softmax(1), "Softmax"),
        (nn.BatchNorm1d(4), "BatchNorm1d"),
        (nn.LayerNorm(4), "LayerNorm"),
        (nn.PReLU(), "PReLU"),
        (nn.Conv1d(1, 1, 1), "Conv1d"),
        (nn.Flatten(), "Flatten"),
        (nn.Bilinear(2, 2, 2), "Bilinear"),
    ],
)
def test_a_layer_that_mixes_features(layer, name):
    head = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ValueError, match=rf"head\.1\.1 is a {name}, which cannot be divided .* allowed .* nn\.Linear"):
        divisible_layers(head, "head")


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)


def test_a_head_with_a_forward_of_its_own():
    with pytest.raises(ValueError, match="head is a OwnForward"):
        divisible_layers(OwnForward(), "head")


def test_a_head_without_linear_layers():
    with pytest.raises(ValueError, match=r"model\.head has no nn\.Linear"):
        divisible_layers(nn.Sequential(nn.ReLU()), "model.head")


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_is_computed():
    with pytest.raises(ValueError, match="head computes its weight"):
        divisible_layers(nn.utils.weight_norm(nn.Linear(3, 4)), "head")
    with pytest.raises(ValueError, match="head is a ParametrizedLinear"):
        divisible_layers(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "head")


def test_what_is_allowed():
    shared = nn.ReLU()
    head = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), shared, nn.Linear(4, 4), shared, nn.Dropout(), nn.Linear(4, 2))
    assert [path for path, _ in divisible_layers(head, "head")] == [f"head.{index}" for index in range(7)]
    assert len(divisible_layers(nn.Linear(3, 4), "head")) == 1


@pytest.mark.parametrize("name", ["", "nothing", "head.9"])
def test_an_unknown_head(name):
    with pytest.raises(ValueError, match=f"head='{name}' names no submodule of HybridNet.* trunk.* head"):
        find_head(HybridNet(), name, "Strategy")


def test_variable_batch_without_head_step_shows_what_to_write():
    with pytest.raises(ValueError, match="variable_batch=True needs") as error:
        check(HybridNet(), variable_batch=True)
    shown = str(error.value).partition(":\n")[2]
    lines = [line for line in shown.splitlines() if line.strip()]
    assert len(lines) == 6
    # What is shown works, as it stands.
    body = "\n".join(lines)
    scope = {"F": nn.functional}
    exec(f"class Shown:\n{body}", scope)
    module = HybridNet()
    module.head_step = scope["Shown"].head_step.__get__(module)
    x, y = torch.randn(2, 6, dtype=torch.float64), torch.tensor([0, 1])
    assert scope["Shown"].training_step(module, (x, y), 0).dim() == 0
    check(StepNet(), variable_batch=True)


def test_a_parameter_that_the_trunk_shares():
    module = HybridNet()
    module.tied = nn.Linear(5, 3)
    module.tied.weight = module.head[-1].weight
    with pytest.raises(ValueError, match=r"tied\.weight shares a parameter with 'head'"):
        check(module)


def test_copies_of_the_parameters():
    with pytest.raises(ValueError, match="StochasticWeightAveraging keeps copies"):
        check(HybridNet(), callbacks=[StochasticWeightAveraging(0.1)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import of the compiler
def test_a_compiled_head():
    module = HybridNet()
    module.head.compile()
    with pytest.raises(ValueError, match="cannot be compiled; compile the trunk alone"):
        check(module)
    module = HybridNet()
    module.trunk.compile()
    check(module)


def test_fp16_with_several_updates_a_step():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="variable_batch=True cannot run with precision='16-mixed'.*bf16-mixed"):
        check_precision(plugin, True, "Strategy")
    check_precision(plugin, False, "Strategy")


class OfTheHead:
    """Stands for a sharded head that owns all there is."""

    def owns(self, parameter):
        return True


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_look_at_whole_parameters(name):
    optimizer = getattr(torch.optim, name)(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=f"{name} looks at parameters as a whole.* use SGD, Adam, AdamW"):
        check_optimizers([optimizer], OfTheHead())


def test_an_unknown_optimizer_gets_a_warning(caplog):
    class Lamb(torch.optim.Optimizer):
        pass

    with caplog.at_level(logging.WARNING):
        check_optimizers([torch.optim.AdamW(nn.Linear(2, 2).parameters())], OfTheHead())
        assert not caplog.records
        check_optimizers([Lamb(nn.Linear(2, 2).parameters(), {})], OfTheHead())
    assert "Lamb updates rows of the head's weights" in caplog.text
