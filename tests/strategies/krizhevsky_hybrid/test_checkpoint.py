"""Checkpoints of a sharded head, and what is left after errors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies import consolidate_checkpoint
from lightning_dp.strategies.krizhevsky_hybrid.state import memory_of
from tests.ranks import logged, run_processes
from tests.strategies.krizhevsky_hybrid.modules import (
    STEPS,
    Result,
    ScheduledNet,
    StepNet,
    all_batches,
    batches,
    fit_with,
)
from tests.strategies.modules import CLASSES, assert_same, snapshot, trainer


def _saving(folder: Any) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    return {"enable_checkpointing": True, "callbacks": [saver]}


def _checkpoint(rank: int, world_size: int, folder: str, ckpt_path: str | None, epochs: int) -> Result:
    warnings.filterwarnings("ignore", "The dirpath has changed")
    module = ScheduledNet()
    runner = trainer(
        KrizhevskyHybridStrategy(scheme="c"),
        world_size,
        use_distributed_sampler=False,
        **_saving(folder),
        max_epochs=epochs,
    )
    runner.fit(module, batches(rank, world_size, steps=4), ckpt_path=ckpt_path)
    runner.save_checkpoint(Path(folder, "after.ckpt"))
    return snapshot(module, runner)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_holds_the_whole_and_goes_on_anywhere(tmp_path):
    module = ScheduledNet()
    runner = trainer("auto", 1, max_epochs=2, **_saving(tmp_path / "one"))
    runner.fit(module, all_batches(4, steps=4))
    expected = snapshot(module, runner)
    run_processes(4, _checkpoint, 4, str(tmp_path / "four"), None, 1)
    plain = torch.load(tmp_path / "one" / "step=4.ckpt", weights_only=True)
    for name in ("step=4.ckpt", "after.ckpt"):
        checkpoint = torch.load(tmp_path / "four" / name, weights_only=True)
        assert checkpoint["global_step"] == 4
        assert_same(checkpoint["state_dict"], plain["state_dict"], 1e-9)
        for index, state in plain["optimizer_states"][0]["state"].items():
            assert_same(checkpoint["optimizer_states"][0]["state"][index], state, 1e-9)

    # In one process, on the number of ranks that wrote it, and on another one.
    path = str(tmp_path / "four" / "step=4.ckpt")
    module = ScheduledNet()
    runner = trainer("auto", 1, max_epochs=2, **_saving(tmp_path / "plain"))
    runner.fit(module, all_batches(4, steps=4), ckpt_path=path)
    assert_same(snapshot(module, runner), expected, 1e-9)
    for result in run_processes(4, _checkpoint, 4, str(tmp_path / "again"), path, 2):
        assert_same(result, expected, 1e-9)
    for result in run_processes(2, _resume_on_two, path, str(tmp_path / "two")):
        assert_same(result, expected, 1e-9)


def _resume_on_two(rank: int, path: str, folder: str) -> Result:
    """Batches of 6 on two ranks are those of 3 on four."""
    warnings.filterwarnings("ignore", "The dirpath has changed")
    module = ScheduledNet()
    runner = trainer(
        KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False, max_epochs=2, **_saving(folder)
    )
    dataset = all_batches(4, steps=4).dataset
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), 2)), batch_size=6)
    runner.fit(module, loader, ckpt_path=path)
    return snapshot(module, runner)


class AggMo(torch.optim.Optimizer):
    """Aggregated momentum (arXiv 1804.00325): a dictionary of buffers for each parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1, betas: tuple[float, ...] = (0.0, 0.9)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                buffers = self.state[p].setdefault("buffers", {beta: torch.zeros_like(p) for beta in group["betas"]})
                for beta, buffer in buffers.items():
                    p.sub_(buffer.mul_(beta).add_(p.grad), alpha=group["lr"] / len(buffers))
        return loss


class AggMoNet(StepNet):
    """Keeps its optimizer from one run of fit to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = AggMo(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.optimizer


def _nested(folder: str, strategy: Any, world_size: int, loader: DataLoader) -> list[Result]:
    """Train for two epochs: with a checkpoint between them, and with the same module in two runs of fit."""
    module, resumed, options = AggMoNet(), AggMoNet(), {"use_distributed_sampler": False}
    trainer(strategy(), world_size, **options, **_saving(folder)).fit(module, loader)
    path = Path(folder, f"step={STEPS}.ckpt")
    trainer(strategy(), world_size, **options, max_epochs=2).fit(resumed, loader, ckpt_path=path)
    trainer(strategy(), world_size, **options).fit(module, loader)
    return [{name: p.detach() for name, p in each.named_parameters()} for each in (resumed, module)]


def _nested_on_two(rank: int, folder: str) -> list[Result]:
    return _nested(folder, lambda: KrizhevskyHybridStrategy(scheme="c"), 2, batches(rank, 2))


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_states_in_a_dictionary_are_those_of_the_head_too(tmp_path):
    expected = _nested(str(tmp_path / "one"), lambda: "auto", 1, all_batches(2))
    for results in run_processes(2, _nested_on_two, str(tmp_path / "two")):
        for result, one in zip(results, expected, strict=True):
            assert_same(result, one, 1e-9)


def _nested_and_sharded(rank: int, folder: str) -> None:
    with pytest.raises(RuntimeError, match="AggMo keeps 'buffers' of the head's parameters in lists or dicts"):
        _nested(folder, lambda: KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, batches(rank, 2))


def test_a_sharded_checkpoint_has_no_states_in_a_dictionary(tmp_path):
    run_processes(2, _nested_and_sharded, str(tmp_path))
    assert not any(tmp_path.iterdir())


class _Fails(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise KeyError("broken")
        return super().training_step(batch, batch_idx)


class SaveOnException(pl.Callback):
    """What Lightning's OnExceptionCheckpoint does."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(Path(self.folder, "exception.ckpt"))


def _fail(rank: int, folder: str, save: bool) -> str:
    module = _Fails()
    callbacks = [SaveOnException(folder)] if save else []
    runner = trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False, callbacks=callbacks)
    with pytest.raises((KeyError, RuntimeError)) as error:
        runner.fit(module, batches(rank, 2))
    with pytest.raises(RuntimeError, match="'head' holds only one rank's local shard: its last run ended with an exc"):
        module.head(torch.zeros(2, 6, dtype=torch.float64))
    assert "head_step" not in vars(module)
    assert len(dist.distributed_c10d._world.pg_map) == 1
    with pytest.raises(ValueError, match=r"head.1.weight is \(., 6\), and not \(7, 6\).* load a checkpoint"):
        trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False).fit(module, batches(rank, 2))
    return str(error.value)


@pytest.mark.ci
def test_an_exception_leaves_nothing_behind_but_parts_of_the_head(tmp_path):
    assert set(run_processes(2, _fail, str(tmp_path), False)) == {"'broken'"}
    for text in run_processes(2, _fail, str(tmp_path), True):
        assert "cannot save a checkpoint after an exception" in text


def _fail_alone(rank: int) -> None:
    module = _Fails()
    with logged() as said, pytest.raises(KeyError):
        trainer(KrizhevskyHybridStrategy(), 1).fit(module, batches(0, 1))
    assert not said
    assert module.head(torch.zeros(2, 6, dtype=torch.float64)).shape == (2, CLASSES)


def test_one_rank_keeps_the_whole_head_after_an_exception():
    run_processes(1, _fail_alone)


def _refit(rank: int) -> Result:
    module = StepNet()
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters())
    runner = trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="Adafactor computes with whole parameters"):
        runner.fit(module, batches(rank, 2))
    del module.configure_optimizers
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(scheme="c"), 2, lambda: module, {})


@pytest.mark.ci
def test_after_a_mistake_in_the_optimizer_one_can_go_on():
    expected = fit_with(all_batches(2), "auto", 1, StepNet, {})
    for result in run_processes(2, _refit):
        assert_same(result, expected, 1e-9)


class NoOptimizer(StepNet):
    def configure_optimizers(self) -> None:
        return None


class TrunkOnly(StepNet):
    """Leaves the head out of checkpoints."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if not name.startswith("head.")}


def _trunk_only(rank: int, folder: str) -> None:
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, **_saving(folder))
    runner.fit(TrunkOnly(), batches(rank, 2, steps=2))


def test_a_module_may_leave_its_head_out_of_checkpoints(tmp_path):
    run_processes(2, _trunk_only, str(tmp_path))
    (file,) = tmp_path.glob("*.ckpt")
    assert set(torch.load(file, weights_only=True)["state_dict"]) == set(TrunkOnly().state_dict())


class FailsInSetup(StepNet):
    """On one rank only: no other rank can be asked for its rows then."""

    def configure_optimizers(self) -> Any:
        if self.global_rank == 1:
            raise KeyError("no optimizer today")
        return super().configure_optimizers()


def _no_optimizer(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore", ".*configure_optimizers.* returned `None`")
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, **_saving(folder))
    runner.fit(NoOptimizer(), batches(rank, 2, steps=2))


def test_a_module_without_an_optimizer_is_saved(tmp_path):
    run_processes(2, _no_optimizer, str(tmp_path))
    (file,) = tmp_path.glob("*.ckpt")
    assert_same(torch.load(file, weights_only=True)["state_dict"], dict(StepNet().state_dict()), 0.0)


def _fails_in_setup(rank: int) -> Result:
    module = FailsInSetup()
    with pytest.raises((KeyError, RuntimeError)):
        trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False).fit(module, batches(rank, 2))
    assert "forward" not in vars(module.head)
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return dict(module.state_dict())


def test_an_error_in_setup_leaves_the_module_whole_on_each_rank():
    for result in run_processes(2, _fails_in_setup):
        assert_same(result, dict(StepNet().state_dict()), 0.0)


class Names(pl.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.names = list(trainer.strategy.sharded_parameter_names)


def _names(rank: int) -> tuple[list[str], list[str], dict[str, int], float | None]:
    names = Names()
    strategy = KrizhevskyHybridStrategy(scheme="c")
    assert not strategy.sharded_parameter_names
    runner = trainer(strategy, 2, use_distributed_sampler=False, callbacks=[names], max_steps=1)
    runner.fit(StepNet(), batches(rank, 2))
    assert runner.callbacks[0] is names  # and not the strategy's own
    return names.names, list(strategy.sharded_parameter_names), strategy.bytes_sent, strategy.exposed_communication_s


def test_what_a_strategy_says_of_itself_while_fitting_and_after():
    for names, after, sent, waited_s in run_processes(2, _names):
        assert names == [f"head.{name}" for name, _ in StepNet().head.named_parameters()]
        assert not after
        assert sent["features"] == 3 * 6 * 8
        assert "parameters" not in sent
        assert waited_s is None


class OwnClipNet(StepNet):
    """torch's function sees one rank's part of the head."""

    def __init__(self, first_step: int) -> None:
        super().__init__()
        self.first_step = first_step

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step >= self.first_step:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def _drift(rank: int, first_step: int, options: dict[str, Any]) -> tuple[str, int]:
    runner = trainer(KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False, **options)
    with pytest.raises(RuntimeError) as error:
        runner.fit(OwnClipNet(first_step), batches(rank, 2))
    return str(error.value), runner.global_step


@pytest.mark.parametrize(("first_step", "found_at"), [(0, 1), (1, 3)])
def test_trunks_that_drift_apart_are_found_soon(first_step, found_at):
    for text, step in run_processes(2, _drift, first_step, {}):
        assert "the trunk's parameters are not the same on all ranks" in text
        assert step == found_at


@pytest.mark.ci
def test_trunks_that_drift_apart_are_not_saved(tmp_path):
    for text, step in run_processes(2, _drift, 4, _saving(str(tmp_path))):
        assert "the trunk's parameters are not the same on all ranks" in text
        assert step == STEPS


def _load_while_fitting(rank: int) -> Result:
    """As the learning rate finder does."""
    module = StepNet()
    before = {"state_dict": {name: value.clone() for name, value in module.state_dict().items()}}

    class Load(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.strategy.load_model_state_dict(before)

    runner = trainer(
        KrizhevskyHybridStrategy(scheme="c"), 2, use_distributed_sampler=False, callbacks=[Load()], max_steps=3
    )
    runner.fit(module, batches(rank, 2))
    return dict(module.state_dict())


@pytest.mark.ci
def test_a_whole_checkpoint_can_be_loaded_while_fitting():
    for result in run_processes(2, _load_while_fitting):
        assert_same(result, dict(StepNet().state_dict()), 0.0)


class GoesBack(pl.Callback):
    """Goes back to a checkpoint by hand, as after a spike of the loss."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)
        if batch_idx == 3:
            checkpoint = torch.load(self.path, weights_only=True)
            pl_module.load_state_dict(checkpoint["state_dict"])
            trainer.optimizers[0].load_state_dict(checkpoint["optimizer_states"][0])


def _go_back(rank: int, path: str) -> Result:
    return fit_with(batches(rank, 2), KrizhevskyHybridStrategy(), 2, StepNet, {"callbacks": [GoesBack(path)]})


@pytest.mark.ci
def test_weights_and_optimizer_of_a_checkpoint_can_be_loaded_by_hand(tmp_path):
    expected = fit_with(all_batches(2), "auto", 1, StepNet, {"callbacks": [GoesBack(str(tmp_path / "one.ckpt"))]})
    for result in run_processes(2, _go_back, str(tmp_path / "two.ckpt")):
        assert_same(result, expected, 1e-9)


class Listed(StepNet):
    """The same for parameters that it lists itself, past the hooks of `torch.nn.Module.state_dict`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"net.{name}": value for name, value in self.named_parameters()}


class Copied(Listed):
    """It copies the parameters that it lists, as code does that saves them from a GPU."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in super().state_dict().items()}


class Renamed(StepNet):
    """Its checkpoints give the head other names, so that another program can load them."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


class Nested(StepNet):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"net": super().state_dict(*args, **kwargs)}


class Halved(StepNet):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"net.{name}": value.half() for name, value in super().state_dict(*args, **kwargs).items()}


def _saved_by(rank: int, world_size: int, net: type[StepNet], folder: str, state_dict_type: Any) -> None:
    strategy = KrizhevskyHybridStrategy(state_dict_type=state_dict_type)
    runner = trainer(strategy, world_size, use_distributed_sampler=False, **_saving(folder))
    runner.fit(net(), batches(rank, world_size))


def _refused(rank: int, net: type[StepNet], folder: str) -> str:
    with pytest.raises(RuntimeError) as error:
        _saved_by(rank, 2, net, folder, "sharded")
    return str(error.value)


@pytest.mark.ci
@pytest.mark.parametrize("net", [Nested, Halved, Copied])
def test_a_sharded_checkpoint_without_the_head_in_a_known_form_is_refused(tmp_path, net):
    for text in run_processes(2, _refused, net, str(tmp_path)):
        assert f"the state_dict of {net.__name__} lacks head.1.weight and has other keys ('net" in text


@pytest.mark.ci
@pytest.mark.parametrize(
    ("state_dict_type", "net"),
    [("full", Renamed), ("full", Listed), ("full", Copied), ("sharded", Renamed), ("sharded", Listed)],
)
def test_a_head_under_other_names_is_saved_as_a_whole(tmp_path, state_dict_type, net):
    run_processes(4, _saved_by, 4, net, str(tmp_path), state_dict_type)
    path = tmp_path / f"step={STEPS}.ckpt"
    if state_dict_type == "sharded":
        consolidate_checkpoint(path, tmp_path / "whole.ckpt")
        path = tmp_path / "whole.ckpt"
    module = net()
    trainer("auto", 1).fit(module, all_batches(4))
    assert_same(torch.load(path, weights_only=True)["state_dict"], module.state_dict(), 1e-9)


class Turned(nn.Linear):
    """Before version 2 its states had the weight the other way round."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *args)


class TurnedNet(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Turned(6, 6), nn.Tanh()).double()


@pytest.mark.ci
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_a_layer_finds_its_version_in_a_checkpoint(tmp_path, state_dict_type):
    run_processes(2, _saved_by, 2, TurnedNet, str(tmp_path), state_dict_type)
    path = tmp_path / f"step={STEPS}.ckpt"
    if state_dict_type == "sharded":
        consolidate_checkpoint(path, tmp_path / "whole.ckpt")
        path = tmp_path / "whole.ckpt"
    module, expected = TurnedNet(), TurnedNet()
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    trainer("auto", 1).fit(expected, all_batches(2))
    assert_same(dict(module.named_parameters()), dict(expected.named_parameters()), 1e-9)


def test_a_sparse_tensor_in_a_checkpoint_is_no_local_shard():
    assert memory_of(torch.eye(3).to_sparse()) is None
    whole = torch.eye(3)
    assert memory_of(whole.detach()) == memory_of(whole) != memory_of(whole.clone())


class SavesWithoutFrozen(StepNet):
    """Chooses what to save from its own ``state_dict``, as `ModelPruning` does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.cost(self(batch[0]), batch[1])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value for name, value in self.state_dict().items() if "frozen" not in name}


def choosing(strategy: Any, world_size: int, loaders: tuple[Any, Any], net: type[StepNet], folder: str) -> None:
    module = net()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    pruning = ModelPruning("l1_unstructured", [(module.trunk[0], "weight")], amount=0.5)
    callbacks = [saver, pruning] if net is StepNet else [saver]
    runner = trainer(
        strategy, world_size, use_distributed_sampler=False, callbacks=callbacks, enable_checkpointing=True
    )
    runner.fit(module, loaders[0], loaders[1] if net is SavesWithoutFrozen else None)


def _choosing(rank: int, kind: Any, net: type[StepNet], folder: str) -> list[str]:
    warnings.simplefilter("ignore")  # Lightning advises on loaders, and says that it prunes
    loaders = batches(rank, 2, steps=4), batches(rank, 2, steps=1)
    with logged() as said:
        choosing(KrizhevskyHybridStrategy(state_dict_type=kind), 2, loaders, net, folder)
    return [message for message in said if "state_dict()" in message]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("net", [StepNet, SavesWithoutFrozen])
def test_a_state_dict_that_is_asked_for_while_saving_is_that_of_the_checkpoint(kind, net, tmp_path):
    choosing("auto", 1, (all_batches(2, steps=4), all_batches(2, steps=1)), net, str(tmp_path / "one"))
    assert run_processes(2, _choosing, kind, net, str(tmp_path / "two")) == [[], []]
    for name in ("step=2.ckpt", "step=4.ckpt"):
        file = tmp_path / "two" / name
        if kind == "sharded":
            consolidate_checkpoint(file, tmp_path / "whole.ckpt", weights_only=False)
            file = (tmp_path / "whole.ckpt").rename(tmp_path / f"whole-{name}")
        found, plain = (torch.load(path, weights_only=False) for path in (file, tmp_path / "one" / name))
        assert_same(found["state_dict"], plain["state_dict"], 1e-9)
