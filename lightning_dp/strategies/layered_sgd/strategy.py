"""Layered SGD (Yu et al., arXiv 1906.05936): hierarchical all-reduce, overlapped with other work. Lightning's hooks."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dp._private.lightning_names import ddp_options, strategy_timeout
from lightning_dp.collectives.compression.options import Compression, has_error_feedback
from lightning_dp.collectives.compression.stages import CompressedAllReduce, OwnState, State, load_state, others_of
from lightning_dp.strategies.base import BaseStrategy
from lightning_dp.strategies.layered_sgd.hooks import PostponedUpdates
from lightning_dp.strategies.layered_sgd.options import (
    CommunicatorOptions,
    check_ddp_options,
    check_layers,
    check_optimizers,
)
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from lightning_dp.strategies.unfreezing import ReducedParameters

log = logging.getLogger(__name__)

# Small enough that the first layers' gradients need not wait long for their bucket's turn, large enough for the link.
BUCKET_CAP_MB = 2.0


class LayeredSGDStrategy(PostponedUpdates, BaseStrategy):
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
    - ``_setup_model``: makes DDP on the CUDA stream that trains.
    - ``training_step``: adds unfrozen parameters to the reduction; see `BaseStrategy`.
    - What postpones updates, and brings them up to date: `PostponedUpdates`.
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
        self._reduction: LayeredReduction | None = None
        self._compression_checkpoint = CompressionCheckpoint(compression, type(self).__name__, strategy_timeout(self))

    @override
    def _configure_launcher(self) -> None:
        self._check_job()
        super()._configure_launcher()

    @override
    def setup(self, trainer: Any) -> None:
        several_groups = self.topology.num_groups > 1
        if several_groups:
            ddp_options(self).setdefault("bucket_cap_mb", BUCKET_CAP_MB)
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel):
            module = self.lightning_module
            self._reduced = ReducedParameters(module)
            check_optimizers(self.optimizers if self.world_size > 1 else (), type(self).__name__)
            if several_groups:
                self._start(trainer, self.model, module)
            else:
                self._warn_of_single_group()
                self._compression_checkpoint.restore(None)

    @override
    def _setup_model(self, model: Any) -> DistributedDataParallel:
        # On the current stream, and not on a new one as in Lightning, which prepares for CUDA graphs. DDP accumulates
        # gradients on the stream on which it is made. Where a gradient has left its bucket, because somebody has read
        # or set it, DDP copies it back on that stream and frees it. Another stream, on which the gradient was
        # allocated, would then get its memory before it is copied.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **ddp_options(self))

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
        self._postpone(self._reduction, trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._reduce_unfrozen()
        return super().training_step(*args, **kwargs)

    @override
    def _wrap_again(self, reduced: ReducedParameters, names: list[str], keep_hooks: bool = True) -> None:
        if self._reduction is None:
            super()._wrap_again(reduced, names)
            return
        check_layers(self.lightning_module, type(self).__name__)
        self._reduction.updates.bring_up_to_date()
        super()._wrap_again(reduced, names, keep_hooks=False)
        assert isinstance(self.model, DistributedDataParallel)
        self._reduction.feed_from(self.model)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._compression_checkpoint.keep(self._compressed)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._bring_up_to_date()
        if self._options.compression is not None:
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
    def teardown(self) -> None:
        self._compression_checkpoint.forget()
        super().teardown()


KEY = "layered_sgd_compression"


class CompressionCheckpoint:
    """Residuals and factors of a compressor: gathered for a checkpoint, and kept from loading until they can be used.

    Args:
        compression: what the user has asked for.
        strategy_name: for messages.
        timeout: of each message that gathers residuals.
    """

    def __init__(self, compression: Compression | None, strategy_name: str, timeout: timedelta) -> None:
        self._compression = compression
        self._strategy_name = strategy_name
        self._timeout = timeout
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
        state: State = {}
        if compressed is not None and interrupted:
            state = {"residuals": {}, "others": others_of(compressed)}
            if has_error_feedback(self._compression):
                log.warning(
                    f"{self._strategy_name}(compression={self._compression!r}): the checkpoint that is written after "
                    "an exception holds no residuals, because other ranks may be gone. If training continues from it, "
                    "what the last compressed step left out of its gradient is dropped"
                )
        elif (own := self._last if compressed is None else OwnState(compressed)) is not None:
            state = own.gather(self._timeout)
        if any(state.values()):
            checkpoint[KEY] = state

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state that ``checkpoint`` holds, until `restore`."""
        self._loaded = checkpoint.pop(KEY, None)

    def restore(self, compressed: CompressedAllReduce | None) -> None:
        """Continue with the loaded state; with none if none was loaded."""
        state = self._loaded or {"residuals": {}, "others": {}}
        self._loaded = None
        self._last = None
        dropped = list(state["residuals"]) if compressed is None else load_state(compressed, state)
        if dropped:
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}): the checkpoint was written with error "
                "feedback; what the last compressed step left out of its gradient is dropped for "
                f"{len(dropped)} parameters, {dropped[0]} first"
            )

    def forget(self) -> None:
        """Drop a loaded state that no fit has used."""
        self._loaded = None
