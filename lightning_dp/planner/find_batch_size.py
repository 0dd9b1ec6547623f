"""`FindBatchSize`: a callback that tries batch sizes before training, under any strategy."""

from __future__ import annotations

import importlib
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_dp._lightning import FRAMEWORK, Callback, LightningModule, require_own_trainer
from lightning_dp._private.lightning_names import before_batch_transfer, wrap_in_ddp
from lightning_dp._private.torch_names import TorchDispatchMode, forget_used_parameters, release_reducer
from lightning_dp.layers.surgery import local_statistics
from lightning_dp.planner.convolutions.measure import measure_time_s, num_bytes, unless_out_of_memory
from lightning_dp.planner.convolutions.measured_plans import num_times, resized
from lightning_dp.planner.formulas import require_count
from lightning_dp.planner.probe import largest_of_ranks
from lightning_dp.trial_run import generators_of, unchanged, unchanged_parameters

log = logging.getLogger(__name__)

SIZES = tuple(2**power for power in range(3, 13))


class FindBatchSize(Callback):
    """Try batch sizes when a fit starts, and set the fastest one that fits on all ranks.

    Lightning's ``BatchSizeFinder`` refuses distributed strategies. This one runs ``training_step`` and backward on each
    rank alone, on the module within the strategy's wrapper. No collective is in a trial, so a rank that runs out of
    memory cannot leave another waiting; the ranks agree after each trial, see `try_batch_sizes`. ``self.all_gather``
    returns this rank's tensor once for each rank, batch norm takes this rank's statistics, and any other collective of
    the step raises ValueError. What the optimizer will hold is reserved meanwhile.

    The module is as training will have it: layers that ``setup`` or ``configure_model`` made, the Trainer's precision,
    and batches by the hooks of Lightning's batch transfer. In manual optimization the optimizers and schedules do not
    step. The first batch of the data module is used for all trials, its rows repeated. Afterwards parameters, gradients
    and what `trial_run.unchanged` names are as before.

    Checkpoints hold the result. A fit that continues from one takes its size: another search may find another size, and
    the run would end with other weights.

    Args:
        batch_sizes: per rank, to be tried from the smallest on. Those above the images that a rank has are left out.
        optimizer_copies: numbers that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.
        is_global: whether the data module's ``batch_size`` is that of all ranks together, as in `lightning_dp.data`.
        repeats: steps that are timed for each size.

    Attributes:
        trials: the result, None before it is there.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int] = SIZES,
        optimizer_copies: int = 2,
        is_global: bool = False,
        repeats: int = 3,
    ) -> None:
        for size in batch_sizes:
            require_count("batch_sizes", size)
        require_count("optimizer_copies", optimizer_copies, least=0)
        require_count("repeats", repeats)
        self.trials: BatchSizeTrials | None = None
        self._batch_sizes = tuple(batch_sizes)
        self._loaded_sizes: list[int] = []  # before the size was set; empty if it has not changed
        self._repeats = repeats
        self._optimizer_copies = optimizer_copies
        self._is_global = is_global

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that there is a batch size to set.

        Raises:
            ValueError: the data module has no ``batch_size``, or the strategy shards the model's head, or its
                parameters over several ranks.
        """
        require_own_trainer(self, trainer)
        if stage != "fit":
            return
        self.trials, self._loaded_sizes = None, []  # of an earlier fit
        data = trainer.datamodule
        if not isinstance(getattr(data, "batch_size", None), int):
            raise ValueError(
                f"FindBatchSize sets batch_size of the data module, and {type(data).__name__} has none that is an "
                "integer; pass fit(datamodule=...) with such an attribute, which its train_dataloader uses"
            )
        strategy = trainer.strategy
        if hasattr(strategy, "gather_head") or getattr(strategy, "num_parameter_shards", 1) > 1:
            raise ValueError(
                f"FindBatchSize cannot try steps under {type(strategy).__name__}, which exchange features or shards of "
                "parameters with the other ranks; find the size with strategy='ddp', or set batch_size yourself"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the result, for a checkpoint."""
        return {} if self.trials is None else asdict(self.trials)

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Set the batch size of the run that continues.

        Lightning calls this before `on_fit_start`, which then finds nothing, or after it if the strategy loads
        checkpoints late. No loader has been made by then, so this size replaces the one that was found.
        """
        state = checkpoint["callbacks"].get(self.state_key)
        if state and trainer.state.fn == "fit":
            self.trials, self._loaded_sizes = BatchSizeTrials(**state), []
            self._set_batch_size(trainer, "as in the checkpoint")

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Find the batch size, before the loaders of training are made, unless a checkpoint has set it.

        Raises:
            ValueError: no size fits, the step contains a collective or returns no loss, or the loaders exist already.
        """
        if self.trials is not None:
            return
        _require_no_loader(trainer)
        device = trainer.strategy.root_device
        # A step may set learning rates, or call the optimizer within Lightning's.
        with unchanged(trainer.optimizers), alone(pl_module, trainer.world_size), logging_nowhere(trainer):
            step = _Step(trainer, pl_module, self._is_global)
            # A batch of more images than there are would never be trained with, and none at all with `drop_last`.
            (most,) = largest_of_ranks([-step.largest_size], device)
            sizes = [size for size in self._batch_sizes if size <= -most] or sorted(self._batch_sizes)[:1]
            if any(map(is_lazy, pl_module.parameters())):
                step(min(sizes))  # lazy layers have no sizes before their first forward
            trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
            optimizer_bytes = self._optimizer_copies * sum(map(num_bytes, trained))
            reserved = torch.empty(optimizer_bytes, dtype=torch.uint8, device=device)
            self.trials = try_batch_sizes(step, sizes, device, repeats=self._repeats)
            self._loaded_sizes = [] if step.present_size == self.trials.batch_size else step.loaded_sizes
            del step, reserved  # the step holds the batch
        _require_no_loader(trainer)
        _forget_gradients(trainer.strategy)
        self._set_batch_size(trainer, f"the fastest\n{self.trials.table()}")

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Check that training has batches of the size that was found.

        Raises:
            ValueError: its loader was made with the size of before.
        """
        loaders = importlib.import_module(f"{FRAMEWORK}.utilities").CombinedLoader(trainer.train_dataloader).flattened
        if self._loaded_sizes and self._loaded_sizes == _sizes_of(loaders):
            raise ValueError(
                f"FindBatchSize has set batch_size={trainer.datamodule.batch_size}, and the loader has batches of "
                f"{self._loaded_sizes[0]}, as before; make the loader in train_dataloader, with this attribute"
            )

    def _set_batch_size(self, trainer: Any, why: str) -> None:
        assert self.trials is not None
        data = trainer.datamodule
        before = data.batch_size
        data.batch_size = self.trials.batch_size * (trainer.world_size if self._is_global else 1)
        # The loader may read it there, and checkpoints hold it. Lightning refuses two that differ.
        for hparams in (data.hparams, trainer.lightning_module.hparams):
            if hparams.get("batch_size") != before:
                continue
            is_plain = isinstance(hparams, dict)  # else it is a configuration of OmegaConf, which may be read-only
            with nullcontext() if is_plain else importlib.import_module("omegaconf").read_write(hparams):
                hparams["batch_size"] = data.batch_size
        if trainer.is_global_zero:
            log.info(f"FindBatchSize: {self.trials.batch_size} images per rank, {why}")


def _forget_gradients(strategy: Any) -> None:
    """Let DDP forget the gradients of the trials, which its hooks on the parameters have seen."""
    model = strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    if not model.static_graph:
        forget_used_parameters(model)  # those that the first step does not use may be among them
        return
    # It has counted them, and would wait in each step for as many: no gradient would be averaged.
    comm_hooks = release_reducer(model)
    strategy.model = wrap_in_ddp(strategy, model.module)
    for hook, state in comm_hooks:
        strategy.model.register_comm_hook(state, hook)


def _require_no_loader(trainer: Any) -> None:
    if trainer.train_dataloader is not None:
        raise ValueError(
            "FindBatchSize comes too late: configure_optimizers or training_step has asked for "
            "trainer.estimated_stepping_batches, or LearningRateFinder has trained, which Lightning puts first; this "
            "made the loader for the present batch size, and perhaps a schedule; give the number of steps yourself, or "
            "find the size in a run of its own"
        )


def _sizes_of(loaders: Sequence[Any]) -> list[int]:
    sizes = (getattr(loader, "batch_size", None) for loader in loaders)
    return [size for size in sizes if size is not None]


class _Step:
    """A training step on the rows of the first batch, forward and backward.

    Attributes:
        largest_size: of which this rank has a whole batch from each loader; infinite if that is not known.
        loaded_sizes: of the loaders' batches; without those that do not tell.
        present_size: what ``batch_size`` is for this rank.
    """

    def __init__(self, trainer: Any, module: LightningModule, is_global: bool) -> None:
        self._trainer, self._module = trainer, module
        combined = importlib.import_module(f"{FRAMEWORK}.utilities").CombinedLoader
        data = trainer.datamodule
        kept = vars(data).copy()
        loaders = combined(data.train_dataloader(), "max_size_cycle")
        generators = [each for loader in loaders.flattened for each in generators_of(loader).values()]
        with unchanged(generators):  # training draws, too
            batch, _, _ = next(iter(loaders))
        vars(data).clear()
        vars(data).update(kept)  # a loader may be seeded by the number of those that were made
        self.loaded_sizes = _sizes_of(loaders.flattened)
        self.present_size = data.batch_size // (trainer.world_size if is_global else 1)
        self.largest_size = min(map(self._largest_size, loaders.flattened))
        self._is_checked = trainer.world_size == 1
        # What follows is as the training loop does it.
        takes = importlib.import_module(f"{FRAMEWORK}.utilities.signature_utils").is_param_in_hook_signature
        self._takes_iterator = takes(module.training_step, "dataloader_iter", explicit=True)
        self._takes_index = takes(module.training_step, "batch_idx", min_args=2)
        if not self._takes_iterator:  # else the step itself moves what it takes
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(before_batch_transfer(module, batch))
        self._batch = batch

    def _largest_size(self, loader: Any) -> float:
        dataset, loaded = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
        if not isinstance(dataset, Sized):
            return math.inf
        return len(dataset) // self._trainer.world_size // num_times(loaded or 0, self.present_size)

    def __call__(self, batch_size: int) -> None:
        self._module.zero_grad()
        try:
            # Looked for once, in the first call, which is not timed: it takes time for each operator.
            with nullcontext() if self._is_checked else _RefuseCollectives():
                self._run(batch_size)
        except Exception as error:
            error.add_note(
                f"FindBatchSize has run this training_step with each tensor of the first batch repeated or cut to "
                f"{batch_size} rows, which packed sequences and lists of single images do not have. If training works "
                "without FindBatchSize, set batch_size yourself"
            )
            raise
        self._is_checked = True

    def _run(self, batch_size: int) -> None:
        module = self._module
        batch = resized(self._batch, batch_size, self.present_size)
        with self._trainer.precision_plugin.train_step_context():  # autocast, if training will have it
            output = module.training_step(*self._arguments(batch))
        if module.automatic_optimization:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise ValueError(
                    "training_step returned no loss for the first batch, so FindBatchSize has no backward to try; "
                    "return a loss for it, or set batch_size yourself"
                )
            loss.backward()

    def _arguments(self, batch: Any) -> tuple[Any, ...]:
        if self._takes_iterator:  # of batches with their numbers and that of the loader; a step may take several
            return (repeat((batch, 0, 0)),)
        return (batch, 0) if self._takes_index else (batch,)


class _RefuseCollectives(TorchDispatchMode):
    """Raises ValueError in place of a collective: a rank that is out of memory would leave the others waiting in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise ValueError(
                f"the training step calls {func}, a message to other ranks, and FindBatchSize runs it on each rank "
                "alone; use self.all_gather, for which a trial needs no other rank, or set batch_size yourself"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def alone(module: LightningModule, world_size: int = 1) -> Iterator[None]:
    """Let ``training_step`` run outside of a training: nothing is logged, nothing is sent, nothing stays changed."""

    def repeated(data: Any, *args: Any, **kwargs: Any) -> Any:
        return apply_to_collection(data, Tensor, lambda x: x.unsqueeze(0).repeat(world_size, *(1 for _ in x.shape)))

    stand_ins: dict[str, Any] = {
        "log": lambda *args, **kwargs: None,
        "log_dict": lambda *args, **kwargs: None,
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "optimizers": _idle(module.optimizers),
        "lr_schedulers": _idle(module.lr_schedulers),
    }
    if world_size > 1:
        stand_ins["all_gather"] = repeated
    with unchanged(module), unchanged_parameters(module), torch.enable_grad(), ExitStack() as stack:
        stack.enter_context(local_statistics(module))  # other ranks may be out of memory
        for name, stand_in in stand_ins.items():
            setattr(module, name, stand_in)
            stack.callback(delattr, module, name)
        for parameter in module.parameters():  # toggle_optimizer leaves others after an error
            stack.callback(setattr, parameter, "requires_grad", parameter.requires_grad)
        yield


@contextmanager
def logging_nowhere(trainer: Any) -> Iterator[None]:
    """Let what a training step writes to ``self.logger`` go nowhere, as in Lightning's own search for a size."""
    loggers = trainer.loggers
    trainer.loggers = [_Mute(logger) for logger in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _Mute:
    """A logger that writes nothing. Its folders are those of the other."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.experiment = importlib.import_module(f"{FRAMEWORK}.loggers.logger").DummyLogger().experiment

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._logger, name)
        return (lambda *args, **kwargs: None) if name.startswith("log_") and callable(found) else found


class _Idle:
    """An optimizer or a schedule that does not step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run the closure, if it is one."""
        return closure() if callable(closure) else None


def _idle(getter: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``getter`` returns, one or several or None, as `_Idle`."""

    def get(*args: Any, **kwargs: Any) -> Any:
        found = getter(*args, **kwargs)
        if found is None:
            return None
        return [_Idle(one) for one in found] if isinstance(found, list) else _Idle(found)

    return get


# The fastest batch size that fits on every rank, by trial, and without a hang if it does not fit on one of them.

FITS, OUT_OF_MEMORY, FAILED = 0, 1, 2


@dataclass(frozen=True)
class BatchSizeTrials:
    """What was tried.

    Attributes:
        batch_size: the fastest size.
        images_per_s: of each size that fits, per rank, on the slowest rank.
        too_large: the smallest size that did not fit on some rank, None if all did.
    """

    batch_size: int
    images_per_s: dict[int, float]
    too_large: int | None

    def table(self) -> str:
        """Return the trials as a Markdown table."""
        lines = ["| batch size per rank | images/s per rank |", "|---|---|"]
        lines += [f"| {size} | {rate:.1f} |" for size, rate in self.images_per_s.items()]
        return "\n".join([*lines, *([f"| {self.too_large} | does not fit |"] if self.too_large else [])])


def try_batch_sizes(
    step: Callable[[int], Any],
    batch_sizes: Sequence[int],
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    repeats: int = 3,
) -> BatchSizeTrials:
    """Run a step at each batch size, from the smallest, until one does not fit; return the fastest.

    Every rank of ``group`` must call it. After each size the ranks tell each other whether it fitted and how long it
    took: it fits if it fits on all of them, and takes as long as on the slowest. So all ranks return the same, and
    none waits for one that is out of memory.

    Args:
        step: called with a batch size per rank. It must contain no collective: a rank that is out of memory in the
            middle would leave the others waiting in it.
        batch_sizes: the same on all ranks.
        device: that the step works on.
        group: None: the default group, or this process alone if there is none.
        repeats: steps that are timed for each size.

    Raises:
        ValueError: not even the smallest size fits, the ranks give different sizes, or a size is less than 1.
        RuntimeError: the step raised another error on another rank. The rank itself raises its own.
    """
    sizes = sorted(set(batch_sizes))
    for size in sizes:
        require_count("batch_sizes", size)
    if not sizes:
        raise ValueError("batch_sizes is empty; give the sizes to try, for example (32, 64, 128)")
    device = torch.device(device)
    _require_same(sizes, device, group)
    rates: dict[int, float] = {}
    too_large = None
    for size in sizes:
        status, time_s, error = _try(step, size, device, repeats)
        worst, slowest_s = largest_of_ranks([float(status), time_s], device, group)
        if error is not None:
            raise error
        if worst == FAILED:
            raise RuntimeError(f"the step with batch size {size} raised an error on another rank; its log has it")
        if worst == OUT_OF_MEMORY:
            too_large = size
            break
        rates[size] = size / slowest_s
    if not rates:
        raise ValueError(
            f"batch_sizes={sizes}: not even {sizes[0]} images per rank fit into memory; add smaller sizes, or keep "
            "fewer activations (Memonger)"
        )
    return BatchSizeTrials(max(rates, key=lambda size: rates[size]), rates, too_large)


def _try(
    step: Callable[[int], Any], size: int, device: torch.device, repeats: int
) -> tuple[int, float, Exception | None]:
    """Run the step, and return how it went, its time, and an error that is not about memory."""
    try:
        time_s = unless_out_of_memory(lambda: measure_time_s(lambda: step(size), device, repeats))
    except Exception as error:
        return FAILED, 0.0, error
    return (OUT_OF_MEMORY, 0.0, None) if time_s is None else (FITS, time_s, None)


def _require_same(sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None) -> None:
    # Ranks with different lists would make different numbers of collectives, and wait for each other.
    checksum = float(zlib.crc32(str(list(sizes)).encode()))
    highest, lowest = largest_of_ranks([checksum, -checksum], device, group)
    if highest != -lowest:
        raise ValueError(f"batch_sizes={list(sizes)} differ between the ranks; give all ranks the same")
