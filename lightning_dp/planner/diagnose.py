"""`Diagnose`: a callback that measures some steps of any training, and says where they go and what would help."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from typing_extensions import override

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import BatchNorm
from lightning_dp.callbacks.step_timer import StepTimer
from lightning_dp.collectives.small_all_gather import waited_s
from lightning_dp.planner.advice import Diagnosis, make_diagnosis
from lightning_dp.planner.checks import require_count, require_positive
from lightning_dp.planner.layer_times import LayerTimes
from lightning_dp.planner.methods import METHODS
from lightning_dp.planner.network import Network
from lightning_dp.planner.overrides import WITH_PLAN
from lightning_dp.planner.probe import probe_network
from lightning_dp.planner.profile import StepProfile
from lightning_dp.planner.recompute_times import RecomputeTimes
from lightning_dp.planner.trace import tensors_of

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
