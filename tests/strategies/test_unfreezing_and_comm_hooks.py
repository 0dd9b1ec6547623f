"""Communication hooks of users, in runs of the strategies that leave sums to DDP, when a parameter is unfrozen."""

# No `from __future__ import annotations`: DDP checks the communication hooks' annotations as objects.
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from tests.ranks import run_processes
from tests.strategies.test_unfreezing import EPOCHS, STEPS, FrozenAtFirst, fit


class FirstFrozen(FrozenAtFirst):
    """DDP has something to reduce from the start, also where another strategy takes care of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared.requires_grad_(True)
        self.body = [*self.first.parameters()]


class Counting(pl.Callback):
    """Registers a communication hook, as users do on CPU, where DDPStrategy ignores its own argument for it."""

    def __init__(self) -> None:
        self.buckets: dict[int, list[int]] = {}  # step -> elements of each bucket

    def on_train_start(self, t: pl.Trainer, module: pl.LightningModule) -> None:
        t.strategy.model.register_comm_hook((self.buckets, t), count_and_reduce)


def count_and_reduce(state, bucket):  # DDP compares annotations with types, and would find strings
    buckets, t = state
    buckets.setdefault(t.global_step, []).append(bucket.buffer().numel())
    return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)


def count_buckets(rank):
    counted = []
    for strategy in (LayeredSGDStrategy(2), KrizhevskyHybridStrategy(head="last")):
        counting = Counting()
        module = FirstFrozen()
        fit(strategy, module, callbacks=[counting])
        counted.append((counting.buckets, sum(p.numel() for p in module.body)))
    return counted


@pytest.mark.ci
def test_a_communication_hook_of_the_user_also_reduces_what_is_unfrozen():
    for of_rank in run_processes(2, count_buckets):
        for buckets, of_body in of_rank:
            assert set(buckets) == set(range(EPOCHS * STEPS))
            elements = [sum(buckets[step]) for step in sorted(buckets)]
            assert set(elements[: 2 * STEPS]) == {elements[0]}
            assert set(elements[2 * STEPS :]) == {elements[0] + of_body}


class ByBucket(powerSGD_hook.PowerSGDState):
    """PowerSGD that notes which parameters each residual belongs to, and which residuals were added to others."""

    def __init__(self) -> None:
        super().__init__(None, matrix_approximation_rank=1, start_powerSGD_iter=STEPS, min_compression_rate=1)
        self.owners: dict[int, list[int]] = {}
        self.mixed: list[int] = []
        self.compressed: list[bool] = []  # for each bucket


def noting_power_sgd(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    parameters = [id(parameter) for parameter in bucket.parameters()]
    if bucket.index() in state.error_dict and state.owners[bucket.index()] != parameters:
        state.mixed.append(bucket.index())
    state.owners[bucket.index()] = parameters
    state.compressed.append(state.iter >= state.start_powerSGD_iter)
    return powerSGD_hook.powerSGD_hook(state, bucket)


class Registers(pl.Callback):
    def __init__(self, state, hook) -> None:
        self.state, self.hook = state, hook

    def on_train_start(self, t: pl.Trainer, module: pl.LightningModule) -> None:
        t.strategy.model.register_comm_hook(self.state, self.hook)


def fit_with_power_sgd(rank):
    results = []
    for strategy in (LayeredSGDStrategy(2), KrizhevskyHybridStrategy(head="last")):
        state = ByBucket()
        module = FirstFrozen()
        fit(strategy, module, callbacks=[Registers(state, noting_power_sgd)])
        results.append((state.mixed, state.compressed, [p.detach().clone() for p in module.parameters()]))
    return results


@pytest.mark.ci
def test_power_sgd_forgets_its_residuals_of_other_buckets():
    """They are kept by the bucket's number, and were of another size or added to other parameters."""
    of_ranks = run_processes(2, fit_with_power_sgd)
    for (mixed, compressed, parameters), (*_, others) in zip(*of_ranks, strict=True):
        assert not mixed
        assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
        assert len(compressed) == EPOCHS * STEPS  # one bucket
        exact = [step for step, is_compressed in enumerate(compressed) if not is_compressed]
        assert exact == [*range(STEPS), 2 * STEPS, 2 * STEPS + 1]
