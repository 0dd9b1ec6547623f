"""Layered SGD is synchronous SGD: whoever looks at the parameters sees what DDP would show."""

from __future__ import annotations

import os
import re
import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint, WeightAveraging
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import RankError, run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, assert_same, data, snapshot, trainer

OVERLAPS, COMMUNICATORS = ("load", "step"), ("leader", "sharded")


def layered(group_size: int | None = 1, communicator: str = "leader", overlap: str = "step", **options: Any):
    return LayeredSGDStrategy(group_size, communicator, overlap, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def fit(strategy: Any, world_size: int, module: pl.LightningModule | None = None, **options: Any):
    module = module or Net()
    t = trainer(strategy, world_size, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice: more loader workers, a validation set, ...
        t.fit(module, data(world_size))
    return module, t


# --- equality with DDP ---

VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "nesterov": {"net": {"optimizer": "nesterov"}},
    "adamw": {"net": {"optimizer": "adamw"}},
    "clip norm": {"gradient_clip_val": 0.1},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 2},
    "schedule": {"net": {"schedule": "step"}},
    "all together": {
        "net": {"optimizer": "adamw", "schedule": "step"},
        "gradient_clip_val": 0.1,
        "accumulate_grad_batches": 3,
    },
}


def compare_with_ddp(rank, world_size, group_size, variants, overlaps=OVERLAPS, communicators=COMMUNICATORS):
    for name in variants:
        options = dict(VARIANTS[name])
        net = options.pop("net", {})
        expected = snapshot(*fit(DDPStrategy(), world_size, Net(**net), **options))
        for overlap in overlaps:
            for communicator in communicators:
                strategy = layered(group_size, communicator, overlap)
                assert_same(snapshot(*fit(strategy, world_size, Net(**net), **options)), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_ddp(variant):
    run_processes(4, compare_with_ddp, 4, 2, [variant], timeout=120)


@pytest.mark.parametrize(
    ("world_size", "group_size"), [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 4)], ids=lambda n: str(n)
)
def test_equals_ddp_in_every_topology(world_size, group_size):
    run_processes(world_size, compare_with_ddp, world_size, group_size, ["momentum", "adamw"], timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)])
def test_equals_ddp_in_every_variant_and_topology(world_size, group_size):
    run_processes(world_size, compare_with_ddp, world_size, group_size, list(VARIANTS), timeout=300)


def compare_with_ring(rank):
    expected = snapshot(*fit(DDPStrategy(), 4))
    for communicator in COMMUNICATORS:
        assert_same(snapshot(*fit(layered(2, communicator, all_reduce="ring"), 4)), expected)


def test_ring_between_groups():
    run_processes(4, compare_with_ring)


def compare_without_crossing(rank):
    HierarchicalAllReduce.inter_group_all_reduce = lambda self, buffer: None
    compare_with_ddp(rank, 2, 1, ["momentum"], overlaps=["step"], communicators=["leader"])


def test_differs_from_ddp_if_nothing_crosses_the_groups():
    with pytest.raises(RankError, match="first.weight"):
        run_processes(2, compare_without_crossing)


def compare_with_one_process(rank):
    """The ranks' batches, concatenated, on one process."""
    world_size, steps = 2, 30
    module, _ = fit(layered(), world_size)
    if rank:
        return
    alone = Net()
    optimizer = alone.configure_optimizers()
    dataset = data(world_size).dataset
    indices = [torch.utils.data.DistributedSampler(dataset, world_size, r, shuffle=True) for r in range(world_size)]
    indices = [torch.tensor(list(sampler)).view(steps, -1) for sampler in indices]
    for step in range(steps):
        optimizer.zero_grad()
        alone.loss(dataset[torch.cat([each[step] for each in indices])]).backward()
        optimizer.step()
    assert_same(dict(module.state_dict()), dict(alone.state_dict()))


def test_equals_one_process_on_the_concatenated_batch():
    run_processes(2, compare_with_one_process)


# --- the update is postponed, and nobody can tell ---


class Versions(pl.Callback):
    """Reads how often each parameter has been changed, which is no use of its value."""

    reads = False

    def __init__(self) -> None:
        self.start = 0
        self.before: list[int] = []
        self.after: list[int] = []
        self.in_forward: list[dict[str, int]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.start = module.first.weight._version
        module.first.register_forward_pre_hook(
            lambda *_: self.in_forward.append(
                {"first": module.first.weight._version, "last": module.last.weight._version}
            )
        )
        module.last.register_forward_hook(lambda *_: self.in_forward[-1].update(done=module.last.weight._version))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.before.append(module.first.weight._version)
        if self.reads:
            module.first.weight.sum()
            self.after.append(module.first.weight._version)


class ReadingVersions(Versions):
    reads = True


def watch_versions(rank, overlap, callback):
    versions = callback()
    fit(layered(overlap=overlap), 2, max_steps=5, callbacks=[versions])
    return versions.start, versions.before, versions.after, versions.in_forward


def steps_done(versions: list[int], start: int) -> list[float]:
    """Versions as numbers of updates: an update changes a parameter a fixed number of times."""
    per_step = (versions[-1] - start) / (len(versions) - 1)
    return [(version - start) / per_step for version in versions]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_update_waits_until_the_next_step(overlap):
    start, before, _, _ = run_processes(2, watch_versions, overlap, Versions)[0]
    assert before[0] == start
    assert steps_done(before, start) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_reading_a_parameter_brings_it_up_to_date(overlap):
    start, before, after, _ = run_processes(2, watch_versions, overlap, ReadingVersions)[0]
    assert before[0] == start
    assert before[1:] == after[:-1]
    assert all(b < a for b, a in zip(before, after, strict=True))


def test_each_layer_is_updated_just_before_its_next_forward():
    _, _, _, in_forward = run_processes(2, watch_versions, "step", Versions)[0]
    for step in in_forward[1:]:
        assert step["last"] < step["done"], "the last layer was updated before the forward came to it"


def test_as_published_the_whole_update_precedes_the_forward():
    _, _, _, in_forward = run_processes(2, watch_versions, "load", Versions)[0]
    for step in in_forward[1:]:
        assert step["last"] == step["done"]


class Gate(pl.Callback):
    """Shut from the start of backward until the next batch has been loaded."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def on_before_backward(self, *_: Any) -> None:
        self.open.clear()

    def on_train_batch_start(self, *_: Any) -> None:
        self.open.set()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.open.set()


def cross_only_after_loading(rank, overlap):
    gate, crossing = Gate(), HierarchicalAllReduce.inter_group_all_reduce

    def gated(self, buffer):
        assert gate.open.wait(10), "something waited for the reduction between groups before the next batch was loaded"
        crossing(self, buffer)

    HierarchicalAllReduce.inter_group_all_reduce = gated
    got = snapshot(*fit(layered(overlap=overlap), 2, max_steps=4, callbacks=[gate]))
    assert_same(got, snapshot(*fit(DDPStrategy(), 2, max_steps=4)))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_network_has_until_the_next_batch_is_loaded(overlap):
    run_processes(2, cross_only_after_loading, overlap)


# --- everything Lightning does ---


class Average(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class NetWithValidation(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[float] = []

    def val_dataloader(self):
        return data(2, steps=2)

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.loss(batch).item())


def watched_fit(rank, folder, strategy):
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    module = NetWithValidation(schedule="epoch")
    module, t = fit(
        strategy, 2, module, callbacks=[checkpoint, Average()], enable_checkpointing=True,
        val_check_interval=10, num_sanity_val_steps=0, max_epochs=2,
    )  # fmt: skip
    return module.seen, snapshot(module, t)


def compare_watched_fits(rank, folder):
    expected_seen, expected = watched_fit(rank, f"{folder}/ddp", DDPStrategy())
    assert len(expected_seen) == 2 * 3 * 2
    for overlap in OVERLAPS:
        seen, values = watched_fit(rank, f"{folder}/{overlap}", layered(overlap=overlap))
        assert_same(values, expected)
        torch.testing.assert_close(seen, expected_seen, rtol=1e-10, atol=0)


def test_validation_checkpoints_and_weight_averaging_see_the_updated_weights(tmp_path):
    run_processes(2, compare_watched_fits, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "ddp").iterdir())
    assert len(names) == 8
    for overlap in OVERLAPS:
        for name in names:
            ours, ddps = (torch.load(tmp_path / side / name, weights_only=True) for side in (overlap, "ddp"))
            assert_same(ours["state_dict"], ddps["state_dict"])
            torch.testing.assert_close(ours["optimizer_states"], ddps["optimizer_states"], rtol=1e-10, atol=1e-12)
            assert ours["lr_schedulers"] == ddps["lr_schedulers"]


def test_a_checkpoint_goes_on_in_a_plain_trainer_as_ddps_would(tmp_path):
    run_processes(2, compare_watched_fits, str(tmp_path))
    ends = []
    for side in ("ddp", *OVERLAPS):
        module = Net(schedule="epoch")
        t = trainer("auto", 1, max_epochs=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint.*")
            t.fit(module, data(1), ckpt_path=tmp_path / side / "step=49.ckpt", weights_only=True)
        ends.append(snapshot(module, t))
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


class Norms(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))


def compare_gradients(rank, callback):
    results = []
    for strategy in (DDPStrategy(), layered(overlap="load"), layered()):
        norms = callback()
        fit(strategy, 2, callbacks=[norms])
        results.append(norms.seen)
    assert len(results[0]) == 30
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-10, atol=0)


def test_on_before_optimizer_step_sees_averaged_gradients():
    run_processes(2, compare_gradients, Norms)


class AfterBackward(Norms):
    """Reads gradients before the strategy hears that backward has ended."""

    on_before_optimizer_step = pl.Callback.on_before_optimizer_step

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        super().on_before_optimizer_step(trainer, module, None)


def test_gradients_read_after_backward_are_averaged():
    run_processes(2, compare_gradients, AfterBackward)


def compare_hook_of_an_instance(rank):
    """LambdaCallback has its hooks on the instance."""
    seen = []
    for strategy in (DDPStrategy(), layered()):
        steps: list[int] = []
        hook = LambdaCallback(on_before_optimizer_step=lambda t, m, o, steps=steps: steps.append(t.global_step))
        fit(strategy, 2, callbacks=[hook])
        seen.append(steps)
    assert seen[1] == seen[0] == list(range(30))


def test_hooks_of_an_instance_run_within_their_step():
    run_processes(2, compare_hook_of_an_instance)


class ManualAccumulation(Net):
    """Every backward is synchronized, every third is followed by a step; DDP rebuilds its buckets after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def compare_manual_accumulation(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, ManualAccumulation()))
    for overlap in OVERLAPS:
        assert_same(snapshot(*fit(layered(overlap=overlap), 2, ManualAccumulation())), expected)


def test_manual_accumulation():
    run_processes(2, compare_manual_accumulation)


class SparseNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


def fit_sparse(rank):
    with pytest.raises(ValueError, match="cannot sum the sparse gradients of 'table'"):
        fit(layered(), 2, SparseNet())


def test_sparse_gradients_are_refused():
    run_processes(2, fit_sparse)


class Manual(Net):
    """Two optimizers, each with its own loss and backward, the second looking at what the first has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.first.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([*self.shared.parameters(), *self.last.parameters()], lr=0.01),
        )

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.norms.append(self.first.weight.grad.norm().item())
        first.step()
        loss = self.loss(batch) + 0.01 * self.first.weight.square().sum()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.norms.append(self.first.bias.abs().sum().item())


def compare_manual(rank):
    module, t = fit(DDPStrategy(find_unused_parameters=True), 2, Manual())
    expected, norms = snapshot(module, t), module.norms
    for overlap in OVERLAPS:
        module, t = fit(layered(overlap=overlap, find_unused_parameters=True), 2, Manual())
        assert_same(snapshot(module, t), expected)
        torch.testing.assert_close(module.norms, norms, rtol=1e-10, atol=0)


def test_manual_optimization_with_two_optimizers():
    run_processes(2, compare_manual)


class Unused(Net):
    """A layer that only rank 0 uses, and only in every other step; another that nobody uses."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.sometimes = nn.Linear(8, 8).double()
        self.never = nn.Linear(8, 8).double()

    def training_step(self, batch, batch_idx):
        self.extra = self.global_rank == 0 and batch_idx % 2 == 0
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.sometimes(x) if self.extra else x
        return self.last(torch.tanh(self.shared(x)))


def compare_unused(rank):
    expected = snapshot(*fit(DDPStrategy(find_unused_parameters=True), 2, Unused()))
    for overlap in OVERLAPS:
        assert_same(snapshot(*fit(layered(overlap=overlap, find_unused_parameters=True), 2, Unused())), expected)


def test_unused_parameters():
    run_processes(2, compare_unused)


class EarlyReader(Net):
    """Uses the last layer's weight before the first layer's forward, and a weight outside its own layer's forward."""

    def training_step(self, batch, batch_idx):
        penalty = sum(p.square().sum() for p in reversed(list(self.parameters())))
        return super().training_step(batch, batch_idx) + 1e-3 * penalty

    def forward(self, x):
        return super().forward(x) + torch.tanh(x) @ self.first.weight.T @ self.last.weight.data.T


def compare_early_reader(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, EarlyReader()))
    assert_same(snapshot(*fit(layered(), 2, EarlyReader())), expected)


def test_parameters_used_out_of_order_are_up_to_date():
    run_processes(2, compare_early_reader)


def compare_precision(rank, precision):
    def plugin():
        # Lightning has no fp16 on CPU of its own, but the plugin works there.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5) if precision == "16-mixed" else None
        return MixedPrecision(precision, "cpu", scaler)

    ends = [
        snapshot(*fit(strategy, 2, Net().float(), plugins=[plugin()], **clip))
        for clip in ({}, {"gradient_clip_val": 0.1})
        for strategy in (DDPStrategy(), layered(), layered(overlap="load"))
    ]
    for expected, *got in (ends[:3], ends[3:]):
        for each in got:
            assert_same(each, expected, rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision):
    run_processes(2, compare_precision, precision)


def compare_in_float32(rank):
    expected = snapshot(*fit(DDPStrategy(), 4, Net().float()))
    for overlap in OVERLAPS:
        assert_same(snapshot(*fit(layered(2, overlap=overlap), 4, Net().float())), expected, rtol=1e-5)


def test_in_float32_equals_ddp_to_the_rounding_of_another_order():
    run_processes(4, compare_in_float32)


def compare_compiled(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, max_steps=6))
    for overlap in OVERLAPS:
        module = Net()
        module.shared.compile(backend="eager")
        # Not `layered`: a compiled module under DDP wants its first bucket smaller than the others.
        got, t = fit(LayeredSGDStrategy(1, overlap=overlap), 2, module, max_steps=6)
        assert_same(snapshot(got, t), expected)


def test_compiled_parts():
    run_processes(2, compare_compiled, timeout=120)


class Stop(Exception):
    pass


class RaiseInForward(Net):
    """Fails in the middle of a forward, when some layers are updated and others are not."""

    def forward(self, x):
        if self.trainer.global_step == 5:
            self.first(x)
            raise Stop
        return super().forward(x)


def raise_in_mid_step(rank):
    expected = dict(fit(DDPStrategy(), 2, max_steps=5)[0].named_parameters())
    for overlap in OVERLAPS:
        module = RaiseInForward()
        with pytest.raises(Stop):
            fit(layered(overlap=overlap), 2, module)
        assert_same(dict(module.named_parameters()), expected)


def test_an_exception_in_mid_step_loses_no_update():
    run_processes(2, raise_in_mid_step)


def fit_validate_fit(rank):
    """One Trainer, used three times, as DDP would have it; no thread is left afterwards."""
    ends = []
    for strategy in (DDPStrategy(), layered()):
        module, t = fit(strategy, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            t.validate(module, data(2), verbose=False)
            t.fit_loop.max_epochs = 2
            t.fit(module, data(2))
        ends.append(snapshot(module, t))
    assert_same(ends[1], ends[0])
    assert [thread.name for thread in threading.enumerate() if "communicator" in thread.name] == []


def test_a_trainer_can_be_used_again_and_leaves_no_thread():
    run_processes(2, fit_validate_fit)


# --- errors ---


class Dying(Net):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            os._exit(3)
        return super().training_step(batch, batch_idx)


def outlive_a_peer(rank, group_size):
    with pytest.raises(RuntimeError) as caught:
        fit(layered(group_size, timeout=timedelta(seconds=20)), 2 * group_size, Dying())
    # Told by the exit, as the dead rank's own result is missing.
    raise AssertionError(f"survived: {caught.value}")


def test_a_dead_peer_is_named():
    with pytest.raises(RankError) as caught:
        run_processes(2, outlive_a_peer, 1, timeout=60)
    # Which of the two it is is a matter of time: the reduction, or the agreement on the next bucket.
    said = (
        r"survived: the (sum|order) of .*, between rank 0 and rank 1 \(group 1\), failed: one of these ranks has died"
    )
    assert re.search(said, str(caught.value))


def trainer_on(devices: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=LayeredSGDStrategy(**options), logger=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainer_on(6, group_size=4), "world_size=6 is not a multiple of group_size=4; use 1, 2, 3 or 6"),
        (
            lambda: LayeredSGDStrategy(communicator="chief"),
            "communicator='chief' is not known; use one of 'leader', 'sh",
        ),
        (lambda: LayeredSGDStrategy(overlap="all"), "overlap='all' is not known; use one of 'load', 'step'"),
        (lambda: LayeredSGDStrategy(all_reduce="tree"), "all_reduce='tree' is not known"),
        (lambda: LayeredSGDStrategy(gradient_as_bucket_view=False), "gradient_as_bucket_view=False cannot work"),
        (lambda: LayeredSGDStrategy(ddp_comm_hook=print), "ddp_comm_hook cannot be given"),
        (lambda: LayeredSGDStrategy(model_averaging_period=3), "model_averaging_period cannot be given"),
    ],
)
def test_bad_options_are_refused_before_any_process_starts(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    assert not dist.is_initialized()


def fit_lbfgs(rank):
    with pytest.raises(ValueError, match="LayeredSGDStrategy cannot run LBFGS"):
        fit(layered(), 2, Net(optimizer="lbfgs"))


def test_lbfgs_is_refused():
    run_processes(2, fit_lbfgs)
