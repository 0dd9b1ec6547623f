"""Complex features and weights: the loss is a real number, and gradients are autograd's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters
from tests.ranks import run_threads

TYPE = torch.complex128
TARGET = torch.tensor([0, 2, 1, 1])


def make_head() -> nn.Sequential:
    head = nn.Sequential(nn.Linear(5, 4, dtype=TYPE), nn.Tanh(), nn.Linear(4, 3, dtype=TYPE))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=TYPE, generator=generator))
    return head


def features() -> Tensor:
    return torch.randn(4, 5, dtype=TYPE, generator=torch.Generator().manual_seed(2))


def cost(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.abs(), target)


def gradients(rank: int, group: Any, uses_head_step: bool) -> list[Tensor]:
    head = make_head()
    sharded = ShardedHead(head, Channel(group))
    ShardedParameters(sharded).shard(CPU)
    passes = HeadPasses(sharded, "c", Channel(group))
    x, target = features()[2 * rank : 2 * rank + 2].requires_grad_(), TARGET[2 * rank : 2 * rank + 2]
    if uses_head_step:
        loss = passes.step(x, {"target": target}, lambda x, others: cost(head(x), others["target"]))
    else:
        loss = cost(passes.forward_local_batch(x), target)
    loss.backward()
    return [x.grad / 2, *[p.grad for p in head.parameters()]]


@pytest.mark.parametrize("uses_head_step", [True, False])
def test_gradients_are_those_of_one_process(uses_head_step):
    head, x = make_head(), features().requires_grad_()
    cost(head(x), TARGET).backward()
    first, second = run_threads(2, gradients, uses_head_step)
    for plain, one, other in zip([x, *head.parameters()], first, second, strict=True):
        torch.testing.assert_close(torch.cat([one, other]), plain.grad, rtol=1e-10, atol=1e-12)
