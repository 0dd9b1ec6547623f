"""The dynamic program for chains against an exhaustive search of all schedules."""

from __future__ import annotations

import heapq
import math
import random
from itertools import count

import pytest

from lightning_dp.recompute.solvers import Stage, solve_chain


def exhaustive(stages: list[Stage], budget: int) -> float:
    """The least time of forward, by Dijkstra's algorithm over all that memory can hold.

    A state: the stages whose backward is still to come; outputs that are kept until the backward behind them; stages
    of which all is saved; and the output that is just being passed on. Moves: run a stage and forget its input, or
    keep it, or save all; backward of the last stage.
    """
    num = len(stages)
    start = (num, frozenset(), frozenset(), -1)  # -1 is the chain's input, which is always there
    order = count()
    queue = [(0.0, next(order), start)]
    done = set()
    while queue:
        time_s, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        left, kept, saved, current = state
        if left == 0:
            return time_s
        held = sum(stages[i].output_bytes for i in kept) + sum(stages[i].saved_bytes for i in saved)
        moves = []
        for stage in range(left):
            source = stage - 1
            is_there = source == -1 or source in kept or source in saved
            if not is_there and current != source:
                continue
            floating = stages[source].output_bytes if not is_there else 0
            with_source = kept if is_there else kept | {source}
            if held + floating + stages[stage].output_bytes <= budget:
                moves.append((stages[stage].time_s, (left, with_source, saved, stage)))
                if not is_there:
                    moves.append((stages[stage].time_s, (left, kept, saved, stage)))
            if stage not in saved and held + floating + stages[stage].saved_bytes <= budget:
                moves.append((stages[stage].time_s, (left, with_source, saved | {stage}, -1)))
        last = left - 1
        if last in saved and (last == 0 or last - 1 in kept or last - 1 in saved):
            moves.append((0.0, (last, kept - {last - 1, last}, saved - {last}, -1)))
        for more_s, following in moves:
            heapq.heappush(queue, (time_s + more_s, next(order), following))
    return math.inf


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_optimum_of_small_chains(seed):
    generator = random.Random(seed)
    stages = []
    for _ in range(generator.choice([3, 4, 5])):
        output = generator.randint(1, 4)
        stages.append(Stage(generator.randint(1, 9), output, output + generator.choice([0, 0, 1, 3])))
    forward_s = sum(stage.time_s for stage in stages)
    total = sum(stage.saved_bytes for stage in stages)
    found = 0
    for budget in range(1, total + 1):
        schedule, expected = solve_chain(stages, budget), exhaustive(stages, budget)
        assert (math.inf if schedule is None else schedule.recompute_s + forward_s) == expected, (stages, budget)
        found += schedule is not None and schedule.recompute_s > 0
    assert found, "some budget needed recomputation"


def test_it_is_the_optimum_of_equal_stages():
    stages = [Stage(1.0, 1, 1)] * 9
    assert solve_chain(stages, 4).recompute_s == exhaustive(stages, 4) - 9


def test_with_enough_memory_nothing_runs_twice():
    stages = [Stage(1.0, 10, 15)] * 6
    schedule = solve_chain(stages, 6 * 15)
    assert schedule == (0.0, (0,) * 6, (1,) * 6)
    assert solve_chain(stages, 14) is None


def test_a_chain_of_fifty_stages_is_planned():
    stages = [Stage(1.0 + i % 3, 1000 + 10 * i, 1500 + 10 * i) for i in range(50)]
    schedule = solve_chain(stages, 20_000)
    assert 0 < schedule.recompute_s < sum(stage.time_s for stage in stages) * 1.5
    assert all(0 <= level < runs for level, runs in zip(schedule.levels, schedule.num_runs, strict=True))
    again_s = sum((runs - 1) * stage.time_s for stage, runs in zip(stages, schedule.num_runs, strict=True))
    assert again_s == pytest.approx(schedule.recompute_s)
