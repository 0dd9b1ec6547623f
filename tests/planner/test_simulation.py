"""The simulation: against closed forms, a naive scheduler, and what was measured on emulated hosts."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from lightning_dp.planner import METHODS, Block, Head, Link, Method, Network, Recomputation, Workload, simulate
from lightning_dp.planner.simulation import FREE, Schedule
from lightning_dp.planner.traffic import head_traffic
from lightning_dp.planner.workload import fill_buckets

SLOW, FAST = Link(1e-3, 1e8), Link(1e-5, 1e10)
ONE_BLOCK = Workload((Block(2e7, 0.1, 0.2),), batch_size=32, load_s=0.05, update_s=0.01)
ALL_REDUCE_S = 2 * SLOW.message_s(1e7)  # two nodes


def step_s(workload: Workload, method: Method | str, world_size: int = 2, network: Network | None = None) -> float:
    return simulate(workload, network or Network(SLOW, FAST), world_size, method).step_s


# --- events ---


def naive(tasks: list[tuple[float, list[int], int, float]]) -> list[float]:
    """Ends of tasks, by looking at all of them whenever something has happened."""
    ends: list[float | None] = [None] * len(tasks)
    started: set[int] = set()
    now = 0.0
    while any(end is None for end in ends):
        begun = True
        while begun:  # tasks without duration make others ready
            begun = False
            free = {resource for _, _, resource, _ in tasks} - {
                tasks[n][2] for n in started if ends[n] > now and tasks[n][2] != FREE
            }
            ready = [
                n
                for n, (_, after, _, _) in enumerate(tasks)
                if n not in started and all(other in started and ends[other] <= now for other in after)
            ]
            for resource in free:
                waiting = [n for n in ready if tasks[n][2] == resource]
                for n in waiting if resource == FREE else sorted(waiting, key=lambda n: (tasks[n][3], n))[:1]:
                    ends[n] = now + tasks[n][0]
                    started.add(n)
                    begun = True
        later = [ends[n] for n in started if ends[n] > now]
        if later:
            now = min(later)
    return ends


@pytest.mark.parametrize("seed", range(30))
def test_events_end_when_a_naive_scheduler_says(seed):
    rng = random.Random(seed)
    schedule = Schedule()
    resources = [FREE, *(schedule.resource() for _ in range(3))]
    tasks = []
    for number in range(40):
        # Few distinct durations, so that many things happen at the same time.
        after = rng.sample(range(number), min(number, rng.randint(0, 3)))
        task = (float(rng.randint(1, 4)), after, rng.choice(resources), float(rng.randint(0, 3)))
        tasks.append(task)
        schedule.add(task[0], task[1], task[2], task[3])
    assert schedule.run() == naive(tasks)


def test_the_most_urgent_ready_task_goes_first_and_none_is_interrupted():
    schedule = Schedule()
    link = schedule.resource()
    first = schedule.add(1.0, (), link, priority=9)
    late_urgent = schedule.add(1.0, [schedule.add(0.5)], link, priority=0)
    waiting = schedule.add(1.0, (), link, priority=9)
    ends = schedule.run()
    assert (ends[first], ends[late_urgent], ends[waiting]) == (1.0, 2.0, 3.0)


# --- one step, in closed form ---


def test_one_rank_loads_and_computes():
    result = simulate(ONE_BLOCK, Network(SLOW, FAST), 1, "ddp")
    assert result.step_s == pytest.approx(0.05 + 0.1 + 0.2 + 0.01)
    assert result.waiting_s == pytest.approx(0)
    assert result.images_per_s == pytest.approx(32 / 0.36)


def test_ddp_waits_for_the_whole_network():
    result = simulate(ONE_BLOCK, Network(SLOW, FAST), 2, "ddp")
    assert result.step_s == pytest.approx(0.36 + ALL_REDUCE_S)
    assert result.waiting_s == pytest.approx(ALL_REDUCE_S)
    assert result.images_per_s == pytest.approx(64 / result.step_s)


def test_sixteen_bits_halve_the_bytes():
    assert step_s(ONE_BLOCK, "ddp_bf16") == pytest.approx(0.36 + 2 * SLOW.message_s(5e6))


def test_accumulation_reduces_once_in_four_batches():
    # The update is part of the step of four, not of each.
    assert step_s(ONE_BLOCK, "ddp_accumulate_4") == pytest.approx(0.35 + (0.01 + ALL_REDUCE_S) / 4)


@pytest.mark.parametrize("method", ["ddp", "layered_sgd_load", "layered_sgd_step"])
def test_a_model_that_sends_no_gradients_updates_once(method):
    assert step_s(Workload((Block(0.0, 0.1, 0.2),), update_s=0.1), method) == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("load_s", [0.05, 1.0])
def test_layered_sgd_as_published_hides_the_network_behind_loading(load_s):
    expected = 0.31 + max(load_s, ALL_REDUCE_S)
    assert step_s(replace(ONE_BLOCK, load_s=load_s), "layered_sgd_load") == pytest.approx(expected)


def test_ddp_overlaps_buckets_with_backward():
    half = Block(30e6, 0.05, 0.3)
    all_reduce_s = 2 * SLOW.message_s(15e6)
    # The first bucket travels while the second is computed; 0.302 s of network, of which 0.3 hide.
    assert all_reduce_s > 0.3
    assert step_s(Workload((half, half)), "ddp") == pytest.approx(0.1 + 0.3 + 2 * all_reduce_s)


@pytest.mark.parametrize("megabytes", [1, 20, 200])
def test_layered_sgd_step_is_at_the_bound_of_compute_or_network(megabytes):
    workload = Workload.uniform(megabytes * 1e6, 0.1, 0.2, num_blocks=64, load_s=0.05, update_s=0.01)
    network = Network(Link(0.0, 1e8), FAST)
    bound_s = max(0.36, megabytes * 1e6 / 1e8)
    assert bound_s * 0.999 <= step_s(workload, "layered_sgd_step", network=network) <= bound_s * 1.03
    assert step_s(workload, "ddp", network=network) > step_s(workload, "layered_sgd_step", network=network)


def test_the_bucket_that_is_needed_first_arrives_first(monkeypatch):
    from lightning_dp.planner import simulation

    workload = Workload.uniform(3e7, 0.1, 0.2, num_blocks=16, load_s=0.05)
    prioritized = step_s(workload, "layered_sgd_step")
    add = simulation.Schedule.add
    monkeypatch.setattr(simulation.Schedule, "add", lambda *args, priority=None: add(*args))
    assert prioritized < 0.98 * step_s(workload, "layered_sgd_step")


def test_on_one_node_layered_sgd_is_ddp():
    network = Network(SLOW, FAST, ranks_per_node=4)
    for name in ("layered_sgd_load", "layered_sgd_step"):
        assert step_s(ONE_BLOCK, name, 4, network) == step_s(ONE_BLOCK, "ddp", 4, network)


@pytest.mark.parametrize(
    "options", [{"accumulate": 4}, {"global_batch_norm": True}, {"recompute": "same_batch"}], ids=["4", "agbn", "again"]
)
def test_on_one_node_layered_sgd_keeps_the_batches_of_the_method(options):
    network = Network(SLOW, FAST, ranks_per_node=4)
    workload = replace(ONE_BLOCK, num_batch_norms=10, recomputation=Recomputation(9e6, 3e6, 0.02))
    layered = simulate(workload, network, 4, Method("layered_sgd", **options))
    assert layered == simulate(workload, network, 4, Method(**options))
    assert layered != simulate(workload, network, 4, Method())


# --- layered FSDP ---

# Two nodes of two ranks. A unit has 10 MB, so a gather or a reduce-scatter takes 5 ms; a rank updates half of a unit.
NO_LIMIT = Network(Link(0.0, 1e15), Link(0.0, 1e9), ranks_per_node=2)


def units(forward_s: float, backward_s: float) -> Workload:
    return replace(Workload.uniform(16e7, 16 * forward_s, 16 * backward_s, num_blocks=16), update_s=0.016)


@pytest.mark.parametrize("overlap", ["load", "step"])
def test_fsdp_gathers_a_unit_while_the_one_before_it_computes(overlap):
    # Exposed are the first gather of the forward and, if parameters were freed, of the backward, and the last sum.
    for is_freed, num_gathers in ((True, 2), (False, 1)):
        method = Method("layered_fsdp", overlap, reshard_after_forward=is_freed)
        found = step_s(units(0.02, 0.04), method, 4, NO_LIMIT)
        assert found == pytest.approx(0.32 + 0.64 + 0.008 + num_gathers * 0.005 + 0.005)


def test_gathers_that_take_longer_than_a_unit_hold_up_the_forward():
    # Forward: each unit waits for its update and its gather, then the last one computes. Backward: 16 sums behind the
    # first unit.
    method = Method("layered_fsdp", reshard_after_forward=False)
    forward_s, backward_s = 16 * (0.0005 + 0.005) + 0.002, 0.004 + 16 * 0.005
    assert step_s(units(0.002, 0.004), method, 4, NO_LIMIT) == pytest.approx(forward_s + backward_s)


def test_layered_fsdp_hides_the_slow_hop_as_layered_sgd_does():
    slow = Network(Link(0.0, 1e8), Link(0.0, 1e9), ranks_per_node=2)
    workload = replace(units(0.02, 0.04), load_s=0.5)
    for overlap in ("load", "step"):
        sgd = Method("layered_sgd", overlap, "sharded", bucket_bytes=1e7, first_bucket_bytes=1e7)
        fsdp = step_s(workload, Method("layered_fsdp", overlap), 4, slow)
        assert fsdp == pytest.approx(step_s(workload, sgd, 4, slow), rel=0.03)
        assert fsdp < 0.85 * step_s(workload, "ddp", 4, slow)


def test_a_frozen_trunk_hides_messages_of_layered_sgd_in_the_next_forward():
    frozen = replace(ONE_BLOCK, load_s=0.0, frozen_s=1.0)
    assert frozen.compute_s == pytest.approx(1.31)
    assert step_s(frozen, "layered_sgd_step") == pytest.approx(1.31), "202 ms of messages in it"
    assert step_s(frozen, "ddp") == pytest.approx(1.31 + ALL_REDUCE_S)
    trained = replace(frozen, blocks=(Block(2e7, 1.1, 0.2),), frozen_s=0.0)
    assert step_s(trained, "layered_sgd_step") == pytest.approx(1.31 + ALL_REDUCE_S)
    assert step_s(frozen.larger(2), "ddp") == pytest.approx(2 * 1.3 + 0.01 + ALL_REDUCE_S)
    assert step_s(replace(frozen, accumulate=3), "ddp") == pytest.approx(3 * 1.3 + 0.01 + ALL_REDUCE_S)
    one_node = Network(SLOW, FAST, ranks_per_node=2)
    sharded_s = step_s(frozen, "layered_fsdp_step", 4, one_node) - step_s(
        replace(frozen, frozen_s=0.0), "layered_fsdp_step", 4, Network(Link(0.0, 1e15), FAST, ranks_per_node=2)
    )
    assert sharded_s == pytest.approx(1.0, rel=0.01), "layered FSDP hides them as well"


def test_loading_in_the_background_counts_only_where_it_is_the_slowest():
    workload = replace(ONE_BLOCK, loads_in_background=True)
    assert step_s(workload, "ddp", 1) == pytest.approx(0.31)
    assert step_s(replace(workload, load_s=0.5), "ddp", 1) == pytest.approx(0.5)
    assert simulate(replace(workload, load_s=0.5), Network(SLOW, FAST), 1, "ddp").waiting_s == pytest.approx(0.19)


def test_global_batch_norm_waits_twice_per_layer():
    workload = replace(ONE_BLOCK, num_batch_norms=10)
    extra_s = step_s(workload, Method(global_batch_norm=True), 8) - step_s(workload, Method(), 8)
    assert extra_s == pytest.approx(2 * 10 * 3 * SLOW.latency_s)
    assert Method(global_batch_norm=True).applies_to(workload)
    assert not Method(global_batch_norm=True).applies_to(ONE_BLOCK)  # which has no batch norm


# --- hybrid ---

HEAD = Head(2e8, 0.06, 0.12, feature_bytes=1e6, hidden_bytes=5e5)
WITH_HEAD = Workload((Block(1e6, 0.2, 0.4),), head=HEAD)


def test_scheme_a_has_one_pass():
    size = 4
    features_s = SLOW.latency_s + (size - 1) * 1e6 / 1e8
    hidden_s = SLOW.latency_s + (size - 1) * 5e5 / 1e8
    trunk_s = 2 * (size - 1) * SLOW.message_s(1e6 / size)
    small_s = 4 * SLOW.latency_s  # sizes, targets, and two of the loss
    expected = 0.6 + 0.18 + 2 * features_s + 2 * hidden_s + small_s + trunk_s
    assert step_s(WITH_HEAD, "hybrid_a", size) == pytest.approx(expected)


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_each_exchange_of_the_head_takes_the_overhead_of_its_messages(scheme, num_layers):
    """As many as the strategy makes: head_traffic counts them, and is compared with it.

    Also those that travel while the head computes: the rank starts and takes their messages itself.
    """
    size, overhead_s = 4, 0.01
    widths = [8] * num_layers + [4]
    exchanges = sum(cost.num_steps for cost in head_traffic(widths, [2] * size, 4, scheme, "cross_entropy").values())
    if scheme == "b":  # of the features that travel meanwhile, and their gradients, a rank sends in its own turn only
        exchanges -= 2 * (size - 1) * (1 - 1 / size)
    nothing = Block(0.0, 0.0, 0.0)
    workload = Workload((nothing,), head=Head(0.0, 5.0, 5.0, 0.0, 0.0, layers=(nothing,) * num_layers))
    network = Network(Link(0.0, 1e15), FAST, overhead_s=overhead_s / (size - 1))
    without_s = step_s(workload, f"hybrid_{scheme}", size, replace(network, overhead_s=0.0))
    assert step_s(workload, f"hybrid_{scheme}", size, network) - without_s == pytest.approx(exchanges * overhead_s)


@pytest.mark.parametrize("method", ["ddp", "layered_sgd_load", "layered_sgd_step", "hybrid_a"])
def test_what_is_not_known_of_a_step_is_in_each_method(method):
    network = Network(Link(0.0, 1e15), FAST)  # behind a slow one it would be hidden
    longer = step_s(replace(WITH_HEAD, rest_s=0.5), method, 4, network) - step_s(WITH_HEAD, method, 4, network)
    assert longer == pytest.approx(0.5)


def test_data_parallelism_reduces_each_layer_of_the_head_as_soon_as_it_is_ready():
    """As if there were no head to shard."""
    layers = (Block(3e6, 0.1, 0.2), Block(9e6, 0.1, 0.2), Block(8e6, 0.1, 0.1))
    total = Block(2e7, 0.3, 0.5)
    head = Head(total.num_bytes, total.forward_s, total.backward_s, 1e6, 5e5, layers=layers)
    trunk = Block(1e6, 0.2, 0.4)
    for method in ("ddp", "layered_sgd_load", "layered_sgd_step"):
        whole = step_s(Workload((trunk, *layers)), method)
        assert step_s(Workload((trunk,), head=head), method) == whole != step_s(Workload((trunk, total)), method)
        assert step_s(Workload((trunk,), head=head).larger(2), method) == step_s(
            Workload((trunk, *layers)).larger(2), method
        )


def test_fewer_passes_hide_less_and_send_no_more():
    def exposed_s(num_passes: int | None) -> float:
        method = Method("hybrid", scheme="c", num_passes=num_passes)
        return step_s(WITH_HEAD, method, 4, Network(Link(0.0, 1e8), FAST)) - step_s(WITH_HEAD, method, 4, ENDLESS)

    ENDLESS = Network(Link(0.0, 1e15), FAST)
    assert exposed_s(None) == exposed_s(4) < exposed_s(2) < exposed_s(1)
    assert exposed_s(1) == pytest.approx(
        step_s(WITH_HEAD, "hybrid_a", 4, Network(Link(0.0, 1e8), FAST)) - step_s(WITH_HEAD, "hybrid_a", 4, ENDLESS)
    )


def test_schemes_b_and_c_hide_features_behind_the_head():
    network = Network(Link(0.0, 1e8), FAST)
    fast = Network(Link(0.0, 1e15), FAST)
    exposed = {
        scheme: step_s(WITH_HEAD, f"hybrid_{scheme}", 4, network) - step_s(WITH_HEAD, f"hybrid_{scheme}", 4, fast)
        for scheme in "abc"
    }
    assert exposed["c"] < exposed["a"]
    assert exposed["c"] < exposed["b"], "in b one rank's link limits all"
    # Not hidden in c: the first pass's features, the last pass's gradients, hidden activations, the trunk's gradients.
    least = 2 * 3 * 1e6 / 4 / 1e8 + 2 * 3 * 5e5 / 1e8 + 2 * 3 / 4 * 1e6 / 1e8
    assert exposed["c"] == pytest.approx(least, rel=0.5)


def test_the_hybrid_beats_ddp_where_the_head_has_the_bytes():
    assert step_s(WITH_HEAD, "ddp", 4) > 3 * step_s(WITH_HEAD, "hybrid_c", 4)
    with pytest.raises(ValueError, match="no head to shard"):
        step_s(ONE_BLOCK, "hybrid_c")


# --- many ranks ---


def test_ranks_wait_for_the_slowest():
    workload = Workload((Block(0.0, 0.0, 1.0),), jitter=0.05)
    network = Network(Link(0.0, 1e12), FAST)
    times = [simulate(workload, network, size, "ddp", num_steps=12).step_s for size in (1, 10, 1000)]
    # The expected maximum of 10 and of 1000 normal numbers is 1.54 and 3.24 standard deviations.
    assert times == pytest.approx([1.0, 1 + 1.54 * 0.05, 1 + 3.24 * 0.05], abs=0.04)


@pytest.mark.parametrize("name", METHODS)
def test_without_jitter_one_rank_stands_for_all(name):
    workload = Workload.uniform(4e7, 0.1, 0.2, load_s=0.05, update_s=0.01, head=HEAD, num_batch_norms=2)
    workload = replace(workload, recomputation=Recomputation(9e6, 3e6, 0.02))
    network = Network(SLOW, FAST, ranks_per_node=2)
    one = simulate(workload, network, 8, name)
    all_ranks = simulate(replace(workload, jitter=1e-12), network, 8, name)
    assert all_ranks.step_s == pytest.approx(one.step_s, rel=1e-9)


@pytest.mark.parametrize("name", ["ddp", "layered_sgd_step"])
def test_ten_thousand_ranks(name):
    workload = Workload.uniform(1e8, 0.05, 0.1, load_s=0.02)
    network = Network(Link(5e-6, 2.5e10), Link(2e-6, 2e11), ranks_per_node=8, all_reduce="tree")
    assert simulate(workload, network, 10_000, name).step_s > 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "layered_sgd_step"])
def test_ten_thousand_ranks_of_different_speed(name):
    workload = Workload.uniform(1e8, 0.05, 0.1, num_blocks=4, load_s=0.02, jitter=0.02)
    network = Network(Link(5e-6, 2.5e10), Link(2e-6, 2e11), ranks_per_node=8, all_reduce="tree")
    begin_s = time.process_time()
    assert simulate(workload, network, 10_000, replace(METHODS[name], bucket_bytes=25e6)).step_s > 0.15
    assert time.process_time() - begin_s < 60, "the promise of the page, not a bound on this machine's speed"


# --- buckets and input ---


def test_buckets_are_filled_as_ddp_fills_them():
    blocks = [Block(size, 1.0, 2.0) for size in (3, 10, 8, 2, 1, 1)]
    buckets = fill_buckets(blocks, bucket_bytes=10, first_bucket_bytes=2)
    assert [bucket.num_bytes for bucket in buckets] == [3, 10, 10, 2]
    assert [bucket.forward_s for bucket in buckets] == [1.0, 1.0, 2.0, 2.0]
    assert sum(bucket.backward_s for bucket in buckets) == 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(-1, 0, 0), "num_bytes=-1"),
        (lambda: Workload(()), "blocks=.. is empty"),
        (lambda: Workload((Block(1, 1, 1),), load_s=-2), "load_s=-2"),
        (lambda: Workload.uniform(1, 1, 1, num_blocks=0), "num_blocks=0"),
        (lambda: Method(scheme="d"), "scheme='d' must be one of 'a', 'b', 'c'"),
        (lambda: Method("fsdp"), "family='fsdp' must be one of 'ddp'"),
        (lambda: Method(accumulate=0), "accumulate=0"),
        (lambda: step_s(ONE_BLOCK, "zero"), "method='zero' is unknown; use one of ddp, ddp_ring"),
        (lambda: simulate(ONE_BLOCK, Network(SLOW, FAST), 0, "ddp"), "world_size=0"),
        (lambda: simulate(ONE_BLOCK, Network(SLOW, FAST), 2, "ddp", num_steps=2), "num_steps=2"),
    ],
)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
