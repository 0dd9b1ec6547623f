"""Random programs of views, changes in place, aliases, threads, dead graphs and gradients within: bitwise as plain."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.recompute import apply_recompute

# Not drawn: changes by `.data`, which plain autograd does not see, so that its backward reads the changed memory.


class Program(nn.Module):
    """The same seed gives the same operators; the numbers of the tensors decide nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.weights = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(3))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed)
        values = [x @ self.weights[0], x * 1.5]
        extra = x.new_zeros(())
        for _ in range(draw.randint(4, 14)):
            a, b = draw.choice(values), draw.choice(values)
            kind = draw.randrange(14)
            if kind == 0:
                values.append(a @ draw.choice(list(self.weights)))
            elif kind == 1:
                values.append(draw.choice([torch.sigmoid, torch.tanh, torch.cos, torch.exp])(a.clamp(-3, 3)))
            elif kind == 2:
                values.append(a * b)
            elif kind == 3:
                values.append(self.norm(a))
            elif kind == 4:
                values.append(F.dropout(a, 0.3))
            elif kind == 5:
                values.append(
                    draw.choice(
                        [lambda t: t.detach(), lambda t: t.view(32, 16), lambda t: t[:], lambda t: t.view_as(t)]
                    )(a)
                )
            elif kind == 6:
                values.append(a.view(16, 32).t().reshape(32, 16) if a.is_contiguous() else a + b)
            elif kind == 7:
                values.append(a.clone().relu_())
            elif kind == 8:
                a.mul_(0.5) if draw.random() < 0.5 else F.relu(a, inplace=True)
            elif kind == 9:
                a[:, 4:8].add_(0.25)
            elif kind == 10 and a.is_contiguous():
                torch.view_as_complex(a.detach().view(32, 8, 2)).mul_(0.5 + 0.5j)
            elif kind == 11:
                extra = extra + torch.sigmoid(a).square().mean().item()
            elif kind == 12 and a.requires_grad:
                (slope,) = torch.autograd.grad(
                    torch.tanh(a).sum(), a, create_graph=draw.random() < 0.5, retain_graph=True
                )
                values.append(slope)
            elif kind == 13:
                worker = threading.Thread(target=lambda a=a: a.detach().mul_(0.9))
                worker.start()
                worker.join()
        return sum(v.float().square().mean() for v in values) + extra


def outcome(seed: int, policy: str | None) -> list[Tensor] | str:
    model = Program(seed)
    if policy:
        apply_recompute(model, policy)
    torch.manual_seed(seed)
    x = torch.randn(32, 16)
    try:
        loss = model(x)
        loss.backward()
    except RuntimeError as error:
        return str(error)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


def check(seeds: range) -> None:
    for seed in seeds:
        plain = outcome(seed, None)
        if isinstance(plain, str):
            continue  # plain training refuses it, too
        for policy in ("cheap", "sublinear"):
            found = outcome(seed, policy)
            if isinstance(found, str):
                assert "by another thread" in found, (seed, policy, found)
                continue
            assert len(found) == len(plain), (seed, policy)
            pairs = zip(found, plain, strict=True)
            assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in pairs), (seed, policy)


def test_random_programs_are_bitwise_those_of_plain_training():
    check(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(10))
def test_many_random_programs_are_bitwise_those_of_plain_training(piece):
    check(range(1000 + 500 * piece, 1500 + 500 * piece))
