"""What else Lightning does, under hybrid parallelism: the same as in one process on the concatenated batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from lightning_dp import AdaptiveGlobalBatchNorm, KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, all_batches, batches
from tests.strategies.modules import CLASSES, FEATURES, assert_same, optimizers, snapshot, trainer

Result = dict[str, Tensor]


class ScheduledNet(StepNet):
    """A learning rate that changes every step."""

    def configure_optimizers(self) -> Any:
        optimizer = optimizers("momentum", self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoRatesNet(StepNet):
    """The head in a parameter group of its own."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.trunk.parameters()}, {"params": self.head.parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)


class ManualNet(StepNet):
    """Two optimizers, stepped by hand, with gradients of two batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [optimizers("momentum", self.trunk.parameters()), optimizers("adamw", self.head.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class BatchNormNet(StepNet):
    """Batch norm in the trunk."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trunk.insert(1, nn.BatchNorm1d(8).double())


class RecomputedHeadNet(HybridNet):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.head, self.trunk(x), use_reentrant=False)


class RecomputedNet(HybridNet):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedStepNet(StepNet):
    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(checkpoint(self.head, features, use_reentrant=False), target)


class FrozenTrunkNet(StepNet):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trunk.requires_grad_(False)


class InPlaceNet(StepNet):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trunk[-1] = nn.Identity()  # tanh needs its output again
        self.head[0] = nn.ReLU(inplace=True)


class EvalNet(StepNet):
    """Lightning keeps the mode that a module has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.eval()


CASES: dict[str, tuple[type[HybridNet], dict[str, Any]]] = {
    "clip by norm": (StepNet, {"gradient_clip_val": 0.05}),
    "clip by norm, head only": (HybridNet, {"gradient_clip_val": 0.05}),
    "clip by value": (StepNet, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": (StepNet, {"accumulate_grad_batches": 3}),
    "accumulation, head only": (HybridNet, {"accumulate_grad_batches": 3}),
    "schedule": (ScheduledNet, {}),
    "two rates": (TwoRatesNet, {"gradient_clip_val": 0.05}),
    "manual": (ManualNet, {}),
    "recomputed head": (RecomputedHeadNet, {"gradient_clip_val": 0.05}),
    "recomputed net": (RecomputedNet, {"gradient_clip_val": 0.05}),
    "recomputed head in head_step": (RecomputedStepNet, {"gradient_clip_val": 0.05}),
    "frozen trunk": (FrozenTrunkNet, {}),
    "in place": (InPlaceNet, {}),
    "eval": (EvalNet, {"gradient_clip_val": 0.05}),
    "bf16": (StepNet, {"precision": "bf16-mixed"}),
}


def _module(net: type[HybridNet], options: dict[str, Any]) -> HybridNet:
    module = net()
    return module.float() if "precision" in options or "plugins" in options else module


class _Float32(DataLoader):
    def __iter__(self) -> Any:
        return ((x.float(), y) for x, y in super().__iter__())


def _loader(loader: DataLoader, options: dict[str, Any]) -> DataLoader:
    return (
        _Float32(loader.dataset, batch_size=loader.batch_size)
        if "precision" in options or "plugins" in options
        else loader
    )


def _fit(loader: DataLoader, strategy: Any, world_size: int, net: type[HybridNet], options: dict[str, Any]) -> Result:
    module = _module(net, options)
    own = trainer(strategy, world_size, use_distributed_sampler=False, **options)
    own.fit(module, _loader(loader, options))
    return snapshot(module, own)


def _cases(rank: int, world_size: int) -> dict[str, Result]:
    warnings.filterwarnings("ignore", "Found .* in eval mode")
    loader = batches(rank, world_size)
    return {
        name: _fit(loader, KrizhevskyHybridStrategy(), world_size, net, options)
        for name, (net, options) in CASES.items()
    }


def assert_close_in_16_bits(actual: Result, expected: Result) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0.02, atol=0.005)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_each_equals_one_process():
    of_ranks = run_processes(2, _cases, 2, timeout=120)
    plain = _fit(all_batches(2), "auto", 1, StepNet, {})
    for name, (net, options) in CASES.items():
        expected = _fit(all_batches(2), "auto", 1, net, options)
        for of_rank in of_ranks:
            if name == "bf16":
                assert_close_in_16_bits(of_rank[name], expected)
            else:
                assert_same(of_rank[name], expected, 1e-9)
        with pytest.raises(AssertionError):  # the option does something
            assert_same({k: expected[k].double() for k in plain if k in expected}, plain, 1e-9)


def _clip_in_sub_passes(rank: int) -> Result:
    module = StepNet()
    strategy = KrizhevskyHybridStrategy(scheme="c", variable_batch=True)
    trainer(strategy, 2, use_distributed_sampler=False, gradient_clip_val=0.05).fit(module, batches(rank, 2))
    return {name: p.detach() for name, p in module.named_parameters()}


def test_variable_batch_clips_each_update_by_the_norm_of_what_it_updates():
    from tests.strategies.krizhevsky_hybrid.test_strategy import variable_batch_loop

    expected = {name: p.detach() for name, p in variable_batch_loop("c", 2, "momentum", clip=0.05).named_parameters()}
    for result in run_processes(2, _clip_in_sub_passes):
        assert_same(result, expected, 1e-9)


class OverflowNet(StepNet):
    """In steps 3 and 7 the last rank's slice of the first layer overflows: the trunk's gradients do not show it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bias = self.head[1].bias
        hook = None
        if batch_idx in (3, 7) and self.trainer.global_rank == 1:
            hook = bias.register_hook(lambda gradient: gradient * torch.inf)
        loss = super().training_step(batch, batch_idx)
        if hook is not None:
            self.hooks.append(hook)
        return loss

    hooks: ClassVar[list[Any]] = []

    def on_after_backward(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()


def _half() -> MixedPrecision:
    # Lightning has no fp16 on CPU of its own, but the plugin works there.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


def _fp16(rank: int) -> list[tuple[Result, float]]:
    results = []
    for net in (OverflowNet, StepNet, HybridNet):
        plugin = _half()
        result = _fit(batches(rank, 2), KrizhevskyHybridStrategy(), 2, net, {"plugins": [plugin]})
        results.append((result, plugin.scaler.get_scale()))
        assert type(plugin.scaler) is torch.amp.GradScaler
    return results


def test_fp16_skips_a_step_on_all_ranks_where_one_slice_overflows():
    first, second = run_processes(2, _fp16)
    expected = _fit(all_batches(2), "auto", 1, StepNet, {"precision": "bf16-mixed"})
    for (ours, scale), (others, other_scale), num_skipped in zip(first, second, (2, 0, 0), strict=True):
        assert scale == other_scale == 2.0 ** (10 - num_skipped)
        assert_same(ours, others, 0.0)
        assert all(value.isfinite().all() for value in ours.values())
        if not num_skipped:
            assert_close_in_16_bits(ours, expected)


def _uneven(rank: int, world_size: int, net: type[HybridNet], scheme: str) -> tuple[Result, list[Tensor]]:
    """Rank r has r + 1 of every 6 examples in training, and batches down to none in prediction."""
    dataset = all_batches(1).dataset
    own = [i for i in range(len(dataset)) if (i % 6) in {0: (0,), 1: (1, 2), 2: (3, 4, 5)}[rank]]
    module = net()
    strategy = KrizhevskyHybridStrategy(scheme=scheme)
    runner = trainer(strategy, world_size, use_distributed_sampler=False, limit_val_batches=2)
    loader = DataLoader(Subset(dataset, own), batch_size=rank + 1)
    evaluation = DataLoader(Subset(dataset, range(7)), batch_size=[4, 1, 2][rank])
    runner.fit(module, loader)
    state = snapshot(module, runner)
    evaluated = _while_fitting(module, world_size, scheme, [x for x, _ in evaluation])
    return state, evaluated


def _while_fitting(module: HybridNet, world_size: int, scheme: str, own: list[Tensor]) -> list[Tensor]:
    """Logits of batches of different sizes in validation, with the head divided: the last batches are empty."""
    seen: list[Tensor] = []
    longest = 7

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert len(pl_module.head[-1].weight) < CLASSES
            pl_module.eval()
            with torch.no_grad():
                for index in range(longest):
                    x = own[index] if index < len(own) else torch.empty(0, FEATURES, dtype=torch.float64)
                    seen.append(pl_module(x))
            pl_module.train()

    strategy = KrizhevskyHybridStrategy(scheme=scheme)
    again = trainer(strategy, world_size, use_distributed_sampler=False, max_steps=1, callbacks=[Look()])
    again.fit(module, batches(0, world_size))
    return seen


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_uneven_batches(scheme):
    results = run_processes(3, _uneven, 3, StepNet, scheme)
    loader = DataLoader(all_batches(1).dataset, batch_size=6)
    expected = StepNet()
    single = trainer("auto", 1)
    single.fit(expected, loader)
    x = torch.stack([all_batches(1).dataset[i][0] for i in range(7)])
    with torch.no_grad():
        logits = expected.eval()(x)
    for state, evaluated in results:
        assert_same(state, snapshot(expected, single), 1e-9)
        torch.testing.assert_close(torch.cat(evaluated), logits, rtol=1e-9, atol=1e-12)


def _unequal_own_batches(rank: int, strategy: str) -> Result:
    """Without head_step each rank's loss is the mean over its own examples, and ranks count equally, as under DDP."""
    dataset = all_batches(1).dataset
    own = [i for i in range(len(dataset)) if (i % 3 == 0) == (rank == 0)]
    module = HybridNet()
    runner = trainer(KrizhevskyHybridStrategy() if strategy == "hybrid" else "ddp", 2, use_distributed_sampler=False)
    runner.fit(module, DataLoader(Subset(dataset, own), batch_size=1 + rank))
    return snapshot(module, runner)


def test_without_head_step_ranks_count_equally_as_under_ddp():
    for ours, theirs in zip(
        run_processes(2, _unequal_own_batches, "hybrid"), run_processes(2, _unequal_own_batches, "ddp"), strict=True
    ):
        assert_same(ours, theirs, 1e-9)


def _dropout(rank: int, net: type[HybridNet]) -> list[Result]:
    results = []
    for seed in (1, 1, 2):
        module = net(dropout=0.5)
        pl.seed_everything(seed, verbose=False)
        runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False)
        runner.fit(module, batches(rank, 2))
        results.append(snapshot(module, runner))
    return results


@pytest.mark.parametrize("net", [HybridNet, StepNet], ids=lambda net: net.__name__)
def test_seeds_make_dropout_reproducible(net):
    first, second = run_processes(2, _dropout, net)
    assert_same(first[0], first[1], 0.0)
    assert_same(first[0], second[0], 0.0)
    with pytest.raises(AssertionError):
        assert_same(first[0], first[2])


def _saving(folder: Any) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    return {"enable_checkpointing": True, "callbacks": [saver]}


def _checkpoint(rank: int, world_size: int, folder: str, ckpt_path: str | None, epochs: int) -> Result:
    warnings.filterwarnings("ignore", "The dirpath has changed")
    module = ScheduledNet()
    runner = trainer(
        KrizhevskyHybridStrategy(),
        world_size,
        use_distributed_sampler=False,
        **_saving(folder),
        max_epochs=epochs,
    )
    runner.fit(module, batches(rank, world_size, steps=10), ckpt_path=ckpt_path)
    runner.save_checkpoint(Path(folder, "after.ckpt"))
    return snapshot(module, runner)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_holds_the_whole_and_goes_on_anywhere(tmp_path):
    module = ScheduledNet()
    runner = trainer("auto", 1, max_epochs=2, **_saving(tmp_path / "one"))
    runner.fit(module, all_batches(4, steps=10))
    expected = snapshot(module, runner)
    run_processes(4, _checkpoint, 4, str(tmp_path / "four"), None, 1)
    plain = torch.load(tmp_path / "one" / "step=10.ckpt", weights_only=True)
    for name in ("step=10.ckpt", "after.ckpt"):
        checkpoint = torch.load(tmp_path / "four" / name, weights_only=True)
        assert checkpoint["global_step"] == 10
        assert_same(checkpoint["state_dict"], plain["state_dict"], 1e-9)
        for index, state in plain["optimizer_states"][0]["state"].items():
            assert_same(checkpoint["optimizer_states"][0]["state"][index], state, 1e-9)

    # In one process, on the number of ranks that wrote it, and on another one.
    path = str(tmp_path / "four" / "step=10.ckpt")
    module = ScheduledNet()
    runner = trainer("auto", 1, max_epochs=2, **_saving(tmp_path / "plain"))
    runner.fit(module, all_batches(4, steps=10), ckpt_path=path)
    assert_same(snapshot(module, runner), expected, 1e-9)
    for result in run_processes(4, _checkpoint, 4, str(tmp_path / "again"), path, 2):
        assert_same(result, expected, 1e-9)
    for result in run_processes(2, _resume_on_two, path, str(tmp_path / "two")):
        assert_same(result, expected, 1e-9)


def _resume_on_two(rank: int, path: str, folder: str) -> Result:
    """Batches of 6 on two ranks are those of 3 on four."""
    warnings.filterwarnings("ignore", "The dirpath has changed")
    module = ScheduledNet()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, max_epochs=2, **_saving(folder))
    dataset = all_batches(4, steps=10).dataset
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), 2)), batch_size=6)
    runner.fit(module, loader, ckpt_path=path)
    return snapshot(module, runner)


def _batch_norm(rank: int) -> tuple[Result, dict[str, Tensor]]:
    warnings.simplefilter("ignore", PossibleUserWarning)  # advice on logging
    module = BatchNormNet()
    callback = AdaptiveGlobalBatchNorm(global_phase="always")
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[callback])
    runner.fit(module, batches(rank, 2))
    assert not getattr(module, "_ddp_params_and_buffers_to_ignore", None)
    return snapshot(module, runner), dict(module.state_dict())


def test_global_batch_norm_in_the_trunk():
    module = BatchNormNet()
    runner = trainer("auto", 1)
    runner.fit(module, all_batches(2))
    for result, state in run_processes(2, _batch_norm):
        assert_same(result, snapshot(module, runner), 1e-9)
        assert_same(state, dict(module.state_dict()), 1e-9)


class _Fails(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 5:
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
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=callbacks)
    with pytest.raises((KeyError, RuntimeError)) as error:
        runner.fit(module, batches(rank, 2))
    assert "forward" not in vars(module.head)
    assert "head_step" not in vars(module)
    assert len(dist.distributed_c10d._world.pg_map) == 1
    with pytest.raises(ValueError, match=r"head.1.weight is \(., 6\), and not \(7, 6\).* Load a checkpoint"):
        trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False).fit(module, batches(rank, 2))
    return str(error.value)


def test_an_exception_leaves_nothing_behind_but_parts_of_the_head(tmp_path):
    assert set(run_processes(2, _fail, str(tmp_path), False)) == {"'broken'"}
    for text in run_processes(2, _fail, str(tmp_path), True):
        assert "cannot save a checkpoint after an exception" in text


def _refit(rank: int) -> Result:
    module = StepNet()
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters())
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="Adafactor looks at parameters as a whole"):
        runner.fit(module, batches(rank, 2))
    del module.configure_optimizers
    return _fit(batches(rank, 2), KrizhevskyHybridStrategy(), 2, lambda: module, {})


def test_after_a_mistake_in_the_optimizer_one_can_go_on():
    expected = _fit(all_batches(2), "auto", 1, StepNet, {})
    for result in run_processes(2, _refit):
        assert_same(result, expected, 1e-9)


class OwnClipNet(StepNet):
    """torch's function sees one rank's part of the head."""

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def _drift(rank: int, folder: str) -> str:
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, **_saving(folder))
    with pytest.raises(RuntimeError) as error:
        runner.fit(OwnClipNet(), batches(rank, 2))
    return str(error.value)


def test_trunks_that_drift_apart_are_not_saved(tmp_path):
    for text in run_processes(2, _drift, str(tmp_path)):
        assert "the trunk's parameters are not the same on all ranks" in text


class TemperatureNet(StepNet):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return super().head_step(features * self.temperature, target)


class PenaltyOnGradientNet(StepNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.trunk(batch[0])
        (gradient,) = torch.autograd.grad(self.head_step(features, batch[1]), features, create_graph=True)
        return gradient.square().sum()


def _refused(rank: int, net: type[HybridNet]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        _fit(batches(rank, 2), KrizhevskyHybridStrategy(find_unused_parameters=True), 2, net, {})
    return str(error.value)


@pytest.mark.parametrize(
    ("net", "message"),
    [(TemperatureNet, "head_step uses the parameter temperature"), (PenaltyOnGradientNet, "differentiated twice")],
)
def test_what_would_go_wrong_silently(net, message):
    assert all(message in text for text in run_processes(2, _refused, net))


class RandomNet(StepNet):
    """Its cost draws random numbers, and calls the head twice."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        self.drawn = torch.rand(3)
        first, second = (self.head(features).clone() for _ in range(2))
        assert not torch.equal(first, second)
        return self.cost(self.head(features), target)


def _random(rank: int) -> Tensor:
    module = RandomNet(dropout=0.5)
    torch.manual_seed(rank)  # and the ranks' own generators are not alike
    trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False).fit(module, batches(rank, 2))
    return module.drawn


def test_ranks_draw_the_same_within_head_step():
    first, second = run_processes(2, _random)
    assert torch.equal(first, second)


def _load_while_fitting(rank: int) -> Result:
    """As the learning rate finder does."""
    module = StepNet()
    before = {"state_dict": {name: value.clone() for name, value in module.state_dict().items()}}

    class Load(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.strategy.load_model_state_dict(before)

    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[Load()], max_steps=5)
    runner.fit(module, batches(rank, 2))
    return dict(module.state_dict())


def test_a_whole_checkpoint_can_be_loaded_while_fitting():
    for result in run_processes(2, _load_while_fitting):
        assert_same(result, dict(StepNet().state_dict()), 0.0)
