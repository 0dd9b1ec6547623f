"""Hybrid parallelism against one process on the concatenated batch (6 steps, float64, 1e-9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies import KrizhevskyHybridStrategy
from lightning_dp.strategies.krizhevsky_hybrid.exchange import sub_passes
from tests.ranks import RankError, run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, PenaltyNet, StepNet, all_batches, batches
from tests.strategies.modules import SMALL_BUCKETS_MB, assert_same, optimizers, snapshot, trainer

Case = tuple[type[HybridNet], str, str, str]  # module, scheme (with its number of passes), optimizer, loss


def fit(rank: int, world_size: int, net: type[HybridNet], strategy: Any, **options: Any) -> Any:
    """Train ``net`` on this rank's batches; return its trainer and the module."""
    names = ("optimizer", "loss", "dropout")
    module = net(**{name: options.pop(name) for name in names if name in options})
    own = trainer(strategy, world_size, use_distributed_sampler=False, **options)
    own.fit(module, batches(rank, world_size))
    return own, module


def single(world_size: int, net: type[HybridNet], **options: Any) -> tuple[dict[str, Tensor], HybridNet]:
    """Train on the concatenated batches in this process."""
    names = ("optimizer", "loss")
    module = net(**{name: options.pop(name) for name in names if name in options})
    own = trainer("auto", 1, **options)
    own.fit(module, all_batches(world_size))
    return snapshot(module, own), module


def _cases(rank: int, world_size: int, cases: list[Case]) -> list[tuple[dict[str, Tensor], list[float]]]:
    results = []
    for net, scheme, optimizer, loss in cases:
        passes = {"num_passes": int(scheme[1:])} if scheme[1:] else {}
        strategy = KrizhevskyHybridStrategy(scheme=scheme[0], bucket_cap_mb=SMALL_BUCKETS_MB, **passes)
        own, module = fit(rank, world_size, net, strategy, optimizer=optimizer, loss=loss)
        results.append((snapshot(module, own), module.losses))
    return results


# Three ranks share out samples and rows unevenly. Two and four show little more.
NETS = [
    pytest.param(net, world_size, marks=pytest.mark.slow if world_size in (2, 4) else ())
    for net in (HybridNet, StepNet)
    for world_size in (1, 2, 3, 4)
]


@pytest.mark.parametrize(
    ("net", "world_size"), [*NETS, (PenaltyNet, 3)], ids=lambda value: getattr(value, "__name__", value)
)
def test_equals_one_process(net, world_size):
    cases: list[Case] = [(net, scheme, "momentum", "cross_entropy") for scheme in "abc"]
    cases += [(net, "c", "adamw", "logistic")]
    cases += [(net, scheme, "momentum", "cross_entropy") for scheme in ("b2", "c2", "c5")]
    expected = {}
    for _, _, optimizer, loss in cases:
        if optimizer not in expected:
            expected[optimizer] = single(world_size, net, optimizer=optimizer, loss=loss)
    of_ranks = run_processes(world_size, _cases, world_size, cases)
    for index, (_, _, optimizer, _) in enumerate(cases):
        state, module = expected[optimizer]
        for of_rank in of_ranks:
            assert_same(of_rank[index][0], state, 1e-9)
        losses = torch.tensor([of_rank[index][1] for of_rank in of_ranks], dtype=torch.float64)
        torch.testing.assert_close(losses.mean(0), torch.tensor(module.losses, dtype=torch.float64))
        if net is not HybridNet:  # every rank has the loss of all samples
            assert (losses == losses[0]).all()


def _without_messages(rank: int, world_size: int, net: type[HybridNet]) -> dict[str, Tensor]:
    before = Channel.all_to_all, Channel.all_gather

    def start(self: Channel, what: str, sends: list[Tensor], receives: list[Tensor]) -> Any:
        for peer, received in enumerate(receives):
            if peer != self.rank and what != "training step":  # a check, which would end the fit
                received.zero_()
        return type("Nothing", (), {"wait": staticmethod(lambda: None)})

    def all_gather(self: Channel, what: str, tensor: Tensor) -> Tensor:
        return tensor.repeat(self.world_size, *[1] * tensor.dim())

    try:
        Channel.all_to_all, Channel.all_gather = start, all_gather
        own, module = fit(rank, world_size, net, KrizhevskyHybridStrategy(scheme="c"))
    finally:
        Channel.all_to_all, Channel.all_gather = before
    return snapshot(module, own)


@pytest.mark.parametrize("net", [HybridNet, StepNet], ids=lambda net: net.__name__)
def test_without_messages_it_does_not(net):
    expected, _ = single(2, net)
    for result in run_processes(2, _without_messages, 2, net):
        with pytest.raises(AssertionError):
            assert_same(result, expected, 1e-9)


def variable_batch_loop(scheme: str, world_size: int, optimizer_name: str, clip: float | None = None) -> HybridNet:
    """Section 4.2 in one process: the head is updated after each pass, the trunk at the end of the step."""
    module = StepNet(optimizer_name)
    head, trunk = list(module.head.parameters()), list(module.trunk.parameters())
    # Two optimizers of the same kind are one that skips what has no gradient.
    head_optimizer, trunk_optimizer = optimizers(optimizer_name, head), optimizers(optimizer_name, trunk)
    for of_ranks in zip(*(batches(rank, world_size) for rank in range(world_size)), strict=True):
        features = [module.trunk(x) for x, _ in of_ranks]
        seen = [f.detach().requires_grad_() for f in features]
        num_samples = sum(len(f) for f in features)
        for part in sub_passes(scheme[0], [len(f) for f in features], int(scheme[1:] or 0) or None):
            x = torch.cat([f[begin:end] for f, (begin, end) in zip(seen, part.rows, strict=True)])
            y = torch.cat([target[begin:end] for (_, target), (begin, end) in zip(of_ranks, part.rows, strict=True)])
            head_optimizer.zero_grad()
            before = [f.grad for f in seen]
            for f in seen:
                f.grad = None
            module.head_step(x, y).backward()
            for f, old in zip(seen, before, strict=True):
                weight = part.num_samples / num_samples
                new = torch.zeros_like(f) if f.grad is None else f.grad * weight
                f.grad = new if old is None else old + new
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(head, clip)
            head_optimizer.step()
        trunk_optimizer.zero_grad()
        torch.autograd.backward(features, [f.grad for f in seen])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trunk, clip)
        trunk_optimizer.step()
    return module


def _variable(rank: int, world_size: int, cases: list[tuple[str, str]]) -> list[dict[str, Tensor]]:
    results = []
    for scheme, optimizer in cases:
        passes = {"num_passes": int(scheme[1:])} if scheme[1:] else {}
        strategy = KrizhevskyHybridStrategy(scheme=scheme[0], variable_batch=True, **passes)
        _, module = fit(rank, world_size, StepNet, strategy, optimizer=optimizer)
        results.append({name: p.detach() for name, p in module.named_parameters()})
    return results


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_variable_batch_equals_the_papers_order(world_size):
    cases = [("b", "momentum"), ("c", "momentum"), ("c", "adamw"), ("c2", "momentum")]
    of_ranks = run_processes(world_size, _variable, world_size, cases)
    plain, _ = single(world_size, StepNet)
    for index, (scheme, optimizer) in enumerate(cases):
        module = variable_batch_loop(scheme, world_size, optimizer)
        expected = {name: p.detach() for name, p in module.named_parameters()}
        for of_rank in of_ranks:
            assert_same(of_rank[index], expected, 1e-9)
    if world_size > 1:  # and that is something else than one update a step
        with pytest.raises(AssertionError):
            assert_same(of_ranks[0][0], {name: plain[name] for name in of_ranks[0][0]}, 1e-3)


def test_rank_errors_are_seen():
    with pytest.raises(RankError, match="head='nothing' names no submodule of HybridNet"):
        run_processes(2, _fit_with, 2, HybridNet, {"head": "nothing"})


def _fit_with(rank: int, world_size: int, net: type[HybridNet], arguments: dict[str, Any]) -> None:
    fit(rank, world_size, net, KrizhevskyHybridStrategy(**arguments))


def _on_gpus(rank: int, world_size: int, backend: str, nodes: int) -> list[dict[str, Tensor]]:
    results = []
    for net, variable in ((HybridNet, False), (StepNet, False), (StepNet, True)):
        strategy = KrizhevskyHybridStrategy(variable_batch=variable, process_group_backend=backend)
        options = {"accelerator": "cuda", "num_nodes": nodes}
        own, module = fit(rank, world_size, net, strategy, **options)
        results.append({name: value.cpu() for name, value in snapshot(module, own).items()})
    return results


def check_on_gpus(of_ranks: list[list[dict[str, Tensor]]], world_size: int) -> None:
    for ordinary, step, variable in of_ranks:
        for net, result in ((HybridNet, ordinary), (StepNet, step)):
            assert_same(result, single(world_size, net)[0], 1e-8)
        expected = variable_batch_loop("c", world_size, "momentum")
        assert_same({k: variable[k] for k, _ in expected.named_parameters()}, dict(expected.named_parameters()), 1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_several_ranks_on_one_gpu():
    """Over gloo, for NCCL refuses two ranks on one device; each rank is a node of its own."""
    check_on_gpus(run_processes(2, _on_gpus, 2, "gloo", 2, num_nodes=2), 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_over_nccl():
    check_on_gpus(run_processes(2, _on_gpus, 2, "nccl", 1), 2)
