"""A linear layer of the head begins with what this rank has of its input, while the rest is on its way."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.collectives.all_to_all import AllToAll, Channel
from lightning_dp.strategies.krizhevsky_hybrid import head as head_module
from lightning_dp.strategies.krizhevsky_hybrid import passes as passes_module
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters, whole_on_all_ranks
from tests.ranks import run_threads

SIZES = (2, 0, 3)  # samples of each rank


def make_head() -> nn.Sequential:
    torch.manual_seed(5)
    before = [nn.Flatten(), nn.ReLU(inplace=True)]
    return nn.Sequential(*before, nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.ReLU(), nn.Linear(5, 4))


HEAD = make_head()  # not in a rank: ranks are threads here, and share the generator


def features(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 2, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))


def cotangent(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 4, dtype=dtype, generator=torch.Generator().manual_seed(2))


def trained(rank: int, group: Any, scheme: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict]:
    """Return logits, the gradients of this rank's features, and those of the whole weights."""
    head = copy.deepcopy(HEAD).to(dtype)
    sharded = ShardedHead(head, Channel(group))
    parameters = ShardedParameters(sharded)
    parameters.shard(CPU)
    passes = HeadPasses(sharded, scheme, Channel(group))
    first = sum(SIZES[:rank])
    rows = slice(first, first + SIZES[rank])
    x = features(dtype)[rows].clone().requires_grad_()
    used = x * 1  # the head's in-place layer must not change what is used beside it
    logits = passes.forward_local_batch(used)
    ((logits * cotangent(dtype)[rows]).sum() + (used**3).sum()).backward()
    assert x.grad is not None
    gradients = {name: whole_on_all_ranks(sharded, p.grad, p, CPU) for name, p in head.named_parameters()}
    return logits.detach(), x.grad, gradients


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
def test_it_is_the_whole_product(scheme: str):
    results = run_threads(3, trained, scheme)
    head = copy.deepcopy(HEAD).double()
    x = features().requires_grad_()
    used = x * 1
    expected = copy.deepcopy(head)(used.clone())
    logits = head(used.clone())
    ((logits * cotangent()).sum() + 3 * (used**3).sum()).backward()
    assert x.grad is not None
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([logits for logits, _, _ in results]), expected.detach(), **close)
    for _, _, gradients in results:  # the mean over ranks of gradients of sums over their samples
        for name, parameter in head.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(3 * gradients[name], parameter.grad, **close)
    # The features' gradients are K times those of the loss, for DDP divides the trunk's.
    own = torch.cat([gradient for _, gradient, _ in results])
    torch.testing.assert_close(own, x.grad - 2 * 3 * used.detach() ** 2, **close)


def events_of_rank_0(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> list[str]:
    events: defaultdict[int, list[str]] = defaultdict(list)  # by thread
    threads = {}

    def recorded(function: Any, name: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            events[threading.get_ident()].append(name(*args))
            return function(*args, **kwargs)

        return record

    def run(rank: int, group: Any) -> None:
        threads[rank] = threading.get_ident()
        trained(rank, group, "a", dtype)

    for name, what in (("begun_with_rows", "own rows"), ("begun_with_columns", "own columns")):
        monkeypatch.setattr(head_module, name, recorded(getattr(head_module, name), lambda *_, what=what: what))
    monkeypatch.setattr(AllToAll, "wait", recorded(AllToAll.wait, lambda exchange: f"wait for {exchange._name}"))
    from_owners = passes_module.FeatureExchange.from_owners
    monkeypatch.setattr(passes_module.FeatureExchange, "from_owners", recorded(from_owners, lambda *_: "backward"))
    run_threads(3, run)
    own = events[threads[0]]
    begin, end = own.index("wait for sizes") + 1, own.index("backward")
    return own[begin:end]


def test_products_begin_before_the_rest_of_their_input_has_arrived(monkeypatch: pytest.MonkeyPatch):
    hidden = ["own columns", "wait for hidden activations"]
    expected = ["own rows", "wait for features", *hidden, *hidden, "wait for logits"]
    assert events_of_rank_0(monkeypatch, torch.float64) == expected


def test_sums_of_16_bits_are_not_rounded_twice(monkeypatch: pytest.MonkeyPatch):
    hidden = ["wait for hidden activations"]
    assert events_of_rank_0(monkeypatch, torch.bfloat16) == ["wait for features", *hidden, *hidden, "wait for logits"]
