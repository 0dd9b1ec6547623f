"""What hybrid parallelism refuses, with the name of the culprit and the remedy."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from pytorch_lightning.callbacks import ModelPruning, StochasticWeightAveraging
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.profilers.pytorch import RegisterRecordFunction
from torch import nn

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp._lightning import StrategyRegistry
from lightning_dp.optim import LARS as PackageLARS
from lightning_dp.optim import KrizhevskySGD
from lightning_dp.strategies.krizhevsky_hybrid.checks import check_module, check_optimizer, find_head
from lightning_dp.strategies.krizhevsky_hybrid.head import divisible_layers
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, batches
from tests.strategies.modules import trainer


def check(module, head="head", variable_batch=False, **options):
    runner = trainer("auto", 1, **options)
    check_module(module, runner, head, variable_batch)


def test_the_default_scheme_is_the_fastest_that_can_do_it():
    assert KrizhevskyHybridStrategy()._options.scheme == "a"
    assert KrizhevskyHybridStrategy(variable_batch=True)._options.scheme == "c"


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
    with pytest.raises(ValueError, match=rf"head\.1\.1 is a {name}, which cannot be sharded .* nn\.Linear"):
        divisible_layers(head, "head")


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)


def test_a_head_with_a_forward_of_its_own():
    with pytest.raises(ValueError, match=r"head is a OwnForward.*Name an nn.Linear inside instead.* head='head.fc'"):
        divisible_layers(OwnForward(), "head")


class MyLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("head", "remedy"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 9)), r"the largest is head='head\.2'"),
        (nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(1)), r"head='head\.0'.* leave it out and use F.cross_entropy"),
        (nn.Sequential(MyLinear(3, 4)), "Use nn.Linear itself"),
        (nn.Sequential(nn.Conv2d(3, 4, 1)), "Name the submodule that holds the large nn.Linear"),
    ],
)
def test_the_remedy_is_one_that_works(head, remedy):
    with pytest.raises(ValueError, match=remedy):
        divisible_layers(head, "head")


class Warmup(StepNet):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)


def test_with_variable_batch_an_optimizer_step_of_the_module_would_not_run_for_the_head():
    check(Warmup())
    with pytest.raises(ValueError, match=r"Warmup overrides optimizer_step.*on_before_optimizer_step, which runs"):
        check(Warmup(), variable_batch=True)


def test_with_variable_batch_manual_optimization_would_not_decide_when_the_head_is_updated():
    module = StepNet()
    module.automatic_optimization = False
    check(module)
    with pytest.raises(ValueError, match=r"StepNet sets automatic_optimization=False.*use variable_batch=False"):
        check(module, variable_batch=True)


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
        find_head(HybridNet(), name)


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
    with pytest.raises(ValueError, match=r"tied\.weight shares a parameter with the head 'head'"):
        check(module)


def test_a_second_name_of_the_head_is_no_tie():
    module = HybridNet()
    module.classifier = module.head
    module.last = module.head[-1]
    check(module)


def test_frozen_memory_that_the_head_shares_stays_equal():
    module = HybridNet()
    module.copy = nn.Linear(5, 3).double()
    module.copy.weight.data = module.head[-1].weight.data
    with pytest.raises(ValueError, match="share memory"):
        check(module)
    module.copy.requires_grad_(False)
    with pytest.raises(ValueError, match="share memory"):
        check(module)
    module.head.requires_grad_(False)
    check(module)


def test_copies_of_the_parameters():
    with pytest.raises(ValueError, match="StochasticWeightAveraging keeps copies"):
        check(HybridNet(), callbacks=[StochasticWeightAveraging(0.1)])


def test_pruning_of_the_head():
    module = HybridNet()
    pruning = ModelPruning("l1_unstructured", use_lottery_ticket_hypothesis=False)
    pruning.setup(trainer("auto", 1), module, "fit")  # before the strategy's set-up
    with pytest.raises(ValueError, match="ModelPruning compares the parameters of the head 'head'"):
        check(module, callbacks=[pruning])
    of_trunk = ModelPruning("l1_unstructured", parameters_to_prune=[(module.trunk[0], "weight")])
    check(module, callbacks=[of_trunk])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import of the compiler
def test_a_compiled_head():
    module = HybridNet()
    module.head.compile()
    with pytest.raises(ValueError, match="compile the trunk alone"):
        check(module)
    module = HybridNet()
    module.trunk.compile()
    check(module)


class CompiledStep(StepNet):
    head_step = torch.compile(StepNet.head_step)


class EagerStep(StepNet):
    head_step = torch.compiler.disable(StepNet.head_step)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_head_step():
    in_init = StepNet()
    in_init.head_step = torch.compile(in_init.head_step)
    for module in (in_init, CompiledStep()):
        with pytest.raises(ValueError, match="head_step is compiled.*compile the trunk, or the loss"):
            check(module)
    check(EagerStep())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["compile()", "torch.compile", "torch.jit.script", "itself"])
def test_a_compiled_module_around_the_head_is_named(how):
    module = HybridNet()
    module.net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(6, 3)))
    head, culprit = "net.1", "net"
    if how == "compile()":
        module.net.compile()
    elif how == "torch.compile":
        module.net = torch.compile(module.net)
    elif how == "torch.jit.script":
        module.net = torch.jit.script(module.net)
    else:
        module.compile()
        culprit = "HybridNet"
    with pytest.raises(
        ValueError, match=f"{culprit} is compiled or scripted.* the head 'net.1'.*compile the trunk alone"
    ):
        check(module, head)


def test_ranks_that_may_leave_a_validation_out():
    module = HybridNet()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    with pytest.raises(ValueError, match="=True lets ranks without batches skip a validation"):
        check(module)


def test_ranks_that_validate_each_by_its_own_clock():
    module, interval = HybridNet(), {"seconds": 1}
    with pytest.raises(ValueError, match=r"val_check_interval is a duration.* use a number of batches, such as"):
        check_module(module, trainer("ddp", 2, val_check_interval=interval), "head", False)
    check(module, val_check_interval=interval)  # one rank agrees with itself


def test_fp16_with_several_updates_a_step():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="variable_batch=True cannot run with precision='16-mixed'.*bf16-mixed"):
        check(StepNet(), variable_batch=True, plugins=[plugin])
    check(StepNet(), plugins=[plugin])


class OfTheHead:
    """Stands for a sharded head that owns all there is."""

    def owns(self, parameter):
        return True


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_look_at_whole_parameters(name):
    optimizer = getattr(torch.optim, name)(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=f"{name} computes with whole parameters.* use one of SGD, Adam, AdamW"):
        check_optimizer(optimizer, OfTheHead())


def test_an_optimizer_of_whole_parameters_may_hold_a_frozen_head():
    layer = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.Adafactor(layer.parameters())
    check_optimizer(optimizer, OfTheHead())
    layer.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="Adafactor computes with whole parameters"):
        check_optimizer(optimizer, OfTheHead())


class LARS(torch.optim.SGD):
    """As many implementations do, it extends SGD, and scales by norms of whole layers."""


class Lamb(torch.optim.Optimizer):
    pass


class MySGD(torch.optim.SGD):
    pass


class Other(torch.optim.Optimizer):
    pass


@pytest.mark.parametrize("kind", [LARS, partial(PackageLARS, lr=0.1), partial(Lamb, defaults={})])
def test_optimizers_that_are_known_for_norms_of_layers(kind):
    with pytest.raises(ValueError, match=r"(LARS|Lamb) computes with whole parameters.* use one of SGD, Adam, AdamW"):
        check_optimizer(kind(nn.Linear(2, 2).parameters()), OfTheHead())


@pytest.mark.parametrize("kind", [MySGD, partial(Other, defaults={})])
def test_an_unknown_optimizer_gets_a_warning(kind, caplog):
    with caplog.at_level(logging.WARNING):
        check_optimizer(torch.optim.AdamW(nn.Linear(2, 2).parameters()), OfTheHead())
        check_optimizer(KrizhevskySGD(nn.Linear(2, 2).parameters(), lr=0.1), OfTheHead())
        assert not caplog.records
        check_optimizer(kind(nn.Linear(2, 2).parameters()), OfTheHead())
    assert "updates a shard of the head's weights" in caplog.text


def _profiled(rank: int) -> None:
    module = HybridNet()
    with (
        RegisterRecordFunction(module),  # as Trainer(profiler="pytorch") does
        pytest.raises(ValueError, match=r"head.0 has hooks.* use PyTorchProfiler\(record_module_names=False\)"),
    ):
        trainer(KrizhevskyHybridStrategy(), 1).fit(module, batches(0, 1))


def test_hooks_of_the_profiler_are_named():
    run_processes(1, _profiled)
