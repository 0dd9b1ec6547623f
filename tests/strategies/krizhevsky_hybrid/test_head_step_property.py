"""Random uses of features and logits within ``head_step``, against plain autograd in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.losses import sharded_binary_cross_entropy, sharded_cross_entropy
from lightning_dp.strategies.krizhevsky_hybrid import head as head_module
from lightning_dp.strategies.krizhevsky_hybrid import passes as passes_module
from lightning_dp.strategies.krizhevsky_hybrid.exchange import sub_passes
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters
from tests.ranks import run_threads

FEATURES, CLASSES = 5, 3  # with 4 ranks one has no class
SIZES = {2: [3, 2], 3: [2, 0, 3], 4: [1, 2, 1, 3]}
IN_SUITE, IN_ALL = 15, 1200  # programs for each number of ranks
PORTION = 100  # of them in one call
BACK = torch.linspace(-1, 1, CLASSES * FEATURES, dtype=torch.float64).reshape(CLASSES, FEATURES)


@pytest.fixture(autouse=True)
def gradients_in_several_blocks(monkeypatch):
    monkeypatch.setattr(head_module, "_BLOCK_NUMEL", 2 * FEATURES)


def make_head(draw: random.Random, generator: torch.Generator) -> nn.Module:
    heads: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(FEATURES, CLASSES),
        lambda: nn.Sequential(
            nn.Tanh(), nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)
        ),
        lambda: nn.Sequential(nn.Linear(FEATURES, 3, bias=False), nn.Tanh(), nn.Linear(3, CLASSES), nn.Tanh()),
    ]
    head = draw.choice(heads)().double()
    with torch.no_grad():
        for parameter in head.parameters():  # not by torch's own generator, which the ranks, threads, share
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return head


class Scaled(torch.autograd.Function):
    """Identity, whose gradient is scaled to the norm 1: it is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (0.1 + gradient.square().sum().sqrt())


class Reversed(torch.autograd.Function):
    """Identity, whose gradient is reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / (0.1 + gradient.abs().max()))
    return x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "affine": lambda x: 0.5 * x + 0.1,
    "view": lambda x: x.view(-1).view(x.shape),
    "scaled": Scaled.apply,
    "reversed": Reversed.apply,
    "hook": hooked,
    "in place": lambda x: x.mul_(0.7) if x.requires_grad and not x.is_leaf else x,
    "in place on a copy": lambda x: x.clone().sin_(),
    "detached part": lambda x: x + x.detach().square(),
    "cat": lambda x: torch.cat([x[:1], x[1:]]),
}


KINDS = ["plain"] * 3 + ["named", "logistic", "penalty", "adversarial", "recurrent", "functional", "in a hook"]


def gradient_in_between(output: Tensor, x: Tensor, with_graph: bool) -> Tensor:
    for _ in range(2):  # a second gradient through the same calls
        (gradient,) = torch.autograd.grad(output, x, create_graph=with_graph, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if gradient is None else gradient


def program(seed: int) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """A random ``head_step``. All its choices depend on the seed alone."""

    def head_step(head: nn.Module, features: Tensor, target: Tensor) -> Tensor:
        draw = random.Random(seed)
        loss = 0.01 * features.square().mean()
        inputs = [features]
        if draw.random() < 0.3:
            inputs[0] = CHANGES[draw.choice(list(CHANGES))](features)
        for _ in range(draw.randrange(1, 4)):
            x = draw.choice(inputs)
            for _ in range(draw.randrange(3)):
                if draw.random() < 0.6:
                    x = CHANGES[draw.choice([name for name in CHANGES if name != "in place"])](x)
            kind = draw.choice(KINDS)
            chunk_bytes = draw.choice([1, 100, 10**6])
            if kind == "named":
                smoothing = draw.choice([0.0, 0.2])
                loss = loss + sharded_cross_entropy(head, x, target, smoothing, chunk_bytes=chunk_bytes)
                continue
            if kind == "logistic":
                loss = loss + sharded_binary_cross_entropy(head, x, target, chunk_bytes=chunk_bytes)
                continue
            changed = {name: 0.9 * p for name, p in head.named_parameters()} if kind == "functional" else {}
            logits = functional_call(head, changed, (x,))
            for _ in range(draw.randrange(3)):
                logits = CHANGES[draw.choice(list(CHANGES))](logits)
            if kind == "penalty":
                other = head(torch.tanh(x)).tanh().square().sum()
                loss = loss + 0.1 * gradient_in_between(other, x, True).square().sum()
            elif kind == "adversarial":
                inputs.append(x + 0.3 * gradient_in_between(F.cross_entropy(logits, target), x, draw.random() < 0.5))
            elif kind == "in a hook":
                other = head(x).tanh().square().sum()
                logits = logits * 1  # a hook of its own
                logits.register_hook(
                    lambda gradient, other=other, x=x: (
                        gradient * (1 + gradient_in_between(other, x, False).square().sum())
                    )
                )
            elif kind == "recurrent":
                inputs.append(torch.tanh(x + logits @ BACK))
            loss = loss + draw.choice([0.3, 1.0]) * F.cross_entropy(logits, target)
        return loss + sharded_cross_entropy(head, inputs[-1], target)

    return head_step


def case(seed: int, world_size: int) -> tuple[nn.Module, list[Tensor], list[Tensor], str]:
    draw = random.Random(-seed - 1)
    generator = torch.Generator().manual_seed(seed)
    sizes = SIZES[world_size]
    features = [torch.randn(n, FEATURES, dtype=torch.float64, generator=generator) for n in sizes]
    dtype = draw.choice([torch.int64, torch.uint8])
    targets = [torch.randint(CLASSES, (n,), generator=generator).to(dtype) for n in sizes]
    return make_head(draw, generator), features, targets, draw.choice("abc")


Result = tuple[Tensor, Tensor, list[Tensor]]


def expected(seed: int, world_size: int) -> Result:
    """Loss, the features' gradients, and the parameters', of plain autograd on each pass's samples."""
    head, features, targets, scheme = case(seed, world_size)
    leaves = [x.requires_grad_() for x in features]
    loss = torch.zeros((), dtype=torch.float64)
    for part in sub_passes(scheme, SIZES[world_size]):
        x, target = part.rows_of([leaf * 1 for leaf in leaves]), part.rows_of(targets)
        loss = loss + len(x) / sum(SIZES[world_size]) * program(seed)(head, x, target)
    loss.backward()
    return loss.detach(), torch.cat([x.grad for x in leaves]), [p.grad for p in head.parameters()]


def hybrid(rank: int, group: Any, seeds: list[int]) -> list[Result]:
    results = []
    for seed in seeds:
        whole, features, targets, scheme = case(seed, group.size())
        head = copy.deepcopy(whole)
        sharded = ShardedHead(head, Channel(group))
        ShardedParameters(sharded).shard(CPU)
        passes = HeadPasses(sharded, scheme, Channel(group))
        x = features[rank].requires_grad_()
        step = program(seed)
        if seed % 3:  # else the parameters get their gradients before the features
            passes.begin_training_step(nn.ModuleDict({"head": head}))
        loss = passes.step(
            x, {"target": targets[rank]}, lambda x, others, head=head, step=step: step(head, x, others["target"])
        )
        if seed % 2:  # a backward that asks for the features' gradient alone
            torch.autograd.grad(2 * loss, x, retain_graph=True)
        loss.backward()
        results.append((loss.detach(), x.grad / group.size(), [p.grad for p in head.parameters()]))
    return results


def differences(world_size: int, seeds: range) -> list[int]:
    """The seeds whose programs have another loss or gradient than in one process."""
    plain_results = {}
    for seed in seeds:
        with suppress(RuntimeError):  # torch refuses to change in place what backward needs
            plain_results[seed] = expected(seed, world_size)
    assert len(plain_results) > 0.7 * len(seeds)
    of_ranks = run_threads(world_size, hybrid, list(plain_results))
    wrong = []
    for seed, *results in zip(plain_results, *of_ranks, strict=True):
        loss, x_grads, parameter_grads = plain_results[seed]
        pairs = [(result[0], loss) for result in results]
        pairs.append((torch.cat([result[1] for result in results]), x_grads))
        for number, gradient in enumerate(parameter_grads):
            pairs.append((torch.cat([result[2][number] for result in results]), gradient))
        if not all(torch.allclose(actual, plain, rtol=1e-10, atol=1e-12) for actual, plain in pairs):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.ci) for size in (2, 4))])
def test_any_use_of_features_and_logits_is_exact(world_size):
    assert differences(world_size, range(IN_SUITE)) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hook_on_the_logits_gets_what_a_second_derivative_adds_at_an_output_that_is_kept(world_size):
    # A head that ends in nn.Tanh, a hook that is not linear in the gradient, and a penalty on a gradient.
    assert differences(world_size, range(168, 169)) == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_thousands_of_uses_are_exact(world_size):
    # Each portion has the ranks' time limit for itself: all together took longer on two cores.
    seeds = range(IN_SUITE, IN_ALL)
    portions = [seeds[begin : begin + PORTION] for begin in range(0, len(seeds), PORTION)]
    assert [found for portion in portions for found in differences(world_size, portion)] == []


@pytest.mark.ci
def test_without_the_sum_over_ranks_they_are_wrong(monkeypatch):
    monkeypatch.setattr(passes_module, "summed", lambda gradient, channel: gradient)
    assert differences(2, range(25))


@pytest.mark.ci
def test_where_each_sum_waits_for_the_end_of_the_pass_they_are_wrong(monkeypatch):
    def wait(self, gradient):
        self._has_partial_gradients = True
        return gradient * 2

    monkeypatch.setattr(passes_module.MicroBatch, "part_or_sum", wait)
    assert differences(2, range(25))


def changed_after_use(rank: int, group: Any) -> None:
    sharded = ShardedHead(nn.Linear(FEATURES, CLASSES).double(), Channel(group))
    ShardedParameters(sharded).shard(CPU)
    x = torch.ones(2, FEATURES, dtype=torch.float64, requires_grad=True)

    def head_step(features: Tensor, _: Any) -> Tensor:
        penalty = features.square().sum()  # backward needs the features
        return sharded.head(features.mul_(2)).sum() + penalty

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        HeadPasses(sharded, "a", Channel(group)).step(x, {}, head_step)


def test_features_that_backward_needs_cannot_be_changed_in_place():
    run_threads(2, changed_after_use)


def backward_twice(rank: int, group: Any) -> None:
    sharded = ShardedHead(nn.Linear(FEATURES, CLASSES).double(), Channel(group))
    ShardedParameters(sharded).shard(CPU)
    passes = HeadPasses(sharded, "a", Channel(group))
    x = torch.ones(2, FEATURES, dtype=torch.float64, requires_grad=True)
    losses = (
        (lambda: passes.step(x, {}, lambda x, _: sharded.head(x).sum())),
        (lambda: passes.forward_local_batch(x).sum()),
    )
    for loss_of in losses:
        for retain_graph in (False, True):
            loss = loss_of()
            loss.backward()
            with pytest.raises(RuntimeError, match="backward went through the sharded head a second time"):
                loss.backward(retain_graph=retain_graph)


def test_a_second_backward_through_one_call_is_an_error():
    run_threads(2, backward_twice)


def without_gradient_in_places(head: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """As a module does that skips what has no sample of interest: of some passes the features get no gradient."""
    return F.cross_entropy(head(x if (target == 0).any() else x.detach()), target)


def partly_used(rank: int, group: Any, scheme: str) -> tuple[Tensor, Tensor]:
    whole, features, _, _ = case(0, 2)
    sharded = ShardedHead(whole, Channel(group))
    ShardedParameters(sharded).shard(CPU)
    x = features[rank].requires_grad_()
    target = torch.tensor([1, 0, 1] if rank == 0 else [2, 2])
    passes = HeadPasses(sharded, scheme, Channel(group))
    loss = passes.step(
        x, {"target": target}, lambda x, others: without_gradient_in_places(sharded.head, x, others["target"])
    )
    loss.backward()
    return x.grad / 2, target


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_features_that_only_some_passes_use(scheme):
    head, features, _, _ = case(0, 2)
    results = run_threads(2, partly_used, scheme)
    leaves = [x.requires_grad_() for x in features]
    for part in sub_passes(scheme, SIZES[2]):
        x, target = part.rows_of(leaves), part.rows_of([target for _, target in results])
        (without_gradient_in_places(head, x, target) * len(x) / 5).backward()
    for (x_grads, _), leaf in zip(results, leaves, strict=True):
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(x_grads, expected, rtol=1e-10, atol=1e-12)
