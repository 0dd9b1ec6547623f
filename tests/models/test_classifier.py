from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics.metric
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from lightning_dp._lightning import Callback, DDPStrategy, Trainer
from lightning_dp.models import Classifier, resnet20
from lightning_dp.optim import polynomial_with_warmup
from tests.ranks import run_processes

CLASSES = 7
SGD_PARTIAL = partial(SGD, lr=0.1, momentum=0.9)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(CLASSES))


def classifier(**options: Any) -> Classifier:
    torch.manual_seed(1)
    model = network()
    model(torch.zeros(2, 3, 5, 5))
    return Classifier(model, CLASSES, SGD_PARTIAL, **options)


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 5, 5, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def trainer(**options: Any) -> Trainer:
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    return Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options})


# Of two ranks: uneven, an odd number in all, and one batch is empty.
SHARDS = [[batch(5, 1), batch(3, 2)], [batch(5, 3), batch(0, 4)]]


def evaluate_shard(rank: int, fault: str | None) -> dict[str, float]:
    """The metrics of a test on two ranks that have, as after training, running statistics of their own.

    Lightning's strategy then takes rank 0's, which are those that a checkpoint holds.
    """
    if fault == "no reduction":
        torchmetrics.metric.gather_all_tensors = lambda tensor, group=None: [tensor]
    model = classifier()
    model.model[1].running_mean += rank
    loader = DataLoader(SHARDS[rank], batch_size=None)
    strategy = DDPStrategy(process_group_backend="gloo")
    return trainer(devices=2, strategy=strategy, use_distributed_sampler=False).test(model, loader, verbose=False)[0]


def reference() -> dict[str, float]:
    """In one process, on the concatenated images, in float64, with rank 0's statistics."""
    model = classifier().double().eval()
    x, y = (torch.cat(tensors) for tensors in zip(*SHARDS[0], *SHARDS[1], strict=True))
    with torch.no_grad():
        logits = model(x.double())
    best = logits.topk(5).indices == y[:, None]
    return {
        "test/loss": F.cross_entropy(logits, y).item(),
        "test/acc": best[:, 0].double().mean().item(),
        "test/acc5": best.any(1).double().mean().item(),
    }


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`", "ignore:It is recommended to use")
def test_metrics_on_two_ranks_are_those_of_all_images_in_one_process():
    for metrics in run_processes(2, evaluate_shard, None):
        assert metrics == pytest.approx(reference(), rel=1e-6)


def test_the_test_above_detects_a_missing_reduction():
    metrics, expected = run_processes(2, evaluate_shard, "no reduction")[1], reference()
    for name in expected:
        assert metrics[name] != pytest.approx(expected[name], rel=1e-3)


def test_the_training_loss_is_weighted_by_batch_size_and_alone_is_smoothed():
    model = classifier(label_smoothing=0.2)
    model.optimizer = partial(SGD, lr=0.0)
    batches = [batch(5, 1), batch(2, 2)]
    run = trainer()
    run.fit(model, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    with torch.no_grad():
        smoothed = sum(F.cross_entropy(model(x), y, label_smoothing=0.2).item() * len(y) for x, y in batches) / 7
        model.load_state_dict(trained)
        model.eval()
        plain = sum(F.cross_entropy(model(x), y).item() * len(y) for x, y in batches) / 7
    assert logged["train/loss"] == pytest.approx(smoothed, rel=1e-5)
    assert logged["val/loss"] == pytest.approx(plain, rel=1e-5)
    assert {"train/acc", "val/acc"} <= set(logged)


def test_accuracy_of_a_class_for_each_pixel_is_by_pixel():
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 6, 6), torch.randint(CLASSES, (4, 6, 6))
    net = nn.Conv2d(3, CLASSES, 1)
    (logged,) = trainer().test(
        Classifier(net, CLASSES, partial(SGD, lr=0.1)), DataLoader([(x, y)], batch_size=None), verbose=False
    )
    assert logged["test/acc"] == pytest.approx((net(x).argmax(1) == y).double().mean().item())


def test_accuracy_with_soft_labels_is_that_of_their_largest_share():
    """MixUp and CutMix make such labels, of which torchmetrics counted each as wrong."""
    model = classifier()
    model.optimizer = partial(SGD, lr=0.0)
    x, y = batch(40, 1)
    soft = 0.7 * F.one_hot(y, CLASSES) + 0.3 * F.one_hot(y.roll(1), CLASSES)
    images = DataLoader([(x, soft)], batch_size=None)
    run = trainer()
    run.fit(model, images, images)
    with torch.no_grad():
        model.train()
        trained = (model(x).argmax(1) == y).double().mean().item()
        model.eval()
        logits = model(x)
    logged = {name: value.item() for name, value in run.callback_metrics.items()} | run.test(model, images)[0]
    assert trained > 0
    assert logged["train/acc"] == pytest.approx(trained)
    assert logged["test/acc"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
    assert logged["test/acc5"] == pytest.approx((logits.topk(5).indices == y[:, None]).any(1).double().mean().item())
    assert logged["test/loss"] == pytest.approx(F.cross_entropy(logits, soft).item())


def test_what_a_fit_has_counted_that_failed_is_not_in_the_next_one():
    class Fails(Callback):
        def on_before_backward(self, run: Trainer, *_: Any) -> None:
            if run.global_step == 2:
                raise MemoryError("as with too large a batch")

    model = classifier()
    model.optimizer = partial(SGD, lr=0.0)
    images = DataLoader([batch(5, n) for n in range(3)], batch_size=None)
    with pytest.raises(MemoryError, match="as with too large a batch"):
        trainer(callbacks=[Fails()]).fit(model, images, images)
    logged = []
    for each in (model, classifier()):
        each.optimizer = partial(SGD, lr=0.0)
        run = trainer()
        run.fit(each, *[DataLoader([batch(2, 7)], batch_size=None)] * 2)
        logged.append({name: run.callback_metrics[name].item() for name in ("train/loss", "train/acc")})
    assert logged[0] == logged[1]


def test_another_trainer_may_validate_while_one_trains():
    """As on another data set after each epoch."""
    images = DataLoader([batch(5, 1), batch(3, 2)], batch_size=None)
    seen: list[float] = []

    class Validates(Callback):
        def on_train_epoch_end(self, run: Trainer, module: Classifier) -> None:
            seen.append(trainer().validate(module, images, verbose=False)[0]["val/loss"])
            module.trainer = run
            module.train()

    logged = []
    for callbacks in ([], [Validates()]):
        run = trainer(max_epochs=2, callbacks=callbacks)
        run.fit(classifier(), images, images)
        logged.append({name: value.item() for name, value in run.callback_metrics.items()})
    assert logged[1] == logged[0]
    assert seen[-1] == logged[0]["val/loss"]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_losses_of_16_bits_are_summed_in_32(precision):
    """In bfloat16, 256 + 1 is 256."""
    model = classifier()
    (metrics,) = trainer(precision=precision).validate(model, DataLoader([batch(4, 1)] * 300, batch_size=None))
    with torch.no_grad():
        x, y = batch(4, 1)
        expected = F.cross_entropy(model.eval()(x.to(model.dtype)), y).item()
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_an_empty_training_batch_counts_nothing(label_smoothing):
    """As on a rank that has no image left: it must neither raise there alone, nor make the loss of the epoch NaN."""
    model = classifier(label_smoothing=label_smoothing)
    model.log = lambda *_, **__: None
    model.training_step(batch(5, 1), 0)
    before = model.train_loss.compute(), model.train_acc.compute()
    loss = model.training_step(batch(0, 2), 1)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert (model.train_loss.compute(), model.train_acc.compute()) == before


@pytest.mark.parametrize(
    ("scheduler", "interval", "rates"),
    [
        (partial(OneCycleLR, max_lr=0.1, pct_start=0.5, cycle_momentum=False), "step", None),
        (partial(MultiStepLR, milestones=[2, 5]), "step", [0.1, 0.1, 0.01, 0.01, 0.01, 0.001]),
        (partial(MultiStepLR, milestones=[1]), "epoch", [0.1] * 3 + [0.01] * 3),
        (partial(ReduceLROnPlateau, patience=-1), "epoch", [0.1] * 3 + [0.01] * 3),  # after each look at val/loss
        (None, "step", [0.1] * 6),
    ],
)
def test_schedules_count_what_they_should_and_checkpoints_hold_plain_values(tmp_path, scheduler, interval, rates):
    seen = []

    class Watched(SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    model = classifier(scheduler=scheduler, interval=interval)
    model.optimizer = partial(Watched, lr=0.1, momentum=0.9)
    run = trainer(max_epochs=2)
    images = DataLoader([batch(4, seed) for seed in range(3)], batch_size=None)
    run.fit(model, images, images)
    if rates is None:  # up to the maximum at half of the six steps, and to nothing at the end
        assert max(seen) == pytest.approx(0.1)
        assert 1 <= seen.index(max(seen)) <= 3
        assert seen[-1] < 1e-3
    else:
        assert seen == pytest.approx(rates)
    run.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["num_classes"] == CLASSES
    assert set(checkpoint["state_dict"]) == {f"model.{name}" for name in model.model.state_dict()}


def test_a_schedule_with_a_phase_of_no_step_is_refused():
    """torch divides by its length. It is the default one of the recipes, with max_steps=5."""
    model = classifier(scheduler=partial(OneCycleLR, max_lr=0.1, pct_start=0.2, cycle_momentum=False), interval="step")
    images = DataLoader([batch(4, seed) for seed in range(5)], batch_size=None)
    with pytest.raises(ValueError, match="a phase without a step if training has 5 steps; train for more or fewer"):
        trainer().fit(model, images, images)


@pytest.mark.parametrize(("mode", "metric"), [("min", "val/loss"), ("max", "val/acc")])
@pytest.mark.parametrize(("interval", "every"), [("epoch", 1), ("step", 1), ("epoch", 2)])
def test_a_plateau_is_one_of_the_validations(interval, every, mode, metric):
    seen = []

    class Watched(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append((run.current_epoch, metrics == run.callback_metrics[metric]))
            super().step(metrics)

    images = DataLoader([batch(4, seed) for seed in range(3)], batch_size=None)
    model = classifier(scheduler=partial(Watched, mode=mode, patience=0), interval=interval)
    run = trainer(max_epochs=4, check_val_every_n_epoch=every)
    run.fit(model, images, images)
    assert seen == [(epoch, True) for epoch in range(4) if (epoch + 1) % every == 0]


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("sanity", [0, 1])
def test_a_plateau_is_one_of_validations_that_count_batches_over_epochs(tmp_path, every, sanity):
    """Of three batches in an epoch. A checkpoint of a validation has the plateau's state after it."""
    seen, validated = [], []

    class Watched(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append((run.global_step, metrics.item()))
            super().step(metrics)

    class Save(Callback):
        def on_validation_end(self, run: Trainer, *_: Any) -> None:
            if not run.sanity_checking and run.state.fn == "fit":
                validated.append((run.global_step, run.callback_metrics["val/loss"].item()))
                run.save_checkpoint(tmp_path / "last.ckpt")

    images = DataLoader([batch(4, seed) for seed in range(3)], batch_size=None)
    model = classifier(scheduler=partial(Watched, patience=0))
    options = {"check_val_every_n_epoch": None, "val_check_interval": every, "num_sanity_val_steps": sanity}
    run = trainer(max_epochs=4, callbacks=[Save()], **options)
    run.fit(model, images, images)
    assert seen == validated
    assert [step for step, _ in seen] == list(range(every, 13, every))
    (state,) = torch.load(tmp_path / "last.ckpt", weights_only=True)["lr_schedulers"]
    assert state["last_epoch"] == len(seen)
    run.validate(model, images, verbose=False)
    assert len(seen) == 12 // every


def fit_with_a_schedule(interval: str = "epoch", data: Any = None, **end: int) -> list[int]:
    """Fit with three batches, two in a step, and return what the schedule was told."""
    told = []

    def schedule(optimizer, total_steps):
        told.append(total_steps)
        return LambdaLR(optimizer, lambda _: 1.0)

    images = DataLoader([batch(4, seed) for seed in range(3)] if data is None else data, batch_size=None)
    model = classifier(scheduler=schedule, interval=interval)
    trainer(accumulate_grad_batches=2, **end).fit(model, images, images)
    return told


@pytest.mark.parametrize(
    "end", [{"max_epochs": 4}, {"max_epochs": 9, "max_steps": 7}, {"max_epochs": -1, "max_steps": 7}]
)
def test_a_schedule_of_epochs_ends_with_the_last_one(end):
    """It is told how many epochs there are: with the number of steps it would still be at its beginning."""
    assert fit_with_a_schedule(**end) == [4]


def test_a_warm_up_counts_steps_of_the_optimizer_and_not_the_batches_of_an_accumulation():
    seen = []

    class Watched(SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    schedule = partial(polynomial_with_warmup, warmup=0.25, power=1.0)
    model = classifier(scheduler=schedule, interval="step")
    model.optimizer = partial(Watched, lr=0.1)
    images = DataLoader([batch(4, seed) for seed in range(4)], batch_size=None)
    trainer(max_epochs=4, accumulate_grad_batches=2).fit(model, images, images)
    assert seen == pytest.approx([0.0, 0.05, *(0.1 * (1 - n / 6) for n in range(6))])  # eight steps of 16 batches


class Endless(IterableDataset):
    def __iter__(self):
        return iter([batch(4, seed) for seed in range(3)])


@pytest.mark.parametrize(("interval", "end"), [("epoch", {"max_steps": 2}), ("step", {}), ("step", {"max_epochs": 2})])
def test_a_schedule_must_know_where_training_ends(interval, end):
    with pytest.raises(ValueError, match=f"how many {interval}s training has.*set max_{interval}s"):
        fit_with_a_schedule(interval, data=Endless(), **({"max_epochs": -1} | end))


def test_a_schedule_knows_the_end_of_data_without_a_length():
    assert fit_with_a_schedule("step", data=Endless(), max_epochs=2, max_steps=3) == [3]
    assert fit_with_a_schedule("epoch", data=Endless(), max_epochs=2, max_steps=9) == [2]


def test_a_schedule_that_a_checkpoint_ends_too_early_is_refused_at_once(tmp_path):
    """It would fail when its last step is taken, and all steps before it would be lost."""
    one_cycle = partial(OneCycleLR, max_lr=0.1, cycle_momentum=False)
    images = DataLoader([batch(4, seed) for seed in range(3)], batch_size=None)
    run = trainer(max_epochs=2)
    run.fit(classifier(scheduler=one_cycle, interval="step"), images, images)
    run.save_checkpoint(tmp_path / "last.ckpt")
    longer = classifier(scheduler=one_cycle, interval="step")
    longer.training_step = lambda *_: pytest.fail("a step was taken")
    with pytest.raises(ValueError, match=r"OneCycleLR ends after 6 steps, and this training after 9"):
        trainer(max_epochs=3).fit(longer, images, images, ckpt_path=tmp_path / "last.ckpt")


def test_a_subclass_may_make_its_own_schedule():
    class Own(Classifier):
        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.1)
            return [optimizer], [OneCycleLR(optimizer, max_lr=0.1, total_steps=9)]

    images = DataLoader([batch(4, seed) for seed in range(3)], batch_size=None)
    run = trainer(max_epochs=1)
    run.fit(Own(classifier().model, CLASSES, SGD_PARTIAL), images, images)
    assert run.global_step == 3


def test_channels_last_changes_the_layout_and_not_the_result():
    torch.manual_seed(0)
    fast = Classifier(resnet20(), 10, SGD_PARTIAL)
    plain = Classifier(resnet20(), 10, SGD_PARTIAL, channels_last=False)
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(2, 3, 32, 32)
    layouts = []
    fast.model.stage3.register_forward_hook(
        lambda _module, _args, out: layouts.append(out.is_contiguous(memory_format=torch.channels_last))
    )
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)
    assert layouts == [True]
    assert fast.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(12,), (3, 8), (3, 4, 4, 4)])
def test_inputs_that_are_no_images_keep_their_layout(shape):
    """torch has the channels-last format for four dimensions only."""
    x, y = torch.randn(6, *shape), torch.arange(6)
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), CLASSES)), CLASSES, SGD_PARTIAL)
    images = DataLoader([(x, y)], batch_size=None)
    run = trainer()
    run.fit(model, images, images)
    assert torch.equal(model(x), model.model(x))


@pytest.mark.parametrize("num_classes", [3, CLASSES + 1])
def test_a_network_with_another_number_of_classes_is_refused_before_the_first_step(num_classes):
    """torchmetrics would say that sizes of tensors differ, and without a validation only in the test."""
    images = DataLoader([batch(4, 1)], batch_size=None)
    for sanity in (0, 2):
        model = Classifier(classifier().model, num_classes, SGD_PARTIAL)
        run = trainer(num_sanity_val_steps=sanity)
        with pytest.raises(ValueError, match=f"returns 7 logits per image, and num_classes={num_classes}; give the"):
            run.fit(model, images, images)
        assert run.global_step == 0


def test_few_classes_have_no_top_5_and_a_wrong_interval_is_refused():
    assert Classifier(nn.Linear(2, 3), 3, SGD_PARTIAL).test_acc5 is None
    with pytest.raises(ValueError, match="interval='batch'"):
        Classifier(nn.Linear(2, 3), 3, SGD_PARTIAL, interval="batch")
