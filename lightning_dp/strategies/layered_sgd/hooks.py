"""Lightning's hooks of a strategy that postpones updates: the same on DDP's buckets and on FSDP2's shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.collectives.groups import OnStage, RankTopology, free_earlier_groups
from lightning_dp.strategies.layered_sgd.gradient_sum import WAIT
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions
from lightning_dp.strategies.layered_sgd.postponement import Postponement, why_step_is_not_postponed
from lightning_dp.strategies.layered_sgd.update import UpdateQueue

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ParallelStrategy as _Base
else:
    _Base = object

log = logging.getLogger(__name__)


class Reduction(Protocol):
    """Sums gradients in the background, and keeps the updates that wait for them.

    It is a `LayeredReduction` of DDP's buckets, or a `ShardReduction` of FSDP2's shards.
    """

    compressed: CompressedAllReduce | None
    updates: UpdateQueue

    def before_forward(self) -> None:
        """Prepare for a forward with a backward after it."""

    def release(self) -> None:
        """Release the buckets that were held back until the end of backward. All ranks call it."""

    def close(self) -> None:
        """Give up what is pending, and stop the communicator."""


class PostponedUpdates(_Base):
    """A mixin for a strategy of Lightning. Each hook does what the strategy's own does, when everything is up to date.

    - ``training_step``: applies an update that cannot be split by bucket before the forward.
    - ``pre_backward``, ``post_backward``: backward refills the buckets, so their sums must have been used before it.
      With ``overlap="load"`` the inter-group stage starts after it.
    - ``optimizer_step``: stages the update instead of applying it.
    - ``on_train_end``, ``on_validation_start``, ``lightning_module_state_dict``, ``optimizer_state``, ``on_exception``:
      apply what is pending, so that nothing is lost and evaluation runs without a watch over the parameters.
    - ``__getstate__``: leaves threads and locks out of copies.
    """

    _options: CommunicatorOptions
    _group_size: int | None
    # Of Lightning's strategies for several processes. The module is there whenever a hook runs.
    lightning_module: Any
    num_nodes: Any
    num_processes: Any
    process_group_backend: Any
    # None outside of fit, and with a single group.
    _reduction: Reduction | None = None
    _postponement: Postponement | None = None
    _waited_s = 0.0
    on_stage: OnStage | None = None
    """Told of each stage of the reduction: its name, start and end (s, `time.perf_counter`). For plots."""

    @property
    def topology(self) -> RankTopology:
        """The groups of ranks."""
        return self.topology_of(self.num_nodes, self.num_processes)

    def topology_of(self, num_nodes: int, num_processes: int) -> RankTopology:
        """Return the groups that ``num_processes`` ranks on each of ``num_nodes`` nodes would form.

        Raises:
            ValueError: the groups would not be equal.
        """
        return RankTopology(num_nodes * num_processes, num_processes if self._group_size is None else self._group_size)

    def _check_job(self) -> None:
        """Check the groups and options, and prepare NCCL: the number of ranks is known, and no process has started."""
        devices = self.parallel_devices or []
        self._options.check_job(devices, self.precision_plugin)
        if self.topology.num_groups > 1:  # raises where the groups would not be equal
            self._options.prepare_environment(devices, self.process_group_backend, type(self).__name__)

    def _warn_of_single_group(self) -> None:
        """Warn that nothing crosses groups, because there is a single one."""
        if self._options.compression is not None:
            log.warning(
                f"{type(self).__name__}(compression={self._options.compression!r}) has no effect: there is a single "
                "group of ranks, whose sums are exact; set group_size to have several groups"
            )

    def _postpone(self, reduction: Reduction, trainer: Any, of_shards: bool = False) -> None:
        """Begin to postpone the updates of a fit. ``of_shards`` is `Postponement`'s."""
        for optimizer in self.optimizers:
            if why_step_is_not_postponed(optimizer, self.precision_plugin) is None:
                reduction.updates.guard(optimizer)  # now, so that a callback may keep ``optimizer.state``
        before_forward = self._options.overlap == "load"
        self._postponement = Postponement(reduction.updates, trainer, before_forward, type(self).__name__, of_shards)

    @property
    def exposed_communication_s(self) -> float | None:
        """Total time that this rank has waited for gradients (s); None with a single group, where nothing is hidden."""
        return None if self._reduction is None else self._waited_s

    @property
    def compressed_bytes_sent(self) -> int | None:
        """Bytes that this rank has sent to other groups in this fit; None without compression, where none counts."""
        return None if self._compressed is None else self._compressed.bytes_sent

    @property
    def _compressed(self) -> CompressedAllReduce | None:
        return None if self._reduction is None else self._reduction.compressed

    def _report_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if stage == WAIT:
            self._waited_s += end_s - start_s
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A copy, which one of the progress bar makes too, is outside of the fit: threads and locks cannot be copied.
        return {**super().__getstate__(), "_reduction": None, "_postponement": None}

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._reduction is None or self._postponement is None:
            return super().training_step(*args, **kwargs)
        self._reduction.before_forward()
        with self._reduction.updates.running_forward(finish=self._postponement.ends_before_forward()):
            return super().training_step(*args, **kwargs)

    @override
    @torch.compiler.disable  # a compiled training_step may call this method and the next two
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._reduction is not None:
            self._reduction.updates.begin_backward(closure_loss)
        super().pre_backward(closure_loss)

    @override
    @torch.compiler.disable
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._reduction is not None and self._postponement is not None:
            self._reduction.updates.end_backward()
            self._reduction.release()
            if self._postponement.uses_gradients_unseen:
                self._reduction.updates.wait_for_gradients()

    @override
    @torch.compiler.disable
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        reduction, postponement = self._reduction, self._postponement
        if reduction is None or postponement is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        updates = reduction.updates
        if not postponement.is_allowed(optimizer):
            updates.finish()
            updates.unguard(optimizer)
            return super().optimizer_step(optimizer, updates.with_own_gradients(closure), model, **kwargs)
        output = closure()
        step_at_once = super().optimizer_step

        def step(optimizer: Optimizer) -> None:
            # The precision plugin unscales, clips and steps, in Lightning's own order. The closure returns the loss:
            # None would mean that there was no backward.
            step_at_once(optimizer, lambda: output, model, **kwargs)

        by_bucket = postponement.goes_by_bucket and not kwargs
        if by_bucket and not self.lightning_module.trainer.gradient_clip_val:
            updates.stage(optimizer)
        else:
            updates.stage(optimizer, postponement.with_present_clipping(step), by_bucket)
        return output

    def finish_update(self) -> None:
        """Apply what is left of the postponed update. Afterwards the parameters are those of synchronous SGD."""
        if self._reduction is not None:
            self._reduction.updates.finish()

    def _bring_up_to_date(self) -> None:
        if self._reduction is not None:
            self._reduction.updates.bring_up_to_date()

    @override
    def on_train_end(self) -> None:
        self._bring_up_to_date()  # also gradients that manual optimization leaves
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        self._bring_up_to_date()
        super().on_validation_start()

    def _finish_before_saving(self) -> None:
        if self._reduction is not None and self._reduction.updates.is_interrupted:
            log.warning(
                f"{type(self).__name__}: a signal handler that saves weights has interrupted the optimizer's step, so "
                "parameters may be saved without their last update, or with half of it (as with DDPStrategy); let the "
                "handler set a flag, and save in on_train_batch_end"
            )
        self.finish_update()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._finish_before_saving()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.finish_update()
        return super().optimizer_state(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        try:
            self.finish_update()
        except Exception as error:  # do not hide the original exception, which may name no rank, as this one does
            exception.add_note(f"{type(self).__name__}: the update of the last step is lost: {error}")

    @override
    def teardown(self) -> None:
        if self._postponement is not None:
            self._postponement.close()
            self._postponement = None
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None
            free_earlier_groups()
        super().teardown()
