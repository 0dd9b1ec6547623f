from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp._lightning import DDPStrategy, Trainer
from lightning_dp.models import Classifier, SplitClassifier, TrunkAndHead, cifar_alexnet, classifier
from lightning_dp.optim import KrizhevskySGD, krizhevsky_schedule, trunk_and_head_groups
from tests.models.test_classifier import trainer
from tests.ranks import run_processes

CLASSES = 7
SGD_PARTIAL = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def network() -> TrunkAndHead:
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten())
    return TrunkAndHead(trunk, nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, CLASSES)))


def split(**options: Any) -> SplitClassifier:
    return SplitClassifier(network(), CLASSES, SGD_PARTIAL, **options)


def batch(size: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 5, 5, generator=generator, dtype=dtype)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def fit(model: Classifier, batches: list[tuple[Tensor, Tensor]], **options: Any) -> Trainer:
    run = trainer(**options)
    run.fit(model, *(DataLoader(batches, batch_size=None) for _ in range(2)))
    return run


def logistic_by_hand(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of independent units, summed over classes; for each image."""
    p = torch.sigmoid(logits)
    of_target = -p.gather(1, y[:, None])[:, 0].log()
    others = -(1 - p).log().sum(1) + (1 - p.gather(1, y[:, None]))[:, 0].log()
    return of_target + others


def test_a_head_with_another_number_of_classes_is_refused():
    """Its losses do not see all logits, so a whole epoch would be trained before the first validation fails."""
    message = "returns 7 logits per image, and num_classes=9; give the"
    with pytest.raises(ValueError, match=message):
        SplitClassifier(network(), 9, SGD_PARTIAL)
    hidden = TrunkAndHead(network().trunk, nn.Sequential(network().head, nn.Identity()))
    for options in ({"train_accuracy": True}, {}):
        with pytest.raises(ValueError, match=message):
            fit(SplitClassifier(hidden, 9, SGD_PARTIAL, **options), [batch(4, 1)])


@pytest.mark.parametrize("loss", ["logistic", "cross_entropy"])
def test_the_loss_is_the_mean_over_images_of_the_named_loss(loss):
    model = split(loss=loss)
    logits, y = torch.randn(6, CLASSES, dtype=torch.double), batch(6, 1)[1]
    expected = logistic_by_hand(logits, y) if loss == "logistic" else F.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(model.compute_loss(logits, y), expected.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.compute_loss(logits, y, reduction="sum"), expected.sum(), rtol=1e-12, atol=0)
    soft = 0.7 * F.one_hot(y, CLASSES) + 0.3 * F.one_hot(y.roll(1), CLASSES).double()
    by_hand = F.cross_entropy if loss == "cross_entropy" else F.binary_cross_entropy_with_logits
    total = by_hand(logits, soft, reduction="sum")
    torch.testing.assert_close(model.compute_loss(logits, soft), total / 6, rtol=1e-12, atol=0)


def test_the_logistic_loss_of_16_bit_logits_is_summed_in_32_bits():
    logits, y = torch.full((64, CLASSES), -2.0, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long)
    loss = split().compute_loss(logits, y, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(64 * (math.log1p(math.exp(2)) + 6 * math.log1p(math.exp(-2))), rel=1e-2)


def test_all_classes_start_equally_likely_so_that_the_loss_starts_small():
    torch.manual_seed(0)
    model = SplitClassifier(cifar_alexnet(dropout=0.0), 10, SGD_PARTIAL)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    with torch.no_grad():
        assert model.compute_loss(model(x), y).item() < 4.5  # 3.25 at the best; with all units at one half it is 6.93


STEPS = 4


def identity(_, bucket):  # DDP takes no annotations that are strings
    """In place of the all-reduce."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def train_on_two_ranks(rank: int, loss: str, fault: bool) -> dict[str, Tensor]:
    """Parameters after DDP on shards of the batches of `train_alone`."""
    model = split(loss=loss, channels_last=False).double()
    if fault:
        model.on_train_start = lambda: model.trainer.strategy.model.register_comm_hook(None, identity)
    batches = [tuple(part.chunk(2)[rank] for part in batch(8, seed, torch.double)) for seed in range(STEPS)]
    fit(model, batches, devices=2, strategy=DDPStrategy(process_group_backend="gloo"), use_distributed_sampler=False)
    return {name: value.detach() for name, value in model.model.named_parameters()}


def train_alone(loss: str) -> dict[str, Tensor]:
    """On the concatenated batches, in a plain loop."""
    model = network().double()
    optimizer = SGD_PARTIAL(model.parameters())
    for seed in range(STEPS):
        x, y = batch(8, seed, torch.double)
        logits = model(x)
        optimizer.zero_grad()
        (logistic_by_hand(logits, y).mean() if loss == "logistic" else F.cross_entropy(logits, y)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("loss", ["logistic", "cross_entropy"])
def test_under_data_parallelism_it_is_an_ordinary_module(loss):
    expected = train_alone(loss)
    for parameters in run_processes(2, train_on_two_ranks, loss, False):
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def test_the_test_above_sees_a_missing_all_reduce():
    expected, (_, second) = train_alone("logistic"), run_processes(2, train_on_two_ranks, "logistic", True)
    assert any((second[name] - expected[name]).abs().max() > 1e-6 for name in expected)


def train_hybrid(rank: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Parameters and metrics after training with a sharded head, a batch of 8 in the trunk and of 4 in the head."""
    model = split(channels_last=False, train_accuracy=True).double()
    batches = [tuple(part.chunk(2)[rank] for part in batch(8, seed, torch.double)) for seed in range(STEPS)]
    strategy = KrizhevskyHybridStrategy("model.head", scheme="b", variable_batch=True, process_group_backend="gloo")
    run = fit(model, batches, devices=2, strategy=strategy, use_distributed_sampler=False)
    metrics = {name: run.callback_metrics[name].item() for name in ("train/loss", "train/acc")}
    return {name: value.detach() for name, value in model.model.named_parameters()}, metrics


@pytest.mark.ci
def test_under_the_hybrid_strategy_its_head_is_updated_in_each_pass_and_every_image_counts_once():
    model = network().double()
    optimizer, losses, right = SGD_PARTIAL(model.parameters()), [], 0
    for seed in range(STEPS):
        x, y = batch(8, seed, torch.double)
        features, gradients = model.trunk(x), []
        for part, target in zip(features.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            boundary = part.detach().requires_grad_()
            logits = model.head(boundary)
            losses.append(logistic_by_hand(logits, target).mean())
            losses[-1].backward()
            gradients.append(boundary.grad / 2)
            right += int((logits.argmax(1) == target).sum())
            optimizer.step()
        optimizer.zero_grad()
        features.backward(torch.cat(gradients))
        optimizer.step()
    expected = dict(model.named_parameters())
    for parameters, metrics in run_processes(2, train_hybrid):
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
        assert metrics["train/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
        assert metrics["train/acc"] == pytest.approx(right / (8 * STEPS), rel=1e-6)
    assert any((value - train_alone("logistic")[name]).abs().max() > 1e-6 for name, value in expected.items())


class Halves(SplitClassifier):
    """Its head works on sub-batches, of unequal sizes, as a strategy may have it."""

    def training_step(self, given: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        y = given[1]
        whole, calls = self.head_step, [slice(0, 1), slice(1, len(y))]
        self.head_step = lambda features, target: sum(  # type: ignore[method-assign]
            whole(features[rows], target[rows]) * len(target[rows]) / len(target) for rows in calls
        )
        try:
            return super().training_step(given, batch_idx)
        finally:
            del self.head_step


@pytest.mark.parametrize("kind", [SplitClassifier, Halves])
def test_metrics_are_those_of_all_images_however_often_the_head_works(kind):
    model = kind(network(), CLASSES, partial(SGD, lr=0.0), train_accuracy=True)
    batches = [batch(5, 1), batch(2, 2)]
    run = fit(model, batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    logits = model(x)
    loss = logistic_by_hand(logits.double(), y).mean().item()
    accuracy = (logits.argmax(1) == y).double().mean().item()
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    expected = {"train/loss": loss, "train/acc": accuracy, "val/loss": loss, "val/acc": accuracy}
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["logistic", "cross_entropy"])
def test_the_loss_is_one_that_can_keep_logits_sharded(loss, monkeypatch):
    seen = []
    for name in ("sharded_cross_entropy", "sharded_binary_cross_entropy"):
        function = getattr(classifier, name)
        monkeypatch.setattr(
            classifier,
            name,
            lambda *args, name=name, function=function, **options: (seen.append(name), function(*args, **options))[1],
        )
    x, y = batch(5, 1)
    for options in ({}, {"train_accuracy": True}):
        model = split(loss=loss, **options)
        actual = model.head_step(model.model.trunk(x), y)
        torch.testing.assert_close(actual, model.compute_loss(model(x), y), rtol=1e-6, atol=1e-6)
    assert seen == ["sharded_cross_entropy" if loss == "cross_entropy" else "sharded_binary_cross_entropy"]


class Halved(SplitClassifier):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().compute_loss(*args, **kwargs) / 2


def test_a_loss_of_a_subclass_is_used():
    x, y = batch(5, 1)
    losses = [kind(network(), CLASSES, SGD_PARTIAL) for kind in (SplitClassifier, Halved)]
    losses[1].load_state_dict(losses[0].state_dict())
    whole, half = (model.head_step(model.model.trunk(x), y) for model in losses)
    torch.testing.assert_close(half, whole / 2)


@pytest.mark.parametrize("kind", [SplitClassifier, Halved])
@pytest.mark.parametrize("train_accuracy", [False, True])
@pytest.mark.parametrize("loss", ["logistic", "cross_entropy"])
def test_an_empty_training_batch_counts_nothing(loss, train_accuracy, kind):
    """As on a rank that has no image left."""
    model = kind(network(), CLASSES, SGD_PARTIAL, loss=loss, train_accuracy=train_accuracy)
    model.log = lambda *_, **__: None
    model.training_step(batch(5, 1), 0)
    before = model.train_loss.compute()
    empty = model.training_step(batch(0, 2), 1)
    empty.backward()
    assert empty == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert model.train_loss.compute() == before


def test_accuracy_in_training_is_counted_only_when_asked_for():
    run = fit(split(), [batch(4, 1)])
    assert "train/loss" in run.callback_metrics
    assert "train/acc" not in run.callback_metrics


def test_a_checkpoint_holds_plain_values_and_can_go_to_a_classifier(tmp_path):
    model = split(loss="cross_entropy")
    run = fit(model, [batch(4, 1)])
    run.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"].items() >= {"num_classes": CLASSES, "loss": "cross_entropy"}.items()
    plain = Classifier(network(), CLASSES, SGD_PARTIAL)
    plain.load_state_dict(checkpoint["state_dict"])
    x, _ = batch(3, 2)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Classifier, SplitClassifier])
def test_trunk_and_head_can_have_rates_of_their_own(kind):
    seen = []

    class Watching(KrizhevskySGD):
        def step(self, closure=None):
            seen.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    groups = partial(trunk_and_head_groups, lr=0.01, weight_decay=0.0, trunk_batch_scale=4)
    options = {"scheduler": krizhevsky_schedule, "interval": "step", "parameter_groups": groups}
    model = kind(network(), CLASSES, partial(Watching, lr=0.01), **options)
    fit(model, [batch(4, seed) for seed in range(4)])
    factor = 250 ** (-1 / 3)
    assert [trunk for trunk, _ in seen] == pytest.approx([0.04 * factor**step for step in range(4)])
    assert [head for _, head in seen] == pytest.approx([0.01 * factor**step for step in range(4)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SplitClassifier(nn.Linear(2, 3), 3, SGD_PARTIAL), "Linear has no submodule trunk and no head"),
        (lambda: split(loss="hinge"), "loss='hinge' must be one of 'logistic', 'cross_entropy'"),
        (lambda: split(label_smoothing=0.1), "label_smoothing=0.1 applies to softmax"),
        (lambda: split(interval="batch"), "interval='batch'"),
    ],
)
def test_what_cannot_be_trained_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_softmax_can_be_smoothed_in_training():
    model = split(loss="cross_entropy", label_smoothing=0.2)
    x, y = batch(5, 1)
    with torch.no_grad():
        loss = model.head_step(model.model.trunk(x), y)
        expected = F.cross_entropy(model(x), y, label_smoothing=0.2)
    torch.testing.assert_close(loss, expected)
