"""Layered SGD (Yu et al., arXiv 1906.05936): hierarchical all-reduce, overlapped with other work. Lightning's hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._private.lightning_names import ddp_options, strategy_timeout, wrap_in_ddp
from lightning_dp.collectives.compression.options import Compression, has_error_feedback
from lightning_dp.collectives.compression.stages import CompressedAllReduce, OwnState, State, gather_state, load_state
from lightning_dp.collectives.groups import OnStage, RankTopology
from lightning_dp.strategies.base import BaseStrategy
from lightning_dp.strategies.layered_sgd.gradient_sum import WAIT, naming_backend_errors
from lightning_dp.strategies.layered_sgd.options import (
    CommunicatorOptions,
    check_ddp_options,
    check_layers,
    check_optimizers,
)
from lightning_dp.strategies.layered_sgd.postponement import Postponement, why_step_is_not_postponed
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from lightning_dp.strategies.unfreezing import ReducedParameters

log = logging.getLogger(__name__)

# Small enough that the first layers' gradients need not wait long for their bucket's turn, large enough for the link.
BUCKET_CAP_MB = 2.0


class LayeredSGDStrategy(BaseStrategy):
    """Synchronous SGD with a hierarchical all-reduce whose inter-group stage is hidden behind other work.

    The parameters are those of `DDPStrategy`, up to rounding in another order of summation. Updates are postponed; a
    use of a parameter, a gradient or the optimizer's state in Python code first applies its pending update. See arXiv
    1906.05936, Algorithm 3; ``docs/methods/layered_sgd.md`` says when it pays, and which uses are not seen.

    Args:
        group_size: number of ranks in a group. Groups are consecutive ranks; must divide the world size. None: the
            ranks of one node. With a single group there is nothing to hide, and this is DDPStrategy.
        communicator: which ranks run the inter-group all-reduce of sums in host memory. ``"leader"``: one rank of each
            group, as published. ``"sharded"``: every rank, for its shard of the bucket, so that every NIC works.
        overlap: ``"load"``: the inter-group all-reduce starts after backward and is hidden behind the loading of the
            next batch, as published. ``"step"``: it starts as backward fills the buckets, the bucket of the layers
            nearest the input first, and each layer is updated just before its next use: backward and the next forward
            hide it, too.
        all_reduce: the algorithm between groups: ``"native"``, the backend's, or ``"ring"``, this package's.
        communicator_device: where gradients are summed. ``"gpu"``: where they are, by the job's backend: reduce-scatter
            in the group, all-reduce of each rank's shard between groups, all-gather. ``"cpu"``: in host memory, over
            gloo, as published; what a GPU's rank sums between groups is copied to pinned memory, after NCCL, if it is
            used, has reduced within groups. ``"auto"``: ``"gpu"`` on NCCL, without ``compression`` and ring; else
            ``"cpu"``.
        compression: of the stage between groups: None, exact; ``"bf16"`` or ``"fp16"``, rounded to 16 bits; ``"int8"``
            or `PowerSGD`, with error feedback, which is in checkpoints. All but None give up synchronous SGD's result.
        **ddp_kwargs: options of DDPStrategy and DistributedDataParallel. With several groups, ``bucket_cap_mb``
            defaults to 2.

    Raises:
        ValueError: a value is not one of those above, two do not go together (``compression`` with sums on GPUs or a
            ring, `PowerSGD` with ``"sharded"``), the world size is not a multiple of ``group_size``,
            ``communicator_device="gpu"`` without GPUs, or an option of DDP takes the place of the communication hook
            (``ddp_comm_hook``, ``gradient_as_bucket_view=False``, ...).

    Overrides of DDPStrategy, and why:

    - ``_configure_launcher``: knows the number of ranks before any process starts: it checks the groups, prepares NCCL.
    - ``setup``, ``teardown``: make and close the communicator, and the communication hook that feeds it.
    - ``training_step``: applies an update that cannot be split by bucket before the forward; adds unfrozen parameters
      to the reduction.
    - ``pre_backward``, ``post_backward``: backward refills the buckets, so their sums must have been used before it.
      With ``overlap="load"`` the inter-group stage starts after it.
    - ``optimizer_step``: stages the update instead of applying it.
    - ``on_train_end``, ``on_validation_start``, ``lightning_module_state_dict``, ``optimizer_state``, ``on_exception``:
      apply what is pending, so that nothing is lost and evaluation runs without a watch over the parameters.
    - ``save_checkpoint``, ``load_checkpoint``: with what compression has left out.
    """

    def __init__(
        self,
        group_size: int | None = None,
        communicator: Literal["leader", "sharded"] = "leader",
        overlap: Literal["load", "step"] = "step",
        all_reduce: Literal["native", "ring"] = "native",
        communicator_device: Literal["auto", "cpu", "gpu"] = "auto",
        compression: Compression | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        self._options = CommunicatorOptions(communicator, overlap, all_reduce, communicator_device, compression)
        check_ddp_options(ddp_kwargs)
        super().__init__(gradient_as_bucket_view=True, **ddp_kwargs)
        self._group_size = group_size
        self._reduced: ReducedParameters | None = None  # only while fitting
        # None outside of fit, and with a single group.
        self._reduction: LayeredReduction | None = None
        self._postponement: Postponement | None = None
        self._compression_checkpoint = CompressionCheckpoint(compression, type(self).__name__)
        self._waited_s = 0.0
        self.on_stage: OnStage | None = None
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

    @property
    def exposed_communication_s(self) -> float | None:
        """Total time that this rank has waited for gradients (s); None with a single group, where DDP reduces them."""
        return None if self._reduction is None else self._waited_s

    @property
    def compressed_bytes_sent(self) -> int | None:
        """Bytes that this rank has sent to other groups in this fit; None without compression, where none counts."""
        return None if self._compressed is None else self._compressed.bytes_sent

    @property
    def _compressed(self) -> CompressedAllReduce | None:
        return None if self._reduction is None else self._reduction.compressed

    @override
    def _configure_launcher(self) -> None:
        devices = self.parallel_devices or []
        self._options.check_job(devices, self.precision_plugin)
        if self.topology.num_groups > 1:  # raises where the groups would not be equal
            self._options.prepare_environment(devices, self.process_group_backend)
        super()._configure_launcher()

    @override
    def setup(self, trainer: Any) -> None:
        several_groups = self.topology.num_groups > 1
        if several_groups:
            ddp_options(self).setdefault("bucket_cap_mb", BUCKET_CAP_MB)
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel):
            module = self.lightning_module
            assert module is not None
            self._reduced = ReducedParameters(module)
            check_optimizers(self.optimizers if self.world_size > 1 else (), type(self).__name__)
            if several_groups:
                self._start(trainer, self.model, module)
            else:
                self._compression_checkpoint.warn_of_no_effect()

    def _start(self, trainer: Any, model: DistributedDataParallel, module: Any) -> None:
        name = type(self).__name__
        check_layers(module, name)
        communicator = self._options.make_communicator(
            self.topology, self.global_rank, self.root_device, self.process_group_backend, strategy_timeout(self),
            self._report_stage, module, bool(ddp_options(self).get("find_unused_parameters")), name,
        )  # fmt: skip
        self._compression_checkpoint.restore(communicator.compressed)
        self._reduction = LayeredReduction(communicator, self.world_size, module)
        self._reduction.feed_from(model)
        for optimizer in self.optimizers:
            if why_step_is_not_postponed(optimizer, self.precision_plugin) is None:
                self._reduction.updates.guard(optimizer)  # now, so that a callback may keep ``optimizer.state``
        self._postponement = Postponement(
            self._reduction.updates, trainer, module, self._options.overlap == "load", name
        )

    def _report_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if stage == WAIT:
            self._waited_s += end_s - start_s
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._reduced is not None and (unfrozen := self._reduced.unfrozen()):
            self._reduce_unfrozen(self._reduced, unfrozen)
        if self._reduction is None or self._postponement is None:
            return super().training_step(*args, **kwargs)
        self._reduction.before_forward()
        with self._postponement.training_step():
            return super().training_step(*args, **kwargs)

    def _reduce_unfrozen(self, reduced: ReducedParameters, names: list[str]) -> None:
        """Wrap the module in a new DDP that reduces the gradients of the parameters that have become trainable."""
        module, model = self.lightning_module, self.model
        assert module is not None
        assert isinstance(model, DistributedDataParallel)
        log.info(f"{type(self).__name__}: {len(names)} parameters have become trainable, {names[0]} first")
        if self._reduction is not None:
            check_layers(module, type(self).__name__)
            self._reduction.updates.bring_up_to_date()
        with naming_backend_errors(
            lambda: f"taking {names[0]}, which has become trainable, into the reduction, with all ranks,"
        ):
            self.model = reduced.wrap_again(
                model, lambda: wrap_in_ddp(self, module), keep_hooks=self._reduction is None
            )
        if self._reduction is not None:
            self._reduction.feed_from(self.model)

    @override
    @torch.compiler.disable  # a compiled training_step may call this method and the next two
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._reduced is not None:
            self._reduced.require_none_unfrozen()
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

        def whole_step(optimizer: Optimizer) -> None:
            # The precision plugin unscales, clips and steps, in Lightning's own order. The closure returns the loss:
            # None would mean that there was no backward.
            BaseStrategy.optimizer_step(self, optimizer, lambda: output, model, **kwargs)

        by_bucket = postponement.goes_by_bucket and not kwargs
        updates.stage(optimizer, None if by_bucket else postponement.with_present_clipping(whole_step))
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
        self._compression_checkpoint.keep(self._compressed)
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        self._bring_up_to_date()
        super().on_validation_start()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._reduction is not None and self._reduction.updates.is_interrupted:
            log.warning(
                f"{type(self).__name__}: a signal handler that saves weights has interrupted the optimizer's step, so "
                "parameters may be saved without their last update, or with half of it (as with DDPStrategy); let the "
                "handler set a flag, and save in on_train_batch_end"
            )
        self.finish_update()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.finish_update()
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._bring_up_to_date()
        assert self.lightning_module is not None
        self._compression_checkpoint.add_to(checkpoint, self._compressed, self.lightning_module.trainer.interrupted)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._compression_checkpoint.take_from(checkpoint)
        if self._compressed is not None and "optimizer_states" in checkpoint:
            self._bring_up_to_date()
            self._compression_checkpoint.restore(self._compressed)  # in the middle of a fit, as lr_find does
        return checkpoint

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        try:
            self.finish_update()
        except Exception as error:  # do not hide the original exception
            log.warning(f"{type(self).__name__}: the update of the last step is lost: {error}")

    @override
    def teardown(self) -> None:
        self._reduced = None
        self._compression_checkpoint.forget()
        if self._postponement is not None:
            self._postponement.close()
            self._postponement = None
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None
        super().teardown()


KEY = "layered_sgd_compression"


class CompressionCheckpoint:
    """Residuals and factors of a compressor: gathered for a checkpoint, and kept from loading until they can be used.

    Args:
        compression: what the user has asked for.
        strategy_name: for messages.
    """

    def __init__(self, compression: Compression | None, strategy_name: str) -> None:
        self._compression = compression
        self._strategy_name = strategy_name
        self._loaded: State | None = None
        self._last: OwnState | None = None  # of the fit that has ended, for a checkpoint that is written after it

    def keep(self, compressed: CompressedAllReduce | None) -> None:
        """Keep this rank's part at the end of a fit. Nothing is sent: other ranks may still be in a step."""
        self._last = None if compressed is None else OwnState(compressed)

    def add_to(self, checkpoint: dict[str, Any], compressed: CompressedAllReduce | None, interrupted: bool) -> None:
        """Add the state to ``checkpoint``, unless it holds weights only. Every rank must call it.

        Args:
            checkpoint: changed in place.
            compressed: what sums at present, if ``fit`` is running.
            interrupted: an exception has ended ``fit``. Other ranks may be gone or still in a step, and a gather would
                wait for them; so residuals are left out, and no other rank need call this.
        """
        if "optimizer_states" not in checkpoint:
            return
        state: State | None = None
        if compressed is not None:
            state = gather_state(compressed, residuals=not interrupted)
        elif self._last is not None:
            state = self._last.gather()
        if state is not None and any(state.values()):
            checkpoint[KEY] = state
        if interrupted and compressed is not None and has_error_feedback(self._compression):
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}): the checkpoint that is written after an "
                "exception holds no residuals, because other ranks may be gone. If training continues from it, what "
                "the last compressed step left out of its gradient is dropped"
            )

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state that ``checkpoint`` holds, until `restore`."""
        self._loaded = checkpoint.pop(KEY, None)

    def restore(self, compressed: CompressedAllReduce | None) -> None:
        """Continue with the loaded state; with none if none was loaded."""
        state = self._loaded
        self._loaded = None
        self._last = None
        if state is None:
            if compressed is not None:
                compressed.clear()
            return
        if compressed is not None:
            load_state(compressed, state)
        if state["residuals"] and not has_error_feedback(self._compression):
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}): the checkpoint was written with error "
                "feedback; what the last compressed step left out of its gradient is dropped"
            )

    def warn_of_no_effect(self) -> None:
        """Warn that nothing crosses groups, because there is a single one."""
        if self._compression is not None:
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}) has no effect: there is a single group of "
                "ranks, whose sums are exact; set group_size to have several groups"
            )
        if self._loaded is not None:
            self.restore(None)

    def forget(self) -> None:
        """Drop a loaded state that no fit has used."""
        self._loaded = None
