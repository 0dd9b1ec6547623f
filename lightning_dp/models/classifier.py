"""LightningModules that train and test any network as a classifier, as a whole or as trunk and head."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp._lightning import LightningModule
from lightning_dp.losses import sharded_binary_cross_entropy, sharded_cross_entropy

Batch = tuple[Tensor, Tensor]

NEVER = sys.maxsize  # epochs between two steps of a schedule that Lightning is to save, but not to step


class Classifier(LightningModule):
    """Cross-entropy, accuracy, optimizer and schedule for a network that maps images to logits.

    It logs once per epoch ``train/loss``, ``train/acc``, ``val/loss``, ``val/acc``, ``test/loss``, ``test/acc`` and,
    with more than five classes, ``test/acc5``. Each is exact on any number of ranks. Every rank keeps sums and counts,
    which are reduced at the end of the epoch, so each image counts once whatever the batch sizes are, and an empty
    batch counts nothing. No step waits for the metrics of another rank. Labels may be soft, (N, num_classes), as MixUp
    makes them: accuracy takes the class with the largest share.

    Args:
        model: maps images (N, C, H, W) to logits (N, num_classes).
        num_classes: number of classes. A network with another number of logits raises ValueError in its first batch,
            before the first step.
        optimizer: makes an optimizer from parameters, for example ``functools.partial(torch.optim.SGD, lr=0.1)``. It
            gets all parameters in one group unless ``parameter_groups`` is given, so weight decay applies to all of
            them, as in He et al. 2015.
        scheduler: makes a learning rate schedule from an optimizer. If it has an argument ``total_steps`` that is not
            set, that is set to the number of optimizer steps, or of epochs, of the whole fit: what ``interval`` counts.
            ``ReduceLROnPlateau`` gets ``val/loss`` (with ``mode="max"`` ``val/acc``) of each validation, at the end of
            its epoch, whatever ``interval`` is. With the Trainer's ``check_val_every_n_epoch=None``, where validations
            count batches over epochs, it gets it when each ends: in `on_validation_epoch_end`.
        interval: what the schedule counts, ``"step"`` or ``"epoch"``.
        label_smoothing: label smoothing of the training loss, 0 to 1. The other losses are not smoothed.
        channels_last: use the channels-last memory format for weights and images. On CPU, ResNet-20 then trains 1.2 to
            1.4 times as many images per second (batches of 32 to 128 on one and two cores). Inputs without four
            dimensions keep their layout.
        parameter_groups: makes the optimizer's parameter groups from the network, for example
            ``functools.partial(lightning_dp.optim.trunk_and_head_groups, ...)``.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        interval: Literal["step", "epoch"] = "epoch",
        label_smoothing: float = 0.0,
        channels_last: bool = True,
        parameter_groups: Callable[[nn.Module], Iterable[dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__()
        if interval not in ("step", "epoch"):
            raise ValueError(f"interval={interval!r} must be 'step' or 'epoch'")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing} must be 0 to 1")
        # Plain values only. These go into the checkpoint, which must load without unpickling objects.
        self.save_hyperparameters("num_classes", "interval", "label_smoothing", "channels_last")
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = model.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        self.num_classes = num_classes
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.interval = interval
        self.label_smoothing = label_smoothing
        self.parameter_groups = parameter_groups
        self._planned_steps = 0  # what the schedule was told; 0 if it was told nothing
        self.train_loss, self.val_loss, self.test_loss = (MeanLoss() for _ in range(3))
        self.train_acc, self.val_acc, self.test_acc = (_accuracy(num_classes) for _ in range(3))
        self.test_acc5 = _accuracy(num_classes, top_k=5) if num_classes > 5 else None

    def setup(self, stage: str) -> None:
        """Forget what was counted before an exception: a new Trainer does not know the metrics of an earlier one.

        A Trainer that a callback validates with while another one trains leaves the metrics of training alone.
        """
        prefix = {"fit": "", "validate": "val_"}.get(stage, f"{stage}_")
        for name, part in self.named_children():
            if isinstance(part, Metric) and name.startswith(prefix):
                part.reset()

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, num_classes)."""
        return self.model(self._laid_out(x))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over this rank's images (N, C, H, W) and labels (N,)."""
        x, y = batch
        logits = self(x)
        _require_classes(logits.shape[1], self.num_classes)
        loss = self.compute_loss(logits, y, _reduction_of(y), self.label_smoothing)
        self.train_loss.update(loss.detach(), len(y))
        if len(y) > 0:
            self.train_acc.update(logits.detach(), _class_of(y))
        self._log_training(loss, {"train/loss": self.train_loss, "train/acc": self.train_acc})
        return loss

    def compute_loss(
        self, logits: Tensor, target: Tensor, reduction: Literal["mean", "sum"] = "mean", label_smoothing: float = 0.0
    ) -> Tensor:
        """Return the loss of logits (N, num_classes) and labels (N,): the mean or the sum over the N images."""
        return F.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the metrics with this rank's slice of a validation batch."""
        self._evaluate(batch, {"val/loss": self.val_loss, "val/acc": self.val_acc})

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the metrics with this rank's slice of a test batch."""
        top_5 = {} if self.test_acc5 is None else {"test/acc5": self.test_acc5}
        self._evaluate(batch, {"test/loss": self.test_loss, "test/acc": self.test_acc, **top_5})

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Return the logits of images, or of images and labels."""
        return self(batch if isinstance(batch, Tensor) else batch[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizer of all parameters and, if there is one, its schedule."""
        groups = self.parameters() if self.parameter_groups is None else self.parameter_groups(self.model)
        optimizer = self.optimizer(groups)
        if self.scheduler is None:
            return optimizer
        arguments = inspect.signature(self.scheduler).parameters
        given = getattr(self.scheduler, "keywords", {})
        fill = {}
        if "total_steps" in arguments and given.get("total_steps") is None:
            fill["total_steps"] = self._planned_steps = self._schedule_steps()
        try:
            scheduler = self.scheduler(optimizer, **fill)
        except ZeroDivisionError as error:  # of OneCycleLR, where pct_start * total_steps is 1
            total = {**given, **fill}.get("total_steps", "so many")
            raise ValueError(
                f"the schedule has a phase without a step if training has {total} {self.interval}s; train for more or "
                "fewer, or use another schedule"
            ) from error
        schedule: dict[str, Any] = {"scheduler": scheduler, "interval": self.interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            metric = "val/acc" if scheduler.mode == "max" else "val/loss"
            every = self.trainer.check_val_every_n_epoch or NEVER
            schedule |= {"monitor": metric, "interval": "epoch", "frequency": every}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _schedule_steps(self) -> int:
        """Return how often Lightning steps the schedule in the whole fit: as often as ``interval`` passes."""
        trainer = self.trainer
        if self.interval == "step":
            total = trainer.estimated_stepping_batches  # -1 or infinite if it is not known
        else:
            total = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
            if trainer.max_steps != -1:
                trainer.fit_loop.setup_data()  # makes the loader, as `estimated_stepping_batches` does
                if math.isfinite(trainer.num_training_batches):
                    in_epoch = max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
                    total = min(total, math.ceil(trainer.max_steps / in_epoch))
        if not 0 <= total < math.inf:
            raise ValueError(
                f"the schedule needs to know how many {self.interval}s training has, which "
                f"max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps} do not tell; set "
                f"max_{self.interval}s, or the schedule's total_steps, with functools.partial"
            )
        return int(total)

    def on_train_start(self) -> None:
        """Raise ValueError if a checkpoint has brought a schedule that ends before this training does."""
        for each in self.trainer.lr_scheduler_configs:
            total_steps = getattr(each.scheduler, "total_steps", self._planned_steps)
            if total_steps < self._planned_steps:
                raise ValueError(
                    f"the checkpoint's {type(each.scheduler).__name__} ends after {total_steps} {self.interval}s, and "
                    f"this training after {self._planned_steps}; this schedule cannot be extended on resume: "
                    "keep the original max_epochs, or start a new run"
                )

    def on_validation_epoch_end(self) -> None:
        """Step a plateau schedule whose validations do not end with epochs. Lightning steps one at ends of epochs only.

        Before checkpoints of this validation are written: they have the schedule that it has led to.
        """
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            return
        for each in self.trainer.lr_scheduler_configs:
            if isinstance(each.scheduler, ReduceLROnPlateau) and each.frequency == NEVER:
                assert each.monitor is not None
                self.lr_scheduler_step(each.scheduler, self.trainer.callback_metrics[each.monitor])

    def _evaluate(self, batch: Batch, metrics: dict[str, Metric]) -> None:
        x, y = batch
        logits = self(x)
        _require_classes(logits.shape[1], self.num_classes)
        for metric in metrics.values():
            if isinstance(metric, MeanLoss):
                metric.update(self.compute_loss(logits, y, _reduction_of(y)), len(y))
            elif len(y) > 0:  # the metrics of torchmetrics do not accept an empty batch
                metric.update(logits, _class_of(y))
        self._log(metrics)

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self.memory_format) if x.ndim == 4 else x

    def _log_training(self, loss: Tensor, metrics: dict[str, Metric]) -> None:
        # The progress bar shows the loss of this rank and step, so that no step waits for a reduction.
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        self._log(metrics)

    def _log(self, metrics: dict[str, Metric]) -> None:
        for name, metric in metrics.items():
            self.log(name, metric, on_step=False, on_epoch=True, prog_bar=not name.endswith("acc5"))


class MeanLoss(Metric):
    """The mean of losses, weighted by the number of images, over all batches and ranks.

    ``self.log(..., sync_dist=True)`` averages the numbers of images of the ranks as integers, which is wrong if they
    differ. ``MeanMetric`` of torchmetrics checks for nan, which makes every step wait for the device.
    """

    full_state_update = False
    same_if_repeated = True  # so that it may be updated in head_step
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: int) -> None:
        """Add the mean loss of ``count`` images. ``count`` may be 0, for a loss of 0."""
        # In at least 32 bits. Lightning's "bf16-true" makes the state one of 16, in which a sum soon stops growing.
        self.total = self.total + loss.to(torch.promote_types(loss.dtype, torch.float32)) * count
        self.count = self.count + count  # not in place: what a validation has reset is an inference tensor

    def compute(self) -> Tensor:
        """Return the mean loss over all images so far, on all ranks."""
        return self.total / self.count


def _reduction_of(target: Tensor) -> Literal["mean", "sum"]:
    """Return how a loss over the images of a batch is reduced. The mean over none is NaN, and the sum is 0."""
    return "mean" if len(target) > 0 else "sum"


def _class_of(target: Tensor) -> Tensor:
    """Return the class of each image, (N,): of soft labels, (N, num_classes), the one with the largest share."""
    return target.argmax(1) if target.is_floating_point() else target


def _require_classes(num_logits: int, num_classes: int) -> None:
    """Raise ValueError for another number of logits: top-5 accuracy would fail in the test, after the training."""
    if num_logits != num_classes:
        raise ValueError(
            f"the network returns {num_logits} logits per image, and num_classes={num_classes}; give the network and "
            "the classifier the same number of classes"
        )


def _accuracy(num_classes: int, top_k: int = 1) -> Metric:
    # Validating the arguments would make every step wait for the device.
    return MulticlassAccuracy(num_classes, average="micro", top_k=top_k, validate_args=False)


# --- A classifier whose training step shows where the convolutional trunk ends and the fully-connected head begins.

LOSSES = ("logistic", "cross_entropy")


class SplitClassifier(Classifier):
    """`Classifier` for a network with submodules ``trunk`` and ``head``, as `AlexNet`.

    On one device, and under data parallelism, it trains as `Classifier` does. ``head_step`` lets
    `KrizhevskyHybridStrategy` (with ``head="model.head"``) send sub-batches through the head, and update it after each
    (Krizhevsky 2014, arXiv 1404.5997, section 4): it may be called several times a step, with samples of any rank.

    The loss is the paper's (section 5): a logistic unit for each class, and the sum of their cross-entropies. It needs
    no normalization across classes, which saves messages where the classes are sharded over ranks.

    Args:
        model: with ``trunk``, (N, C, H, W) to features (N, F), and ``head``, features to logits (N, num_classes).
        num_classes: number of classes.
        optimizer: see `Classifier`, as for those that follow.
        scheduler: see `Classifier`.
        interval: see `Classifier`.
        label_smoothing: see `Classifier`; only with ``loss="cross_entropy"``.
        channels_last: see `Classifier`.
        parameter_groups: see `Classifier`.
        loss: ``"logistic"``, or ``"cross_entropy"`` for softmax; in training, validation and test.
        train_accuracy: also log ``train/acc``. Under `KrizhevskyHybridStrategy` each pass through the head then gathers
            its logits from all ranks, which the loss alone does not need.

    Raises:
        ValueError: the model lacks ``trunk`` or ``head``, its head ends with an ``nn.Linear`` of another number of
            classes, the loss is unknown, or it is logistic and to be smoothed.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None = None,
        interval: Literal["step", "epoch"] = "epoch",
        label_smoothing: float = 0.0,
        channels_last: bool = True,
        parameter_groups: Callable[[nn.Module], Iterable[dict[str, Any]]] | None = None,
        loss: Literal["logistic", "cross_entropy"] = "logistic",
        train_accuracy: bool = False,
    ) -> None:
        lacking = [name for name in ("trunk", "head") if not isinstance(getattr(model, name, None), nn.Module)]
        if lacking:
            raise ValueError(
                f"{type(model).__name__} has no submodule {' and no '.join(lacking)}; wrap its two parts in "
                "lightning_dp.models.TrunkAndHead(trunk, head), or use Classifier"
            )
        # The losses of a sharded head never see all logits, so that a wrong number would train.
        last = model.head[-1] if isinstance(model.head, nn.Sequential) and len(model.head) > 0 else model.head
        if type(last) is nn.Linear:
            _require_classes(last.out_features, num_classes)
        if loss not in LOSSES:
            raise ValueError(f"loss={loss!r} must be one of {', '.join(map(repr, LOSSES))}")
        if loss == "logistic" and label_smoothing:
            raise ValueError(
                f"label_smoothing={label_smoothing} applies to softmax, and loss='logistic' has none; "
                "use loss='cross_entropy', or label_smoothing=0"
            )
        super().__init__(
            model, num_classes, optimizer, scheduler, interval, label_smoothing, channels_last, parameter_groups
        )
        self.save_hyperparameters("loss", "train_accuracy")
        self.loss, self.train_accuracy = loss, train_accuracy

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over this rank's images (N, C, H, W) and labels (N,)."""
        x, y = batch
        loss = self.head_step(self.model.trunk(self._laid_out(x)), y)
        accuracy = {"train/acc": self.train_acc} if self.train_accuracy else {}
        self._log_training(loss, {"train/loss": self.train_loss, **accuracy})
        return loss

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over samples with features (n, F) and labels (n,), and count them in the metrics."""
        # A subclass may have a loss of its own, which is computed from the logits.
        if self.train_accuracy or type(self).compute_loss is not SplitClassifier.compute_loss:
            logits = self.model.head(features)
            _require_classes(logits.shape[1], self.num_classes)
            loss = self.compute_loss(logits, target, _reduction_of(target), self.label_smoothing)
            if self.train_accuracy and len(target) > 0:
                self.train_acc.update(logits.detach(), _class_of(target))
        elif self.loss == "cross_entropy":
            reduction = _reduction_of(target)
            loss = sharded_cross_entropy(self.model.head, features, target, self.label_smoothing, reduction=reduction)
        else:
            loss = sharded_binary_cross_entropy(self.model.head, features, target, "sum") / max(1, len(target))
        self.train_loss.update(loss.detach(), len(target))
        return loss

    def compute_loss(
        self, logits: Tensor, target: Tensor, reduction: Literal["mean", "sum"] = "mean", label_smoothing: float = 0.0
    ) -> Tensor:
        """Return the loss of logits (N, num_classes) and labels (N,): the mean, or the sum, over the N images."""
        if self.loss == "cross_entropy":
            return super().compute_loss(logits, target, reduction, label_smoothing)
        # In the logits' precision, and at least in 32 bits: the sum runs over N x num_classes numbers.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        shares = target if target.is_floating_point() else F.one_hot(target, self.num_classes)
        total = F.binary_cross_entropy_with_logits(logits, shares.to(dtype), reduction="sum")
        return total / len(target) if reduction == "mean" else total
