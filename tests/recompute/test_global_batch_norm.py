"""Recomputation of global batch norm: no collective is issued twice, on two ranks over gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_dp.collectives.small_all_gather import small_all_gather
from lightning_dp.layers import apply_global_batch_norm, batch_statistics, global_batch_norm_layers
from lightning_dp.recompute import apply_recompute
from tests.ranks import run_threads
from tests.recompute.counting import OperatorCounts, differing, recomputed, state_of
from tests.recompute.models import Shared, batch, residual

POLICIES = ("cheap", "sublinear")
BUILD = {"residual": partial(residual, num_blocks=2), "shared": Shared}
STEPS = 10
NUM_LAYERS = {"residual": 5, "shared": 8}


def train(rank: int, group: Any, model: nn.Module, switch_at: int = STEPS) -> tuple[dict[str, Tensor], Any]:
    """Train on this rank's batches; statistics become local at step ``switch_at``.

    Return the state, and the operators of the last step's backward.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for step in range(STEPS):
        for layer in global_batch_norm_layers(model):
            layer.is_global = step < switch_at
        x, y = batch(2 * step + rank)
        optimizer.zero_grad()
        with OperatorCounts() as operators:
            loss = F.cross_entropy(model(x), y)
            operators.counts.clear()
            loss.backward()
        for parameter in model.parameters():
            gathered = small_all_gather(parameter.grad.flatten(), group)
            parameter.grad = gathered.sum(0).view_as(parameter) / 2
        optimizer.step()
    state = state_of(model)
    del state["random numbers"]  # the ranks are threads and share a generator
    return state, operators.counts


def run(name: str, apply: Callable[[nn.Module], object], switch_at: int = STEPS) -> tuple[list[Any], int]:
    """Return each rank's state and counts, and how many collectives of batch norm there were on both ranks."""
    torch.manual_seed(3)
    models = [BUILD[name]() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def on_rank(rank: int, group: Any) -> Any:
        apply_global_batch_norm(models[rank], group)
        apply(models[rank])
        return train(rank, group, models[rank], switch_at)

    collectives: list[int] = []  # a mock's call_count loses calls: the ranks are threads

    def counting(values: Tensor, group: Any) -> Tensor:
        collectives.append(1)
        return small_all_gather(values, group)

    with patch.object(batch_statistics, "small_all_gather", counting):
        results = run_threads(2, on_rank)
    return results, len(collectives)


@pytest.mark.ci
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", BUILD)
def test_it_is_bitwise_the_same_with_as_many_collectives(name, policy):
    plain, num_plain = run(name, lambda model: None)
    results, num_collectives = run(name, lambda model: apply_recompute(model, policy))
    for (state, counts), (plain_state, plain_counts) in zip(results, plain, strict=True):
        assert differing(state, plain_state) == []
        assert recomputed(plain_counts, counts)["relu"] >= 3
    assert num_collectives == num_plain == 2 * 2 * NUM_LAYERS[name] * STEPS  # ranks, forward and backward


@pytest.mark.ci
@pytest.mark.parametrize("policy", POLICIES)
def test_the_switch_to_local_statistics_is_bitwise_the_same(policy):
    plain, num_plain = run("residual", lambda model: None, switch_at=2)
    results, num_collectives = run("residual", lambda model: apply_recompute(model, policy), switch_at=2)
    assert [differing(result[0], expected[0]) for result, expected in zip(results, plain, strict=True)] == [[], []]
    assert num_collectives == num_plain == 2 * 2 * NUM_LAYERS["residual"] * 2


@pytest.mark.ci
def test_the_test_sees_a_second_collective():
    def checkpoint_it(model: nn.Module) -> None:
        forward = model.forward
        model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)

    _, num_plain = run("residual", lambda model: None, switch_at=1)
    with set_checkpoint_early_stop(False):
        _, num_collectives = run("residual", checkpoint_it, switch_at=1)
    assert num_collectives == num_plain * 3 // 2
