"""What the hybrid's benchmarks say about the network, and how they take waits and traffic apart."""

from __future__ import annotations

from pathlib import Path

import hybrid_throughput
import hybrid_traffic
import pytest
import torch
from support.alexnet import alexnet, head_widths, num_parameters
from support.hybrid_report import DDP, FIXED, REFERENCE, throughput_over, throughput_table
from support.hybrid_stages import FOR_BYTES, FOR_RANKS, Waits, feature_waits, hidden_share, split_waits
from support.interception import ALWAYS_SENT, COMPARISONS, ExchangeSwitch, send_nothing, wait_at_once
from support.timeline import gaps

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies import krizhevsky_hybrid
from tests.ranks import run_threads


def test_the_network_has_as_many_parameters_as_the_benchmarks_say():
    net = alexnet()
    assert num_parameters(net) == 61_838_248
    assert "61,838,248" in hybrid_traffic.__doc__
    assert head_widths(net) == [9216, 4096, 4096, 1000]
    assert "9216-4096-4096-1000" in hybrid_throughput.__doc__


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_network_takes_small_images(size):
    assert alexnet(size)(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


def test_a_wait_is_for_bytes_once_the_last_rank_has_started_the_exchange():
    ranks = [
        [("features", 0.0, 10.0), ("wait for features", 2.0, 10.0)],
        [("features", 6.0, 11.0), ("wait for features", 9.0, 11.0)],
    ]
    assert split_waits(ranks, ["features"]) == [
        [(FOR_RANKS, 2.0, 6.0), (FOR_BYTES, 6.0, 10.0)],
        [(FOR_BYTES, 9.0, 11.0)],
    ]
    assert feature_waits(ranks) == Waits(for_bytes_s=6.0, for_ranks_s=4.0)


def test_exchanges_of_one_name_are_matched_in_their_order():
    ranks = [
        [("loss", 0.0, 2.0), ("wait for loss", 1.0, 2.0), ("loss", 5.0, 9.0), ("wait for loss", 6.0, 9.0)],
        [("loss", 0.5, 2.0), ("wait for loss", 1.0, 2.0), ("loss", 8.0, 9.0), ("wait for loss", 8.0, 9.0)],
    ]
    first, second = split_waits(ranks, ["loss"])
    assert first == [(FOR_BYTES, 1.0, 2.0), (FOR_RANKS, 6.0, 8.0), (FOR_BYTES, 8.0, 9.0)]
    assert second == [(FOR_BYTES, 1.0, 2.0), (FOR_BYTES, 8.0, 9.0)]


def test_the_hidden_share_has_the_spread_of_the_pairs_of_steps():
    overlapped = [Waits(1.0, 9.0), Waits(2.0, 9.0)]
    alone = [Waits(4.0, 0.0), Waits(4.0, 0.0)]
    assert hidden_share(overlapped, alone).text(3) == "0.625 (0.500-0.750)"


def test_gaps_are_the_times_that_no_stage_covers():
    stages = [("b", 4.0, 6.0), ("a", 1.0, 3.0), ("c", 2.0, 3.5)]
    assert gaps(stages, 0.0, 8.0) == [(0.0, 1.0), (3.5, 4.0), (6.0, 8.0)]
    assert gaps(stages, 2.0, 5.0) == [(3.5, 4.0)]
    assert gaps([], 1.0, 2.0) == [(1.0, 2.0)]


def exchange(rank, group, replacement_is_on: bool) -> tuple[list[float], list[float], dict[str, int]]:
    channel = Channel(group)
    results = []
    for what in ("features", "sizes"):
        receives = [torch.full((1,), -1.0) for _ in range(2)]
        channel.all_to_all(what, [torch.tensor([10.0 + rank])] * 2, receives).wait()
        results.append([float(tensor) for tensor in receives])
    return results[0], results[1], dict(channel.bytes_sent)


@pytest.fixture
def switched(request):
    switch = ExchangeSwitch(request.param)
    switch.on()
    yield
    switch.off()


@pytest.mark.parametrize("switched", [send_nothing], indirect=True)
def test_without_communication_others_parts_are_zero_and_sizes_are_still_sent(switched):
    features, sizes, sent = run_threads(2, exchange, True)[0]
    assert features == [-1.0, 0.0]
    assert sizes == [-1.0, 11.0]
    assert sent == {"sizes": 4}


def gather(rank, group) -> list[float]:
    return Channel(group).all_gather("training step", torch.tensor(10.0 + rank)).tolist()


@pytest.mark.parametrize("switched", [send_nothing], indirect=True)
def test_without_communication_the_ranks_appear_to_agree(switched):
    """Otherwise the check of the factor and of the loss would stop the run."""
    assert run_threads(2, gather) == [[10.0, 10.0], [11.0, 11.0]]


def test_the_names_of_exchanges_are_those_of_the_strategy():
    """A renamed exchange would be cut off without a word, and stop the benchmark or change what it measures."""
    source = "".join(path.read_text() for path in Path(krizhevsky_hybrid.__file__).parent.glob("*.py"))
    for name in (*ALWAYS_SENT, *COMPARISONS):
        assert f'"{name}"' in source, name


@pytest.mark.parametrize("switched", [wait_at_once], indirect=True)
def test_without_overlap_the_same_arrives(switched):
    features, sizes, _ = run_threads(2, exchange, True)[0]
    assert features == [-1.0, 11.0]
    assert sizes == [-1.0, 11.0]


def test_switching_off_restores_the_exchange():
    original = Channel.all_to_all
    switch = ExchangeSwitch(send_nothing)
    switch.on()
    assert Channel.all_to_all is not original
    switch.off()
    assert Channel.all_to_all is original


def sides() -> dict:
    def side(step_s: list[float], alone_s: float | None) -> dict:
        rounds = [{"step_s": s, "alone_s": alone_s, "nic_bytes": 3e6} for s in step_s]
        return {"rounds": rounds, "bytes": 2_000_000, "bound_s": 0.1}

    return {
        REFERENCE: side([0.4, 0.5], None),
        DDP: side([1.0, 1.0], 0.2),
        FIXED: side([0.5, 0.4], 0.3),
    }


def test_tensor_parallelism_is_the_reference_and_comes_first():
    assert hybrid_throughput.SIDES[0] == REFERENCE == "tensor parallelism + DDP"
    table = throughput_table({"1gbit": sides()}, num_samples=64)
    header, _, *rows = table.splitlines()
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    cells = {row.split("|")[2].strip(): [c.strip() for c in row.strip("|").split("|")] for row in rows if row}
    over_reference = columns.index("throughput over tensor parallelism + DDP's (minimum-maximum)")
    over_ddp = columns.index("over DDP's (minimum-maximum)")
    assert cells[FIXED][over_reference] == "1.02 (0.80-1.25)"
    assert cells[FIXED][over_ddp] == "2.25 (2.00-2.50)"
    assert cells[REFERENCE][-1] == "100 (of the bytes alone)"


def test_ratios_compare_runs_of_one_round():
    assert throughput_over(sides()[FIXED], sides()[REFERENCE]).text() == "1.02 (0.80-1.25)"
