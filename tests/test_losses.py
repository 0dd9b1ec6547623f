"""Losses that do not hold all logits, in one process and over ranks, against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_dp import losses
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.losses import Margin, sharded_binary_cross_entropy, sharded_cross_entropy
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.state import CPU, ShardedParameters
from tests.ranks import RankError, run_threads

SAMPLES, FEATURES, CLASSES = 5, 6, 7  # not more samples than features: logits have room in a gradient's memory
GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=GENERATOR) * 10
TARGET = torch.tensor([0, 6, 3, 3, 5])
SOFT = torch.softmax(torch.arange(35.0, dtype=torch.float64).reshape(5, 7).sin(), 1)
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
COTANGENT = torch.linspace(-1, 2, SAMPLES, dtype=torch.float64)


def linear(bias: bool = True) -> nn.Linear:
    layer = nn.Linear(FEATURES, CLASSES, bias=bias).double()
    with torch.no_grad():
        for parameter in layer.parameters():  # not by torch's own generator, which ranks that are threads share
            parameter.copy_(torch.linspace(-1, 2, parameter.numel(), dtype=torch.float64).sin().view_as(parameter))
    return layer


def entropy(chunk_bytes: int, **options: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda head, x: sharded_cross_entropy(head, x, TARGET, **options, chunk_bytes=chunk_bytes)


def plain_entropy(**options: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda head, x: F.cross_entropy(head(x), TARGET, **options)


def with_margin(margin: Margin) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_of(head: nn.Module, x: Tensor) -> Tensor:
        cos = F.linear(F.normalize(x), F.normalize(head.weight))
        at_target = cos.gather(1, TARGET[:, None])
        at_target = (at_target.acos() + margin.angle).cos() - margin.cosine
        return F.cross_entropy(margin.scale * cos.scatter(1, TARGET[:, None], at_target), TARGET, label_smoothing=0.1)

    return loss_of


def logistic(chunk_bytes: int, target: Tensor, reduction: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda head, x: sharded_binary_cross_entropy(head, x, target, reduction, chunk_bytes)


def plain_logistic(target: Tensor, reduction: str) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda head, x: F.binary_cross_entropy_with_logits(head(x), target, reduction=reduction)


ONE_HOT = F.one_hot(TARGET, CLASSES).double()
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.3},
    {"ignore_index": 3},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "label_smoothing": 0.3, "ignore_index": 3},
    {"weight": WEIGHT, "label_smoothing": 0.3, "ignore_index": 3, "reduction": "none"},
]
MARGINS = [Margin(8, angle=0.5), Margin(8, cosine=0.35), Margin(5, 0.2, 0.1)]


def cases(chunk_bytes: int) -> list[tuple[Callable[..., Tensor], Callable[..., Tensor], bool]]:
    """Pairs of a loss and torch's own, and whether the layer has a bias."""
    pairs = [(entropy(chunk_bytes, **options), plain_entropy(**options), True) for options in OPTIONS]
    for margin in MARGINS:
        pairs.append((entropy(chunk_bytes, label_smoothing=0.1, margin=margin), with_margin(margin), False))
    for reduction in ("mean", "sum"):
        pairs.append((logistic(chunk_bytes, TARGET, reduction), plain_logistic(ONE_HOT, reduction), True))
        pairs.append((logistic(chunk_bytes, SOFT, reduction), plain_logistic(SOFT, reduction), True))
        pairs.append(
            (logistic(chunk_bytes, SOFT > 0.1, reduction), plain_logistic((SOFT > 0.1).double(), reduction), True)
        )
    return pairs


def of_step(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss as a single number, as ``head_step`` returns it."""

    def one_number(head: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(head, x)
        return (loss * COTANGENT).sum() if loss.dim() else loss

    return one_number


def sampled(chunk_bytes: int, margin: Margin | None = None) -> Callable[[nn.Module, Tensor], Tensor]:
    target = torch.where(TARGET == 5, -100, TARGET)
    return lambda head, x: sharded_cross_entropy(
        head, x, target, weight=WEIGHT, margin=margin, chunk_bytes=chunk_bytes, sample_rate=0.5
    )


DRAWN = torch.tensor([False, True, False, False, True, True, False])


def plain_sampled(head: nn.Module, x: Tensor) -> Tensor:
    is_kept = DRAWN | F.one_hot(torch.tensor([0, 6, 3]), CLASSES).any(0)
    logits = head(x).masked_fill(~is_kept, -torch.inf)
    return F.cross_entropy(logits, torch.where(TARGET == 5, -100, TARGET), WEIGHT)


def in_one_process(loss_of: Callable[[nn.Module, Tensor], Tensor], bias: bool) -> list[Tensor]:
    head, x = linear(bias), X.clone().requires_grad_()
    loss = of_step(loss_of)(head, x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in head.parameters())]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = linear()

    def forward(self, x: Tensor) -> Tensor:
        return sharded_cross_entropy(self.head, x, TARGET, chunk_bytes=1)


def test_weights_may_be_computed():
    """As in meta-learning. torch would warn if their gradient was asked for, and the tests do not let it."""
    module = Loss()
    doubled = {name: 2 * parameter for name, parameter in module.named_parameters()}
    functional_call(module, doubled, (X,)).backward()
    weight, bias = (2 * p.detach().clone().requires_grad_() for p in (module.head.weight, module.head.bias))
    weight.retain_grad()
    F.cross_entropy(F.linear(X, weight, bias), TARGET).backward()
    torch.testing.assert_close(module.head.weight.grad, 2 * weight.grad)


def run_step(
    head: nn.Module, group: Any, x: Tensor, head_step: Callable[[nn.Module, Tensor], Tensor]
) -> tuple[Tensor, dict[str, int]]:
    """The loss of one step in scheme a, with all samples on rank 0, and the bytes that were sent."""
    sharded, channel = ShardedHead(head, Channel(group)), Channel(group)
    ShardedParameters(sharded).shard(CPU)
    passes = HeadPasses(sharded, "a", channel)
    loss = passes.step(x, {}, lambda x, _: head_step(head, x))
    return loss, {**channel.bytes_sent, **sharded.channel.bytes_sent}


def over_ranks(rank: int, group: Any, chunk_bytes: int) -> list[tuple[list[Tensor], dict[str, int]]]:
    results = []
    for loss_of, _, bias in cases(chunk_bytes):
        head, x = linear(bias), (X if rank == 0 else X[:0]).clone().requires_grad_()
        loss, sent = run_step(head, group, x, of_step(loss_of))
        loss.backward()
        results.append(([loss.detach(), x.grad / group.size(), *(p.grad for p in head.parameters())], sent))
    return results


@pytest.mark.parametrize("chunk_bytes", [1, 200, 10**6])
def test_in_one_process_they_are_torchs(chunk_bytes):
    for loss_of, plain, bias in cases(chunk_bytes):
        for actual, expected in zip(in_one_process(loss_of, bias), in_one_process(plain, bias), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.ci
@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
@pytest.mark.parametrize("world_size", [2, 3, 8])  # with 8 ranks one has no class
def test_over_ranks_they_are_torchs_and_no_logits_travel(world_size, chunk_bytes):
    of_ranks = run_threads(world_size, over_ranks, chunk_bytes)
    for (_, plain, bias), *results in zip(cases(chunk_bytes), *of_ranks, strict=True):
        loss, x_grads, *parameter_grads = in_one_process(plain, bias)
        for (one, _, *_), sent in results:
            torch.testing.assert_close(one, loss, rtol=1e-11, atol=1e-12)
            assert torch.equal(one, results[0][0][0])
            assert "logits" not in sent
            assert "input gradients" not in sent
        torch.testing.assert_close(results[0][0][1], x_grads, rtol=1e-11, atol=1e-12)
        for number, gradient in enumerate(parameter_grads):
            whole = torch.cat([result[0][2 + number] for result in results])
            torch.testing.assert_close(whole, gradient, rtol=1e-11, atol=1e-12)


def twice(head: nn.Module, x: Tensor, chunk_bytes: int) -> Tensor:
    """The second loss cannot borrow the memory of the weight's gradient, and the first one loses what it has there."""
    first = sharded_cross_entropy(head, x, TARGET, chunk_bytes=chunk_bytes)
    second = sharded_cross_entropy(head, 0.5 * x, TARGET, chunk_bytes=chunk_bytes)
    return first + second + torch.autograd.grad(first, x, retain_graph=True)[0].detach().sum()


def plain_twice(head: nn.Module, x: Tensor) -> Tensor:
    first = F.cross_entropy(head(x), TARGET)
    second = F.cross_entropy(head(0.5 * x), TARGET)
    return first + second + torch.autograd.grad(first, x, retain_graph=True)[0].detach().sum()


def twice_over_ranks(rank: int, group: Any, chunk_bytes: int) -> list[Tensor]:
    head, x = linear(), (X if rank == 0 else X[:0]).clone().requires_grad_()
    loss, _ = run_step(head, group, x, lambda head, x: twice(head, x, chunk_bytes))
    loss.backward()
    return [loss.detach(), x.grad / group.size(), *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_two_losses_of_one_head(chunk_bytes):
    expected = in_one_process(plain_twice, True)
    first, second = run_threads(2, twice_over_ranks, chunk_bytes)
    for actual, of_plain in zip(first[:2], expected[:2], strict=True):
        torch.testing.assert_close(actual, of_plain, rtol=1e-11, atol=1e-12)
    for number in (2, 3):
        whole = torch.cat([first[number], second[number]])
        torch.testing.assert_close(whole, expected[number], rtol=1e-11, atol=1e-12)


def test_gradients_add_up_over_backwards_and_calls():
    actual, expected = linear(), linear()
    for head, loss_of in ((actual, entropy(1)), (expected, plain_entropy())):
        x = X.clone().requires_grad_()
        loss = loss_of(head, x)
        loss.backward(retain_graph=True)
        loss.backward()
        (3 * loss_of(head, x)).backward()
    for one, other in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


def recomputed(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda head, x: checkpoint(loss_of, head, x, use_reentrant=False)


def recomputed_over_ranks(rank: int, group: Any) -> list[list[Tensor]]:
    results = []
    for loss_of in (entropy(10**6), logistic(10**6, TARGET, "mean")):
        head, x = linear(), (X[:3] if rank == 0 else X[3:]).clone().requires_grad_()
        loss, _ = run_step(head, group, x, recomputed(loss_of))
        loss.backward()
        results.append([p.grad for p in head.parameters()])
    return results


def test_a_checkpoint_runs_them_again_although_no_memory_is_lent_then():
    plain = [in_one_process(loss_of, True)[2:] for loss_of in (plain_entropy(), plain_logistic(ONE_HOT, "mean"))]
    for expected, *parts in zip(plain, *run_threads(2, recomputed_over_ranks), strict=True):
        for whole, *of_ranks in zip(expected, *parts, strict=True):
            torch.testing.assert_close(torch.cat(of_ranks), whole, rtol=1e-11, atol=1e-12)


def test_a_checkpoint_runs_them_again_after_the_old_gradients_are_gone():
    head, plain = linear(bias=False), linear(bias=False)
    loss_of = recomputed(entropy(10**6, margin=MARGINS[0]))
    loss_of(head, X).backward()
    loss = loss_of(head, X)
    head.zero_grad()  # Lightning does it between training_step and backward
    loss.backward()
    entropy(10**6, margin=MARGINS[0])(plain, X).backward()
    torch.testing.assert_close(head.weight.grad, plain.weight.grad, rtol=1e-11, atol=1e-12)


def sampled_over_ranks(rank: int, group: Any, chunk_bytes: int) -> list[Tensor]:
    head, x = linear(), (X if rank == 0 else X[:0]).clone().requires_grad_()
    loss, _ = run_step(head, group, x, sampled(chunk_bytes))
    loss.backward()
    return [loss.detach(), x.grad / group.size(), *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_a_sample_is_a_softmax_over_the_drawn_classes_and_those_of_the_targets(chunk_bytes, monkeypatch):
    monkeypatch.setattr(losses, "_draw", lambda *_: DRAWN.clone())
    expected = in_one_process(plain_sampled, True)
    for actual, of_plain in zip(in_one_process(sampled(chunk_bytes), True), expected, strict=True):
        torch.testing.assert_close(actual, of_plain, rtol=1e-11, atol=1e-12)
    first, *others = run_threads(4, sampled_over_ranks, chunk_bytes)
    for actual, of_plain in zip(first[:2], expected[:2], strict=True):
        torch.testing.assert_close(actual, of_plain, rtol=1e-11, atol=1e-12)
    for number in (2, 3):
        whole = torch.cat([result[number] for result in (first, *others)])
        torch.testing.assert_close(whole, expected[number], rtol=1e-11, atol=1e-12)


def test_a_sample_is_drawn_with_its_rate_for_training_only():
    head, x, target = many_classes(torch.float64)
    torch.manual_seed(1)
    used = []
    for _ in range(2):
        head.zero_grad()
        sharded_cross_entropy(head, x, target, sample_rate=0.3).backward()
        used.append(head.weight.grad.any(dim=1))
    assert 0.28 < used[0].double().mean() < 0.32
    assert not torch.equal(*used)
    with torch.no_grad():
        actual = sharded_cross_entropy(head, x, target, sample_rate=0.3)
    torch.testing.assert_close(actual, F.cross_entropy(head(x), target).detach(), rtol=1e-12, atol=0)


def test_classes_are_drawn_with_their_rate_whatever_the_default_dtype_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as Lightning does in a step with "bf16-true"
    try:
        drawn = losses._draw(100_000, 0.001, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert 50 < drawn.sum() < 200


def test_without_messages_they_are_wrong(monkeypatch):
    gather = Channel.all_gather

    def lost(self: Channel, what: str, tensor: Tensor) -> Tensor:
        return torch.stack([tensor] * self.world_size) if what == "loss" else gather(self, what, tensor)

    monkeypatch.setattr(Channel, "all_gather", lost)
    with pytest.raises(RankError, match="head_step returns different losses on the ranks"):
        run_threads(2, over_ranks, 1)
    monkeypatch.setattr(HeadPasses, "_require_same_loss", lambda *_: None)
    _, plain, _ = cases(1)[0]
    for results in run_threads(2, over_ranks, 1):
        assert not torch.allclose(results[0][0][0], in_one_process(plain, True)[0], rtol=1e-3)


def test_four_numbers_a_sample_travel_for_softmax_and_one_a_pass_for_logistic_units():
    for results in run_threads(2, over_ranks, 1):
        assert results[0][1]["loss"] == 4 * SAMPLES * 8
        assert results[-1][1]["loss"] == 8


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator has written, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, x.untyped_storage().nbytes())
        return result


MANY, WIDTH, BATCH, CHUNK = 20_000, 2, 64, 2**18  # logits of a rank: 64 x 10,000 x 8 bytes, 5.1 MB


def many_classes(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    head = nn.Linear(WIDTH, MANY, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(0, 3000, MANY * WIDTH, dtype=torch.float64).sin().view(MANY, WIDTH))
    x = torch.linspace(0, 90, BATCH * WIDTH, dtype=torch.float64).cos().view(BATCH, WIDTH).to(dtype)
    return head, x, torch.arange(BATCH) * 311


def many_over_ranks(rank: int, group: Any, loss_of: Any) -> tuple[int, list[Tensor]]:
    head, x, target = many_classes(torch.float64)
    x = (x if rank == 0 else x[:0]).clone().requires_grad_()
    largest = []

    def head_step(head: nn.Module, x: Tensor) -> Tensor:
        with Largest() as mode:
            loss = loss_of(head, x, target)
            torch.autograd.grad(loss, x, retain_graph=True)  # also writes the weight's gradient
        largest.append(mode.num_bytes)
        return loss

    loss, _ = run_step(head, group, x, head_step)
    loss.backward()
    return largest[0], [loss.detach(), x.grad / group.size(), head.weight.grad]


def test_a_head_of_many_classes_never_holds_more_than_a_chunk():
    head, x, target = many_classes(torch.float64)
    x.requires_grad_()
    loss = F.cross_entropy(head(x), target)
    loss.backward()
    first, second = run_threads(
        2, many_over_ranks, lambda head, x, target: sharded_cross_entropy(head, x, target, chunk_bytes=CHUNK)
    )
    weight_bytes = MANY * WIDTH * 8 // 2
    assert max(first[0], second[0]) <= max(CHUNK, weight_bytes) < BATCH * MANY * 8 // 2 / 10
    for result in (first[1], second[1]):
        torch.testing.assert_close(result[0], loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(first[1][1], x.grad, rtol=1e-11, atol=1e-13)
    whole = torch.cat([first[1][2], second[1][2]])
    torch.testing.assert_close(whole, head.weight.grad, rtol=1e-11, atol=1e-14)
    # The measure sees whole logits, where a loss has them.
    for largest, _ in run_threads(2, many_over_ranks, lambda head, x, target: F.cross_entropy(head(x), target)):
        assert largest >= BATCH * MANY * 8


def test_in_one_process_many_classes_need_no_more_memory():
    head, x, target = many_classes(torch.float32)
    with Largest() as mode:
        sharded_cross_entropy(head, x.requires_grad_(), target, chunk_bytes=CHUNK).backward()
    assert mode.num_bytes <= CHUNK
    with Largest() as mode:
        F.cross_entropy(head(x), target).backward()
    assert mode.num_bytes >= BATCH * MANY * 4


@pytest.mark.parametrize("chunk_bytes", [1000, 10**6])
def test_autocast_multiplies_in_16_bits_and_adds_in_32(chunk_bytes):
    head, x = linear().float(), X.float()
    grads = []
    for loss_of in (entropy(chunk_bytes), plain_entropy()):
        head.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(head, x)
        assert loss.dtype == torch.float32
        loss.backward()
        assert head.weight.grad.dtype == torch.float32
        grads.append(head.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_losses_of_16_bit_logits_have_32(chunk_bytes):
    head, x = linear().bfloat16(), X.bfloat16()
    actual = sharded_cross_entropy(head, x, TARGET, weight=WEIGHT.float(), chunk_bytes=chunk_bytes)
    expected = F.cross_entropy(head(x).float(), TARGET, WEIGHT.float())
    torch.testing.assert_close(actual, expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("chunk_bytes", [1, 10**6])
def test_weights_of_classes_have_any_dtype(dtype, chunk_bytes):
    """Those that NumPy has computed are of 64 bits, and their sum may be too large for 16."""
    gradients = []
    weight = torch.arange(10_000, 10_000 + CLASSES)
    for given, chunk in ((weight.to(dtype), chunk_bytes), (weight.to(dtype).float(), 10**6)):
        head, options = linear().float(), {"label_smoothing": 0.1, "weight": given}
        sharded_cross_entropy(head, X.float(), TARGET, chunk_bytes=chunk, **options).backward()
        gradients.append(head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_without_samples(reduction):
    options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction}
    actual = sharded_cross_entropy(linear(False), X[:0], TARGET[:0], margin=Margin(), **options)
    torch.testing.assert_close(actual, F.cross_entropy(X[:0], TARGET[:0], **options), equal_nan=True)


def test_in_bytes_class_156_is_not_ignored():
    torch.testing.assert_close(torch.tensor(-100).to(torch.uint8), torch.tensor(156, dtype=torch.uint8))
    head = nn.Linear(FEATURES, 200).double()
    target = torch.tensor([156, 6, 156, 199, 0], dtype=torch.uint8)
    actual = sharded_cross_entropy(head, X, target, chunk_bytes=1)
    torch.testing.assert_close(actual, F.cross_entropy(head(X), target))


@pytest.mark.parametrize("wrong", [-1, CLASSES])
@pytest.mark.parametrize("loss", [sharded_cross_entropy, sharded_binary_cross_entropy])
def test_a_class_that_there_is_not(wrong, loss):
    target = torch.tensor([0, wrong, 3, 3, 5])
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds; classes are 0 to 6"):
        loss(linear(), X, target, chunk_bytes=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sharded_cross_entropy(linear(), X, TARGET, reduction="max"), "reduction='max' is not known"),
        (lambda: sharded_binary_cross_entropy(linear(), X, TARGET, "none"), "reduction='none' is not known"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET, margin=Margin()), "a bias has none"),
        (lambda: sharded_cross_entropy(nn.Tanh(), X, TARGET, margin=Margin()), "needs class indices, and a head that"),
        (lambda: sharded_binary_cross_entropy(linear(), X, SOFT[:, 1:], chunk_bytes=1), "they must be the same"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET, weight=linear().weight[:, 0]), "pass weight.detach()"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET, chunk_bytes=0), "chunk_bytes=0 must be at least 1"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET, sample_rate=0.0), "sample_rate=0.0 must be above 0"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET, 0.1, sample_rate=0.5), "label_smoothing counts all"),
        (lambda: sharded_cross_entropy(nn.Tanh(), X, TARGET, sample_rate=0.5), "sample_rate needs class indices"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET[:1], chunk_bytes=1), "target has 1 rows, and there are 5"),
        (lambda: sharded_binary_cross_entropy(linear(), X, TARGET[:3], chunk_bytes=1), "target has 3 rows"),
        (lambda: sharded_binary_cross_entropy(linear(), X, TARGET / 7), "it holds class indices, which are integers"),
        (lambda: sharded_cross_entropy(linear(), X, TARGET, 1.5, chunk_bytes=1), "label_smoothing=1.5 must be"),
        (
            lambda: sharded_cross_entropy(linear(), X, TARGET, weight=torch.ones(CLASSES + 1), chunk_bytes=1),
            r"weight has shape \(8,\); pass one of shape \(7,\)",
        ),
        (lambda: sharded_cross_entropy(linear(), X.float(), TARGET, chunk_bytes=1), "the features are torch.float32"),
        (lambda: sharded_binary_cross_entropy(linear(), X.float(), SOFT, chunk_bytes=1), "last layer's weight is"),
    ],
)
def test_what_cannot_be_computed_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_second_derivatives_are_an_error():
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="this loss cannot be differentiated twice"):
        torch.autograd.grad(sharded_cross_entropy(linear(), x, TARGET, chunk_bytes=1), x, create_graph=True)


def test_a_head_with_hooks_or_of_another_kind_computes_all_logits():
    head, seen = nn.Sequential(linear(), nn.Tanh()), []
    actual = sharded_cross_entropy(head, X, TARGET, 0.1, chunk_bytes=1)
    torch.testing.assert_close(actual, F.cross_entropy(head(X), TARGET, label_smoothing=0.1), rtol=0, atol=0)
    hooked = linear()
    hooked.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    sharded_cross_entropy(hooked, X, TARGET, chunk_bytes=1)
    assert seen == [(SAMPLES, CLASSES)]


def ignored(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    head, x = linear(), X.clone().requires_grad_()
    loss, _ = run_step(head, group, x, lambda head, x: sharded_cross_entropy(head, x, torch.full((10,), -100)))
    loss.backward()
    return loss.detach(), x.grad


def test_a_pass_of_ignored_targets_has_no_part_in_the_loss():
    for loss, gradient in run_threads(2, ignored):
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize("is_named", [False, True])
def test_a_loss_of_many_gathered_logits_is_told_once_what_to_call(is_named, caplog):
    def loss_of(head: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        if is_named:
            return sharded_cross_entropy(head, x, target)
        return F.cross_entropy(head(x), target) + F.cross_entropy(head(x), target)

    with caplog.at_level("WARNING", logger="lightning_dp"):
        run_threads(2, many_over_ranks, loss_of)
    said = [record.getMessage() for record in caplog.records if "sharded_cross_entropy" in record.getMessage()]
    assert len(said) == (0 if is_named else 1)
