"""`Diagnose`: a callback that measures some steps of any training, and says where they go and what would help."""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_dp._lightning import FRAMEWORK, LightningModule
from lightning_dp._private.lightning_names import time_stop_checks
from lightning_dp._private.torch_names import BatchNorm, is_compiled_function, is_in_backward
from lightning_dp.callbacks.timers import StepTimer
from lightning_dp.collectives.groups import group_size
from lightning_dp.collectives.small_all_gather import waited_s
from lightning_dp.layers import GlobalBatchNorm
from lightning_dp.planner.convolutions.measure import num_bytes, tensors_of
from lightning_dp.planner.formulas import require_count, require_positive
from lightning_dp.planner.network import Network
from lightning_dp.planner.probe import probe_compressors, probe_network
from lightning_dp.planner.report import WITH_PLAN, Diagnosis, make_diagnosis
from lightning_dp.planner.simulation import METHODS
from lightning_dp.planner.workload import LayerProfile, Recomputation, StepProfile
from lightning_dp.recompute import Profiler, RecomputeHandle, make_plan
from lightning_dp.recompute.apply import require_recomputable
from lightning_dp.recompute.policies import Sublinear
from lightning_dp.recompute.profile import synchronize
from lightning_dp.recompute.values import tensors_in

log = logging.getLogger(__name__)

# Batches before the measured ones: the first set libraries and connections up, the last of them times the layers.
WARM_UP = 3


class Diagnose(StepTimer):
    """Measure some training steps, then say where a step goes and how long it would take with each method.

    It also logs what `StepTimer` logs, so use one of the two. Training goes on afterwards as before, unless ``stop``.
    Rank 0 logs the result; it is ``diagnosis`` on all ranks, each from its own clock.

    A step goes from one update to the next: with ``accumulate_grad_batches`` it has several batches. A diagnosis that
    cannot be made is a warning, and training goes on.

    On a GPU the parts of a step are those of the host's clock. The callback waits for the device at each of them, in
    the measured steps only, which lengthens these steps a little.

    Args:
        num_steps: steps that are measured, after `WARM_UP` batches.
        max_s: stop measuring earlier after so many seconds.
        network: the links of the job that is asked about. None: measured between the ranks of this job.
        world_size: number of ranks to predict for. None: those of this job.
        folder: where rank 0 writes ``plan.md``, ``plan.yaml`` and ``plan.png``. None: nothing is written.
        stop: end training when the steps are measured.
        method: the one that ``plan.yaml`` is for, also one that changes what is computed. None: the fastest that
            computes what DDP computes.
        memonger: plan recomputation from one of the first steps, for the rows of `Memonger`. Takes up to 12 s (SciPy).
            The error of a step that cannot be recorded says so. A model with compiled parts is not recorded.

    Attributes:
        diagnosis: the result, None before it is there.
        why_none: a reason for which training ended without one.
    """

    def __init__(
        self,
        num_steps: int = 20,
        max_s: float = 40.0,
        network: Network | None = None,
        world_size: int | None = None,
        folder: str | Path | None = None,
        stop: bool = False,
        method: str | None = None,
        memonger: bool = True,
    ) -> None:
        super().__init__()
        require_count("num_steps", num_steps)
        require_positive("max_s", max_s)
        if world_size is not None:
            require_count("world_size", world_size)
            if network is not None:
                network.num_nodes(world_size)  # raises if the last node would not be full
        if method is not None and method not in WITH_PLAN:
            what = "no method of the recipes" if method in METHODS else "unknown"
            raise ValueError(f"method={method!r} is {what}: no plan can be for it; use one of {', '.join(WITH_PLAN)}")
        self.diagnosis: Diagnosis | None = None
        self._method = method
        self._memonger = memonger
        self._num_steps = num_steps
        self._max_s = max_s
        self._stop = stop
        self._network = network
        self._world_size = world_size
        self._folder = None if folder is None else Path(folder)
        self._start()

    @override
    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check the callback's package, and that the strategy leaves the model whole.

        Raises:
            ValueError: the strategy shards the model's head, or is FSDP with flat shards.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            require_whole_model(trainer.strategy)

    def _start(self) -> None:
        """Forget what an earlier fit has measured."""
        self.why_none = ""
        self._is_done = False
        self._writes_plan = True
        self._start_s = time.perf_counter()
        self._num_batches = 0
        self._wanted = self._num_steps
        self._steps: list[_Step] = []
        self._step = _Step(0)
        self._num_updates = 0
        self._phase_begin_s = 0.0
        self._waited_s = waited_s()  # when the last batch ended
        self._step_exposed_s = 0.0
        self._stop_timing: Callable[[], None] | None = None
        self._layers = LayerTimes()
        self._recomputation = RecomputeTimes()
        self._batch_size = 1

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin to count steps. A second fit is measured by itself."""
        super().on_train_start(trainer, pl_module)
        self.diagnosis = None
        self._start()
        self._num_updates = trainer.global_step
        self._stop_timing = time_stop_checks(trainer, self._add_wait)

    def _add_wait(self, seconds: float) -> None:
        """Take the wait before a batch out of its loading, in which it falls."""
        self._step.seconds["wait_s"] += seconds
        self._step.seconds["load_s"] -= seconds

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restart the clock: what ends an epoch is not part of a step."""
        super().on_train_epoch_start(trainer, pl_module)
        self._waited_s = waited_s()

    @override
    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restart the clock: nor is a validation."""
        super().on_validation_end(trainer, pl_module)
        self._waited_s = waited_s()

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note when the batch is there."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._is_done:
            return
        # AdaptiveGlobalBatchNorm(max_batch_size=...) waits for the other ranks when a batch starts. If it comes before
        # this callback that is no loading, but part of the forward, as it is if it comes after it.
        early_s = waited_s() - self._waited_s
        self._step.seconds["load_s"] += self._begin_s - self._last_end_s - early_s
        self._step.seconds["forward_s"] += early_s
        self._phase_begin_s = self._begin_s
        # The first tensor: another one may be longer, such as the boxes of all images. The last batch may be smaller.
        self._batch_size = max(self._batch_size, next((len(t) for t in tensors_of(batch) if t.dim()), 1))
        if self._num_batches == WARM_UP - 1:
            self._layers.start(pl_module)
        # Not the step in which layers are timed: recording takes time of its own. The first of them sets caches up.
        if self._memonger and self._num_batches < WARM_UP - 1:
            self._recomputation.start(pl_module)

    @override
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Note the end of a forward."""
        self._end_phase("forward_s", pl_module)
        self._recomputation.begin_backward()

    @override
    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the end of a backward."""
        self._end_phase("backward_s", pl_module)
        self._step.num_backwards += 1
        self._recomputation.end_backward()

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's times, and make the diagnosis after the last one."""
        if batch is None:  # Lightning skips it, without `on_train_batch_start`: the next step has waited longer
            return
        self._end_phase("update_s", pl_module)
        # The base class asks for it as well, and DDP reports each reduction once: see `_exposed_s`.
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._is_done:
            return
        self._layers.stop()
        self._recomputation.stop()
        self._step.seconds["exposed_communication_s"] += self._step_exposed_s
        self._step.seconds["batch_norm_s"] += waited_s() - self._waited_s
        self._step.num_batches += 1
        self._num_batches += 1
        if self._num_batches == WARM_UP:
            self._wanted = self._affordable_steps(trainer)
        if trainer.global_step != self._num_updates:  # else the gradients of further batches are added
            self._num_updates = trainer.global_step
            if self._step.first_batch >= WARM_UP and self._step.num_backwards:
                self._steps.append(self._step)
            self._step = _Step(self._num_batches)
        if len(self._steps) >= self._wanted:
            self._finish(trainer, pl_module)
        self._last_end_s = time.perf_counter()  # what this callback does is no loading
        self._waited_s = waited_s()

    @override
    def _times_every_step(self, device: torch.device) -> bool:
        # Also on a GPU, while it measures: the median over steps of which DDP times less than a half would be 0.
        return not self._is_done or super()._times_every_step(device)

    @override
    def _exposed_s(self, trainer: Any) -> float | None:
        exposed_s = super()._exposed_s(trainer)
        self._step_exposed_s = exposed_s or 0.0
        return exposed_s

    def _end_phase(self, name: str, pl_module: LightningModule) -> None:
        if not self._is_done:
            synchronize(pl_module.device)
            now_s = time.perf_counter()
            self._step.seconds[name] += now_s - self._phase_begin_s
            self._phase_begin_s = now_s

    def _affordable_steps(self, trainer: Any) -> int:
        """Return how many steps to measure: the same number on all ranks, because the probe has collectives.

        The ranks agree once, in advance. A collective in each step would itself wait for the slowest rank.
        """
        elapsed_s = time.perf_counter() - self._start_s
        left = (self._max_s - elapsed_s) / (elapsed_s / WARM_UP * trainer.accumulate_grad_batches)
        num_steps = float(max(1, min(self._num_steps, int(left))))
        steps = torch.tensor(num_steps, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(steps, reduce_op="min"))

    def _finish(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the diagnosis. What goes wrong in it is a warning: training is worth more."""
        self._is_done = True
        # What layered SGD and layered FSDP send behind the next forward would hold up the messages of the probe.
        getattr(trainer.strategy, "finish_update", lambda: None)()
        network = self._network
        if network is None and trainer.world_size > 1:
            network = probe_network(_host_or_gpu(pl_module), ranks_per_node=trainer.world_size // trainer.num_nodes)
        cores_per_rank = _cores_per_rank(trainer)
        try:
            profile = self._profile(trainer, pl_module, cores_per_rank, network)
            self.diagnosis = self._diagnose(profile, network)
            if trainer.is_global_zero:
                log.info(f"{self.diagnosis}")
                self._write(self.diagnosis)
        except Exception as error:
            self.why_none = f"the diagnosis failed: {type(error).__name__}: {error}"
            log.warning(f"Diagnose: {self.why_none}; training goes on", exc_info=True)
        if self._stop:
            trainer.should_stop = True

    def _diagnose(self, profile: StepProfile, network: Network | None) -> Diagnosis:
        """Return the diagnosis, with a plan for the method that was asked for if the job can use it."""
        is_probed = self._network is None
        try:
            return make_diagnosis(profile, network, self._world_size, self._method, is_probed)
        except ValueError as error:  # the method needs a head, several nodes, or batch norm layers
            if self._method is None:
                raise
            log.warning(f"Diagnose: no plan is written: {error}")
            self._writes_plan = False
            return make_diagnosis(profile, network, self._world_size, None, is_probed)

    def _profile(
        self, trainer: Any, pl_module: LightningModule, cores_per_rank: float, network: Network | None
    ) -> StepProfile:
        """Return the medians over the measured steps, and the layers."""
        # The last step of an epoch may have fewer batches than the others.
        num_batches = max(step.num_batches for step in self._steps)
        steps = [step.seconds for step in self._steps if step.num_batches == num_batches]
        parts = {name: median(step[name] for step in steps) for name in PARTS}
        step_s = median(sum(step[name] for name in PHASES) for step in steps)
        # DDP waits for gradients in backward. Strategies that postpone the update wait in the next forward.
        phase = "forward_s" if getattr(trainer.strategy, "exposed_communication_s", None) else "backward_s"
        parts[phase] = max(0.0, parts[phase] - parts["exposed_communication_s"])
        for name in ("forward_s", "backward_s"):
            parts[name] = max(0.0, parts[name] - parts["batch_norm_s"] / 2)
        # A rank that has its gradients early waits for the others before the next batch. The message precedes each.
        wait_s = parts.pop("wait_s")
        message_s = 0.0 if network is None else num_batches * math.log2(trainer.world_size) * network.inter.latency_s
        parts["load_s"] += min(wait_s, message_s)
        parts["exposed_communication_s"] += max(0.0, wait_s - message_s)
        return StepProfile(
            strategy=type(trainer.strategy).__name__,
            batch_size=self._batch_size,
            world_size=trainer.world_size,
            num_steps=len(steps),
            step_s=step_s,
            num_batch_norms=sum(
                isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
                for module in pl_module.modules()
            ),
            layers=self._layers.profiles(),
            frozen_part=self._layers.frozen_part(),
            recomputation=self._recomputation.plan(parts["forward_s"] / num_batches),
            why_no_recomputation=self._recomputation.why_not,
            accumulate=num_batches,
            num_workers=getattr(trainer.train_dataloader, "num_workers", None),
            cores_per_rank=cores_per_rank,
            codec_s=self._codec_s(trainer, pl_module),
            statistics_ranks=_statistics_ranks(pl_module),
            unmeasured=self._unmeasured(trainer, pl_module),
            **parts,
        )

    def _unmeasured(self, trainer: Any, pl_module: LightningModule) -> tuple[str, ...]:
        """Return the waits for other ranks that count as compute."""
        if trainer.world_size == 1:
            return ()
        found = []
        if self._exposed_s(trainer) is None:
            found.append(f"the waits of {type(trainer.strategy).__name__} for messages")
        elif getattr(trainer.strategy, "num_parameter_shards", 1) > 1:
            found.append("the waits for parameters that are gathered within a group")
        if any(isinstance(module, nn.SyncBatchNorm) for module in pl_module.modules()):
            found.append("the waits of SyncBatchNorm for statistics (AdaptiveGlobalBatchNorm's are measured)")
        return tuple(found)

    def _codec_s(self, trainer: Any, pl_module: LightningModule) -> dict[str, float]:
        """Return the times of compressors, if rows of theirs will be simulated. All ranks measure at the same time."""
        if (self._world_size or trainer.world_size) == 1:
            return {}
        shapes = [shape for layer in self._layers.profiles() for shape in layer.shapes]
        return probe_compressors(shapes, device=_host_or_gpu(pl_module) if trainer.world_size > 1 else None)

    def _write(self, diagnosis: Diagnosis) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_plan(self._folder)  # not each diagnosis has a plan and a plot
        (self._folder / "plan.md").write_text(f"{diagnosis}\n")
        try:
            if self._writes_plan:
                diagnosis.save(self._folder / "plan.yaml")
        except ValueError as error:
            log.warning(f"Diagnose: no plan is written: {error}")
        if diagnosis.network is None:
            return
        try:
            diagnosis.plot(self._folder / "plan.png")
        except ModuleNotFoundError:
            log.info("Diagnose: no plot, because matplotlib is not installed: pip install matplotlib")

    @override
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Diagnose a training that ended early, from the steps that there were."""
        self._stop_recording()
        if self._is_done:
            return
        if self._steps:
            self._finish(trainer, pl_module)
            return
        self.why_none = (
            f"nothing is measured in {self._num_batches} batches: the first {WARM_UP} do not count, and a step has a "
            "backward and an update that Lightning sees (manual_backward, self.optimizers()); train for longer"
        )
        if trainer.is_global_zero:
            log.warning(f"Diagnose: {self.why_none}")

    @override
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks. Lightning does not call `on_train_end` after an exception."""
        self._stop_recording()

    def _stop_recording(self) -> None:
        if self._stop_timing is not None:
            self._stop_timing()
            self._stop_timing = None
        self._layers.stop()
        self._recomputation.stop()


def remove_plan(folder: Path) -> None:
    """Remove the files of an earlier plan, which would be taken for those of the next one."""
    for name in ("plan.md", "plan.yaml", "plan.png"):
        (folder / name).unlink(missing_ok=True)


def _statistics_ranks(module: nn.Module) -> int | None:
    """Return how many ranks share batch norm's statistics, None for all of them, or if no layer is global."""
    sizes = [group_size(layer.group) for layer in module.modules() if isinstance(layer, GlobalBatchNorm)]
    return max(sizes) if sizes and max(sizes) < group_size(None) else None


def _host_or_gpu(module: LightningModule) -> torch.device | str:
    """Return where messages between the ranks are."""
    return module.device if module.device.type == "cuda" else "cpu"


def _cores_per_rank(trainer: Any) -> float:
    """Return the processor cores of a node over its ranks. All ranks must call it.

    The ranks may share the cores, or be bound to some each, as SLURM does with ``--cpus-per-task``.
    """
    cores = [os.sched_getaffinity(0)]
    per_node = trainer.world_size // trainer.num_nodes
    if trainer.world_size > 1:
        every: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(every, cores[0])
        first = trainer.global_rank // per_node * per_node
        cores = every[first : first + per_node]
    return len(set().union(*cores)) / per_node


def require_whole_model(strategy: Any) -> None:
    """Raise ValueError for a strategy that shards what is measured: the layers would be those of one rank's part."""
    if hasattr(strategy, "gather_head"):
        raise ValueError(
            f"Diagnose cannot measure the layers of a head that {type(strategy).__name__} shards; measure with "
            "strategy='ddp' (in a recipe strategy=ddp), whose table has the rows of the hybrid, too"
        )
    if isinstance(strategy, importlib.import_module(f"{FRAMEWORK}.strategies").FSDPStrategy):
        raise ValueError(
            f"Diagnose cannot measure the gradients of layers that {type(strategy).__name__} cuts into flat shards; "
            "measure with strategy='ddp', or with LayeredFSDPStrategy or ModelParallelStrategy (FSDP2)"
        )


# `wait_s` is that for slower ranks, before a batch.
PHASES = ("load_s", "wait_s", "forward_s", "backward_s", "update_s")
PARTS = (*PHASES, "exposed_communication_s", "batch_norm_s")


class _Step:
    """The parts of a step so far, added up over its batches."""

    def __init__(self, first_batch: int) -> None:
        self.first_batch = first_batch
        self.num_batches = 0
        self.num_backwards = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)


# The layers: how long the forward of each takes in one step, and which gradients are its own.

NOT_CALLED = "parameters of no called module"


class LayerTimes:
    """Times the modules within a model, by hooks, while they are in place.

    On a GPU each hook waits for the device, so that times are those of kernels; the step as a whole is slower then.
    """

    def __init__(self) -> None:
        self._model = nn.Module()
        self._hooks = ExitStack()
        self._running: list[_Call] = []
        self._calls: dict[int, _Call] = {}  # by module, as the forward meets them
        self._last_s = 0.0
        self._total_s = 0.0

    @override
    def __reduce__(self) -> tuple[type[LayerTimes], tuple[()]]:
        # A training step may copy or pickle a part of the model. Its hooks must not take the whole model along.
        return type(self), ()

    def start(self, model: nn.Module) -> None:
        """Put the hooks in place."""
        self._model = model
        for name, module in model.named_modules():
            # Some strategies call the model for the whole step, others do not. A scripted part takes no hooks: its
            # parameters are those of the module around it.
            if module is not model and not isinstance(module, torch.jit.ScriptModule):
                enter = partial(self._enter, name)
                self._hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks.enter_context(module.register_forward_hook(self._leave))

    def stop(self) -> None:
        """Take the hooks off. A second call does nothing."""
        self._hooks.close()

    def profiles(self) -> tuple[LayerProfile, ...]:
        """Return the layers with trainable parameters, in the order in which they were first called.

        A parameter counts once: where the forward meets it first, because there its gradient becomes complete. A
        module that was not called leaves its parameters to the one around it, which uses them itself: attention does
        so with its ``out_proj``. Parameters without any such module come first, as if their gradients were the last.
        """
        counted: set[int] = set()
        layers = []
        for call in self._calls.values():
            own = [parameter for parameter in self._parameters_of(call.module) if parameter.requires_grad]
            if own:
                layers.append(call.profile([parameter for parameter in own if id(parameter) not in counted]))
                counted.update(map(id, own))
        rest = [p for p in self._model.parameters() if p.requires_grad and id(p) not in counted]
        if rest:
            layers.insert(0, _Call(NOT_CALLED, self._model).profile(rest))
        return tuple(layers)

    def frozen_part(self) -> float:
        """Return which part of the forward was over when it came to the first layer of `profiles`."""
        first = next((layer.name for layer in self.profiles()), NOT_CALLED)
        begin_s = next((call.begin_s for call in self._calls.values() if call.name == first), 0.0)
        return begin_s / self._total_s if self._total_s else 0.0

    def _parameters_of(self, module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters(recurse=False)
        for child in module.children():
            if id(child) not in self._calls:
                yield from self._parameters_of(child)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_in_backward():  # `torch.utils.checkpoint` runs modules again, some of them in part
            return
        self._add_time()
        call = self._calls.setdefault(id(module), _Call(name, module, self._total_s))
        call.input_bytes += sum(map(num_bytes, tensors_in([args, kwargs])))
        self._running.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            self._add_time()
            self._running.pop()

    def _add_time(self) -> None:
        """Add the time since the last hook to the innermost module that runs."""
        synchronize(next((parameter.device for parameter in self._model.parameters()), torch.device("cpu")))
        now_s = time.perf_counter()
        if self._running:
            self._running[-1].forward_s += now_s - self._last_s
            self._total_s += now_s - self._last_s
        self._last_s = now_s


class _Call:
    """The calls of one module."""

    def __init__(self, name: str, module: nn.Module, begin_s: float = 0.0) -> None:
        self.name = name
        self.module = module
        self.begin_s = begin_s  # time of the forward before the first call
        self.forward_s = 0.0  # without that of the modules that it calls
        self.input_bytes = 0

    def profile(self, parameters: Sequence[nn.Parameter]) -> LayerProfile:
        """Return the layer, with the gradients of these parameters."""
        return LayerProfile(
            name=self.name,
            num_bytes=sum(map(num_bytes, parameters)),
            forward_s=self.forward_s,
            is_linear=isinstance(self.module, nn.Linear),
            input_bytes=self.input_bytes,
            shapes=tuple(tuple(parameter.shape) for parameter in parameters),
        )


# What `Memonger` would make of a training step: planned from one step that is recorded.

METHOD = "training_step"
# A third of the bytes holds three times the batch. A model in which one block keeps most of them needs more.
SHARES = (1 / 3, 1 / 2, 2 / 3)
# Of one linear program. A share that is impossible takes two: the second finds what is possible.
TIME_LIMIT_S = 2.0


class RecomputeTimes:
    """Records training steps as `Memonger` does, and plans from the last one what a budget of memory would cost.

    Nothing of the step changes but its time and memory: recorded operators run as before. A step that cannot be
    recorded raises.

    Attributes:
        why_not: a reason for which there is no plan; "" if there is one, or no step was recorded.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._handle: _Recording | None = None
        self._profiler: Profiler | None = None

    def start(self, module: nn.Module) -> None:
        """Record the next training step of ``module``."""
        try:
            require_recomputable(module)
        except ValueError as error:
            self.why_not = str(error)
            return
        if is_compiled_function(getattr(module, METHOD)):  # Lightning makes it of `torch.compile(module)`
            self.why_not = f"{METHOD} is compiled, which hides its operators"
            return
        self._handle = _Recording(module, METHOD, Sublinear())
        self._profiler = self._handle.start_profiling()

    def begin_backward(self) -> None:
        """Note the end of a forward, if it is recorded."""
        if self._handle is not None:
            self._handle.begin_backward()

    def end_backward(self) -> None:
        """Note that another forward, or the update, begins."""
        if self._handle is not None:
            self._handle.end_backward()

    def stop(self) -> None:
        """Take the recording off the module. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()

    def plan(self, forward_s: float) -> Recomputation | None:
        """Return what the plan of the smallest of `SHARES` that is possible holds and takes.

        Args:
            forward_s: of a step that was not recorded.
        """
        if self._profiler is None or self.why_not:
            return None
        operations = self._profiler.operations
        plain_bytes = sum(operation.num_bytes for operation in operations if operation.uses)
        if plain_bytes == 0:
            self.why_not = "the training step keeps nothing for backward that could be computed again"
            return None
        for share in SHARES:
            try:
                budget_bytes = max(1, round(share * plain_bytes))
                plan = make_plan(operations, self._profiler.forward_s, budget_bytes, TIME_LIMIT_S)
            except (ValueError, ModuleNotFoundError) as error:  # it holds too little; SciPy is not installed
                self.why_not = str(error)
                continue
            self.why_not = ""
            return Recomputation(plan.plain_bytes, plan.peak_bytes, plan.recompute_s, self._record_s(forward_s))
        return None

    def _record_s(self, forward_s: float) -> float:
        """Return by how much recording makes a forward longer.

        It is what the recorded step took beside its operators, less what another step takes beside them. The operators
        themselves took longer than in other steps: the recorded one is among the first.
        """
        assert self._handle is not None
        assert self._profiler is not None
        # The profiler also runs batch norm again, to time it.
        again_s = sum(operation.time_s for operation in self._profiler.operations if "batch_norm" in operation.key)
        beside_s = self._handle.step_s - again_s - self._profiler.forward_s
        return max(0.0, beside_s - max(0.0, forward_s - self._profiler.forward_s))


class _Recording(RecomputeHandle):
    """Times the forward of a recorded step, and says what to do about one that cannot be recorded.

    That one must not run again: its statistics would move twice.

    Attributes:
        step_s: of the forward. Backward and update are not in it, which manual optimization has within the step.
    """

    step_s = 0.0
    _begin_s = 0.0
    _is_running = False

    @override
    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.step_s, self._is_running = 0.0, True
        self.end_backward()
        try:
            result = super().run(function, args, kwargs)
            if not self.step_s:  # there was no backward
                self.begin_backward()
            return result
        except Exception as error:
            error.add_note(
                f"Diagnose has recorded this {METHOD}, to plan recomputation. If it works without Diagnose, use "
                "Diagnose(memonger=False), or plan.memonger=false in a recipe"
            )
            raise
        finally:
            self._is_running = False

    def begin_backward(self) -> None:
        """Count the forward so far. Batch norm's waits are none of its time."""
        if self._is_running:
            self.step_s += time.perf_counter() - waited_s() - self._begin_s

    def end_backward(self) -> None:
        """Go on to count."""
        self._begin_s = time.perf_counter() - waited_s()
