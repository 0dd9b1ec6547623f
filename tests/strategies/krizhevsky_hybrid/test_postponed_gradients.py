"""The head's weights get their gradients last: when messages are on their way, and the trunk's backward has run."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.collectives.all_to_all import AllToAll, Channel
from lightning_dp.losses import sharded_cross_entropy
from lightning_dp.strategies.krizhevsky_hybrid import head as head_module
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters
from tests.ranks import run_threads

IN_BLOCKS_OF = 20  # elements; the first weight of a rank has 4 x 6 of them


@pytest.fixture(autouse=True)
def gradients_in_several_blocks(monkeypatch):
    monkeypatch.setattr(head_module, "_BLOCK_NUMEL", IN_BLOCKS_OF)


class Net(nn.Module):
    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.trunk = nn.Linear(5, 6).double()
        last = nn.Linear(7, self.num_classes)
        self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), last).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)

    def sharded(self, group: Any, scheme: Any) -> HeadPasses:
        head = ShardedHead(self.head, Channel(group))
        ShardedParameters(head).shard(CPU)
        return HeadPasses(head, scheme, Channel(group))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(6, 5, dtype=torch.float64, generator=generator), torch.randint(3, (6,), generator=generator)
    return x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3]


def loss_of(net: Net, passes: HeadPasses, uses_head_step: bool, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of the whole batch, or of this rank's if the head is called directly."""
    features = net.trunk(x)
    if uses_head_step:
        return passes.step(features, {"y": y}, lambda x, others: F.cross_entropy(net.head(x), others["y"]))
    with passes.head.forwarding_to(passes.forward_local_batch):
        return F.cross_entropy(net.head(features), y)


def traced(rank: int, group: Any, uses_head_step: bool, begins: bool, events: dict[int, list[str]]) -> list[str]:
    """Return what a rank has done in backward, in order."""
    net = Net()
    passes = net.sharded(group, "a")
    if begins:
        passes.begin_training_step(net)
    own = events[threading.get_ident()]
    own.clear()
    net.trunk.weight.register_hook(lambda _: own.append("trunk"))
    loss_of(net, passes, uses_head_step, *batch(rank)).backward()
    return own


def events_of_rank_0(monkeypatch: pytest.MonkeyPatch, uses_head_step: bool, begins: bool = True) -> list[str]:
    events: defaultdict[int, list[str]] = defaultdict(list)  # by thread
    add_product, wait = head_module.add_product, AllToAll.wait

    def recorded_product(total: Tensor, *args: Any) -> None:
        events[threading.get_ident()].append(f"{total.shape[0]} x {total.shape[1]}")
        add_product(total, *args)

    def recorded_wait(self: AllToAll) -> None:
        events[threading.get_ident()].append(self._name)
        wait(self)

    monkeypatch.setattr(head_module, "add_product", recorded_product)
    monkeypatch.setattr(AllToAll, "wait", recorded_wait)
    of_rank_0 = run_threads(2, traced, uses_head_step, begins, events)[0]
    forward = ("sizes", "targets", "features", "hidden activations", "logits", "loss of a pass")
    return [event for event in of_rank_0 if event not in forward]


# Rank 0 has the rows (2, 7), (4, 8) and (4, 6) of the three weights. Their gradients come in blocks of at most 20
# elements: (2, 7), then (2, 8) twice, then (3, 6) and (1, 6).
def test_products_come_while_messages_travel_and_after_the_trunk(monkeypatch):
    assert events_of_rank_0(monkeypatch, uses_head_step=True) == [
        *("2 x 7", "hidden gradients", "2 x 8", "hidden gradients", "2 x 8", "feature gradients"),
        *("trunk", "3 x 6", "1 x 6"),
    ]


def test_so_they_do_where_the_head_is_called_directly(monkeypatch):
    assert events_of_rank_0(monkeypatch, uses_head_step=False) == [
        *("logit gradients", "2 x 7", "hidden gradients", "2 x 8", "hidden gradients", "2 x 8"),
        *("feature gradients", "trunk", "3 x 6", "1 x 6"),
    ]


def test_outside_of_a_training_step_the_trunk_comes_last(monkeypatch):
    assert events_of_rank_0(monkeypatch, uses_head_step=True, begins=False)[-1] == "trunk"


def unfrozen_late(net: Net, passes: HeadPasses, loss: Any) -> None:
    net.head[0].requires_grad_(False)
    passes.begin_training_step(net)
    net.head[0].requires_grad_(True)
    loss().backward()


def frozen_late(net: Net, passes: HeadPasses, loss: Any) -> None:
    passes.begin_training_step(net)
    net.head[2].requires_grad_(False)
    loss().backward()


def asked_for_features_first(net: Net, passes: HeadPasses, loss: Any) -> None:
    passes.begin_training_step(net)
    result = loss()
    torch.autograd.grad(result, net.trunk.weight, retain_graph=True)
    result.backward(retain_graph=True)
    net.zero_grad()
    (3 * result).backward()


def two_calls(net: Net, passes: HeadPasses, loss: Any) -> None:
    passes.begin_training_step(net)
    (loss() + 2 * loss()).backward()


def only_some(net: Net, passes: HeadPasses, loss: Any) -> None:
    """What autograd.grad returns, in the place of what backward would have added."""
    passes.begin_training_step(net)
    wanted = [net.trunk.weight, net.head[0].weight, net.head[4].bias]
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss(), wanted), strict=True):
        parameter.grad = gradient


def penalized(net: Net, passes: HeadPasses, loss: Any) -> None:
    """Weights with a gradient from elsewhere, too."""
    passes.begin_training_step(net)
    (loss() + sum(p.square().sum() for p in net.head.parameters())).backward()


WAYS = [unfrozen_late, frozen_late, asked_for_features_first, two_calls, only_some, penalized]


def gradients(rank: int, group: Any, way: Any, scheme: str, uses_head_step: bool) -> list[Tensor | None]:
    net = Net()
    passes = net.sharded(group, scheme)
    x, y = batch(rank)
    way(net, passes, lambda: loss_of(net, passes, uses_head_step, x, y))
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("uses_head_step", [True, False])
@pytest.mark.parametrize("scheme", ["a", "c"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(way, scheme, uses_head_step):
    plain = Net()
    x, y = (torch.cat(parts) for parts in zip(batch(0), batch(1), strict=True))

    class Nothing:
        begin_training_step = staticmethod(lambda net: None)

    way(plain, Nothing(), lambda: F.cross_entropy(plain.head(plain.trunk(x)), y))
    first, second = run_threads(2, gradients, way, scheme, uses_head_step)
    for (name, parameter), own, other in zip(plain.named_parameters(), first, second, strict=True):
        if own is None:
            assert parameter.grad is None, name
        else:  # the trunk's are averaged by DDP, and here
            joined = torch.cat([own, other]) if name.startswith("head") else (own + other) / 2
            torch.testing.assert_close(joined, parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def changed_before_its_product(rank: int, group: Any) -> None:
    net = Net()
    passes = net.sharded(group, "a")
    passes.begin_training_step(net)
    kept = []

    def head_step(x: Tensor, others: Any) -> Tensor:
        kept.append(x)
        return net.head(x).square().mean()

    loss = passes.step(net.trunk(batch(rank)[0]), {}, head_step)
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_input_that_was_changed_meanwhile_is_an_error():
    run_threads(2, changed_before_its_product)


def two_losses(rank: int, group: Any, scheme: str) -> list[Tensor | None]:
    net = Net()
    passes = net.sharded(group, scheme)
    passes.begin_training_step(net)
    x, y = batch(rank)

    def head_step(x: Tensor, others: Any) -> Tensor:
        # Backward comes to the second first: its weight's gradient has begun when that of the first arrives.
        first = sharded_cross_entropy(net.head, x / 2, others["y"])
        return first + F.cross_entropy(net.head(x), others["y"])

    passes.step(net.trunk(x), {"y": y}, head_step).backward()
    return [p.grad for p in net.head.parameters()]


@pytest.mark.parametrize("scheme", ["a", "c"])
def test_a_product_that_has_begun_overwrites_no_other_gradient(scheme, monkeypatch):
    monkeypatch.setattr(head_module, "_BLOCK_NUMEL", 1)  # a row
    monkeypatch.setattr(Net, "num_classes", 9)
    plain = Net()
    x, y = (torch.cat(parts) for parts in zip(batch(0), batch(1), strict=True))
    features = plain.trunk(x)
    (F.cross_entropy(plain.head(features / 2), y) + F.cross_entropy(plain.head(features), y)).backward()
    first, second = run_threads(2, two_losses, scheme)
    for parameter, own, other in zip(plain.head.parameters(), first, second, strict=True):
        torch.testing.assert_close(torch.cat([own, other]), parameter.grad, rtol=1e-10, atol=1e-12)
