"""The probe's arithmetic, on links whose times are given. That ranks measure and agree is in test_diagnose.py."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_dp.planner import diagnose

SIZE = 4  # ranks
ALPHA_S = 1e-3


@pytest.fixture
def measure(monkeypatch):
    def measured(bytes_per_s: float, at_once: float, bounds: tuple[int, int] = (65536, diagnose.LARGEST_BYTES)):
        def all_reduce_s(group, num_bytes, device, repeats):
            """A ring over links that let ``at_once`` bytes pass at once, and the others at their rate."""
            steps = 2 * (SIZE - 1)
            return steps * ALPHA_S + max(0.0, steps * num_bytes / SIZE - at_once) / bytes_per_s

        monkeypatch.setattr(dist, "get_world_size", lambda group: SIZE)
        monkeypatch.setattr(diagnose, "_all_reduce_s", all_reduce_s)
        return diagnose._measure(None, bounds, "cpu", 1)

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
