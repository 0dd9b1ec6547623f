"""`Diagnose` in real trainings, and the probe between real ranks."""

from __future__ import annotations

import logging
import os
import time
import warnings

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lightning_dp import KrizhevskyHybridStrategy, LayeredSGDStrategy
from lightning_dp.callbacks import StepTimer
from lightning_dp.collectives.compression.wire import Transport
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.planner import Diagnose, Link, Network, diagnose, probe_network
from lightning_dp.planner.diagnose import WARM_UP, require_whole_model
from tests.callbacks.test_step_timer import one_second
from tests.planner.test_rows import PROFILE
from tests.ranks import run_processes

NETWORK = Network(Link(1e-4, 1e8), Link(1e-5, 1e10))
LOAD_S, FORWARD_S, BACKWARD_S = 0.01, 0.015, 0.02


class Items(Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:  # once per batch of a rank
            time.sleep(LOAD_S)
        return torch.full((3, 6, 6), float(index))


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD_S)
        return grad


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 5)

    def training_step(self, batch, batch_idx):
        return self.head(Sleep.apply(self.norm(self.conv(batch))).flatten(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def fit(
    callback: Diagnose, module: pl.LightningModule | None = None, loader: DataLoader | None = None, **options
) -> pl.Trainer:
    options = {"callbacks": [callback], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"max_epochs": 1, **options},
        )
        trainer.fit(Net() if module is None else module, loader or DataLoader(Items(), batch_size=4, num_workers=0))
    return trainer


def test_one_process_is_told_where_its_steps_go(caplog):
    callback = Diagnose(num_steps=4, stop=True)
    with caplog.at_level(logging.INFO, logger="lightning_dp.planner.diagnose"):
        trainer = fit(callback)
    assert trainer.global_step == WARM_UP + 4
    profile = callback.diagnosis.profile
    assert (profile.num_steps, profile.batch_size, profile.world_size) == (4, 4, 1)
    assert profile.load_s >= LOAD_S
    assert profile.forward_s >= FORWARD_S
    assert profile.backward_s >= BACKWARD_S
    assert profile.exposed_communication_s == profile.batch_norm_s == 0
    assert profile.num_batch_norms == 1
    parts = profile.load_s + profile.forward_s + profile.backward_s + profile.update_s
    assert parts == pytest.approx(profile.step_s, rel=0.2)
    assert [layer.name for layer in profile.layers] == ["conv", "norm", "head"]
    assert profile.layers[0].num_bytes == 4 * (4 * 27 + 4)
    assert profile.layers[0].shapes == ((4, 3, 3, 3), (4,))
    assert profile.layers[2].input_bytes == 4 * 64 * 4
    assert "of a step is compute" in caplog.text
    assert not any(module._forward_hooks for module in trainer.lightning_module.modules())


def test_each_fit_is_measured_again():
    callback = Diagnose(num_steps=1, stop=True)
    fit(callback)
    first = callback.diagnosis
    fit(callback)
    assert callback.diagnosis is not first
    assert [layer.name for layer in callback.diagnosis.profile.layers] == ["conv", "norm", "head"]


@pytest.mark.ci
def test_a_given_network_predicts_for_more_ranks(tmp_path):
    network = Network(Link(1e-4, 1e8), Link(1e-5, 1e10))
    method = "layered_sgd_step_int8"
    callback = Diagnose(num_steps=2, network=network, world_size=4, folder=tmp_path / "new", stop=True, method=method)
    fit(callback)
    assert callback.diagnosis.world_size == 4
    assert '"strategy.compression=int8"' in (tmp_path / "new" / "plan.yaml").read_text()
    assert (tmp_path / "new" / "plan.png").exists()


class Convolutions(Net):
    """Keeps enough for backward that some of it is worth computing again."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), *layers, *layers, nn.Conv2d(16, 16, 3, padding=1))

    def training_step(self, batch, batch_idx):
        return self.body(batch.repeat(8, 1, 4, 4)).square().mean()


def test_memonger_is_planned_from_a_step_and_leaves_the_training_as_it_was():
    states = []
    for memonger in (True, False):
        torch.manual_seed(0)
        callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, memonger=memonger)
        trainer = fit(callback, Convolutions(), limit_train_batches=5)
        states.append(trainer.lightning_module.state_dict())
        assert "training_step" not in vars(trainer.lightning_module)
        plan = callback.diagnosis.profile.recomputation
        rows = {prediction.method for prediction in callback.diagnosis.predictions}
        assert (plan is not None) == ("ddp_memonger" in rows) == memonger
        if plan is not None:
            assert 0 < plan.held_bytes < 0.7 * plan.plain_bytes
            assert plan.recompute_s > 0
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class Unrecordable(Net):
    """Calls what Memonger refuses within a step."""

    num_calls = 0

    def training_step(self, batch, batch_idx):
        type(self).num_calls += 1
        torch.func.grad(lambda x: x.square().sum())(batch)
        return super().training_step(batch, batch_idx)


def test_a_step_that_cannot_be_recorded_raises_and_does_not_run_again():
    with pytest.raises(RuntimeError, match=r"torch\.func\..*saved tensor hooks") as error:
        fit(Diagnose(num_steps=1, network=NETWORK, world_size=2, stop=True), Unrecordable())
    assert "use Diagnose(memonger=False), or plan.memonger=false" in error.value.__notes__[0]
    assert Unrecordable.num_calls == 1, "the first batch"
    callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, stop=True, memonger=False)
    fit(callback, Unrecordable())
    assert callback.diagnosis.profile.recomputation is None


@pytest.mark.ci
def test_a_compiled_module_is_diagnosed_without_recording_it():
    callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, stop=True)
    fit(callback, torch.compile(Convolutions(), backend="eager"))
    profile = callback.diagnosis.profile
    assert profile.recomputation is None
    assert profile.why_no_recomputation == "training_step is compiled, which hides its operators"


def test_a_method_that_the_job_cannot_use_is_named(tmp_path, caplog):
    (tmp_path / "new").mkdir()
    callback = Diagnose(folder=tmp_path / "new", method="hybrid_a")
    with caplog.at_level(logging.WARNING, logger="lightning_dp.planner.diagnose"):
        callback._write(callback._diagnose(PROFILE, NETWORK))
    assert "no plan is written: there is no plan for method='hybrid_a'; use one of" in caplog.text
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"plan.md", "plan.png"}


def test_files_of_an_earlier_plan_do_not_stay_beside_another_report(tmp_path):
    first, second = Diagnose(folder=tmp_path), Diagnose(folder=tmp_path)
    first._write(first._diagnose(PROFILE, NETWORK))
    assert {path.name for path in tmp_path.iterdir()} == {"plan.md", "plan.yaml", "plan.png"}
    second._write(second._diagnose(PROFILE, None))  # of one rank, for which no method is predicted
    assert {path.name for path in tmp_path.iterdir()} == {"plan.md"}


@pytest.mark.ci
def test_measuring_stops_when_the_time_is_up():
    callback = Diagnose(num_steps=90, max_s=0.3)
    trainer = fit(callback, limit_train_batches=15)
    assert trainer.global_step == 15, "training goes on"
    assert 1 <= callback.diagnosis.profile.num_steps < 12


def test_a_short_training_is_diagnosed_from_the_steps_that_it_has(caplog):
    callback = Diagnose()
    fit(callback, limit_train_batches=WARM_UP + 1)
    assert callback.diagnosis.profile.num_steps == 1
    with caplog.at_level(logging.WARNING, logger="lightning_dp.planner.diagnose"):
        fit(Diagnose(), limit_train_batches=WARM_UP)
    assert "nothing is measured in 3 batches" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"max_s": 0}, "max_s=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"method": "zero"}, "method='zero' is unknown: no plan can be for it; use one of ddp, "),
        (
            {"method": "ddp_bf16"},
            "method='ddp_bf16' is no method of the recipes: no plan can be for it; use one of ddp, ",
        ),
        ({"world_size": 3, "network": Network(Link(0, 1), Link(0, 1), 2)}, "world_size=3 is not a multiple"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Diagnose(**options)


def test_a_head_that_is_sharded_is_not_measured():
    callback = Diagnose()
    strategy = KrizhevskyHybridStrategy()
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"head that KrizhevskyHybridStrategy shards; .*strategy='ddp'"):
        callback.setup(trainer, Net(), "fit")
    callback.setup(trainer, Net(), "validate")


def test_flat_shards_of_fsdp_are_not_measured():
    with pytest.raises(ValueError, match="layers that FSDPStrategy cuts into flat shards; measure with "):
        require_whole_model(FSDPStrategy())


def distributed_fit(rank):
    from lightning_dp import AdaptiveGlobalBatchNorm

    callback = Diagnose(num_steps=4, stop=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            callbacks=[AdaptiveGlobalBatchNorm(), callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
        )
        trainer.fit(Net(), DataLoader(Items(), batch_size=4))
        own = probe_network(ranks_per_node=1, repeats=1, num_elements=10_000)
    return callback.diagnosis, trainer.global_step, own


@pytest.mark.ci
def test_two_ranks_measure_their_network_and_agree_on_it():
    (first, steps, _), (second, _, _) = results = run_processes(2, distributed_fit)
    assert steps == WARM_UP + 4
    assert first.network == second.network
    assert first.network.ranks_per_node == 2
    assert 0 < first.network.intra.bytes_per_s < 1e12
    assert 0 < first.network.overhead_s < 1
    assert first.profile.batch_norm_s > 0
    methods = {prediction.method for prediction in first.predictions}
    # All but layered SGD, for it is one node; and tiny layers keep nothing that could be computed again.
    assert methods >= {"ddp", "ddp_power_sgd", "hybrid_a", "hybrid_b", "hybrid_c"}
    assert "ddp_global_batch_norm" not in methods, "the job has it, and so have all its rows"
    assert first.profile.cores_per_rank > 0
    assert set(first.profile.codec_s) == {"bf16", "int8", "power_sgd"}
    assert first.is_present_job
    assert not any(name.startswith("layered_sgd") for name in methods)
    assert results[0][2] == results[1][2]
    assert results[0][2].num_nodes(2) == 2
    assert results[0][2].direct_bytes_per_s == 0, "two nodes swap all they have"


def probe_where_direct_messages_wait(rank):
    dist.init_process_group("gloo")
    whole = probe_network(ranks_per_node=1, repeats=1, num_elements=10_000)
    start, sizes = Transport.start, []

    def waiting(self, outgoing, incoming):
        sizes.append(self.num_ranks)
        time.sleep(0.05)  # this is what is measured
        return start(self, outgoing, incoming)

    Transport.start = waiting
    pairs = probe_network(ranks_per_node=2, repeats=1, num_elements=10_000)
    alone = probe_network(ranks_per_node=1, repeats=1, num_elements=10_000)
    return whole, pairs, alone, set(sizes)


def test_three_nodes_or_more_measure_direct_messages_too():
    results = run_processes(4, probe_where_direct_messages_wait)
    for whole, pairs, alone, sizes in results:
        assert 0 < whole.direct_bytes_per_s <= whole.inter.bytes_per_s
        assert pairs.direct_bytes_per_s == 0, "two nodes"
        # 40 kB in four parts, of which each rank sends 6, in two exchanges, each of which waits.
        assert alone.direct_bytes_per_s <= 60_000 / 0.1
        assert sizes == {4}
        assert (whole, pairs, alone) == results[0][:3]


def fit_on_what_counts_as_a_gpu(rank):
    StepTimer._times_every_step = lambda self, device: False
    DistributedDataParallel._get_ddp_logging_data = one_second(DistributedDataParallel._get_ddp_logging_data)
    timed = []
    set_rate = DistributedDataParallel._set_ddp_runtime_logging_sample_rate

    def noted(self, rate):
        timed.append(rate)
        set_rate(self, rate)

    DistributedDataParallel._set_ddp_runtime_logging_sample_rate = noted
    callback = Diagnose(num_steps=20, memonger=False, network=NETWORK)
    fit(callback, devices=2, strategy="ddp", limit_train_batches=WARM_UP + 22)
    return callback.diagnosis.profile.exposed_communication_s, timed


def test_on_a_gpu_ddp_times_each_measured_step_and_then_a_sample_again():
    for exposed_s, timed in run_processes(2, fit_on_what_counts_as_a_gpu):
        assert exposed_s >= 1.0, "with the sample, 7 of 20 steps"
        assert timed == [1] * (WARM_UP + 20) + [100] * 2


class OnHost(nn.SyncBatchNorm):
    """Takes a rank's own statistics: torch has no others on CPU."""

    def forward(self, x):
        return nn.BatchNorm2d.forward(self, x)


class Sharded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OnHost(4)

    def configure_model(self):
        if not isinstance(self.head, FSDPModule):
            fully_shard(self.head, mesh=self.device_mesh["data_parallel"])


def fit_with_waits_that_nobody_times(rank, strategy):
    callback = Diagnose(num_steps=1, stop=True, memonger=False, network=NETWORK)
    fit(callback, Sharded() if strategy != "ddp" else Net(), devices=2, strategy=strategy)
    return callback.diagnosis


def test_waits_that_nobody_times_are_named():
    found = run_processes(2, fit_with_waits_that_nobody_times, ModelParallelStrategy())[0]
    messages, statistics = found.profile.unmeasured
    assert messages == "the waits of ModelParallelStrategy for messages"
    assert statistics.startswith("the waits of SyncBatchNorm for statistics")
    assert "ddp_global_batch_norm" not in {row.method for row in found.predictions}, "the job has it"
    assert run_processes(2, fit_with_waits_that_nobody_times, "ddp")[0].profile.unmeasured == ()


def fit_with_groups(rank):
    from lightning_dp import AdaptiveGlobalBatchNorm

    callback = Diagnose(num_steps=2, stop=True, memonger=False, network=Network(Link(1.0, 1e8), Link(1.0, 1e10)))
    # Groups of two ranks have the eight images that are enough.
    fit(callback, callbacks=[AdaptiveGlobalBatchNorm(group_size=2), callback], devices=4, strategy="ddp")
    return callback.diagnosis


@pytest.mark.ci
def test_groups_that_share_statistics_already_are_not_proposed():
    found = run_processes(4, fit_with_groups)[0]
    assert found.profile.batch_norm_s > 0
    assert found.profile.statistics_ranks == 2
    assert not any("group_size" in override for part in found.advice for override in part.overrides)


class Clock:
    """A clock that stands, unless somebody sets it forward. Counts the waits among its seconds."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = self.waited_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(diagnose, "waited_s", lambda: self.waited_s)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class Timed(Net):
    """Loading takes a second, forward four, and backward eight."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.clock.pass_s(1)
        return batch

    def training_step(self, batch, batch_idx):
        self.clock.pass_s(4)
        return self.head(self.norm(self.conv(batch)).flatten(1)).square().mean()

    def backward(self, loss, *args, **options):
        super().backward(loss, *args, **options)
        self.clock.pass_s(8)


class WaitsAtBatchStart(pl.Callback):
    """As AdaptiveGlobalBatchNorm does to know the batch size of all ranks: for two seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *_) -> None:
        self.clock.pass_s(2)
        self.clock.waited_s += 2


def test_a_wait_of_batch_norm_when_a_batch_starts_is_no_loading_in_either_order(monkeypatch):
    profiles = []
    for place in (0, 1):
        clock = Clock(monkeypatch)
        callback = Diagnose(num_steps=2, max_s=1e9, stop=True, memonger=False)
        callbacks: list[pl.Callback] = [callback]
        callbacks.insert(place, WaitsAtBatchStart(clock))
        fit(callback, Timed(clock), callbacks=callbacks)
        profiles.append(callback.diagnosis.profile)
    for profile in profiles:
        assert (profile.load_s, profile.batch_norm_s, profile.step_s) == (1, 2, 15)
        # The waits are taken out of both in equal parts.
        assert (profile.forward_s, profile.backward_s) == (4 + 2 - 1, 8 - 1)


class Trained(Net):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.rows = nn.Linear(64, 5)

    def training_step(self, batch, batch_idx):
        return self.rows(self.norm(self.conv(batch / 400)).flatten(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_in_both_orders(rank):
    from lightning_dp import AdaptiveGlobalBatchNorm

    states, found = [], []
    for order in ("batch norm", "batch norm, diagnosis", "diagnosis, batch norm"):
        callback = Diagnose(num_steps=2, network=NETWORK)
        made = {"batch norm": AdaptiveGlobalBatchNorm(max_batch_size=99), "diagnosis": callback}
        loader = DataLoader(Items(), batch_size=4)
        options = {"devices": 2, "strategy": "ddp_find_unused_parameters_true", "limit_train_batches": 7}
        trainer = fit(callback, Trained(), loader, callbacks=[made[name] for name in order.split(", ")], **options)
        states.append(trainer.lightning_module.state_dict())
        if callback.diagnosis is not None:
            profile = callback.diagnosis.profile
            layers = [(layer.name, layer.num_bytes) for layer in profile.layers]
            found.append((profile.num_batch_norms, profile.statistics_ranks, profile.unmeasured, layers))
    assert len(found) == 2
    assert found[0] == found[1]
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    return states[0]["norm.running_mean"].tolist()


@pytest.mark.ci
def test_a_diagnosis_before_or_after_global_batch_norm_changes_nothing():
    first, second = run_processes(2, fit_in_both_orders)
    assert first == second, "statistics are global"


def fit_with_cores(rank, cores_of_ranks):
    os.sched_getaffinity = lambda pid: cores_of_ranks[rank]
    callback = Diagnose(num_steps=1, stop=True, memonger=False, network=NETWORK)
    fit(callback, devices=2, strategy="ddp")
    return callback.diagnosis.profile.cores_per_rank


@pytest.mark.parametrize("cores_of_ranks", [({0, 1, 2, 3}, {0, 1, 2, 3}), ({0, 1}, {2, 3})], ids=["shared", "bound"])
def test_cores_of_a_rank_are_those_of_the_node_over_its_ranks(cores_of_ranks):
    assert run_processes(2, fit_with_cores, cores_of_ranks) == [2.0, 2.0]


WAIT_S = 0.1


def wait_for_a_late_rank():
    time.sleep(WAIT_S)


class WaitsBeforeBatches(pl.Callback):
    """As where another rank comes late to the broadcast with which Lightning begins a batch."""

    def on_train_start(self, trainer, pl_module):
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = wait_for_a_late_rank


def fit_with_a_rank_that_is_late(rank):
    # Several, because DDP reports a reduction one step later: on a busy machine a single one may be another's.
    callback = Diagnose(num_steps=5, stop=True, memonger=False, network=NETWORK)
    trainer = fit(callback, devices=2, strategy="ddp", callbacks=[WaitsBeforeBatches(), callback])
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor is wait_for_a_late_rank, "what was there before"
    return callback.diagnosis.profile


def test_the_wait_for_a_rank_that_is_late_is_communication_and_no_loading():
    for profile in run_processes(2, fit_with_a_rank_that_is_late):
        assert profile.exposed_communication_s >= WAIT_S - NETWORK.inter.latency_s
        assert profile.step_s >= profile.load_s + profile.exposed_communication_s, "it does not count twice"


def fit_with_postponed_sums(rank):
    events = []
    between, probe = HierarchicalAllReduce.inter_group_all_reduce, diagnose.probe_network

    def late(self, buffer):
        time.sleep(0.05)  # still under way when the step has ended
        between(self, buffer)
        events.append("sum")

    def noted(*args, **options):
        events.append("probe")
        return probe(*args, **options)

    HierarchicalAllReduce.inter_group_all_reduce, diagnose.probe_network = late, noted
    fit(Diagnose(num_steps=1, stop=True, memonger=False), devices=2, strategy=LayeredSGDStrategy(group_size=1))
    return events


@pytest.mark.ci
def test_the_network_is_probed_when_no_sums_of_gradients_are_under_way():
    for events in run_processes(2, fit_with_postponed_sums):
        assert events.count("sum") >= WARM_UP + 1
        assert events[-1] == "probe"


class Boxes(Net):
    def training_step(self, batch, batch_idx):
        images, _ = batch
        return super().training_step(images, batch_idx)


def test_the_first_tensor_of_a_batch_has_its_images():
    batches = [(torch.ones(4, 3, 6, 6), torch.ones(37, 4))] * (WARM_UP + 1)
    callback = Diagnose(num_steps=1, stop=True, memonger=False)
    fit(callback, Boxes(), loader=DataLoader(batches, batch_size=None))
    assert callback.diagnosis.profile.batch_size == 4


def test_the_last_batch_of_an_epoch_may_be_smaller():
    callback = Diagnose(num_steps=1, stop=True, memonger=False)
    fit(callback, loader=DataLoader(torch.ones(10, 3, 6, 6), batch_size=4), max_epochs=3)  # three batches in an epoch
    assert callback.diagnosis.profile.batch_size == 4


def two_by_two(rank):
    dist.init_process_group("gloo")
    network = probe_network(repeats=1, num_elements=10_000)
    return network


@pytest.mark.slow
def test_batches_that_lightning_skips_do_not_count():
    batches = [None if index in (2, 4) else torch.ones(4, 3, 6, 6) for index in range(9)]
    callback = Diagnose(num_steps=4)
    fit(callback, loader=DataLoader(batches, batch_size=None))
    profile = callback.diagnosis.profile
    assert (profile.num_steps, profile.accumulate) == (4, 1)
    assert [layer.name for layer in profile.layers] == ["conv", "norm", "head"]


def test_the_probe_tells_links_within_nodes_from_those_between():
    results = run_processes(4, two_by_two, num_nodes=2)
    assert all(network == results[0] for network in results)
    assert results[0].ranks_per_node == 2


def test_the_probe_needs_more_than_one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="world_size=1 and ranks_per_node=1: the probe needs two ranks or more"):
            probe_network()
    finally:
        dist.destroy_process_group()
