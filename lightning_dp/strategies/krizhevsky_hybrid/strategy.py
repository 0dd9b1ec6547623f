"""Krizhevsky's "one weird trick" (arXiv 1404.5997): data parallelism in the trunk, model parallelism in the head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._private.torch_names import (
    ddp_ignored_names,
    ignore_buffers,
    ignore_in_ddp,
    stop_ignoring_in_ddp,
)
from lightning_dp.collectives.groups import OnStage, free_earlier_groups
from lightning_dp.strategies import complete_files
from lightning_dp.strategies.base import BaseStrategy
from lightning_dp.strategies.krizhevsky_hybrid import checkpoint as files
from lightning_dp.strategies.krizhevsky_hybrid import checks
from lightning_dp.strategies.krizhevsky_hybrid.fit import HybridFitState
from lightning_dp.strategies.unfreezing import ReducedParameters, restore_groups


class KrizhevskyHybridStrategy(BaseStrategy):
    """Data parallelism in the convolutional trunk, model parallelism in the fully-connected head.

    Each rank holds a shard of every linear layer in the head and computes it for the samples of all ranks. The
    gradients of the head, which has most of the parameters of a network like AlexNet, are never sent. The result is
    that of synchronous SGD on the batches of all ranks, unless ``variable_batch`` is on. See arXiv 1404.5997.
    ``docs/methods/krizhevsky_hybrid.md`` says when the method pays and what it does not work with.

    During ``fit`` the head's parameters hold this rank's local shard. The strategy gathers the whole head at
    points that all ranks reach: before training, at the start of a validation, and at the end of training. Until the
    next training step, every rank can then call the head alone, and ``state_dict()`` returns whole tensors.

    Args:
        head: dotted name of the submodule to shard: an nn.Linear, or an nn.Sequential of nn.Linear and elementwise
            layers.
        scheme: how features reach the head (section 4). ``"a"``: all at once. ``"b"``: the ranks take turns. ``"c"``:
            each rank sends 1/K of its samples for each of K passes. In b and c the features of the next pass travel
            while the head computes the current one, and with ``head_step`` the head's activations need 1/K of the
            memory. But the head's batches are smaller: scheme a was the fastest in every setting measured. None:
            ``"a"``, or ``"c"`` with ``num_passes`` or ``variable_batch``, which needs several passes.
        num_passes: of schemes b and c. Fewer passes have larger batches in the head, whose products are then faster,
            and need more memory for activations. b has at most K. None: K.
        variable_batch: update the head after each of its K passes (section 4.2): its batch is that of one pass, the
            trunk's that of all K. The module must have a method ``head_step(features, target) -> loss``.
        evaluation: ``"gathered"``: as described above. ``"sharded"``, for heads that are too large for one device: the
            head is never gathered. A call in ``validation_step`` is a collective, so all ranks need the same number
            of batches. The head cannot be called outside of training and validation steps.
        state_dict_type: ``"full"``: a checkpoint is a file with whole tensors, which rank 0 gathers in host memory, and
            the module is whole after ``fit``. ``"sharded"``, for heads that are too large for one host: a checkpoint is
            a folder with a file of each rank's local shard, which it keeps after ``fit``.
        **ddp_kwargs: options of DDPStrategy and DistributedDataParallel, for the trunk.

    Raises:
        ValueError: an argument has another value than those above, or ``model_averaging_period`` is given. In `fit`:
            the head cannot be sharded, or the module or the Trainer has something that does not work with a sharded
            head. The message names it.

    Overrides of DDPStrategy, and why:

    - ``setup``, ``teardown``: shard the head for a run of ``fit``, and leave the module whole, also if set-up fails.
    - ``model_to_device``, ``tensor_init_context``: the head is sharded before it moves to a device.
    - ``configure_ddp``: DDP refuses a module whose trunk is frozen. Where it looks for unused parameters, it must see
      that a backward has reached the head; see `HybridFitState.marked`.
    - ``training_step``, ``backward``, ``validation_step``: calls of the head are collective here. The first adds
      unfrozen parameters of the trunk to the reduction; see `BaseStrategy`.
    - ``on_validation_start``: gathers the head if no callback has done it. As ``training_step``, takes the buffers of
      rank 0 if the whole trunk is frozen, so that there is no DDP.
    - ``lightning_module_state_dict``, ``load_model_state_dict``, ``optimizer_state``, ``load_optimizer_state_dict``,
      ``save_checkpoint``, ``load_checkpoint``, ``restore_checkpoint_after_setup``: local shards to whole tensors, and
      back.
    """

    def __init__(
        self,
        head: str = "head",
        scheme: Literal["a", "b", "c"] | None = None,
        num_passes: int | None = None,
        variable_batch: bool = False,
        evaluation: Literal["gathered", "sharded"] = "gathered",
        state_dict_type: Literal["full", "sharded"] = "full",
        **ddp_kwargs: Any,
    ) -> None:
        if scheme is None:
            scheme = "a" if num_passes is None and not variable_batch else "c"
        self._options = checks.Options(head, scheme, num_passes, variable_batch, evaluation, state_dict_type)
        checks.check_options(self._options, ddp_kwargs)
        super().__init__(**ddp_kwargs)
        self._fitting: HybridFitState | None = None  # from set-up to teardown
        self._first_buffers: frozenset[Tensor] = frozenset()  # of the module, when the run began
        self._finds_unused = bool(ddp_kwargs.get("find_unused_parameters"))
        self._syncs_buffers = all(ddp_kwargs.get(name, True) for name in ("broadcast_buffers", "forward_sync_buffers"))
        self._restores_after_setup = False
        self._bytes_sent: dict[str, int] = {}  # by the last run of fit
        self.on_stage: OnStage | None = None  # called with name, start and end of each stage

    @property
    def exposed_communication_s(self) -> float | None:
        """Seconds that this rank has waited for features and activations so far, without DDP's wait for the trunk."""
        return None if self._fitting is None else sum(channel.waited_s for channel in self._fitting.passes.channels)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent for the head in the training steps of the last `fit`, by kind of message.

        The trunk's bytes, which DDP sends, are not included, nor are gathered parameters and checks.
        """
        return self._bytes_sent if self._fitting is None else self._fitting.passes.bytes_sent

    @property
    def updates_within_training_step(self) -> bool:
        """Whether parameters are updated before the backward of the training step that used them."""
        return self._options.variable_batch

    @property
    def sharded_parameter_names(self) -> list[str]:
        """Names of the parameters of which this rank holds a local shard: the head's during ``fit``, otherwise none."""
        fitting, module = self._fitting, self.lightning_module
        return [] if fitting is None or module is None else list(fitting.head.names_in(module))

    def gather_head(self) -> None:
        """Gather the head, so that every rank can call it alone until the next training step. All ranks must call this.

        Use it where the strategy does not gather by itself, as in ``on_train_epoch_end`` without a validation.

        Raises:
            RuntimeError: ``fit`` is not running.
        """
        if self._fitting is None:
            raise RuntimeError("gather_head() was called outside of fit, where the head is whole on every rank")
        self._fitting.gather()

    @override
    def setup(self, trainer: Any) -> None:
        try:
            super().setup(trainer)
            if self._fitting is not None:
                self._fitting.succeed()
        except BaseException:
            if self._fitting is not None:
                self._fitting.fail()
                self._fitting = None
            raise

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init), torch.device("cpu"):
            yield

    @override
    def model_to_device(self) -> None:
        module = self.lightning_module
        if module.trainer.state.fn == "fit":
            self._fitting = HybridFitState(self._options, module, self, self._record_stage)
        else:
            checks.require_whole(module, self._options.head)
        super().model_to_device()
        self._first_buffers = frozenset(module.buffers())

    @override
    def configure_ddp(self) -> None:
        module, fitting = self.lightning_module, self._fitting
        assert fitting is not None
        trunk = [(name, p) for name, p in module.named_parameters() if not fitting.head.owns(p)]
        self._reduced = ReducedParameters(module, fitting.head.parameters)
        if any(p.requires_grad for _, p in trunk):
            with fitting.marked() if self._finds_unused else nullcontext():
                super().configure_ddp()
        else:  # DDP refuses a module without any gradient to reduce, but the ranks must still start from equal values
            self._take_from_rank_0([*trunk, *module.named_buffers()])

    @override
    def _wrap_again(self, reduced: ReducedParameters, names: list[str], keep_hooks: bool = True) -> None:
        is_wrapped = isinstance(self.model, DistributedDataParallel)  # else `configure_ddp` is called
        copies = self._copies_of_shards()
        ignore_in_ddp(self.lightning_module, copies)
        try:
            with self._fitting.marked() if self._fitting and is_wrapped and self._finds_unused else nullcontext():
                super()._wrap_again(reduced, names, keep_hooks)
        finally:
            stop_ignoring_in_ddp(self.lightning_module, copies)

    def _take_from_rank_0(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters and buffers of the module the values of rank 0, but not those that DDP is told to ignore."""
        ignored = ddp_ignored_names(self.lightning_module)
        for name, tensor in named:
            if name not in ignored:
                # Rows after rows: gloo sends memory as it lies, and would write past the end of an expanded tensor's.
                value = tensor.data.contiguous()
                dist.broadcast(value, src=0)
                tensor.data.copy_(value)

    def _record_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._fitting is not None
        self._reduce_unfrozen()
        with self._fitting.training_step():
            self._sync_buffers()
            return super().training_step(*args, **kwargs)

    def _sync_buffers(self) -> None:
        """Take the buffers of rank 0, as DDP does, if there is no DDP because the whole trunk is frozen.

        Its batch norm moves statistics all the same. Let neither take rank 0's copies of its local shard.
        """
        copies = self._copies_of_shards()
        if isinstance(self.model, DistributedDataParallel):
            ignore_buffers(self.model, copies)
        elif self._syncs_buffers:
            buffers = self.lightning_module.named_buffers()
            self._take_from_rank_0((name, buffer) for name, buffer in buffers if name not in copies)

    def _copies_of_shards(self) -> list[str]:
        """Return the names of buffers that were made while fitting and have the shape of a local shard of some rank.

        They are copies or averages of this rank's shard, as in a penalty on the distance to the first weights.
        """
        assert self._fitting is not None
        shapes, first = self._fitting.head.shapes_of_shards, self._first_buffers
        buffers = self.lightning_module.named_buffers()
        return [name for name, buffer in buffers if buffer not in first and buffer.shape in shapes]

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self._fitting is not None
        with self._fitting.backward(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._fitting is not None:
            self._fitting.gather_if_changed()
            self._sync_buffers()  # once: unlike DDP's ranks, these may have different numbers of batches

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._fitting is None else self._fitting.validation_step():
            return super().validation_step(*args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._fitting is None:
            checks.require_whole(self.lightning_module, self._options.head)
            return super().lightning_module_state_dict()
        return self._with_all_ranks().module_state(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._fitting is None:
            return state
        return self._with_all_ranks().optimizer_state(optimizer, state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with nullcontext() if self._fitting is None else self._fitting.loading_checkpoint():
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._fitting is not None:
            restore_groups(self.lightning_module.trainer)
            checkpoint = {**checkpoint, "optimizer_states": self._fitting.own_states(checkpoint["optimizer_states"])}
        super().load_optimizer_state_dict(checkpoint)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether to load after set-up, into local shards: a sharded checkpoint, or a module on the meta device."""
        module = self.lightning_module
        if self._fitting is None and module is not None:  # Lightning asks before set-up, and again after it
            is_sharded = self._options.state_dict_type == "sharded"
            is_late = is_sharded or any(p.is_meta for p in module.parameters())
            self._restores_after_setup = is_late and module.trainer.state.fn == "fit"
        return self._restores_after_setup

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._fitting is not None:
            self._fitting.end_checkpoint()
        if self._fitting is None or self._options.state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None or not complete_files.is_plain_file(self.checkpoint_io, filepath):
            raise ValueError(
                "state_dict_type='sharded' writes local files only; remove the checkpoint plugin and storage_options, "
                "or use state_dict_type='full'"
            )
        folder, head = Path(filepath).expanduser(), self._fitting.head
        files.write_folder(checkpoint, folder, self.lightning_module, self.optimizers, head, self.broadcast)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint_path = complete_files.existing(checkpoint_path)
        module = self.lightning_module
        is_fit = module is not None and module.trainer.state.fn == "fit"
        if module is not None and self._fitting is None:  # else torch names sizes that do not match, and no remedy
            checks.require_whole(module, self._options.head)
        with complete_files.naming_checkpoint(checkpoint_path):
            if files.is_sharded(checkpoint_path):
                parts = (0, 1)
                if self._fitting is not None:
                    parts = (self.global_rank, self.world_size)
                    self._fitting.begin_loading_shards()
                return files.load_folder(Path(checkpoint_path), *parts, weights_only)
            is_folder = Path(checkpoint_path).is_dir()  # of FSDP2
            if is_fit and not is_folder and complete_files.is_plain_file(self.checkpoint_io, checkpoint_path):
                return files.map_file(checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _with_all_ranks(self) -> HybridFitState:
        """Return the state of the fit, for a checkpoint to which all ranks contribute.

        Raises:
            RuntimeError: there was an exception, so other ranks may be gone, and a gather would wait for them.
        """
        fitting = self._fitting
        assert fitting is not None
        if self.lightning_module.trainer.interrupted:
            # Raising here ends Lightning's handling of the first error, so teardown will not be called.
            self._end(interrupted=True)
            raise RuntimeError(
                "cannot save a checkpoint after an exception: the head's parameters are spread over all ranks, and the "
                "others may be gone. Save every few steps instead: ModelCheckpoint(every_n_train_steps=...)"
            )
        return fitting

    @override
    def teardown(self) -> None:
        self._first_buffers = frozenset()
        if self._fitting is not None:
            self._end(self.lightning_module.trainer.interrupted)
            free_earlier_groups()
        is_meta = self.lightning_module is not None and any(p.is_meta for p in self.lightning_module.parameters())
        # If set-up has failed, there are no values to move. The error from set-up must not be hidden by one from here.
        with suppress(NotImplementedError) if is_meta else nullcontext():
            super().teardown()

    def _end(self, interrupted: bool) -> None:
        fitting, self._fitting = self._fitting, None
        assert fitting is not None
        self._bytes_sent = fitting.passes.bytes_sent
        if interrupted:
            fitting.abandon()
            return
        try:
            fitting.finish()
        except BaseException:
            fitting.abandon()
            raise
