"""The probe's arithmetic, on links whose times are given. That ranks measure and agree is in test_diagnose.py."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives.compression.layout import ParameterTable, whole_shard
from lightning_dp.planner import probe
from lightning_dp.planner.diagnose import RecomputeTimes
from tests.ranks import run_processes

SIZE = 4  # ranks
ALPHA_S = 1e-3


@pytest.fixture
def measure(monkeypatch):
    def measured(bytes_per_s: float, at_once: float, bounds: tuple[int, int] = (65536, probe.LARGEST_BYTES)):
        def all_reduce_s(group, num_bytes, device, repeats):
            """A ring over links that let ``at_once`` bytes pass at once, and the others at their rate."""
            steps = 2 * (SIZE - 1)
            return steps * ALPHA_S + max(0.0, steps * num_bytes / SIZE - at_once) / bytes_per_s

        monkeypatch.setattr(dist, "get_world_size", lambda group: SIZE)
        monkeypatch.setattr(probe, "_all_reduce_s", all_reduce_s)
        return probe._measure(None, bounds, "cpu", 1)[0]

    return measured


@pytest.mark.parametrize("bytes_per_s", [12.5e6, 125e6, 1.25e9])
def test_what_a_link_lets_pass_at_once_does_not_count(measure, bytes_per_s):
    link = measure(bytes_per_s, at_once=0.004 * bytes_per_s)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.06)
    assert link.latency_s == pytest.approx(ALPHA_S, rel=0.1)


def test_an_unlimited_link_ends_at_the_largest_message(measure):
    assert measure(1e12, at_once=0.0).bytes_per_s == pytest.approx(1e12, rel=1e-6)


def test_a_large_message_that_takes_no_longer_tells_all(measure):
    link = measure(1e12, at_once=1e9, bounds=(4096, 4096))
    assert link.latency_s == pytest.approx(ALPHA_S)
    assert link.bytes_per_s == pytest.approx(1024 / ALPHA_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_message_has_as_many_bytes_with_any_default_dtype(monkeypatch, dtype):
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda message, group: sent.append(message.nbytes))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        probe._all_reduce_s(None, 1000, "cpu", repeats=1)
    finally:
        torch.set_default_dtype(before)
    assert sent == [1000, 1000, 8], "not timed, timed, and the time itself"


# --- compressors ---


def test_a_compressor_alone_sums_as_with_a_carrier_that_sends_the_same():
    infos = ParameterTable([("weight", torch.empty(300, 4))]).all()
    bucket = torch.arange(1200.0).bfloat16().float()
    doubled = 2 * bucket
    probe.make_compressor("bf16").all_reduce(bucket, whole_shard(infos), probe._Loopback())
    assert torch.equal(bucket, doubled)


def test_a_part_of_the_gradients_stands_for_all(monkeypatch):
    monkeypatch.setattr(probe, "PROBED_ELEMENTS", 1000)
    monkeypatch.setattr(probe, "_compress_s", lambda choice, gradients, *_: float(len(gradients)))
    # The second one does not fit, the third does; one that is too large is measured if it is the first.
    assert probe.probe_compressors([(20, 30), (50, 20), (100,)]) == pytest.approx(
        {"bf16": 1700.0, "int8": 1700.0, "power_sgd": 1700.0}
    )
    assert probe.probe_compressors([(50, 40)])["int8"] == 2000.0
    assert probe.probe_compressors([]) == {}


def test_each_compressor_takes_time():
    measured = probe.probe_compressors([(64, 64), (64,)], repeats=1)
    assert set(measured) == {"bf16", "int8", "power_sgd"}
    assert all(seconds > 0 for seconds in measured.values())


def measure_beside_a_slow_rank(rank):
    dist.init_process_group("gloo")
    compress = probe._Loopback.start

    def slowly(self, outgoing, incoming):
        time.sleep(0.1 * rank)  # far more than a pause of a busy machine
        return compress(self, outgoing, incoming)

    probe._Loopback.start = slowly
    try:
        alone, together = (probe.probe_compressors([(64, 64)], 1, device)["bf16"] for device in (None, "cpu"))
    finally:
        probe._Loopback.start = compress
    return alone, together


def test_ranks_that_measure_together_wait_for_the_slowest():
    (alone, together), slowest = run_processes(2, measure_beside_a_slow_rank)
    assert together == pytest.approx(slowest[1], rel=1e-6), "all get the same"
    assert together > alone + 0.02 > 0.02


# --- recording ---


@pytest.mark.parametrize(
    ("forward_s", "record_s"),
    [
        (0.40, 0.25),  # operators 0.40 s, batch norm once more 0.05 s, of 0.70 s
        (0.45, 0.20),  # another step also takes 0.05 s beside its operators
        (0.10, 0.25),  # the recorded step was slow, as one of the first
        (0.90, 0.0),
    ],
)
def test_recording_is_what_a_recorded_forward_takes_beside_its_operators(forward_s, record_s):
    times = RecomputeTimes()
    times._handle = SimpleNamespace(step_s=0.7)
    operations = [SimpleNamespace(key="norm:aten::native_batch_norm:0", time_s=0.05)]
    operations.append(SimpleNamespace(key="conv:aten::convolution:0", time_s=0.3))
    times._profiler = SimpleNamespace(operations=operations, forward_s=0.4)
    assert times._record_s(forward_s) == pytest.approx(record_s)
