"""A classifier whose training step shows where the convolutional trunk ends and the fully-connected head begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp.models.classifier import Batch, Classifier

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
        ValueError: the model lacks ``trunk`` or ``head``, the loss is unknown, or it is logistic and to be smoothed.
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
        self.num_classes, self.loss, self.train_accuracy = num_classes, loss, train_accuracy

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over this rank's images (N, C, H, W) and labels (N,)."""
        x, y = batch
        loss = self.head_step(self.model.trunk(self._laid_out(x)), y)
        accuracy = {"train/acc": self.train_acc} if self.train_accuracy else {}
        self._log_training(loss, {"train/loss": self.train_loss, **accuracy})
        return loss

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over samples with features (n, F) and labels (n,), and count them in the metrics."""
        logits = self.model.head(features)
        loss = self.compute_loss(logits, target, label_smoothing=self.label_smoothing)
        self.train_loss.update(loss.detach() * len(target), len(target))
        if self.train_accuracy:
            self.train_acc.update(logits.detach(), target)
        return loss

    def compute_loss(
        self, logits: Tensor, target: Tensor, reduction: Literal["mean", "sum"] = "mean", label_smoothing: float = 0.0
    ) -> Tensor:
        """Return the loss of logits (N, num_classes) and labels (N,): the mean, or the sum, over the N images."""
        if self.loss == "cross_entropy":
            return super().compute_loss(logits, target, reduction, label_smoothing)
        # In the logits' precision, and at least in 32 bits: the sum runs over N x num_classes numbers.
        dtype = torch.promote_types(logits.dtype, torch.float32)
        is_target = F.one_hot(target, self.num_classes).to(dtype)
        total = F.binary_cross_entropy_with_logits(logits, is_target, reduction="sum")
        return total / len(target) if reduction == "mean" else total
