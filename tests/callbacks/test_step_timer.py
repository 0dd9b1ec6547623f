from __future__ import annotations

import time
import warnings
from collections import Counter

import pytest
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.callbacks.timers import StepTimer
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from tests.ranks import run_processes
from tests.strategies.modules import SMALL_BUCKETS_MB, Net, data, trainer

LOAD_S, COMPUTE_S, NETWORK_S = 0.02, 0.03, 0.2


class SlowNet(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(COMPUTE_S)
        return super().training_step(batch, batch_idx)


class SlowLoading(torch.utils.data.TensorDataset):
    def __getitems__(self, indices):
        time.sleep(LOAD_S)
        return [self[i] for i in indices]


def timed_fit(rank, strategy, world_size, slow_network=False, slow_messages=False):
    if slow_messages and rank == 1:
        start = Channel.all_to_all

        def late_start(self, what, sends, receives):
            if what == "sizes":  # the first message of a step
                time.sleep(NETWORK_S)
            return start(self, what, sends, receives)

        Channel.all_to_all = late_start
    if slow_network:
        crossing = HierarchicalAllReduce.inter_group_all_reduce

        def late(self, buffer):
            time.sleep(NETWORK_S)
            crossing(self, buffer)

        HierarchicalAllReduce.inter_group_all_reduce = late
    dataset = SlowLoading(*data(world_size, steps=10).dataset.tensors)
    t = trainer(strategy, world_size, callbacks=[StepTimer()])
    start_s = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(SlowNet(), torch.utils.data.DataLoader(dataset, batch_size=3))
    assert t.callback_metrics["time/step_s"] <= time.perf_counter() - start_s, "a step is a part of the fit"
    return {name: float(value) for name, value in t.callback_metrics.items() if name.startswith("time/")}


NAMES = {"time/step_s", "time/data_wait_s", "time/compute_s", "time/exposed_communication_s"}


def check(times):
    assert times.keys() == NAMES
    assert times["time/data_wait_s"] >= LOAD_S
    assert times["time/compute_s"] >= COMPUTE_S
    parts = sum(times[name] for name in NAMES - {"time/step_s"})
    assert times["time/step_s"] == pytest.approx(parts)


def test_one_process():
    times = timed_fit(0, "auto", 1)
    check(times)
    assert times["time/exposed_communication_s"] == 0.0


@pytest.mark.ci
def test_ddp():
    times = run_processes(2, timed_fit, DDPStrategy(), 2)[0]
    check(times)
    assert times["time/exposed_communication_s"] > 0.0


def accumulating_fit(rank):
    """Exposed communication if only every fifth step reduces. DDP's timers report the last reduction."""
    DistributedDataParallel._get_ddp_logging_data = one_second(DistributedDataParallel._get_ddp_logging_data)
    t = trainer(DDPStrategy(), 2, callbacks=[StepTimer()], accumulate_grad_batches=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(Net(), data(2, steps=10))
    return float(t.callback_metrics["time/exposed_communication_s"])


def one_second(true):
    def data(self):
        times_ns = true(self)
        if not times_ns["iteration"]:  # this DDP has not reported a reduction yet
            return times_ns
        overlap_ns = times_ns.get("backward_compute_comm_overlap_time", 0)
        return {**times_ns, "backward_comm_time": overlap_ns + int(1e9)}

    return data


def test_a_step_that_only_accumulates_has_no_exposed_communication():
    """Two steps of ten reduce gradients, a second each, and DDP reports a reduction at the next one."""
    for exposed_s in run_processes(2, accumulating_fit):
        assert exposed_s == pytest.approx(0.1)


def sampling_fit(rank):
    """Times if DDP times a sample of the steps only, as on a GPU: its first ten here, of which it reports nine."""
    StepTimer._times_every_step = lambda self, device: False
    DistributedDataParallel._get_ddp_logging_data = one_second(DistributedDataParallel._get_ddp_logging_data)
    logged = []
    log = Net.log
    Net.log = lambda self, name, value, **options: logged.append((name, value)) or log(self, name, value, **options)
    t = trainer(DDPStrategy(), 2, callbacks=[StepTimer()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(Net(), data(2, steps=30))
    return float(t.callback_metrics["time/exposed_communication_s"]), logged


@pytest.mark.ci
def test_on_a_gpu_exposed_communication_is_the_mean_over_the_steps_that_ddp_times():
    for exposed_s, logged in run_processes(2, sampling_fit):
        assert exposed_s == pytest.approx(1.0)
        counts = Counter(name for name, _ in logged)
        assert counts == {
            "time/step_s": 30,
            "time/data_wait_s": 30,
            "time/exposed_communication_s": 10,
            "time/compute_s": 10,
        }
        assert all(value.device.type == "cpu" for _, value in logged), "Lightning would copy a float to the GPU"


class Unfreezing(Net):
    """Unfreezes a layer before the third step: the strategy then wraps the module in a new DDP."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.first.requires_grad_(True)


def unfreezing_fit(rank):
    """Exposed communication if each reduction that DDP reports has exposed one second."""
    DistributedDataParallel._get_ddp_logging_data = one_second(DistributedDataParallel._get_ddp_logging_data)
    t = trainer(LayeredSGDStrategy(2), 2, callbacks=[StepTimer()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(Unfreezing(), data(2, steps=30))
    return float(t.callback_metrics["time/exposed_communication_s"])


@pytest.mark.ci
def test_every_step_is_timed_after_a_parameter_was_unfrozen():
    """Both DDPs report all of their 2 and 28 reductions but the last. By default DDP times ten, and then a sample."""
    for exposed_s in run_processes(2, unfreezing_fit):
        assert exposed_s == pytest.approx((1 + 27) / 30)


@pytest.mark.ci
def test_layered_sgd_reports_communication_that_is_not_hidden():
    """One bucket per step takes 200 ms, of which loading hides 20: the rest is exposed."""
    strategy = LayeredSGDStrategy(1, overlap="load")
    times = run_processes(2, timed_fit, strategy, 2, True)[0]
    check(times)
    assert times["time/exposed_communication_s"] >= 0.25 * NETWORK_S


@pytest.mark.ci
def test_layered_sgd_of_one_group_is_timed_as_ddp():
    times = run_processes(2, timed_fit, LayeredSGDStrategy(2, bucket_cap_mb=SMALL_BUCKETS_MB), 2)[0]
    check(times)
    assert times["time/exposed_communication_s"] > 0.0


@pytest.mark.ci
def test_the_hybrid_adds_its_own_waiting_time_to_that_of_ddp():
    strategy = KrizhevskyHybridStrategy(head="last", bucket_cap_mb=SMALL_BUCKETS_MB)
    times = run_processes(2, timed_fit, strategy, 2, False, True)[0]
    check(times)
    assert times["time/exposed_communication_s"] >= NETWORK_S
