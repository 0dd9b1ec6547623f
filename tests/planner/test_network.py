"""The alpha-beta model: links, and collectives over them."""

from __future__ import annotations

import pytest

from lightning_dp.planner import Link, Network
from lightning_dp.planner.traffic import ring_cost

GIGABIT = Link(1e-4, 125e6)
FAST = Link(1e-5, 10e9)


@pytest.mark.parametrize("world_size", [2, 4, 7])
def test_the_ring_takes_the_bytes_and_steps_that_the_collectives_count(world_size):
    cost = ring_cost(world_size * 1000, 4, world_size)
    network = Network(GIGABIT, FAST)
    expected = cost.time_bound_s(GIGABIT.bytes_per_s, GIGABIT.latency_s)
    assert network.all_reduce_s(4 * world_size * 1000, world_size) == pytest.approx(expected)


def test_on_one_node_the_intra_link_counts_and_beyond_it_the_nic():
    network = Network(GIGABIT, FAST, ranks_per_node=4)
    assert network.all_reduce_s(1e9, 4) == pytest.approx(6 * FAST.message_s(0.25e9))
    assert network.all_reduce_s(1e9, 8) == pytest.approx(14 * GIGABIT.message_s(0.125e9))
    assert network.all_reduce_s(1e9, 1) == 0
    # Layered SGD sends 2(G-1)/G of the bytes between G nodes, DDP 2(N-1)/N over the same NIC.
    assert network.inter_group_all_reduce_s(1e9, 8) == pytest.approx(2 * GIGABIT.message_s(0.5e9))


def test_a_tree_has_fewer_steps_and_auto_takes_the_faster():
    ring, tree, auto = (Network(GIGABIT, FAST, all_reduce=name) for name in ("ring", "tree", "auto"))
    assert tree.all_reduce_s(1000, 1024) == pytest.approx(20e-4 + 2000 / 125e6)
    for num_bytes in (1e3, 1e9):
        assert auto.all_reduce_s(num_bytes, 64) == min(
            ring.all_reduce_s(num_bytes, 64), tree.all_reduce_s(num_bytes, 64)
        )
    assert ring.all_reduce_s(1e9, 4) < tree.all_reduce_s(1e9, 4)


def test_ranks_of_a_node_share_its_nic_in_an_exchange():
    alone, shared = Network(GIGABIT, FAST), Network(GIGABIT, FAST, ranks_per_node=2)
    assert alone.exchange_s(3e6, 4) == pytest.approx(1e-4 + 3e6 / 125e6)
    # Two of three peers are on the other node, for each of the two ranks of a node.
    assert shared.exchange_s(3e6, 4) == pytest.approx(1e-4 + 4e6 / 125e6)
    assert shared.exchange_s(3e6, 4, senders_per_node=1) == pytest.approx(1e-4 + 2e6 / 125e6)
    assert alone.exchange_s(3e6, 1) == 0
    assert alone.small_exchange_s(8) == pytest.approx(3e-4)


def test_an_exchange_takes_as_long_as_its_messages_take_the_rank_or_the_link():
    network = Network(GIGABIT, FAST, overhead_s=1e-3)
    assert network.exchange_s(1e3, 4) == network.small_exchange_s(4) == pytest.approx(3e-3)
    assert network.exchange_s(3e6, 4) == pytest.approx(1e-4 + 3e6 / 125e6), "further ones are started on the way"
    assert network.exchange_s(1e3, 1) == network.small_exchange_s(1) == 0


def test_compressed_sums_of_three_nodes_or_more_are_as_fast_as_direct_messages():
    network = Network(Link(0.0, 125e6), FAST, direct_bytes_per_s=100e6)
    assert network.compressed_all_reduce_s(3e6, 3) == pytest.approx(4e6 / 100e6)
    assert network.compressed_all_reduce_s(3e6, 2) == pytest.approx(3e6 / 125e6), "two swap all they have"
    assert network.inter_group_all_reduce_s(3e6, 3) == pytest.approx(4e6 / 125e6), "a ring"


def test_intra_group_stages():
    network = Network(GIGABIT, FAST, ranks_per_node=4)
    assert network.intra_group_s(1e9, 8) == pytest.approx(2e-5 + 0.1)
    assert network.intra_group_s(1e9, 8, "sharded") == pytest.approx(3 * FAST.message_s(0.25e9))
    assert Network(GIGABIT, FAST).intra_group_s(1e9, 8) == 0


def test_a_link_is_fitted_to_measured_times():
    link = Link(2e-4, 1.2e8)
    sizes = [0, 1000, 10**5, 10**7]
    found = Link.fit(sizes, [link.message_s(size) for size in sizes])
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((link.latency_s, link.bytes_per_s), rel=1e-6)
    noise = (1.1, 0.9, 1.02, 0.98)
    noisy = Link.fit(sizes, [link.message_s(size) * factor for size, factor in zip(sizes, noise, strict=True)])
    assert (noisy.latency_s, noisy.bytes_per_s) == pytest.approx((link.latency_s, link.bytes_per_s), rel=0.1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Link(-1, 1), ValueError, "latency_s=-1"),
        (lambda: Link(0, 0), ValueError, "bytes_per_s=0"),
        (lambda: Link.fit([1, 2], [2.0, 1.0]), ValueError, "do not grow with sizes"),
        (lambda: Link.fit([1, 1], [2.0, 1.0]), ValueError, "give two different sizes"),
        (lambda: Network(GIGABIT, FAST, 0), ValueError, "ranks_per_node=0"),
        (lambda: Network(GIGABIT, FAST, overhead_s=-1.0), ValueError, "overhead_s=-1.0"),
        (lambda: Network(GIGABIT, FAST, direct_bytes_per_s=-1.0), ValueError, "direct_bytes_per_s=-1.0"),
        (lambda: Network(GIGABIT, FAST, all_reduce="star"), ValueError, "all_reduce='star' must be one of 'ring'"),
        (lambda: Network(GIGABIT, FAST, 4).num_nodes(6), ValueError, "world_size=6 is not a multiple of ranks_per"),
    ],
)
def test_bad_input_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()
