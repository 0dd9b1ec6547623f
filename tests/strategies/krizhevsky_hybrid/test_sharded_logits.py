"""Loss functions of logits that are sharded over ranks, against torch's own on all of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.ring import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.logits import ShardedLogits
from tests.ranks import run_threads

SAMPLES, CLASSES = 5, 7
LOGITS = torch.randn(SAMPLES, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 30
TARGET = torch.tensor([0, 6, 3, 3, 5])
ONE_HOT = F.one_hot(TARGET, CLASSES)
SOFT = torch.softmax(torch.arange(35.0, dtype=torch.float64).reshape(5, 7).sin(), 1)
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
COTANGENT = torch.linspace(-1, 2, SAMPLES, dtype=torch.float64)

SHARDED = {
    "mean": lambda z: F.cross_entropy(z, TARGET),
    "sum": lambda z: F.cross_entropy(z, TARGET, reduction="sum"),
    "none": lambda z: (F.cross_entropy(z, TARGET, reduction="none") * COTANGENT).sum(),
    "smoothing": lambda z: F.cross_entropy(z, TARGET, label_smoothing=0.3),
    "ignored": lambda z: F.cross_entropy(z, TARGET, ignore_index=3),
    "module": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z, TARGET),
    "keywords": lambda z: F.cross_entropy(input=z, target=TARGET),
    "temperature": lambda z: F.cross_entropy(z / 3, TARGET),
    "scalar arithmetic": lambda z: F.cross_entropy(-(2 - 0.5 * z.mul(0.25) + 1) * torch.tensor(1.5), TARGET),
    "reflected": lambda z: F.cross_entropy(1 / (torch.sub(z, 100.0)), TARGET),
    "soft cap": lambda z: F.cross_entropy(30 * torch.tanh(z / 30), TARGET),
    "cast": lambda z: F.cross_entropy(z.double().to(torch.float64).to(dtype=torch.float64), TARGET),
    "flattened": lambda z: F.cross_entropy(
        z.contiguous().view(-1, z.size(-1)).reshape(SAMPLES, CLASSES), TARGET.view(-1)
    ),
    "asked for": lambda z: F.cross_entropy(z, TARGET) if z.requires_grad and z.is_floating_point() else z.sum(),
    "logistic mean": lambda z: F.binary_cross_entropy_with_logits(z, ONE_HOT.double()),
    "logistic sum": lambda z: nn.BCEWithLogitsLoss(reduction="sum")(z, ONE_HOT.double()),
}
GATHERED = {
    "weights": lambda z: F.cross_entropy(z, TARGET, weight=WEIGHT),
    "soft targets": lambda z: F.cross_entropy(z, SOFT),
    "pos_weight": lambda z: F.binary_cross_entropy_with_logits(z, ONE_HOT.double(), pos_weight=WEIGHT),
    "logistic none": lambda z: (F.binary_cross_entropy_with_logits(z, SOFT, reduction="none").sum(1) * COTANGENT).sum(),
    "number with a gradient": lambda z: F.cross_entropy(z * torch.tensor(0.5, requires_grad=True), TARGET),
    "two logits": lambda z: F.cross_entropy(z + z * 0.5, TARGET),
    "another shape": lambda z: z.view(-1).tanh().sum(),
    "number of each class": lambda z: F.cross_entropy(z + WEIGHT, TARGET),
    "arithmetic": lambda z: ((z / 3 + 1).square() * WEIGHT).mean() + F.cross_entropy(z * 0.5, TARGET),
    "indexing": lambda z: z[1, 2] * z[:, 6].sum() + z.T[0].tanh().sum(),
}


def losses(rank, group, loss_of):
    channel = Channel(group)
    bounds = chunk_bounds(CLASSES, group.size())
    begin, end = bounds[rank]
    own = LOGITS[:, begin:end].clone().requires_grad_()
    loss = loss_of(ShardedLogits(own, bounds, channel))
    loss.backward()
    return loss.detach(), own.grad, channel.bytes_sent


def expected(loss_of):
    logits = LOGITS.clone().requires_grad_()
    loss = loss_of(logits)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])  # with 8 ranks one has no class
@pytest.mark.parametrize("name", [*SHARDED, *GATHERED])
def test_losses_and_gradients(world_size, name):
    loss_of = (SHARDED | GATHERED)[name]
    loss, gradient = expected(loss_of)
    results = run_threads(world_size, losses, loss_of)
    for rank, (one, of_own, sent) in enumerate(results):
        torch.testing.assert_close(one, loss, rtol=1e-12, atol=1e-12)
        assert torch.equal(one, results[0][0])
        begin, end = chunk_bounds(CLASSES, world_size)[rank]
        torch.testing.assert_close(of_own, gradient[:, begin:end], rtol=1e-10, atol=1e-13)
        assert ("logits" in sent) == (name in GATHERED)


@pytest.mark.parametrize("name", ["mean", "logistic mean"])
def test_without_messages_they_are_wrong(name, monkeypatch):
    loss, _ = expected(SHARDED[name])
    monkeypatch.setattr(Channel, "all_gather", lambda self, what, t: torch.stack([t] * self.world_size))
    for one, _, _ in run_threads(2, losses, SHARDED[name]):
        assert not torch.allclose(one, loss, rtol=1e-3)


def sends_per_sample(rank, group):
    channel = Channel(group)
    bounds = chunk_bounds(1000, group.size())
    own = torch.zeros(SAMPLES, bounds[rank][1] - bounds[rank][0], dtype=torch.float32)
    F.cross_entropy(ShardedLogits(own, bounds, channel), TARGET)
    entropy = channel.bytes_sent["loss"]
    F.binary_cross_entropy_with_logits(ShardedLogits(own, bounds, channel), torch.zeros(SAMPLES, 1000))
    return entropy, channel.bytes_sent["loss"] - entropy


def test_four_numbers_a_sample_travel_for_softmax_and_one_a_batch_for_logistic_units():
    for entropy, logistic in run_threads(4, sends_per_sample):
        assert entropy == 4 * SAMPLES * 4 * 3
        assert logistic == 4 * 3


def looks(rank, group):
    bounds = chunk_bounds(CLASSES, group.size())
    begin, end = bounds[rank]
    channel = Channel(group)
    logits = ShardedLogits(LOGITS[:, begin:end], bounds, channel)
    assert (tuple(logits.shape), logits.dtype, logits.dim(), len(logits)) == ((5, 7), torch.float64, 2, 5)
    assert logits.size(1) == 7
    assert not channel.bytes_sent
    assert torch.equal(logits.argmax(1), LOGITS.argmax(1))
    assert torch.equal(logits.detach(), LOGITS)
    assert "tensor" in repr(logits)
    assert channel.bytes_sent["logits"] == sum(own.nbytes for own in [LOGITS[:, begin:end]]) * (group.size() - 1)
    return True


def test_they_look_like_a_tensor_and_are_gathered_once():
    assert all(run_threads(3, looks))


def metric_first(logits):
    with torch.no_grad():
        logits.argmax(1)
    with torch.inference_mode():
        logits.softmax(1)
    return F.cross_entropy(logits, TARGET, weight=WEIGHT)


def detached_metric_first(logits):
    logits.detach().argmax(1)
    logits.float().detach().softmax(1)
    return F.cross_entropy(logits, TARGET, weight=WEIGHT)


def masked(logits):
    logits[:, 0] = -5.0
    return F.cross_entropy(logits, TARGET)


@pytest.mark.parametrize("loss_of", [metric_first, masked, detached_metric_first])
def test_what_is_done_to_them_before_the_loss(loss_of):
    plain = LOGITS.clone().requires_grad_()
    loss = loss_of(plain.clone())
    loss.backward()
    for rank, (one, gradient, _) in enumerate(run_threads(2, losses, loss_of)):
        begin, end = chunk_bounds(CLASSES, 2)[rank]
        torch.testing.assert_close(one, loss.detach())
        torch.testing.assert_close(gradient, plain.grad[:, begin:end])


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_class_that_there_is_not(wrong):
    target = torch.tensor([0, wrong, 3, 3, 5])

    def refused(rank, group):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds; classes are 0 to 6"):
            losses(rank, group, lambda logits: F.cross_entropy(logits, target))

    run_threads(2, refused)


def target_gradient(rank, group):
    target = SOFT.clone().requires_grad_()
    losses(rank, group, lambda logits: F.binary_cross_entropy_with_logits(logits, target))
    return target.grad


def test_gradients_of_targets():
    target = SOFT.clone().requires_grad_()
    F.binary_cross_entropy_with_logits(LOGITS, target).backward()
    for gradient in run_threads(2, target_gradient):
        torch.testing.assert_close(gradient, target.grad)


def half(rank, group):
    bounds = chunk_bounds(CLASSES, group.size())
    begin, end = bounds[rank]
    own = LOGITS[:, begin:end].to(torch.bfloat16).requires_grad_()
    loss = F.cross_entropy(ShardedLogits(own, bounds, Channel(group)), TARGET)
    loss.backward()
    return loss.detach(), own.grad


def test_16_bit_logits_have_a_32_bit_loss():
    for loss, gradient in run_threads(2, half):
        assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(loss, F.cross_entropy(LOGITS.to(torch.bfloat16).float(), TARGET))


def gathers(rank, group):
    bounds = chunk_bounds(CLASSES, group.size())
    begin, end = bounds[rank]
    own = LOGITS[:, begin:end].clone().requires_grad_()
    channel = Channel(group)
    logits = ShardedLogits(own, bounds, channel)
    assert logits.requires_grad
    loss = F.cross_entropy(logits.float().contiguous().view(-1, CLASSES) / 2.5, TARGET)
    without = dict(channel.bytes_sent)
    accuracy = (logits.detach().argmax(1) == TARGET).double().mean()
    top = logits.detach().topk(2).indices
    loss.backward()
    return without, dict(channel.bytes_sent), accuracy, top, own.nbytes


def test_a_loss_of_cast_and_scaled_logits_sends_numbers_and_a_detached_metric_gathers_once():
    for without, in_all, accuracy, top, own_bytes in run_threads(2, gathers):
        assert without == {"loss": 4 * SAMPLES * 4}
        assert in_all == {**without, "logits": own_bytes}
        assert accuracy == (LOGITS.argmax(1) == TARGET).double().mean()
        assert torch.equal(top, LOGITS.topk(2).indices)


def ignored(rank, group):
    bounds = chunk_bounds(CLASSES, group.size())
    begin, end = bounds[rank]
    own = LOGITS[:, begin:end].clone().requires_grad_()
    loss = F.cross_entropy(ShardedLogits(own, bounds, Channel(group)), torch.full((SAMPLES,), -100))
    loss.backward()
    return loss.detach(), own.grad


def test_a_pass_of_ignored_targets_has_no_part_in_the_loss():
    for loss, gradient in run_threads(2, ignored):
        assert loss == 0
        assert not gradient.any()
