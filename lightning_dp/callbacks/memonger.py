"""Callback that keeps fewer activations for backward, and computes the others again."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Literal

from typing_extensions import override

from lightning_dp._lightning import Callback, LightningModule, Trainer, require_own_trainer
from lightning_dp._private.lightning_names import is_compiled_by_lightning
from lightning_dp.layers import NoEffectWarning
from lightning_dp.recompute import RecomputeHandle, apply_recompute, check_policy

log = logging.getLogger(__name__)


class Memonger(Callback):
    """Keep fewer activations for backward, and compute the others again when backward needs them.

    Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018), section 4.2, and Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). Gradients, parameters, buffers and random
    numbers are bitwise those of training without the callback: `lightning_dp.recompute` runs single operators again,
    and no Python code of the model. So batch norm moves its running statistics once a step, global batch norm gathers
    once, and no strategy sees another read of the parameters. Any strategy, precision and accumulation may be used.

    The callback records ``training_step`` for the time of ``fit``.

    Args:
        policy: see `lightning_dp.recompute.apply_recompute`.
        budget_bytes: for ``policy="budget"``: how many bytes may be kept at any time.

    Raises:
        ValueError: ``policy`` is unknown, or ``budget_bytes`` and ``policy`` contradict each other. In ``fit``: the
            module, or a part of it, is compiled or scripted.
    """

    def __init__(self, policy: Literal["cheap", "sublinear"] = "cheap", budget_bytes: int | None = None) -> None:
        check_policy(policy)
        self.policy = policy
        self.budget_bytes = budget_bytes
        self._handle: RecomputeHandle | None = None
        self._checked_effect = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_own_trainer(self, trainer)
        if stage != "fit":
            return
        if is_compiled_by_lightning(pl_module):
            raise ValueError(
                f"{type(pl_module).__name__} was passed through torch.compile, which decides itself what it "
                "recomputes: use either torch.compile or Memonger. docs/methods/memonger.md says which"
            )
        self._checked_effect = False
        self._handle = apply_recompute(pl_module, self.policy, method="training_step")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._handle is None or self._checked_effect:
            return
        self._checked_effect = True
        dropped_bytes = self._handle.dropped_bytes
        if trainer.is_global_zero:
            log.info(f"{type(self).__name__}: policy {self.policy!r} drops {dropped_bytes / 1e6:.1f} MB of a step")
        if dropped_bytes == 0:
            warnings.warn(
                f"{type(self).__name__}(policy={self.policy!r}) found nothing to recompute in the training_step of "
                f"{type(pl_module).__name__}: remove it, or use policy='sublinear'",
                NoEffectWarning,
                stacklevel=2,
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()  # Lightning does not call `teardown` after an exception

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._remove()

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
