"""What exists for one run of ``fit``: the head's rows, its channels and passes, and what they replace in the module."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.lightning_names import strategy_timeout
from lightning_dp._private.torch_names import backend_name
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.groups import create_groups, destroy_group, unbound_default_group
from lightning_dp.strategies.krizhevsky_hybrid import checkpoint as checkpoints
from lightning_dp.strategies.krizhevsky_hybrid import policy, sharded_checkpoint
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import State
from lightning_dp.strategies.krizhevsky_hybrid.gathering import GatherHead
from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.meeting import require_same_place
from lightning_dp.strategies.krizhevsky_hybrid.parameter_rows import ShardedParameters
from lightning_dp.strategies.krizhevsky_hybrid.schemes import Scheme
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies
from lightning_dp.strategies.krizhevsky_hybrid.takeover import Takeover, is_raised_here

if TYPE_CHECKING:
    from lightning_dp.strategies.krizhevsky_hybrid.strategy import KrizhevskyHybridStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """The user's arguments of `KrizhevskyHybridStrategy`, which explains them."""

    head: str
    scheme: Scheme
    variable_batch: bool
    evaluation: Literal["gathered", "sharded"]
    state_dict_type: Literal["full", "sharded"]


class Fitting(SharedByCopies):
    """Shards the head of ``module`` for one run of ``fit``, and makes it whole again. All ranks must construct it.

    A run ends with one of three methods: `fail` if set-up fails, `abandon` after an exception, otherwise `finish`.

    Args:
        options: the user's arguments.
        module: on the device where it was built, usually the CPU.
        strategy: has the device, precision plugin, optimizers, timeout and ``on_stage``.

    Raises:
        ValueError: the module, its head or the Trainer has something that does not work with a sharded head.
    """

    def __init__(self, options: Options, module: LightningModule, strategy: KrizhevskyHybridStrategy) -> None:
        self._options = options
        self._module = module
        self._strategy = strategy
        self._checked: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()  # sizes of their groups
        plugin = strategy.precision_plugin
        layers = policy.find_head(module, options.head)
        policy.check_module(module, module.trainer, layers, options.head, options.variable_batch)
        policy.check_precision(plugin, options.variable_batch)
        # Two groups, because features travel while the head exchanges activations, and the messages of one group must
        # start in the same order on all ranks.
        timeout = strategy_timeout(strategy)
        with unbound_default_group(None):
            groups = [dist.new_group(timeout=timeout) for _ in range(2)]
        host = _make_host_group(groups[0], strategy.root_device, timeout)
        hidden = Channel(groups[0], self._record_stage, policy.UNEQUAL_LOADERS)
        features = Channel(groups[1], self._record_stage, policy.UNEQUAL_LOADERS, host)
        self.channels = [features, hidden]
        # Parameters and checks travel in the features' group. If one rank gathers the head while another begins a step,
        # each receives a message that it does not expect, and raises at once. In two groups both would wait.
        control = Channel(features.group, hint=policy.UNEQUAL_LOADERS)
        self.head = ShardedHead(layers, hidden, options.head, control)
        policy.warn_of_single_rows(self.head)
        self._parameters = ShardedParameters(self.head)
        # If anything in here raises, what was done is undone, the last first, and the user's module is as it was. Where
        # all goes well, `pop_all` keeps the callbacks of ``stack`` for the end, and forgets those of ``undo_all``.
        with ExitStack() as undo_all, ExitStack() as stack:
            undo_all.callback(self._parameters.restore)
            stack.callback(self._destroy_groups)
            self._parameters.shard(strategy.root_device)
            passes = self._passes = HeadPasses(self.head, options.scheme, features)
            self.takeover = Takeover(module, passes, plugin, options.variable_batch, self._optimizers)
            stack.callback(self.takeover.undo)
            self._stack = stack.pop_all()
            undo_all.pop_all()

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent in training steps, by kind of message."""
        total: Counter[str] = Counter()
        for channel in self.channels:
            total.update(channel.bytes_sent)
        return dict(total)

    def succeed(self) -> None:
        """Complete set-up, and gather the head for what comes before the first step. All ranks must call it.

        Raises:
            ValueError: an optimizer cannot work on rows.
        """
        self._check_optimizers()
        # If set-up has failed on another rank, this call fails, while `fail` can still restore the module.
        self.head.control.all_gather("end of set-up", torch.zeros(1, device=self._strategy.root_device))
        self._parameters.keep()
        for optimizer in self._optimizers():
            checkpoints.shard_state(optimizer, self.head)
        self.takeover.remember_rows()
        if self._options.evaluation == "gathered":
            self.takeover.gather_head()
            callback = GatherHead(self.gather, self.gather_if_changed)
            self._stack.enter_context(callback.installed(self._module.trainer))

    def _meet(self) -> None:
        """Raise CallMismatchError if a rank is elsewhere, before others wait for it. All ranks must call it."""
        require_same_place(self._strategy.root_device, policy.UNEQUAL_LOADERS)

    def gather(self) -> None:
        """Gather the head, so that each rank can call it alone until the next training step. All ranks must call it."""
        self._meet()
        self.takeover.gather_head()

    def gather_if_changed(self) -> None:
        """Gather the head unless what was gathered is still the same on all ranks. All ranks must call it.

        At the start of a validation this comes after the hooks of all callbacks. A callback may have put averaged
        weights into the module. `GatherHead` may be missing: Lightning's tuner removes callbacks.
        """
        if self._options.evaluation != "gathered":
            return
        self._meet()
        is_changed = torch.tensor([float(not self.takeover.has_current_head)], device=self._strategy.root_device)
        if self.head.control.all_gather("is changed", is_changed).any():
            self.takeover.gather_head()

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Run a training step within the context, see `Takeover.training_step`."""
        self._check_optimizers()  # before head_step, which may update the head
        with self.takeover.training_step():
            yield

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Run backward of ``loss`` within the context, see `Takeover.backward`."""
        with self.takeover.backward(loss):
            yield
        self._check_optimizers()  # again, because on_after_backward may have changed them

    @contextmanager
    def validation_step(self) -> Iterator[None]:
        """Run a validation step within the context. If the head is never gathered, its calls are collective there."""
        with self.takeover.exchanging() if self._options.evaluation == "sharded" else nullcontext():
            yield

    def fail(self) -> None:
        """Restore the module after set-up has failed on this rank. No other rank is needed."""
        if self._parameters.restore():
            self._stack.close()
        else:
            self.abandon()

    def explain(self, error: BaseException) -> None:
        """Log the likely cause of an error about shapes that was not raised here: rows where the whole was expected."""
        if self.head.is_sharded and "size of tensor" in str(error) and not is_raised_here(error):
            log.warning(
                f"the error may come from the head {self._options.head!r}: during fit, rank "
                f"{self.head.channel.rank} holds only its rows of the parameters and optimizer states. To average "
                "weights with a whole copy (a mean teacher, torch's AveragedModel), let all ranks call "
                "trainer.strategy.gather_head(), and use module.state_dict(), which then has whole tensors"
            )

    def abandon(self) -> None:
        """Leave the rows in the head. After an exception the other ranks may be gone, and their rows with them."""
        log.warning(
            f"after an exception rank {self.head.channel.rank} holds only its rows of {self._options.head!r}. Build "
            "the module anew and load a checkpoint before you use it again"
        )
        self._stack.close()

    def finish(self) -> None:
        """Make the head and its optimizer states whole again on every rank, in host memory. All ranks must call it."""
        self._passes.checks.finish()
        if self._keeps_rows:
            log.warning(
                f"state_dict_type='sharded': rank {self.head.channel.rank} holds only its rows of "
                f"{self._options.head!r} after fit. To use the whole head, convert a checkpoint with "
                "lightning_dp.strategies.consolidate_checkpoint, and load it into a new module"
            )
        else:
            # The gathered values were copies. Free them first, because what follows is the peak of memory: each rank
            # ends with the whole weights and optimizer states.
            self.takeover.forget_gathered_head()
            for optimizer in self._optimizers():
                checkpoints.make_whole(optimizer, self.head)
            self._parameters.unshard()
        self._stack.close()

    def module_state(self, state_dict: Callable[[], State]) -> State:
        """Return the module's state for a checkpoint: whole on rank 0, or this rank's rows. All ranks must call it."""
        self._passes.checks.finish()
        self._meet()
        with self.takeover.state_dict_hooks.leaving_rows():
            state = state_dict()
        checkpoints.require_one_trunk(self._module, self.head)
        if self._keeps_rows:
            return state
        # A module may leave parameters out of its state_dict.
        whole = checkpoints.gather_parameters(self._module, self.head)
        return state | {name: value for name, value in whole.items() if name in state}

    def optimizer_state(self, optimizer: Optimizer, state: State) -> State:
        """Return an optimizer's state for a checkpoint, like `module_state`. All ranks must call it."""
        checkpoints.warn_of_other_shapes(optimizer, self.head)
        return state if self._keeps_rows else checkpoints.gather_optimizer_state(optimizer, state, self.head)

    def own_states(self, states: list[State]) -> list[State]:
        """Return the optimizers' states of a checkpoint, cut to this rank's rows."""
        both = zip(self._optimizers(), states, strict=False)  # Lightning, too, ignores states without an optimizer
        return [checkpoints.own_optimizer_state(optimizer, state, self.head) for optimizer, state in both]

    def warn_of_rows(self, checkpoint: State) -> None:
        """Warn of what ``checkpoint`` holds of rank 0 alone."""
        checkpoints.warn_of_rows(checkpoint, self._module, self.head)

    def writes(self, is_plain: bool) -> bool:
        """Return whether to save by `write`. Lightning's own way makes two more copies of a checkpoint in memory.

        Args:
            is_plain: whether the checkpoint is an ordinary local file to Lightning.

        Raises:
            ValueError: each rank must write its rows, and the checkpoint is not a plain local file.
        """
        if self._keeps_rows and not is_plain:
            raise ValueError(
                "state_dict_type='sharded' writes local files only; remove the checkpoint plugin and storage_options, "
                "or use state_dict_type='full'"
            )
        return is_plain

    def write(self, checkpoint: State, path: Path) -> None:
        """Write a checkpoint: a file by rank 0, or a folder by all ranks. All ranks must call it."""
        if self._keeps_rows:
            # `ModelCheckpoint` may put a metric into the name that differs between ranks. All write to rank 0's folder.
            path = self._strategy.broadcast(path)
            barrier = self._strategy.barrier
            sharded_checkpoint.save(checkpoint, path, self._module, self._optimizers(), self.head, barrier)
        elif self.head.channel.rank == 0:
            checkpoints.write_to_disk(checkpoint, path)

    def _optimizers(self) -> list[Optimizer]:
        return self._strategy.optimizers  # they do not exist before set-up ends

    def _check_optimizers(self) -> None:
        """Check those that are new, or have other parameters: callbacks add groups, and replace optimizers."""
        for optimizer in self._optimizers():
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            if self._checked.get(optimizer) != sizes:
                policy.check_optimizers([optimizer], self.head)
                self._checked[optimizer] = sizes

    def _record_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if self._strategy.on_stage is not None:
            self._strategy.on_stage(stage, start_s, end_s)

    @property
    def _keeps_rows(self) -> bool:
        return self._options.state_dict_type == "sharded"

    def _destroy_groups(self) -> None:
        for channel in self.channels:
            destroy_group(channel.host_group)
            dist.destroy_process_group(channel.group)


def _make_host_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a gloo group for numbers that the host needs, or None if ``group`` has one. All ranks must call it."""
    if device.type == "cpu" or backend_name(group, device) == "gloo":
        return None
    return create_groups([list(range(dist.get_world_size()))], dist.get_rank(), timeout, "gloo")
