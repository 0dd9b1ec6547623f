"""`Diagnose`: a callback that measures some steps of any training, and says where they go and what would help."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import BatchNorm
from lightning_dp.callbacks.timers import StepTimer
from lightning_dp.collectives.groups import create_groups, destroy_group
from lightning_dp.collectives.small_all_gather import waited_s
from lightning_dp.planner.convolutions.measure import num_bytes, tensors_of
from lightning_dp.planner.formulas import require_count, require_positive
from lightning_dp.planner.network import Link, Network
from lightning_dp.planner.report import WITH_PLAN, Diagnosis, make_diagnosis
from lightning_dp.planner.simulation import METHODS
from lightning_dp.planner.workload import LayerProfile, Recomputation, StepProfile
from lightning_dp.recompute import Profiler, RecomputeHandle, plan_profile
from lightning_dp.recompute.apply import require_recomputable
from lightning_dp.recompute.policies import Sublinear
from lightning_dp.recompute.values import tensors_in

log = logging.getLogger(__name__)

# Steps before the measured ones: the first set libraries and connections up, the last of them times the layers.
WARM_UP = 3


class Diagnose(StepTimer):
    """Measure some training steps, then say where a step goes and how long it would take with each method.

    It also logs what `StepTimer` logs, so use one of the two. Training goes on afterwards as before, unless ``stop``.
    Rank 0 logs the result; it is ``diagnosis`` on all ranks, each from its own clock.

    On a GPU the parts of a step are those of the host's clock. The callback waits for the device at each of them, in
    the measured steps only, which lengthens these steps a little.

    Args:
        num_steps: steps that are measured, after `WARM_UP` others.
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
        self._steps: list[dict[str, float]] = []
        self._seen = 0
        self._wanted = num_steps
        self._start_s = 0.0
        self._marks: dict[str, float] = {}
        self._layers = LayerTimes()
        self._recomputation = RecomputeTimes()
        self._batch_size = 1

    @override
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin to count steps."""
        super().on_train_start(trainer, pl_module)
        # A second fit is measured anew.
        self.diagnosis = None
        self._layers = LayerTimes()
        self._recomputation = RecomputeTimes()
        self._steps = []
        self._seen = 0
        self._wanted = self._num_steps
        self._start_s = time.perf_counter()

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note when the batch is there."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.diagnosis is not None:
            return
        self._marks = {"previous": self._last_end_s, "start": self._begin_s, "waited": waited_s()}
        if self._seen == WARM_UP - 1:
            self._batch_size = max((len(t) for t in tensors_of(batch) if t.dim()), default=1)
            self._layers.start(pl_module)
        # Not the step in which layers are timed: recording takes time of its own.
        if self._memonger and self._seen == WARM_UP - 2:
            self._recomputation.start(pl_module)

    @override
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Note the end of the forward."""
        self._mark("forward", pl_module)

    @override
    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the end of backward."""
        self._mark("backward", pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's times, and make the diagnosis after the last one."""
        self._mark("end", pl_module)
        # The base class asks for it as well, and DDP reports each reduction once: see `_exposed_s`.
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.diagnosis is not None:
            return
        self._layers.stop()
        self._recomputation.stop()
        self._seen += 1
        if self._seen > WARM_UP and {"forward", "backward"} <= self._marks.keys():
            self._steps.append(self._parts())
        if self._seen == WARM_UP:
            self._wanted = self._affordable_steps(trainer)
        if len(self._steps) >= self._wanted:
            self._finish(trainer, pl_module)
        self._last_end_s = time.perf_counter()  # what this callback does is no loading

    @override
    def _exposed_s(self, trainer: Any) -> float | None:
        exposed_s = super()._exposed_s(trainer)
        self._marks["exposed"] = exposed_s or 0.0
        return exposed_s

    def _mark(self, name: str, pl_module: LightningModule) -> None:
        if self.diagnosis is None:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
            self._marks[name] = time.perf_counter()

    def _affordable_steps(self, trainer: Any) -> int:
        """Return how many steps to measure: the same number on all ranks, because the probe has collectives.

        The ranks agree once, in advance. A collective in each step would itself wait for the slowest rank.
        """
        elapsed_s = time.perf_counter() - self._start_s
        left = (self._max_s - elapsed_s) / (elapsed_s / WARM_UP)
        num_steps = float(max(1, min(self._num_steps, int(left))))
        if trainer.world_size > 1:
            steps = torch.tensor(num_steps, device=trainer.strategy.root_device)
            num_steps = float(trainer.strategy.reduce(steps, reduce_op="min"))
        return int(num_steps)

    def _parts(self) -> dict[str, float]:
        marks = self._marks
        batch_norm_s = waited_s() - marks["waited"]
        return {
            "step_s": marks["end"] - marks["previous"],
            "load_s": marks["start"] - marks["previous"],
            "forward_s": marks["forward"] - marks["start"],
            "backward_s": marks["backward"] - marks["forward"],
            "update_s": marks["end"] - marks["backward"],
            "exposed_communication_s": marks["exposed"],
            "batch_norm_s": batch_norm_s,
        }

    def _finish(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the diagnosis."""
        parts = {name: median(step[name] for step in self._steps) for name in self._steps[0]}
        # DDP waits for gradients in backward. Strategies that postpone the update wait in the next forward.
        phase = "forward_s" if getattr(trainer.strategy, "exposed_communication_s", None) else "backward_s"
        parts[phase] = max(0.0, parts[phase] - parts["exposed_communication_s"])
        for name in ("forward_s", "backward_s"):
            parts[name] = max(0.0, parts[name] - parts["batch_norm_s"] / 2)
        profile = StepProfile(
            strategy=type(trainer.strategy).__name__,
            batch_size=self._batch_size,
            world_size=trainer.world_size,
            num_steps=len(self._steps),
            num_batch_norms=sum(isinstance(module, BatchNorm) for module in pl_module.modules()),
            layers=self._layers.profiles(),
            recomputation=self._recomputation.plan(),
            why_no_recomputation=self._recomputation.why_not,
            **parts,
        )
        network = self._network
        if network is None and trainer.world_size > 1:
            device = pl_module.device if pl_module.device.type == "cuda" else "cpu"
            network = probe_network(device, ranks_per_node=trainer.world_size // trainer.num_nodes)
        self.diagnosis = make_diagnosis(profile, network, self._world_size)
        if trainer.is_global_zero:
            log.info(f"{self.diagnosis}")
            self._write(self.diagnosis)
        if self._stop:
            trainer.should_stop = True

    def _write(self, diagnosis: Diagnosis) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "plan.md").write_text(f"{diagnosis}\n")
        if diagnosis.best is None:
            log.warning("Diagnose: no plan is written, because no method was predicted; give network=Network(...)")
            return
        try:
            diagnosis.save(self._folder / "plan.yaml", self._method)
        except ValueError as error:  # the method needs a head, several nodes, or batch norm layers
            log.warning(f"Diagnose: no plan is written: {error}")
        try:
            diagnosis.plot(self._folder / "plan.png")
        except ModuleNotFoundError:
            log.info("Diagnose: no plot, because matplotlib is not installed: pip install 'lightning-dp[recipes]'")

    @override
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Diagnose a training that ended early, from the steps that there were."""
        self._stop_recording()
        if self.diagnosis is None and self._steps:
            self._finish(trainer, pl_module)
        elif self.diagnosis is None and trainer.is_global_zero:
            log.warning(
                f"Diagnose: nothing is measured in {self._seen} steps, the first {WARM_UP} do not count, and manual "
                "optimization has no backward that the callback could see; train for longer"
            )

    @override
    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks. Lightning does not call `on_train_end` after an exception."""
        self._stop_recording()

    def _stop_recording(self) -> None:
        self._layers.stop()
        self._recomputation.stop()


# --- The time of each layer's forward in one step.


class LayerTimes:
    """Times the modules of a model that have parameters of their own, by hooks, while they are in place.

    On a GPU each hook waits for the device, so that times are those of kernels; the step as a whole is slower then.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._begins: dict[int, float] = {}
        self._found: dict[int, LayerProfile] = {}

    def start(self, model: nn.Module) -> None:
        """Put the hooks in place."""
        for name, module in model.named_modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave(name)))

    def stop(self) -> None:
        """Take the hooks off. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def profiles(self) -> tuple[LayerProfile, ...]:
        """Return the layers in the order in which they were first called."""
        return tuple(self._found.values())

    def _enter(self, module: nn.Module, args: Any) -> None:
        _synchronize(module)
        self._begins[id(module)] = time.perf_counter()

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            _synchronize(module)
            forward_s = time.perf_counter() - self._begins[id(module)]
            found = self._found.get(id(module))
            if found is not None:  # called before: its gradients are the same, its time is longer
                self._found[id(module)] = replace(found, forward_s=found.forward_s + forward_s)
                return
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            self._found[id(module)] = LayerProfile(
                name=name,
                num_bytes=sum(map(num_bytes, parameters)),
                forward_s=forward_s,
                is_linear=isinstance(module, nn.Linear),
                input_bytes=sum(map(num_bytes, tensors_in(args))),
                shapes=tuple(tuple(parameter.shape) for parameter in parameters),
            )

        return leave


def _synchronize(module: nn.Module) -> None:
    device = next(module.parameters(recurse=False)).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- What `Memonger` would make of a training step: planned from one step that is recorded.

METHOD = "training_step"
# A third of the bytes holds three times the batch. A model in which one block keeps most of them needs more.
SHARES = (1 / 3, 1 / 2, 2 / 3)
# Of one linear program. A share that is impossible takes two: the second finds what is possible.
TIME_LIMIT_S = 2.0


class RecomputeTimes:
    """Records one training step as `Memonger` does, and plans from it what a budget of memory would cost.

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
        self._handle = _Recording(module, METHOD, Sublinear())
        self._profiler = self._handle.start_profiling()

    def stop(self) -> None:
        """Take the recording off the module. A second call does nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def plan(self) -> Recomputation | None:
        """Return what the plan of the smallest of `SHARES` that is possible holds and takes."""
        if self._profiler is None or self.why_not:
            return None
        operations = self._profiler.operations
        plain_bytes = sum(operation.num_bytes for operation in operations if operation.uses)
        if plain_bytes == 0:
            self.why_not = "the training step keeps nothing for backward that could be computed again"
            return None
        for share in SHARES:
            try:
                plan = plan_profile(self._profiler, max(1, round(share * plain_bytes)), TIME_LIMIT_S)
            except (ValueError, ModuleNotFoundError) as error:  # it holds too little; SciPy is not installed
                self.why_not = str(error)
                continue
            self.why_not = ""
            return Recomputation(plan.plain_bytes, plan.peak_bytes, plan.recompute_s)
        return None


class _Recording(RecomputeHandle):
    """Says what to do about a step that cannot be recorded. It must not run again: its statistics would move twice."""

    @override
    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().run(function, args, kwargs)
        except Exception as error:
            error.add_note(
                f"Diagnose has recorded this {METHOD}, to plan recomputation. If it works without Diagnose, use "
                "Diagnose(memonger=False), or plan.memonger=false in a recipe"
            )
            raise


# --- Measures latency and bandwidth between the ranks of a job.

SMALLEST_BYTES = 1024  # only latency matters
# Larger and larger messages, until one takes this long: what a limited link lets pass at once no longer matters then.
LONG_ENOUGH_S = 0.2
LARGEST_BYTES = 64 * 1024 * 1024


def probe_network(
    device: torch.device | str = "cpu", ranks_per_node: int | None = None, repeats: int = 4, num_elements: int = 0
) -> Network:
    """Time all-reduces of growing size, and return the network that explains them. All ranks must call it.

    The links are those that a ring all-reduce would need to take as long. With several nodes, an all-reduce over all
    ranks gives the NIC's, and one within each node the inner link. All ranks return the same.

    Args:
        device: of the messages; CUDA for NCCL.
        ranks_per_node: by default, ``LOCAL_WORLD_SIZE``, or all ranks.
        repeats: all-reduces of each size that are timed; the median counts.
        num_elements: ignored if 0; else the only large message, for tests.

    Raises:
        ValueError: there is one rank only, or ``ranks_per_node`` does not divide the number of ranks.
    """
    require_count("repeats", repeats)
    world_size = dist.get_world_size()
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size == 1 or world_size % per_node:
        raise ValueError(
            f"world_size={world_size} and ranks_per_node={per_node}: the probe needs two ranks or more, and the same "
            "number on each node"
        )
    bounds = (4 * num_elements, 4 * num_elements) if num_elements else (64 * SMALLEST_BYTES, LARGEST_BYTES)
    all_ranks = _measure(None, bounds, device, repeats)
    if per_node == world_size:
        return Network(all_ranks, all_ranks, per_node)
    if per_node == 1:
        return Network(all_ranks, all_ranks, 1)
    nodes = [range(first, first + per_node) for first in range(0, world_size, per_node)]
    own = create_groups(nodes, dist.get_rank())
    inner = _measure(own, bounds, device, repeats)
    destroy_group(own)
    return Network(all_ranks, _slowest(inner, device), per_node)


def _measure(
    group: dist.ProcessGroup | None, bounds: tuple[int, int], device: torch.device | str, repeats: int
) -> Link:
    """Return the link of a ring over ``group``. All its ranks get the same."""
    size = dist.get_world_size(group)
    steps = 2 * (size - 1)  # messages one after the other, each with one of as many parts as there are ranks

    def message_s(num_bytes: int) -> float:
        return _all_reduce_s(group, num_bytes, device, repeats) / steps

    smallest_s = message_s(SMALLEST_BYTES)
    num_bytes, largest_bytes = bounds
    while (largest_s := message_s(num_bytes)) * steps < LONG_ENOUGH_S and num_bytes < largest_bytes:
        num_bytes = min(4 * num_bytes, largest_bytes)
    try:
        return Link.fit([SMALLEST_BYTES / size, num_bytes / size], [smallest_s, largest_s])
    except ValueError:
        # On a busy machine a large message may be as fast as a small one: then the large one tells all.
        return Link(largest_s, num_bytes / size / largest_s)


def _all_reduce_s(group: dist.ProcessGroup | None, num_bytes: int, device: torch.device | str, repeats: int) -> float:
    """Return the time of one all-reduce: the mean over the ranks of their medians, which all of them get."""
    message = torch.zeros(num_bytes // 4, device=device)
    measured = []
    for _ in range(repeats + 1):
        _synchronize_ranks(device)
        begin_s = time.perf_counter()
        dist.all_reduce(message, group=group)
        _synchronize_ranks(device)
        measured.append(time.perf_counter() - begin_s)
    # The first one sets connections up, and takes what the link lets pass at once.
    shared = torch.tensor(median(measured[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(shared, group=group)
    return shared.item() / dist.get_world_size(group)


def _slowest(link: Link, device: torch.device | str) -> Link:
    """Return the slowest of all ranks' links: the nodes must agree on one network."""
    values = torch.tensor([link.latency_s, 1 / link.bytes_per_s], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    latency_s, seconds_per_byte = values.tolist()
    return Link(latency_s, 1 / seconds_per_byte)


def _synchronize_ranks(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
