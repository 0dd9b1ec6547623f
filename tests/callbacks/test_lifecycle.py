"""What adaptive global batch norm does to the model before, after and between fits, and after exceptions."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import EMAWeightAveraging, LearningRateFinder
from torch import nn

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau
from lightning_dp.layers import GlobalBatchNorm1d, global_batch_norm_layers
from lightning_dp.strategies import LayeredSGDStrategy
from tests.callbacks.training import CLASSES, FEATURES, STEPS, Net, Probe, assert_same, fit, rank_loader, state_of
from tests.ranks import RankError, run_processes

IGNORED = "_ddp_params_and_buffers_to_ignore"
STRATEGIES = {"one process": lambda: "auto", "ddp": lambda: "ddp", "layered sgd": lambda: LayeredSGDStrategy(1)}


def objects(net: nn.Module) -> dict[str, Any]:
    """Types of all modules, and identity of all parameters and buffers."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {
        **{name: type(module) for name, module in net.named_modules()},
        **{f"tensor {name}": id(tensor) for name, tensor in tensors.items()},
    }


class Types(pl.Callback):
    """Record of the types of the batch norm layers during training."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.types = [type(layer) for layer in (pl_module.net[1], pl_module.net[4])]


def train_and_transform(rank: int, world_size: int, strategy: str) -> None:
    net, types = Net(), Types()
    before = objects(net)
    fit(world_size, AdaptiveGlobalBatchNorm(), types, net=net, strategy=STRATEGIES[strategy]())
    assert types.types == [GlobalBatchNorm1d] * 2
    assert objects(net) == before
    assert not getattr(net, IGNORED, [])
    net.eval()
    x = torch.randn(3, FEATURES, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(torch.jit.script(net.net)(x), net.net(x))
        assert torch.equal(torch.fx.symbolic_trace(net.net)(x), net.net(x))
        assert isinstance(torch.ao.quantization.fuse_modules(net.net, ["0", "1"])[1], nn.Identity)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_fit_the_model_is_what_it_was_and_can_be_transformed(strategy):
    world_size = 1 if strategy == "one process" else 2
    if world_size == 1:
        train_and_transform(0, 1, strategy)
    else:
        run_processes(world_size, quietly, train_and_transform, world_size, strategy)


def quietly(rank: int, function: Any, *args: Any) -> Any:
    """Call ``function`` where warnings about deprecated functions of torch are no errors."""
    import warnings

    warnings.filterwarnings("ignore", category=DeprecationWarning)
    return function(rank, *args)


def train_twice(rank: int) -> tuple[list[bool], dict[str, torch.Tensor]]:
    callback, probe, net = AdaptiveGlobalBatchNorm(), Probe(), Net()
    setattr(net, IGNORED, [])
    fit(2, callback, net=net, max_steps=1)
    assert getattr(net, IGNORED) == []
    fit(2, callback, probe, net=net, max_steps=2)
    return probe.is_global, state_of(net)


def test_a_second_fit_of_the_same_model_works():
    first, second = run_processes(2, train_twice)
    assert first[0] == [True, True]
    assert_same(first[1], second[1])


@pytest.mark.parametrize("when", ["before a fit", "after a fit"])
def test_a_launcher_can_send_it_to_new_processes(when):
    """The strategies that spawn processes, such as ``"ddp_spawn"``, pickle the callbacks."""
    callback = AdaptiveGlobalBatchNorm(max_batch_size=8, convergence=Plateau("train_loss"))
    if when == "after a fit":
        fit(1, callback, net=Net((1.0,)), strategy="auto")
    sent = pickle.loads(pickle.dumps(callback))  # noqa: S301  our own
    net, probe = Net((1.0,)), Probe()
    fit(1, sent, probe, net=net, strategy="auto")
    assert probe.is_global == [True] * STEPS


class Copier(pl.Callback):
    """Copies all callbacks, as a search over hyperparameters may."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.copies = copy.deepcopy(trainer.callbacks)


def copy_within_a_fit(rank: int) -> bool:
    callback = AdaptiveGlobalBatchNorm(max_batch_size=100, group_size=1)
    copier = Copier()
    fit(2, callback, copier)
    (copied,) = (each for each in copier.copies if isinstance(each, AdaptiveGlobalBatchNorm))
    return (copied.max_batch_size, copied.group_size) == (100, 1)


def test_callbacks_can_be_copied_within_a_fit():
    assert run_processes(2, copy_within_a_fit) == [True, True]


class Failing(pl.Callback):
    def __init__(self, hook: str, error: type[BaseException]) -> None:
        def fail(*_: Any) -> None:
            raise error("as in a user's code")

        setattr(self, hook, fail)


@pytest.fixture
def sigint() -> Iterator[None]:
    """Lightning ignores SIGINT after a KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start", "on_after_backward", "on_train_end"])
def test_after_an_exception_the_model_is_what_it_was_and_can_be_trained(hook, error):
    net = Net()
    setattr(net, IGNORED, ["of the user"])
    before = objects(net)
    with pytest.raises((error, SystemExit)):  # Lightning exits after a KeyboardInterrupt
        fit(1, AdaptiveGlobalBatchNorm(), Failing(hook, error), net=net, strategy="auto")
    assert objects(net) == before
    assert getattr(net, IGNORED) == ["of the user"]
    fit(1, AdaptiveGlobalBatchNorm(), net=net, strategy="auto")
    assert objects(net) == before
    assert getattr(net, IGNORED) == ["of the user"]


def train_after_exception(rank: int) -> dict[str, torch.Tensor]:
    net, callback = Net(), AdaptiveGlobalBatchNorm(max_batch_size=100, group_size=1)
    with pytest.raises(RuntimeError, match="as in a user's code"):
        fit(2, callback, Failing("on_train_batch_end", RuntimeError), net=net)
    assert not global_batch_norm_layers(net)
    fresh = Net()
    fit(2, callback, net=fresh)
    return state_of(fresh)


def train_once(rank: int) -> dict[str, torch.Tensor]:
    net, _ = fit(2, AdaptiveGlobalBatchNorm(max_batch_size=100, group_size=1))
    return state_of(net)


@pytest.mark.ci
def test_a_failed_fit_does_not_affect_the_next_one():
    for state, expected in zip(run_processes(2, train_after_exception), run_processes(2, train_once), strict=True):
        assert_same(state, expected)


def fit_alone_in_a_job_of_two(rank: int) -> list[dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    if rank == 1:
        return []
    return [state_of(fit(1, *callbacks, strategy="auto")[0]) for callbacks in ((AdaptiveGlobalBatchNorm(),), ())]


def test_a_trainer_of_one_rank_in_a_larger_job_trains_alone():
    """As after a fit on all ranks, on rank 0; or as with a training on each rank."""
    (actual, expected), _ = run_processes(2, fit_alone_in_a_job_of_two)
    assert_same(actual, expected)


def test_layers_of_the_user_stay_global_and_get_their_switch_back():
    net = Net()
    own = GlobalBatchNorm1d(6).double()
    own.is_global = False
    net.net[1] = own
    fit(1, AdaptiveGlobalBatchNorm(), net=net, strategy="auto")
    assert net.net[1] is own
    assert own.is_global is False
    assert type(net.net[4]) is nn.BatchNorm1d


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_layers_of_the_user_keep_their_group_after_an_exception_in_validation():
    net, group = Net(), object()
    net.net[1] = own = GlobalBatchNorm1d(6, group=group).double()  # type: ignore[arg-type]
    callbacks = [AdaptiveGlobalBatchNorm(), Failing("on_validation_batch_end", RuntimeError)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
    with pytest.raises(RuntimeError, match="as in a user's code"):
        trainer.validate(net, rank_loader(1))
    assert own.group is group


class Teaching(Net):
    """Its teacher begins with the weights that a checkpoint may have brought."""

    def on_fit_start(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)


def test_a_teacher_that_is_copied_when_fit_starts_is_reverted_too():
    net = Teaching()
    fit(1, AdaptiveGlobalBatchNorm(), net=net, strategy="auto")
    assert [type(net.teacher[at]) for at in (1, 4)] == [nn.BatchNorm1d] * 2


def test_copies_of_the_model_in_other_callbacks_are_reverted():
    class Keeping(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.copied = copy.deepcopy(pl_module)
            self.part = copy.deepcopy(pl_module.net)
            assert len(global_batch_norm_layers(self.copied)) == len(global_batch_norm_layers(self.part)) == 2

    average, keeping = EMAWeightAveraging(), Keeping()
    fit(1, AdaptiveGlobalBatchNorm(), average, keeping, strategy="auto")
    assert not global_batch_norm_layers(keeping.copied)
    assert not global_batch_norm_layers(keeping.part)
    assert not global_batch_norm_layers(average._average_model)


# --- before the first step, and in a second fit ---


class Modes(Net):
    """Record of the layers' mode in each forward in training."""

    def __init__(self, losses: tuple[float, ...] = ()) -> None:
        super().__init__(losses)
        self.lr = 0.1
        self.modes: list[set[bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.modes.append({layer.is_global for layer in global_batch_norm_layers(self)})
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("phase", "is_global"), [("until_converged", True), ("after_converged", False)])
def test_the_learning_rate_is_searched_in_the_phase_in_which_training_begins(phase, is_global, tmp_path):
    """The search takes all other callbacks away, so that none decides about its steps."""
    net = Modes()
    callback = AdaptiveGlobalBatchNorm(convergence=lambda metrics: False, global_phase=phase)
    search = LearningRateFinder(1e-3, 1.0, num_training_steps=3, early_stop_threshold=None)
    fit(1, callback, search, net=net, strategy="auto", default_root_dir=tmp_path)
    assert net.modes == [{is_global}] * (3 + STEPS)


def test_a_callback_that_has_converged_says_so_in_the_next_fit(caplog):
    callback = AdaptiveGlobalBatchNorm(convergence=Plateau("train_loss", patience=1))
    warning = "the criterion was met in an earlier fit, so statistics are local from the first step on"
    for expected in ([{True}] * 2 * STEPS, [{False}] * 2 * STEPS):
        net = Modes((1.0, 1.0))
        assert warning not in caplog.text
        fit(1, callback, net=net, strategy="auto", max_epochs=2)
        assert net.modes == expected
    assert warning in caplog.text


# --- layers that appear after the conversion ---


class Late(Net):
    """A network that builds or replaces a layer in the given hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()

        def build(*_: Any, **__: Any) -> None:
            self.late = nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.BatchNorm1d(CLASSES)).double()

        setattr(self, hook, build)


def train_late(rank: int, hook: str) -> None:
    fit(2, AdaptiveGlobalBatchNorm(), net=Late(hook))


@pytest.mark.parametrize("hook", ["setup", "configure_model", "on_train_start"])
def test_layers_that_are_built_after_the_conversion_are_refused_by_name(hook):
    with pytest.raises(RankError) as error:
        run_processes(2, train_late, hook)
    message = "found batch norm layers that were created after its setup and would keep local statistics: 'late.1'"
    assert f"ValueError: AdaptiveGlobalBatchNorm {message}" in str(error.value)
