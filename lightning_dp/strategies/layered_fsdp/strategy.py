"""Layered FSDP: FSDP2 inside groups of ranks, layered SGD between them. Lightning's hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._lightning import ModelParallelStrategy
from lightning_dp._private.lightning_names import (
    DEFAULT_TIMEOUT,
    converts_batch_norm,
    give_device_mesh,
    set_up_process_group,
    strategy_timeout,
)
from lightning_dp._private.torch_names import begin_passes_at, is_in_backward, local_part
from lightning_dp.collectives.compression.layout import ParameterTable
from lightning_dp.collectives.compression.options import Compression, PowerSGD, has_error_feedback
from lightning_dp.collectives.groups import RankTopology, create_groups, resolve_group
from lightning_dp.strategies.base import AVERAGING, is_a
from lightning_dp.strategies.complete_files import (
    CHECKSUMS,
    checksum,
    existing,
    hidden_beside,
    naming_checkpoint,
    remove,
    replace,
    save,
    write_complete_files,
)
from lightning_dp.strategies.consolidate import OUTLINE, REST
from lightning_dp.strategies.layered_fsdp.reduction import Residuals, ShardReduction
from lightning_dp.strategies.layered_fsdp.sharding import (
    STEPS,
    Wrap,
    attributes_of,
    broadcast_from_rank_0,
    check_all_reduced,
    check_embeddings,
    check_hooks,
    check_last_backward,
    check_parameters,
    check_wrap,
    forget_failed_backward,
    forget_failed_step,
    gather_added,
    give_attributes,
    load_optimizer,
    loading_whole_values,
    materialize,
    outermost_units,
    own_parameters,
    parameter_names,
    read_shards,
    shard,
    shard_added,
    sharded_units,
    whole_optimizer_state,
    whole_values,
    with_outline,
    with_own_classes,
    with_parts_as_given,
)
from lightning_dp.strategies.layered_sgd.hooks import PostponedUpdates
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions, check_layers, check_optimizers
from lightning_dp.strategies.layered_sgd.postponement import runs_before_backward
from lightning_dp.strategies.unfreezing import restore_groups

log = logging.getLogger(__name__)

RESIDUALS = "layered_fsdp_residuals"
"""In a checkpoint: what compression has left out, of each rank."""

REPLICATE, SHARD = "replicate", "data_parallel"
"""Dimensions of `LayeredFSDPStrategy.device_mesh`: between groups, and inside a group."""


def make_mesh(topology: RankTopology, rank: int, device_type: str, timeout: timedelta) -> DeviceMesh:
    """Return the mesh with the dimensions `REPLICATE` and `SHARD`. All ranks call it.

    `init_device_mesh` would give the groups of a dimension PyTorch's own timeout, half an hour.
    """
    ranks = torch.arange(topology.world_size).view(topology.num_groups, topology.group_size)
    key = (topology, timeout)
    of_job = _groups.setdefault(resolve_group(None), {})
    if key not in of_job:
        of_job[key] = [create_groups(partition.tolist(), rank, timeout) for partition in (ranks.T, ranks)]
    return DeviceMesh.from_group(of_job[key], device_type, ranks, mesh_dim_names=(REPLICATE, SHARD))


# By default group. They live as long as it: sharded parameters use them after a fit, and each fit has the same ones.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[RankTopology, timedelta], list[Any]]] = WeakKeyDictionary()


class RunningSteps:
    """Knows whether a step of the module runs. Outside of steps a part that has run is freed again.

    A callback may run the module, or one of its steps, to log what it makes of a sample. FSDP2 keeps the root gathered
    until its backward, and other units, too, with ``reshard_after_forward=False``. The module then shows parameters
    that have no gradients and are not the optimizer's, and what somebody writes to them is lost.
    """

    def __init__(self) -> None:
        self._is_running = False
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Run a step within the context."""
        before, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = before

    def watch(self, module: Any, units: Sequence[Any]) -> None:
        """Free each of ``units`` after its forward outside of a step, and after a step of ``module``, until `close`."""
        self.close()
        self._undo = [unit.register_forward_hook(self._free).remove for unit in units]
        for name in STEPS if isinstance(module, FSDPModule) else ():
            step = getattr(module, name)
            setattr(module, name, self._freeing(module, units, step))  # FSDP2 calls no hooks after these methods
            self._undo.append(partial(setattr, module, name, step))

    def _freeing(self, module: Any, units: Sequence[Any], step: Callable[..., Any]) -> Callable[..., Any]:
        own = set(own_parameters(module))
        named = ((part, *each) for part in module.modules() for each in part.named_parameters("", False))
        place = next(((part, name) for part, name, parameter in named if parameter in own), None)

        @wraps(getattr(step, "__wrapped__", step))  # Lightning looks at the user's method, one level below
        def step_and_free(*args: Any, **kwargs: Any) -> Any:
            is_gathered = place is not None and not isinstance(getattr(*place), DTensor)
            with self.running():  # else a call of the module within the step would free what the step itself uses
                output = step(*args, **kwargs)
            if is_gathered:  # Another step has called this one. FSDP2 has freed the root, which that step may use.
                module.unshard()
            for unit in units:
                self._free(unit)
            return output

        return step_and_free

    def close(self) -> None:
        """Free nothing more."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    @torch.compiler.disable
    def _free(self, unit: Any, *_: object) -> None:
        if not self._is_running and not is_in_backward():  # in backward it is recomputed
            unit.reshard()


class LayeredFSDPStrategy(PostponedUpdates, ModelParallelStrategy):
    """Parameters sharded inside groups of ranks by FSDP2; the all-reduce between groups is hidden, as in layered SGD.

    The parameters are those of HSDP (``fully_shard`` with a mesh of two dimensions) and of DDP, up to rounding in
    another order of summation. HSDP waits for the all-reduce between groups within the step. Here it starts when FSDP2
    has reduce-scattered a unit, and the unit is updated just before its parameters are gathered in the next forward. A
    use of a parameter before that applies its pending update first. See arXiv 1906.05936, Algorithm 3, and
    ``docs/methods/layered_fsdp.md``.

    Args:
        group_size: number of ranks in a group, over which parameters, gradients and optimizer states are sharded.
            Groups are consecutive ranks; must divide the world size. None: the ranks of one node. With a single group
            there is nothing to hide, and this is FSDP2.
        overlap: ``"load"``: the all-reduce between groups starts after backward and is hidden behind the loading of the
            next batch. ``"step"``: it starts in backward, and each unit is updated just before its next use.
        all_reduce: the algorithm between groups: ``"native"``, the backend's, or ``"ring"``, this package's.
        communicator_device: where shards are summed between groups; as in `LayeredSGDStrategy`.
        compression: of the stage between groups: None, exact; ``"bf16"`` or ``"fp16"``, rounded to 16 bits; ``"int8"``
            with error feedback, which is in checkpoints for as many groups of as many ranks.
        wrap: the units that are gathered, reduced and updated at once: classes of modules, a function that says whether
            a module is one, or None: parts of about a sixteenth of the model. A module whose ``configure_model`` calls
            ``fully_shard`` with ``self.device_mesh["data_parallel"]`` has its own.
        reshard_after_forward: free gathered parameters after forward, and gather them again in backward.
        mixed_precision: FSDP2's policy. None: parameters are gathered as they are, and the Trainer's precision decides
            what operations compute in.
        save_distributed_checkpoint: write a folder with a file of each rank, by ``torch.distributed.checkpoint``.
            False: one file with whole parameters, which any strategy can load.
        process_group_backend, timeout: as in ``ModelParallelStrategy``.

    Raises:
        ValueError: a value is not one of those above, two do not go together, or the world size is not a multiple of
            ``group_size``.
        RuntimeError: torch is older than 2.10.
    """

    @property
    def num_parameter_shards(self) -> int:
        """For callbacks: rank ``r`` has the shards of the parameters that rank ``r + num_parameter_shards`` has."""
        return self.topology.group_size

    frees_gathered_parameters = True
    """For callbacks: a parameter's values are there only while the module that owns it runs forward or backward."""

    def __init__(
        self,
        group_size: int | None = None,
        overlap: Literal["load", "step"] = "step",
        all_reduce: Literal["native", "ring"] = "native",
        communicator_device: Literal["auto", "cpu", "gpu"] = "auto",
        compression: Compression | None = None,
        wrap: Wrap | None = None,
        reshard_after_forward: bool = True,
        mixed_precision: MixedPrecisionPolicy | None = None,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        if torch.__version__ < "2.10":
            raise RuntimeError(
                f"LayeredFSDPStrategy needs torch 2.10 or newer, and this is {torch.__version__}, whose FSDP2 clips by "
                "an inexact norm: install a newer torch, or use LayeredSGDStrategy"
            )
        if isinstance(compression, PowerSGD):
            raise ValueError(
                f"compression={compression!r} approximates whole parameters, and each rank has a shard of them; use "
                "'int8', 'bf16' or 'fp16'"
            )
        check_wrap(wrap)
        self._options = CommunicatorOptions("sharded", overlap, all_reduce, communicator_device, compression)
        self._mixed_precision = mixed_precision or MixedPrecisionPolicy()
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._group_size = group_size
        self._saves_shards = save_distributed_checkpoint
        self._wrap = wrap
        self._reshard_after_forward = reshard_after_forward
        self._reduction: ShardReduction | None = None
        self._units: list[FSDPModule] = []
        self._steps = RunningSteps()
        self._last_residuals: Residuals = {}  # of the fit that has ended, for a checkpoint that is written after it

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        self._check_job()
        if converts_batch_norm(self):
            raise ValueError(
                f"sync_batchnorm=True has no effect under {type(self).__name__}, as under ModelParallelStrategy; "
                'leave it out, and use callbacks=[AdaptiveGlobalBatchNorm(global_phase="always")]'
            )
        super()._configure_launcher()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # With ``empty_init`` not on the meta device, as Lightning's own: nothing gives memory to a whole module.
        strategy: Any = super(ModelParallelStrategy, self) if empty_init else super()
        with strategy.tensor_init_context(empty_init):
            yield

    @override
    def setup_environment(self) -> None:
        # Lightning's mesh knows nodes only, and each fit would make new groups for it.
        set_up_process_group(self)
        mesh = make_mesh(self.topology, self.global_rank, self.root_device.type, strategy_timeout(self))
        give_device_mesh(self, mesh)
        give_device_mesh(self.lightning_module, mesh)

    @override
    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        write_complete_files(self)
        is_fitting = trainer.state.fn == "fit"
        if is_fitting:
            self._check_callbacks(trainer)
            check_layers(module, type(self).__name__)
            check_embeddings(module)
        attributes = attributes_of(module)
        self.model = self.precision_plugin.convert_module(module)
        if not any(isinstance(part, FSDPModule) for part in module.modules()):
            self.model_to_device()
            broadcast_from_rank_0([*module.parameters(), *module.buffers()])
            shard(module, self.device_mesh[SHARD], self._wrap, self._reshard_after_forward, self._mixed_precision)
        materialize(module, self.root_device)
        units = sharded_units(module)
        self._units = [unit for _, unit in units]
        self._free_gathered()  # the user may have run a part since an earlier fit
        forget_failed_step(module)
        self._steps.watch(module, self._units)
        self._require_all_sharded(module, units)
        self.model_to_device()
        broadcast_from_rank_0(module.parameters(), self.device_mesh[REPLICATE].get_group())
        self._share_buffers()  # also of a module that shards itself, or that an earlier fit has sharded
        for root in outermost_units(module):
            begin_passes_at(root)  # a callback may run a part of the module first
        for unit in self._units:  # now, for what is gathered in inference mode first cannot be trained any more
            unit.unshard()
            give_attributes(module, attributes)
            unit.reshard()
        give_attributes(module, attributes)
        self.barrier()
        if is_fitting:
            with with_own_classes(module):
                self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, type(self).__name__)
            check_parameters(self.optimizers, module)
        self.setup_precision_plugin()
        if is_fitting and self.topology.num_groups > 1:
            self._start(trainer)
        elif is_fitting:
            self._warn_of_single_group()

    def _check_callbacks(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if is_a(callback, *AVERAGING):
                raise ValueError(
                    f"{type(callback).__name__} copies the module before it is sharded, and cannot average shards into "
                    f"that; under {type(self).__name__} keep an average of each parameter in a callback of your own, "
                    "made in on_train_start"
                )
            if is_a(callback, "ModelPruning"):
                raise ValueError(
                    f"{type(callback).__name__} looks at whole parameters, and under {type(self).__name__} each rank "
                    "has a shard of them; prune after training, or use LayeredSGDStrategy"
                )

    def _require_all_sharded(self, module: nn.Module, units: list[tuple[str, Any]]) -> None:
        for name, parameter in module.named_parameters():
            if getattr(parameter, "device_mesh", None) != self.device_mesh[SHARD]:
                raise ValueError(
                    f"{name} is not sharded over the ranks of its group: configure_model must call fully_shard with "
                    f'mesh=self.device_mesh["{SHARD}"] for every part that has parameters; if an earlier fit had '
                    "another group_size, make a new module"
                )
        sizes = ", ".join(f"{name} {sum(p.numel() for p in own_parameters(unit)):,}" for name, unit in units)
        if self.is_global_zero:
            log.info(f"{type(self).__name__}: {len(units)} units with their numbers of elements: {sizes}")

    def _start(self, trainer: Any) -> None:
        name = type(self).__name__
        module = self.lightning_module
        table = ParameterTable()
        communicator = self._options.make_communicator(
            self.topology, self.global_rank, self.root_device, self.process_group_backend,
            strategy_timeout(self), self._report_stage, module, False, name, table,
        )  # fmt: skip
        self._reduction = ShardReduction(
            communicator, self.topology.num_groups, module, sharded_units(module), strategy_timeout(self)
        )
        if self.root_device.type == "cpu" and self.topology.group_size > 1:
            self._reduction.overlap_intra_group()
        self._postpone(self._reduction, trainer, of_shards=True)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with nullcontext() if self._reduction is None else self._reduction.accumulating():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        check_hooks(self.lightning_module)
        forget_failed_backward(self.lightning_module)
        check_last_backward(self.lightning_module)
        self._free_gathered()  # somebody may have gathered a part by hand, and changed its parameters since
        with self._steps.running():
            output = super().training_step(*args, **kwargs)
        # Without automatic optimization its backward passes are over, if it had any. And what a hook writes before
        # backward would be lost with what is gathered.
        module = self.lightning_module
        stays = module.automatic_optimization and not runs_before_backward(module.trainer, module)
        return output if stays else self._then_free(output)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps.running():
            return self._then_free(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps.running():
            return self._then_free(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps.running():
            return self._then_free(super().predict_step(*args, **kwargs))

    @override
    @torch.compiler.disable  # a compiled training_step may call this method and the next one
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        try:
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
            check_all_reduced(self.lightning_module)
            return loss
        except Exception:
            # Now, because the step may catch it, and run another forward and backward.
            if self._reduction is not None:
                self._reduction.forget_backward()
            with suppress(RuntimeError):  # the first exception says why, if another rank has died
                forget_failed_step(self.lightning_module)
            raise

    @override
    @torch.compiler.disable
    def pre_backward(self, closure_loss: Tensor) -> None:
        check_hooks(self.lightning_module)  # again, for the step may have set one
        check_last_backward(self.lightning_module)  # again, for the step may have caught what another one raised
        if self._reduction is not None:
            self._reduction.before_backward(closure_loss)
        super().pre_backward(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def closure_then_sums() -> Any:
            output = closure()
            if self._reduction is not None:
                self._reduction.before_step(each for group in optimizer.param_groups for each in group["params"])
            return output

        return self._then_free(super().optimizer_step(optimizer, closure_then_sums, model, **kwargs))

    def _then_free(self, output: Any) -> Any:
        self._free_gathered()
        return output

    def _free_gathered(self) -> None:
        """Free what was gathered and not freed: by forward passes without a backward.

        The module would show it to callbacks in place of the sharded parameters, and use it when those have changed.
        """
        if self._reduction is not None:
            self._reduction.stop_prefetch()
        for unit in self._units:
            unit.reshard()

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as DDP does: running statistics of batch norm, and others."""
        broadcast_from_rank_0(self.lightning_module.buffers())

    @override
    def on_validation_start(self) -> None:
        trainer = self.lightning_module.trainer
        self._require_as_many(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
        super().on_validation_start()
        self._share_buffers()

    @override
    def on_test_start(self) -> None:
        self._require_as_many(self.lightning_module.trainer.num_test_batches)
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self._require_as_many(self.lightning_module.trainer.num_predict_batches)
        super().on_predict_start()

    def _require_as_many(self, num_batches: Iterable[float]) -> None:
        """Raise ValueError, on all ranks, if a rank has more batches than others of its group, and would wait for them.

        In training Lightning gives all ranks as many, but not in ``predict``, where it repeats no sample.
        """
        of_ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(of_ranks, list(num_batches))
        if any(of_ranks[rank] != of_ranks[self.topology.members(rank)[0]] for rank in range(self.world_size)):
            raise ValueError(
                f"ranks of a group have different numbers of batches ({', '.join(map(str, of_ranks))}), and each "
                "forward gathers parameters on all of them; let the number of samples be a multiple of the ranks, or "
                "give Trainer(use_distributed_sampler=False) a loader with a DistributedSampler, which repeats some"
            )

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._share_buffers()
        self._last_residuals = {} if self._reduction is None else self._reduction.residuals()

    @override
    def teardown(self) -> None:
        self._steps.close()
        super().teardown()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._saves_shards:
            return super().lightning_module_state_dict()
        self._finish_before_saving()
        # PyTorch's names differ from the module's where a part is compiled, and other strategies could not load them.
        return whole_values(self.lightning_module.state_dict(), keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.finish_update()
        if not self._saves_shards:
            return whole_optimizer_state(optimizer, keep=self.is_global_zero)
        if optimizer.state:
            return super().optimizer_state(optimizer)
        # PyTorch steps an optimizer that has no state yet, to see what it will have: Adam would count that step.
        state = super().optimizer_state(optimizer)
        optimizer.state.clear()
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._bring_up_to_date()
        if has_error_feedback(self._options.compression) and "optimizer_states" in checkpoint:
            if self.lightning_module.trainer.interrupted:
                self._warn_of_dropped("the checkpoint is written after an exception: other ranks may be gone")
            else:
                self._add_residuals(checkpoint)
        by_rank = ("state_dict", "optimizer_states") if self._saves_shards else ()
        others = {key: value for key, value in checkpoint.items() if key not in by_rank}
        checkpoint = checkpoint | gather_added(others, keep=self.is_global_zero)
        checkpoint = with_parts_as_given(checkpoint, self.lightning_module)
        place = self.broadcast(filepath)
        if self._saves_shards:
            checkpoint["state_dict"] = self._with_buffers_of_rank_0(checkpoint["state_dict"])
            checkpoint = with_outline(checkpoint, self.lightning_module)
            self._save_folder(checkpoint, Path(place), storage_options)
            return
        # A file may replace a folder of an earlier run. Lightning would remove that first, on all ranks at once.
        if Path(place).is_dir() and not Path(place, REST).exists():
            raise IsADirectoryError(f"{place} is a folder, and no checkpoint; give the checkpoint another name")
        if self.is_global_zero:
            # Not by Lightning's strategy, which takes an address, such as s3://..., for a local path.
            self.checkpoint_io.save_checkpoint(checkpoint, place, storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], folder: Path, storage_options: Any) -> None:
        """Write a folder beside the one that is there, and replace that. All ranks call it.

        Lightning writes into the folder that is there. A kill meanwhile would leave the new part of one rank and the
        old one of another, which load without an error.
        """
        unfinished: Any = self.broadcast(hidden_beside(folder) if self.is_global_zero else None)
        try:
            super().save_checkpoint(checkpoint, unfinished, storage_options)
            checksums = self._checksums(unfinished)  # the parts of all ranks are written by now
            if self.is_global_zero:
                save(checksums, unfinished / CHECKSUMS)
                replace(folder, unfinished)
            self.barrier()
        finally:
            if self.is_global_zero:
                remove(unfinished)

    def _checksums(self, folder: Path) -> dict[str, int]:
        """Return those of all files that PyTorch has written, by their names. Each rank reads its own parts again."""
        own = [*folder.glob(f"__{self.global_rank}_*"), *(folder.glob(".metadata") if self.is_global_zero else ())]
        of_ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(of_ranks, {file.name: checksum(file) for file in own})
        return {name: value for of_rank in of_ranks for name, value in of_rank.items()}

    def _with_buffers_of_rank_0(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with rank 0's buffers: PyTorch writes each of them as it is on any one rank.

        Callbacks have changed them by now: `AdaptiveGlobalBatchNorm` puts averages of running statistics there.
        """
        own = self.lightning_module_state_dict()
        names = [name for name, value in own.items() if isinstance(value, Tensor) and local_part(value) is value]
        buffers = {name: state[name].to(self.root_device, copy=True) for name in names if name in state}
        broadcast_from_rank_0(buffers.values())
        return state | buffers

    def _add_residuals(self, checkpoint: dict[str, Any]) -> None:
        """Add what compression has left out, of each rank. All ranks call it; a file that is resumed needs all."""
        own = self._last_residuals if self._reduction is None else self._reduction.residuals()
        group = dist.new_group(timeout=strategy_timeout(self), backend="gloo")
        ranks: list[Residuals] | None = [{}] * self.world_size if self.is_global_zero else None
        dist.gather_object(own, ranks, group=group)
        dist.destroy_process_group(group)
        if ranks is not None and any(ranks):
            units = parameter_names(self.lightning_module)
            checkpoint[RESIDUALS] = {"group_size": self.topology.group_size, "units": units, "ranks": ranks}

    def _restore_residuals(self, checkpoint: dict[str, Any]) -> None:
        """Continue with what the checkpoint says compression has left out; with nothing if it does not."""
        saved = checkpoint.pop(RESIDUALS, None)
        is_fitting = self.lightning_module.trainer.state.fn == "fit"
        if not is_fitting or "lr_schedulers" not in checkpoint:  # a folder has its optimizer states elsewhere
            return
        keeper = self._reduction if has_error_feedback(self._options.compression) else None
        own: Residuals = {}
        if saved is not None:
            is_same_job = [saved["group_size"], len(saved["ranks"])] == [self.topology.group_size, self.world_size]
            own = saved["ranks"][self.global_rank] if is_same_job else {}
            if keeper is None:
                self._warn_of_dropped("the checkpoint was written with error feedback")
            # Not by name alone: what a unit with other parameters has left out would never be applied, or to others.
            elif not is_same_job or saved.get("units") != parameter_names(self.lightning_module):
                self._warn_of_dropped("the checkpoint was written with other groups or other units")
                own = {}
        if keeper is not None:
            keeper.load_residuals(own)

    def _warn_of_dropped(self, reason: str) -> None:
        log.warning(
            f"{type(self).__name__}(compression={self._options.compression!r}): {reason}; if training continues from "
            "it, what the last compressed step left out of its gradient is dropped"
        )

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._bring_up_to_date()
        place: Any = self.broadcast(existing(checkpoint_path) if self.is_global_zero else None)
        with naming_checkpoint(place):
            if Path(place).is_dir():
                checkpoint = self._read_folder(Path(place), weights_only)
            else:
                # Not Lightning's way, which takes the optimizer's numbers of parameters for the module's.
                checkpoint = self.checkpoint_io.load_checkpoint(place, weights_only=weights_only)
        self._restore_residuals(checkpoint)
        return shard_added(checkpoint, self.device_mesh[SHARD])

    def _read_folder(self, folder: Path, weights_only: bool | None) -> dict[str, Any]:
        """Return what the folder has. Not by Lightning's strategy, which loads the module and the optimizers at once.

        That is before ``on_load_checkpoint``, and before callbacks have restored the groups that they had added.
        """
        checkpoint: dict[str, Any] = torch.load(folder / REST, map_location="cpu", weights_only=weights_only)
        outline = checkpoint.pop(OUTLINE, None)
        if outline is None:
            raise ValueError(
                f"{folder} is not a folder of this strategy; make a file of it with "
                "lightning_dp.strategies.consolidate_checkpoint, and continue from that"
            )
        read = read_shards(folder, outline, self.lightning_module)
        return checkpoint | {key: value for key, value in read.items() if key in outline}

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self.lightning_module
        restore_groups(module.trainer)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_optimizer(optimizer, state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with loading_whole_values(self.lightning_module):  # `on_load_checkpoint` may have changed it
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
