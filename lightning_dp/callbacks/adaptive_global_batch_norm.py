"""Callback that switches batch norm between global and local statistics during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_dp._lightning import Callback, LightningModule, Trainer, require_own_trainer
from lightning_dp._private.lightning_names import (
    converts_batch_norm,
    end_when_stop_check_times_out,
    strategy_timeout,
)
from lightning_dp._private.torch_names import ignore_in_ddp, stop_ignoring_in_ddp
from lightning_dp.callbacks.convergence import Convergence, Monitor, ask
from lightning_dp.collectives.groups import (
    RankTopology,
    create_groups,
    destroy_group,
    group_size,
    unbound_default_group,
)
from lightning_dp.collectives.small_all_gather import small_all_gather
from lightning_dp.layers import (
    GlobalBatchNorm,
    apply_global_batch_norm,
    average_running_statistics,
    global_batch_norm_layers,
    revert_global_batch_norm,
    unconverted_layer_names,
)

log = logging.getLogger(__name__)


class AdaptiveGlobalBatchNorm(Callback):
    """Synchronize batch norm's statistics over the ranks, until a criterion is met or a batch size is reached.

    Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018). At the beginning of ``fit`` the batch
    norm layers of the model are converted to `GlobalBatchNorm` layers, and at its end, also after an exception, they
    are converted back. Statistics are global in a training step if both conditions hold, and local in all other steps:

    - training is in the global phase, which ``global_phase`` defines: before the convergence criterion is met, after
      it, or always;
    - the global batch of the step is smaller than ``max_batch_size``.

    Rank 0 evaluates the criterion once per epoch, for all ranks. A criterion with an attribute ``monitor`` is evaluated
    only in epochs in which that metric was logged. In local steps each rank has its own running statistics. They are
    averaged over all ranks before validation, at the end of each epoch, when a checkpoint is saved and at the end of
    training, both in the model and in copies of it that other callbacks hold, such as WeightAveraging.
    ``agbn/is_global``, logged once per epoch, is the fraction of its batches with global statistics. It is the same on
    all ranks.

    Args:
        max_batch_size: BZ_max in section 4.3 of the paper. Statistics are local from this global batch size on. The
            global batch size is the number of samples in one forward of all ranks (with gradient accumulation, of one
            micro-batch). It is computed for each batch by an all-gather of one number.
        convergence: the criterion: `Plateau`, another object with ``update(metrics) -> bool``, or a function that takes
            the metrics of an epoch and returns whether training has converged. It is evaluated until it is met. None:
            it is never met.
        global_phase: ``"until_converged"``: global until the criterion is met, then local. ``"after_converged"``: local
            until the criterion is met, then global, as in section 4.3 of the paper. ``"always"``: no criterion.
        group_size: number of consecutive ranks that share statistics. It must divide the world size. None: all ranks.

    Raises:
        ValueError: a value is out of range, or ``convergence`` and ``global_phase`` contradict each other. In ``fit``:
            the model has no batch norm layer, or one that was created in ``setup`` or ``configure_model``;
            ``group_size`` does not divide the world size; the monitored metric is missing after a validation; or a rank
            has a single value per channel in a global step, although a criterion can make statistics local, which need
            more than one value.
        PeerError: a rank has died, or has been silent for longer than the timeout of the strategy. If the ranks span
            hosts, a RuntimeError that names all of them.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        convergence: Convergence | None = None,
        global_phase: GlobalPhase = "until_converged",
        group_size: int | None = None,
    ) -> None:
        check_arguments(max_batch_size, convergence, global_phase, group_size)
        self.max_batch_size = max_batch_size
        self.convergence = convergence
        self.global_phase = global_phase
        self.group_size = group_size
        self._converged = False
        self._was_asked = False  # whether the criterion was evaluated in this fit, or before it was resumed
        self._monitor = Monitor(convergence)
        self._conversion = BatchNormConversion(type(self).__name__)
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to a single fit to its initial state."""
        self._is_global: bool | None = None  # in the last training step; None before the first one
        self._num_batches = 0  # in this epoch
        self._num_global_batches = 0  # in this epoch
        self._ranks_differ = False  # whether the running statistics differ between ranks
        self._validated = False  # in this epoch
        self._awaited: Trainer | None = None  # after an epoch whose metric was not logged before this callback's turn
        self._checked_batch = False  # whether the first batch was checked for single values
        self._statistics_group: dist.ProcessGroup | None = None
        self._batch_size_group: dist.ProcessGroup | None = None
        self._undo: Callable[[], None] | None = None  # a change of the Trainer's loop

    def __getstate__(self) -> dict[str, Any]:
        """Leave the process groups out of copies: they cannot be copied, and end with the fit."""
        return {**vars(self), "_statistics_group": None, "_batch_size_group": None}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_own_trainer(self, trainer)
        if stage != "fit":
            return
        self._reset()
        self._was_asked = False
        if converts_batch_norm(trainer.strategy):
            raise ValueError(
                "Trainer(sync_batchnorm=True) would replace the layers of AdaptiveGlobalBatchNorm; remove that argument"
            )
        topology = RankTopology(trainer.world_size, self.group_size or trainer.world_size)
        # The model first: if it is refused, no process group is left behind.
        layers = self._conversion.apply(pl_module)
        self._create_groups(trainer, topology)
        if trainer.world_size > 1:
            self._undo = end_when_stop_check_times_out(trainer)
        for layer in layers:
            layer.group = self._statistics_group
            # For steps of Lightning's Tuner, which removes the callbacks: `on_train_batch_start` is not called then.
            layer.is_global = in_global_phase(self.global_phase, self._converged)
        if trainer.is_global_zero:
            ranks = f"{topology.group_size} of {topology.world_size} ranks"
            log.info(f"{type(self).__name__}: {len(layers)} batch norm layers, statistics over {ranks}")
            if self._converged:
                now = "global" if in_global_phase(self.global_phase, self._converged) else "local"
                log.warning(
                    f"{type(self).__name__}: the criterion was met in an earlier fit, so statistics are {now} from the "
                    "first step on; make a new callback and a new criterion to train another model"
                )

    def _create_groups(self, trainer: Trainer, topology: RankTopology) -> None:
        timeout = strategy_timeout(trainer.strategy)
        if topology.num_groups > 1:
            partition = [topology.members(first) for first in topology.peers(0)]
            self._statistics_group = create_groups(partition, trainer.global_rank, timeout)
        if topology.world_size > 1 and self.max_batch_size is not None:
            # A gloo group, because the host needs the number: on a GPU it would have to wait for all queued kernels.
            ranks = list(range(topology.world_size))
            self._batch_size_group = create_groups([ranks], trainer.global_rank, timeout, "gloo")
        if topology.world_size == 1 and group_size(None) > 1:
            # This process alone trains here, and the default group has others, which may have a Trainer each, or none.
            with unbound_default_group("gloo"):
                alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            self._statistics_group = alone

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conversion.require_complete(pl_module)
        # All ranks start with rank 0's buffers. DDP would broadcast them, but is told to ignore these buffers.
        if trainer.world_size > 1:
            for buffer in (buffer for layer in global_batch_norm_layers(pl_module) for buffer in layer.buffers()):
                dist.broadcast(buffer, src=0)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conversion.require_complete(pl_module)
        self._ask_late()
        self._num_batches = 0
        self._num_global_batches = 0
        self._validated = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        is_global, reason = self._decide(batch)
        if is_global != self._is_global:
            self._is_global = is_global
            for layer in global_batch_norm_layers(pl_module):
                layer.is_global = is_global
            if trainer.is_global_zero:
                since = f"from step {trainer.global_step} (epoch {trainer.current_epoch}) on"
                log.info(
                    f"{type(self).__name__}: statistics are {'global' if is_global else 'local'} {since}: {reason}"
                )
        self._num_batches += 1
        self._num_global_batches += is_global
        self._ranks_differ |= not is_global or self._statistics_group is not None

    def _decide(self, batch: Any) -> tuple[bool, str]:
        """Return whether the statistics of this step are global, the same on all ranks, and the reason."""
        is_global = in_global_phase(self.global_phase, self._converged)
        if not is_global or self.max_batch_size is None:
            converged = "converged" if self._converged else "not converged"
            return is_global, f"{converged}, global_phase={self.global_phase!r}"
        batch_size = local_batch_size(batch)
        if self._batch_size_group is not None:
            batch_size = int(small_all_gather(torch.tensor(batch_size), self._batch_size_group).sum())
        is_global = batch_size < self.max_batch_size
        relation = "<" if is_global else ">="
        return is_global, f"global batch size {batch_size} {relation} max_batch_size={self.max_batch_size}"

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._checked_batch:
            self._checked_batch = True
            self._refuse_single_values(trainer, pl_module)

    def _refuse_single_values(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise, on all ranks, if any rank had a batch on which training would fail once statistics become local.

        `max_batch_size` alone is no reason: a batch that is global because it is small stays global.
        """
        can_become_local = self.global_phase == "until_converged" and self.convergence is not None
        if not can_become_local or self._converged or trainer.world_size == 1:
            return
        layers = [(name, layer) for name, layer in pl_module.named_modules() if isinstance(layer, GlobalBatchNorm)]
        names = [name for name, layer in layers if layer.had_single_value]
        if small_all_gather(torch.tensor(len(names), device=pl_module.device)).any():
            names_by_rank: list[list[str]] = [[]] * trainer.world_size
            dist.all_gather_object(names_by_rank, names)
            raise ValueError(single_value_error(names_by_rank))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning synchronizes metrics of the epoch when they are first read. A progress bar reads them in this hook,
        # on rank 0 alone. All ranks read them here, so that these collectives come before ours on every rank; without
        # this line rank 0 waits in the bar for the others, which wait for rank 0 in the next line.
        dict(trainer.callback_metrics)
        self._refuse_single_values(trainer, pl_module)
        if self._num_batches:  # a run that resumes at the end of an epoch has none
            # The value is the same on all ranks. With both options Lightning does not reduce it, and does not warn.
            fraction = self._num_global_batches / self._num_batches
            pl_module.log("agbn/is_global", fraction, on_epoch=True, sync_dist=True, rank_zero_only=True)
            # Lightning calls this hook before the module's own, which may be the one that logs the metric.
            if not self._ask_criterion(trainer, may_be_missing=True):
                self._awaited = trainer
        self._average(trainer, pl_module)

    def _ask_late(self, may_come: bool = False) -> None:
        """Evaluate the criterion on a metric that was logged after this callback's turn at the end of the epoch.

        All ranks call it: before the next epoch, and before a checkpoint has the criterion's state.

        Args:
            may_come: whether the metric may still be logged: another callback saves before the module's turn.
        """
        trainer, self._awaited = self._awaited, None
        if trainer is not None and not trainer.interrupted:
            # A validation metric is missing until the first validation, and one that is logged in some epochs only is
            # missing in the first ones of a run that was resumed.
            is_early = trainer.enable_validation and not self._validated
            is_asked = self._ask_criterion(trainer, may_be_missing=is_early or self._was_asked or may_come)
            if may_come and not is_asked:
                self._awaited = trainer

    def _ask_criterion(self, trainer: Trainer, may_be_missing: bool) -> bool:
        """Evaluate the criterion on rank 0, for all ranks. An exception of the criterion is raised on all ranks.

        Return whether nothing is left to evaluate: False if the monitored metric was not logged.
        """
        if self.convergence is None or self._converged:
            return True
        metrics = dict(trainer.callback_metrics)
        answer = (False, False, "")
        if trainer.is_global_zero and self._monitor.is_due(metrics, may_be_missing):
            answer = (True, *ask(self.convergence, metrics))
        is_asked, self._converged, failure = trainer.strategy.broadcast(answer)
        if failure:
            raise ValueError(f"the convergence criterion failed on rank 0: {failure}")
        self._was_asked |= is_asked
        return is_asked

    def _average(self, trainer: Any, pl_module: LightningModule) -> None:
        """Average the running statistics over all ranks, if they differ."""
        if self._ranks_differ and trainer.world_size > 1:
            average_over_ranks(trainer.callbacks, pl_module)
        self._ranks_differ = False

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._average(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = self._validated or not trainer.sanity_checking

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ask_late()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # The checkpoint already holds the state_dict. Its tensors are the buffers themselves, so averaging in place
        # changes it too. A rank that saves a checkpoint after an exception must not wait for the other ranks.
        if trainer.interrupted:
            return
        saved = checkpoint["state_dict"]
        buffers = named_statistics(pl_module)
        # Those of a state_dict that copies or converts. What else is there may be an averaged model's.
        copied = [name for name, buffer in buffers.items() if is_copy_of(buffer, saved.get(name))]
        self._average(trainer, pl_module)
        for name in copied:
            saved[name] = buffers[name].to(saved[name], copy=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        self._ask_late(may_come=True)
        save = getattr(self.convergence, "state_dict", dict)
        return {"converged": self._converged, "convergence": save(), "was_asked": self._was_asked}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning's finders load one within a fit, after their trial steps, whose metrics do not count.
        self._monitor.forget(trainer.callback_metrics)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._converged = state_dict["converged"]
        self._was_asked = state_dict.get("was_asked", False)
        load = getattr(self.convergence, "load_state_dict", None)
        if load is not None and state_dict["convergence"]:
            load(state_dict["convergence"])

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning does not call `teardown` after an exception. The process groups stay: collectives may be in flight.
        self._revert(trainer, pl_module)
        # The ranks may have failed at different places, so that a later average could wait for some of them.
        self._ranks_differ = False
        self._awaited = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._revert(trainer, pl_module)
        destroy_group(self._statistics_group)
        destroy_group(self._batch_size_group)
        self._reset()

    def _revert(self, trainer: Any, pl_module: LightningModule) -> None:
        self._conversion.revert(pl_module, model_copies(trainer.callbacks, pl_module))
        if self._undo is not None:
            self._undo()
            self._undo = None


# When statistics are global: functions without state.

GlobalPhase = Literal["until_converged", "after_converged", "always"]


def in_global_phase(global_phase: GlobalPhase, converged: bool) -> bool:
    """Return whether statistics are global in this phase of training, apart from the batch size."""
    return global_phase == "always" or converged == (global_phase == "after_converged")


def local_batch_size(batch: Any) -> int:
    """Return the length of the first tensor in ``batch``: nested lists, tuples, dictionaries and dataclasses.

    Raises:
        ValueError: ``batch`` holds no tensor with at least one dimension, or a list of tensors that may be images.
    """
    size = _first_length(batch)
    if size is None:
        raise ValueError(
            f"max_batch_size needs the size of the batch, but a {type(batch).__name__} without tensors does not have "
            "one; return tensors from the collate function, or leave max_batch_size out"
        )
    return size


def _first_length(batch: Any) -> int | None:
    """Return the length of the first tensor in ``batch``, None if there is none with a dimension."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() > 0 else None
    if is_dataclass(batch) and not isinstance(batch, type):  # Lightning accepts these, too
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return None
    elif len(batch) > 1 and all(map(_may_be_image, batch)):
        raise ValueError(
            f"max_batch_size needs the size of the batch, but a list of {len(batch)} tensors of shapes such as "
            f"{tuple(batch[0].shape)} may hold single images, whose length is their number of channels; stack them to "
            "one tensor in the collate function, or leave max_batch_size out"
        )
    return next((size for size in map(_first_length, batch) if size is not None), None)


def _may_be_image(value: Any) -> bool:
    """Whether ``value`` may be (C, H, W). A sequence of signals, (N, C, L), is taken for one only if N is so small."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.shape[0] in (1, 3, 4)


def single_value_error(names_by_rank: list[list[str]]) -> str:
    """Return the error message for layers that had a single value per channel, given their names for each rank."""
    named = [f"rank {rank}: {', '.join(map(repr, names))}" for rank, names in enumerate(names_by_rank) if names]
    return (
        f"batch norm layers had a single value per channel ({'; '.join(named)}). Global statistics accept that, but "
        "training would fail when the convergence criterion makes statistics local. Give each rank at least two "
        "samples (also in the last batch: drop_last=True), or use global_phase='always'"
    )


def check_arguments(
    max_batch_size: int | None, convergence: Convergence | None, global_phase: GlobalPhase, group_size: int | None
) -> None:
    """Raise ValueError for values out of range, and for a phase that could never begin or end."""
    # Not `max_batch_size < 1`, which is False for NaN.
    if max_batch_size is not None and not (isinstance(max_batch_size, Real) and max_batch_size >= 1):
        raise ValueError(f"max_batch_size={max_batch_size!r} must be at least 1, or None")
    if group_size is not None and not (isinstance(group_size, Integral) and group_size >= 1):
        raise ValueError(f"group_size={group_size!r} must be at least 1, or None; a whole number")
    if global_phase not in get_args(GlobalPhase):
        raise ValueError(
            f"global_phase={global_phase!r} is not known; use 'until_converged', 'after_converged' or 'always'"
        )
    if global_phase == "always" and convergence is not None:
        raise ValueError("global_phase='always' does not use a criterion; leave convergence out, or change the phase")
    if global_phase == "after_converged" and convergence is None:
        raise ValueError(
            "global_phase='after_converged' never begins without a criterion; pass convergence=Plateau(monitor=...)"
        )
    if isinstance(convergence, type):
        name = convergence.__name__
        raise ValueError(f"convergence={name} is a class; make an object of it: {name}()")
    if convergence is not None and not callable(getattr(convergence, "update", convergence)):
        raise ValueError(
            f"convergence={convergence!r} is neither a function nor has it update(metrics); use Plateau(...)"
        )


class BatchNormConversion:
    """Converts the batch norm layers of a model, keeps their buffers from DDP, and takes both back.

    Args:
        owner: name of the callback, for error messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._ignored_names: list[str] = []
        # The user's own layers by name, with group and switch; None while nothing is converted.
        self._own: dict[str, tuple[GlobalBatchNorm, dist.ProcessGroup | None, bool]] | None = None

    def apply(self, model: nn.Module) -> list[GlobalBatchNorm]:
        """Convert the layers of ``model`` in place and return them. Call it before DDP wraps the model.

        Raises:
            ValueError: there is no batch norm layer, or one cannot be converted. The model has not been changed then.
        """
        # The user may have built global layers. They are not converted back, but get their group and switch back.
        own = {
            name: (layer, layer.group, layer.is_global)
            for name, layer in model.named_modules()
            if isinstance(layer, GlobalBatchNorm)
        }
        if not (own or unconverted_layer_names(model)):
            raise ValueError(
                f"{type(model).__name__} has no BatchNorm1d, 2d or 3d for {self._owner} to work on; build the layers "
                "in __init__ (setup and configure_model come too late), or remove the callback"
            )
        apply_global_batch_norm(model)
        self._own = own
        # DDP would replace the running statistics of all ranks by those of rank 0 in each forward.
        self._ignored_names = list(named_statistics(model))
        ignore_in_ddp(model, self._ignored_names)
        return global_batch_norm_layers(model)

    def require_complete(self, model: nn.Module) -> None:
        """Raise ValueError if ``model`` has batch norm layers that appeared after `apply`.

        They would keep local statistics, and DDP has been built by now and would broadcast their buffers.
        """
        names = unconverted_layer_names(model)
        if names:
            raise ValueError(
                f"{self._owner} found batch norm layers that were created after its setup and would keep local "
                f"statistics: {', '.join(map(repr, names))}; build them in __init__ of {type(model).__name__} (setup "
                "and configure_model come too late)"
            )

    def revert(self, model: nn.Module, copies: Iterable[nn.Module]) -> None:
        """Undo `apply` in ``model`` and in copies of it. Does nothing if it was undone before."""
        own, self._own = self._own, None
        if own is None:
            return
        stop_ignoring_in_ddp(model, self._ignored_names)
        self._ignored_names = []
        for converted in (model, *copies):
            names: set[str] = set()
            for name, layer in converted.named_modules():
                if not isinstance(layer, GlobalBatchNorm):
                    continue
                layer.group = None
                layer.had_single_value = False
                # Also layers that were copied since, as for a teacher that a module makes in on_fit_start.
                if name not in own:
                    layer.is_global = False  # one that cannot be taken back computes what PyTorch's does
                    if not isinstance(layer, FSDPModule):  # FSDP2 has derived a class from that of the layer
                        names.add(name)
            try:
                revert_global_batch_norm(converted, names)
            except ValueError as error:
                log.warning(
                    f"{self._owner}: {error}. The model keeps its global batch norm layers, with local statistics."
                )
        for layer, group, is_global in own.values():
            layer.group = group
            layer.is_global = is_global


def named_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of the global layers in ``model``. A layer that is registered at two places has two names."""
    ours = {id(buffer) for layer in global_batch_norm_layers(model) for buffer in layer.buffers()}
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in ours}


def average_over_ranks(callbacks: Iterable[Callback], model: LightningModule) -> None:
    """Average the running statistics of ``model``, and of the copies that callbacks hold, over all ranks in place.

    Every rank must call it. If the ranks hold different numbers of copies, the copies are left out with a warning.
    """
    copies = model_copies(callbacks, model)
    num_copies = small_all_gather(torch.tensor(len(copies), device=model.device)).tolist()
    if len(set(num_copies)) > 1:
        copies = []
        if model.global_rank == 0:
            log.warning(
                f"the callbacks of the ranks hold {num_copies} copies of the model; the running statistics of these "
                "copies stay those of their rank. Keep the copy on all ranks"
            )
    average_running_statistics(model, copies=copies)


def is_copy_of(tensor: Tensor, value: Any) -> bool:
    """Return whether ``value`` has the contents of ``tensor``, in memory of its own and perhaps in another dtype."""
    if not isinstance(value, Tensor) or value.data_ptr() == tensor.data_ptr() or value.shape != tensor.shape:
        return False
    return torch.equal(value, tensor.to(value))


def model_copies(callbacks: Iterable[Callback], model: nn.Module) -> list[nn.Module]:
    """Return the copies of ``model`` that the callbacks hold as attributes, in the order of the callbacks.

    Finds those of Lightning's WeightAveraging and StochasticWeightAveraging, and of other callbacks that keep a copy of
    the whole LightningModule in an attribute, by itself or in an AveragedModel, or of a part that has global layers.
    """
    copies: list[nn.Module] = []
    ours = set(global_batch_norm_layers(model))
    for callback in callbacks:
        for value in getattr(callback, "__dict__", {}).values():
            candidate: Any = value.module if isinstance(value, AveragedModel) else value
            if not isinstance(candidate, nn.Module) or candidate is model or candidate in copies:
                continue
            is_whole = type(candidate) is type(model) and _has_layers_of(candidate, model)
            if is_whole or not ours.issuperset(global_batch_norm_layers(candidate)):
                copies.append(candidate)
    return copies


def _has_layers_of(candidate: nn.Module, model: nn.Module) -> bool:
    """Return whether both have buffers of the same names and shapes. A user may have changed the copy's layers."""
    buffers = {name: buffer.shape for name, buffer in candidate.named_buffers()}
    return buffers == {name: buffer.shape for name, buffer in model.named_buffers()}
