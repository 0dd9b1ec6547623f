"""Callback that keeps fewer activations for backward, and computes the others again."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Literal

from typing_extensions import override

from lightning_dp._lightning import Callback, LightningModule, Trainer, require_own_trainer
from lightning_dp._private.lightning_names import is_compiled_by_lightning
from lightning_dp.layers import NoEffectWarning
from lightning_dp.recompute import (
    Policy,
    Profiler,
    RecomputeHandle,
    RecomputePlan,
    apply_recompute,
    check_budget,
    check_policy,
    make_plan,
)
from lightning_dp.recompute.policies import Sublinear

log = logging.getLogger(__name__)


class Memonger(Callback):
    """Keep fewer activations for backward, and compute the others again when backward needs them.

    Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018), section 4.2, and Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). Gradients, parameters, buffers and random
    numbers are bitwise those of training without the callback: `lightning_dp.recompute` runs single operators again,
    and no Python code of the model. So batch norm moves its running statistics once a step, global batch norm gathers
    once, and no strategy sees another read of the parameters. Any precision and accumulation may be used, and any
    strategy but layered FSDP and others that free parameters after the forward (FSDP2 with ``reshard_after_forward``),
    and the hybrid with ``variable_batch``, which updates weights before backward has used them.

    The callback records ``training_step`` for the time of ``fit``.

    Args:
        policy: see `lightning_dp.recompute.apply_recompute`. ``"budget"``: the first two steps run with
            ``"sublinear"``, and the second is measured, operator by operator. From the third on, the least time within
            ``budget_bytes`` is planned from that. A step in which more or other parameters are trained than before is
            measured and planned in the same way. Or a plan that `lightning_dp.recompute.plan_recompute` made for the
            module's ``training_step``.
        budget_bytes: for ``policy="budget"``: activations on a device at any time of backward, beside parameters,
            inputs and gradients.

    Attributes:
        plan: with ``policy="budget"``, the plan in use. It can be saved and drawn. None before the third step.

    Raises:
        ValueError: ``policy`` is unknown, or ``budget_bytes`` and ``policy`` contradict each other. In ``fit``: the
            module, or a part of it, is compiled or scripted; the strategy is layered FSDP, or the hybrid with
            ``variable_batch``; no plan holds as little as ``budget_bytes``.
    """

    def __init__(
        self, policy: Literal["cheap", "sublinear", "budget"] | Policy = "cheap", budget_bytes: int | None = None
    ) -> None:
        if isinstance(policy, str) and policy == "budget":
            if budget_bytes is None:
                raise ValueError("policy='budget' with budget_bytes=None must be given a number of bytes")
            budget_bytes = check_budget(budget_bytes)
        elif budget_bytes is not None:
            raise ValueError(f"budget_bytes={budget_bytes} has no effect on policy={policy!r}; use policy='budget'")
        else:
            check_policy(policy, "budget")
        self.policy = policy
        self.budget_bytes = budget_bytes
        self._handle: RecomputeHandle | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget what an earlier fit has measured: another model, or another batch."""
        self.plan: RecomputePlan | None = None
        self._profiler: Profiler | None = None
        self._num_batches = 0  # from the first that was not left out
        self._num_trained = -1  # parameters in the step that was measured
        self._trained: set[str] = set()  # in any step that was measured

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
        if getattr(trainer.strategy, "frees_gathered_parameters", False):
            raise ValueError(
                f"{type(trainer.strategy).__name__} frees the parameters of each part after its forward, and what is "
                "computed again in backward would need those of other parts; use LayeredSGDStrategy, or "
                "torch.utils.checkpoint in the parts"
            )
        if getattr(trainer.strategy, "updates_within_training_step", False):
            raise ValueError(
                f"{type(trainer.strategy).__name__} with variable_batch=True updates the head within the training "
                "step, and what is computed again in backward would be computed from the updated weights; use "
                "variable_batch=False, or remove Memonger"
            )
        self._reset()
        policy = "sublinear" if self.policy == "budget" else self.policy
        self._handle = apply_recompute(pl_module, policy, method="training_step")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._handle is None or self.budget_bytes is None or self._num_batches == 0:  # which sets libraries up
            return
        trained = {name for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
        if len(trained) > self._num_trained or not trained <= self._trained:
            # The second batch; or a part was unfrozen, of which the plan does not know what backward needs.
            self._num_trained = len(trained)
            self._trained |= trained
            self._handle.policy = Sublinear()
            self._profiler = self._handle.start_profiling()
        elif self._profiler is not None and self._profiler.operations:  # none: that step was left out
            self.plan = make_plan(self._profiler.operations, self._profiler.forward_s, self.budget_bytes)
            self._profiler = None
            self._handle.adopt(self.plan)
            if trainer.is_global_zero:
                added = self.plan.recompute_s / max(self.plan.forward_s, 1e-9)
                log.info(
                    f"{type(self).__name__}: planned {self.plan.peak_bytes / 1e6:.1f} MB of activations in place of "
                    f"{self.plan.plain_bytes / 1e6:.1f} MB, for {added:.0%} of the time of forward"
                )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._handle is None or not self._handle.was_asked:  # a step that is left out tells nothing of the others
            return
        self._num_batches += 1
        if self._num_batches > 1:
            return
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
