"""A head divided over ranks against the same head on one."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading

import pytest
import torch
from torch import nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.fit import clip_by_global_norm
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead, seeded
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters, whole_on_all_ranks
from tests.ranks import run_processes, run_threads


def make_head(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Flatten(), nn.Dropout(dropout), nn.Linear(6, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 5)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(5, 3)).double()


HEAD = make_head()
X = torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
COTANGENT = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def forward_and_backward(rank, group):
    head = copy.deepcopy(HEAD)
    if rank:  # all start from rank 0's parameters
        nn.init.zeros_(head[2].weight)
    before = {name: id(p) for name, p in head.named_parameters()}
    sharded = ShardedHead(head, Channel(group))
    parameters = ShardedParameters(sharded)
    parameters.shard(CPU)
    assert {name: id(p) for name, p in head.named_parameters()} == before
    x = X.clone().requires_grad_()
    begin, end = sharded.output_bounds[rank]
    out = sharded(x)
    out.backward(COTANGENT[:, begin:end])
    gradients = {name: whole_on_all_ranks(sharded, p.grad, p, CPU) for name, p in head.named_parameters()}
    shapes = {name: tuple(p.shape) for name, p in head.named_parameters()}
    parameters.unshard()
    return out.detach(), x.grad, gradients, shapes, head.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_output_and_gradients(world_size):
    head = copy.deepcopy(HEAD)
    x = X.clone().requires_grad_()
    expected = head(x)
    expected.backward(COTANGENT)
    results = run_threads(world_size, forward_and_backward)
    torch.testing.assert_close(torch.cat([r[0] for r in results], 1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(r[1] for r in results), x.grad, rtol=1e-12, atol=1e-12)
    rows = [sum(r[3]["2.weight"][0] for r in results), sum(r[3]["7.bias"][0] for r in results)]
    assert rows == [7, 3]
    for _, _, gradients, _, state in results:
        for name, parameter in head.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)
            assert torch.equal(state[name], parameter)


@pytest.mark.parametrize("broken", ["hidden activations", "hidden gradients"])
def test_without_messages_they_are_wrong(broken, monkeypatch):
    start = Channel.all_to_all

    def lost(self, what, sends, receives):
        if what == broken:
            for peer, received in enumerate(receives):
                if peer != self.rank:
                    received.zero_()
            sends = receives = [torch.empty(0)] * self.world_size
        return start(self, what, sends, receives)

    monkeypatch.setattr(Channel, "all_to_all", lost)
    x = X.clone().requires_grad_()
    expected = copy.deepcopy(HEAD)(x)
    expected.backward(COTANGENT)
    results = run_threads(2, forward_and_backward)
    same_output = torch.allclose(torch.cat([r[0] for r in results], 1), expected)
    same_gradient = torch.allclose(sum(r[1] for r in results), x.grad)
    assert same_output == (broken == "hidden gradients")
    assert not same_gradient


def test_dropout_has_one_mask_for_what_all_ranks_have_and_other_ones_for_slices():
    # Threads share one generator, as processes do not, so two ranks are played one after the other.
    channel = type("Alone", (), {"rank": 0, "world_size": 1})()
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    nn.init.eye_(head[1].weight)
    seen = []
    for rank in range(2):
        channel.rank = rank
        sharded = ShardedHead(head, channel, control=channel)
        assert sharded.draws_random_numbers
        torch.manual_seed(0)
        before = torch.get_rng_state()
        first, second = sharded(torch.ones(8, 64), 3), sharded(torch.ones(8, 64), 3)
        assert torch.equal(first, second)
        assert not torch.equal(first, sharded(torch.ones(8, 64), 4))
        assert torch.equal(torch.get_rng_state(), before)
        seen.append(first != 0)
    assert not torch.equal(seen[0], seen[1])
    common = ShardedHead(head[:2], channel, control=channel)(torch.ones(8, 64), 3) != 0
    for one in seen:
        assert not (one & ~common).any()  # both keep nothing that the common mask drops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_a_head_is_that_of_torch_but_for_the_numbers_that_it_draws(dtype, p, inplace):
    channel = type("Alone", (), {"rank": 0, "world_size": 1})()
    layer = nn.Dropout(p, inplace)
    linear = nn.Linear(400, 400, bias=False).to(dtype)
    nn.init.eye_(linear.weight)
    sharded = ShardedHead(nn.Sequential(layer, linear), channel, control=channel)
    x = torch.rand(300, 400, dtype=dtype).add_(1).requires_grad_()
    out = sharded(x, 7)
    kept = out.detach() != 0
    assert out.dtype == dtype
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-12
    # What is kept is multiplied as torch multiplies it, to the last bit, and so is its gradient.
    torch.testing.assert_close(out.detach()[kept], (x.detach() * (1 / (1 - p) if p < 1 else 0.0))[kept], rtol=0, atol=0)
    out.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    layer.eval()
    assert torch.equal(sharded(x), x)


def clipped(rank, group, dtype):
    head, other = nn.Linear(2, 3).to(dtype), nn.Parameter(torch.ones(2, dtype=dtype))
    sharded = ShardedHead(head, Channel(group))
    ShardedParameters(sharded).shard(CPU)
    for p in head.parameters():
        p.grad = torch.full_like(p, 200.0)
    other.grad = torch.full_like(other, 200.0)
    clip_by_global_norm([*head.parameters(), other], 1.0, sharded)
    return torch.cat([p.grad.flatten() for p in (*head.parameters(), other)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clipping_by_a_norm_whose_square_is_no_16_bit_number(dtype):
    for gradients in run_threads(2, clipped, dtype):
        # Of 11 equal gradients in all.
        torch.testing.assert_close(gradients, torch.full_like(gradients, 11**-0.5), rtol=0.01, atol=0)


def test_features_that_are_not_flat():
    channel = type("Alone", (), {"rank": 0, "world_size": 1})()
    # Within `ShardedHead.by_rows` they are.
    with pytest.raises(ValueError, match=r"features of shape \(2, 3, 4\) reach head's first nn.Linear; flatten them"):
        ShardedHead(nn.Linear(4, 4), channel, control=channel)(torch.ones(2, 3, 4))


def test_random_numbers_within_are_those_of_the_seed_and_go_on_after_it_as_if_nothing_had_been_drawn():
    before = torch.get_rng_state()
    with contextlib.suppress(KeyError), seeded(5, CPU):
        drawn = torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    with seeded(None, CPU):
        torch.rand(3)
    assert not torch.equal(torch.get_rng_state(), before)


class Cycle:
    """What only garbage collection can end, which then runs Python code: there other threads get their turn."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        sum(range(50))


def draw_in_many_threads(rank: int) -> None:
    sys.setswitchinterval(1e-6)

    def draw() -> None:
        for _ in range(2000):
            Cycle()
            with seeded(5, CPU):
                pass

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_seed_at_once_do_not_wait_for_each_other():
    # In a process of its own, which can be ended: no signal reaches a thread that waits with the interpreter's lock.
    run_processes(1, draw_in_many_threads)
