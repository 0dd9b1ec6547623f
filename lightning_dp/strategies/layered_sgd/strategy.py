"""Layered SGD (Yu et al., arXiv 1906.05936): two-level synchronous SGD with the network hidden behind other work."""

# No `from __future__ import annotations`: DDP looks at the communication hook's annotations as objects.
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._lightning import DDPStrategy, OwnTrainerOnly
from lightning_dp.collectives.hierarchical import AllReduce, HierarchicalAllReduce, native_all_reduce
from lightning_dp.collectives.ring import ring_all_reduce
from lightning_dp.collectives.topology import RankTopology
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.compiled import hides_parameter_use
from lightning_dp.strategies.layered_sgd.bucket import WAIT, BucketReduction
from lightning_dp.strategies.layered_sgd.communicator import Communicator
from lightning_dp.strategies.layered_sgd.parameter_watch import ParameterWatch
from lightning_dp.strategies.layered_sgd.pending_update import PendingUpdate, PendingUpdates
from lightning_dp.strategies.layered_sgd.policy import (
    check_supported,
    steps_by_bucket,
    why_not_postponed,
)

log = logging.getLogger(__name__)

# Small enough that the first layers' gradients need not wait long for their bucket's turn, large enough for the link.
BUCKET_CAP_MB = 2.0

ALL_REDUCES: dict[str, AllReduce] = {"native": native_all_reduce, "ring": ring_all_reduce}


class LayeredSGDStrategy(OwnTrainerOnly, DDPStrategy):
    """Synchronous SGD in two levels, hidden behind the loading of data, backward and the next forward.

    The parameters are those of `DDPStrategy`, to the rounding of the order of summation. See arXiv 1906.05936,
    Algorithm 3; ``docs/layered_sgd.md`` says when it pays and when not.

    Overrides of DDPStrategy, and why:

    - ``_configure_launcher``: the first place that knows the number of ranks, before any process is started.
    - ``setup``, ``teardown``: the communicator, and the communication hook that feeds it.
    - ``pre_backward``, ``post_backward``: backward reuses the buckets, so the last reduction must be over; and its end
      is where the reduction between groups starts with ``overlap="load"``.
    - ``optimizer_step``: stages the update instead of doing it. A compiled ``training_step`` that calls it must not
      compile it too, nor backward's hooks.
    - ``on_train_start``, ``on_train_end``, ``on_validation_start``, ``on_validation_end``, ``training_step``: while
      training, every use of a parameter is watched, and does what is left of its update first.
    - ``lightning_module_state_dict``, ``optimizer_state``, ``on_exception``: the state is complete in checkpoints.

    Args:
        group_size: ranks in a group, consecutive ones; must divide the number of ranks. None: the ranks of one node.
            With a single group there is nothing to hide, and this is DDPStrategy.
        communicator: who crosses groups: ``"leader"``, one rank a group, as published; ``"sharded"``, each rank with
            its share, so that every network link works.
        overlap: ``"load"``, as published: the reduction between groups starts after backward and is hidden behind the
            loading of the next batch. ``"step"``: it starts as backward produces gradients, layers nearest the input
            first, and each layer is updated just before its next use: backward and the next forward hide it too.
        all_reduce: the algorithm between groups: ``"native"``, the backend's, or ``"ring"``, ours.
        communicator_device: where gradients are summed: ``"cpu"``, as published: in host memory by gloo, all three
            stages, to which training on GPUs copies each bucket. ``"gpu"``: where they are, by the job's own backend.
            On NCCL that is not safe: the communicator's collectives and DDP's are then issued by two threads, in no
            one order, and a warning says so. That is also why ``"cpu"`` leaves no stage to the GPU.
        **ddp_kwargs: of DDPStrategy and DistributedDataParallel. With several groups, ``bucket_cap_mb`` defaults to 2.

    Raises:
        ValueError: a value is not one of those above, the groups would be unequal, ``communicator_device="gpu"``
            without GPUs, or an option of DDP is given that takes the place of the communication hook
            (``ddp_comm_hook``, ``gradient_as_bucket_view=False``, ...).
    """

    def __init__(
        self,
        group_size: int | None = None,
        communicator: Literal["leader", "sharded"] = "leader",
        overlap: Literal["load", "step"] = "step",
        all_reduce: Literal["native", "ring"] = "native",
        communicator_device: Literal["cpu", "gpu"] = "cpu",
        **ddp_kwargs: Any,
    ) -> None:
        _require("communicator", communicator, ("leader", "sharded"))
        _require("overlap", overlap, ("load", "step"))
        _require("all_reduce", all_reduce, tuple(ALL_REDUCES))
        _require("communicator_device", communicator_device, ("cpu", "gpu"))
        _refuse_conflicts(ddp_kwargs)
        super().__init__(gradient_as_bucket_view=True, **ddp_kwargs)
        self._group_size = group_size
        self._carriers = communicator
        self._overlap = overlap
        self._all_reduce = ALL_REDUCES[all_reduce]
        self._communicator_device = communicator_device
        self._communicator: Communicator | None = None  # there is none while not fitting, or with a single group
        self._updates = PendingUpdates()
        self._reductions: dict[Tensor, BucketReduction] = {}  # of the last backward, by parameter
        self._parameter_watch = ParameterWatch(self._updates, self._reductions)
        self._watching = False
        self._postponed = True
        self._whole_update = overlap == "load"  # before the forward begins
        self._hides_use = False  # a compiled module is also not to be traced with the watch in place
        self._validating: AbstractContextManager[None] | None = None

        self._waited_s = 0.0
        self.on_stage: OnStage | None = None  # told of each stage (name, start, end), to make the overlap visible

    @property
    def topology(self) -> RankTopology:
        """The groups of ranks."""
        return self.topology_of(self.num_nodes, self.num_processes)

    def topology_of(self, num_nodes: int, num_processes: int) -> RankTopology:
        """Return the groups that ``num_processes`` ranks on each of ``num_nodes`` nodes would form.

        Raises:
            ValueError: they would be unequal.
        """
        return RankTopology(num_nodes * num_processes, num_processes if self._group_size is None else self._group_size)

    @property
    def exposed_communication_s(self) -> float | None:
        """How long this rank has waited for gradients, in all (s); None with a single group, where DDP does it."""
        return None if self._communicator is None else self._waited_s

    @override
    def _configure_launcher(self) -> None:
        _ = self.topology  # raises where the groups would be unequal
        devices = self.parallel_devices or []
        if self._communicator_device == "gpu" and any(device.type == "cpu" for device in devices):
            raise ValueError(
                "communicator_device='gpu' needs gradients on GPUs, but this job trains on CPU; leave the option out"
            )
        super()._configure_launcher()

    @override
    def setup(self, trainer: Any) -> None:
        several_groups = self.topology.num_groups > 1
        if several_groups:
            self._ddp_kwargs.setdefault("bucket_cap_mb", BUCKET_CAP_MB)
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel) and several_groups:
            self._start_communicator(trainer, self.model)

    def _start_communicator(self, trainer: Any, model: DistributedDataParallel) -> None:
        module = self.lightning_module
        assert module is not None
        check_supported(module, self.optimizers, type(self).__name__)
        timeout = self._timeout or timedelta(minutes=30)
        on_host = self._communicator_device == "cpu" and self.root_device.type != "cpu"
        collective = HierarchicalAllReduce(
            self.topology, self.global_rank, self._carriers, timeout, "gloo" if on_host else None, self._all_reduce
        )
        self._communicator = Communicator(
            collective, self._overlap == "step", timeout, self.root_device, on_host, self._record_stage
        )
        model.register_comm_hook(None, self._reduce_bucket)
        reason = why_not_postponed(trainer, module)
        self._postponed = reason is None
        self._hides_use = hides_parameter_use(module)
        self._whole_update = self._overlap == "load" or self._hides_use
        if not on_host and "nccl" in str(self.process_group_backend):
            log.warning(
                f"{type(self).__name__}(communicator_device='gpu'): NCCL may deadlock, for the communicator and DDP "
                "issue collectives in an order that differs between ranks; communicator_device='cpu', the default, "
                "makes no use of NCCL"
            )
        if reason is not None:
            log.warning(
                f"{type(self).__name__}: {reason} must run within its own step, so updates are not postponed: the "
                "reduction is not hidden behind the loading of data or the next forward."
            )

    def _record_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if stage == WAIT:
            self._waited_s += end_s - start_s
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    @torch.compiler.disable
    def _reduce_bucket(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The communication hook: hand the bucket to the communicator, and let backward go on.

        DDP is told that the bucket is done. Its gradients are views of the buffer that the communicator works on.
        """
        assert self._communicator is not None
        # Divided before the sum, as DDP does it, so that 16-bit sums do not overflow (Algorithm 3 divides after it).
        buffer = bucket.buffer().div_(self.world_size)
        reduction = self._communicator.submit(bucket.index(), buffer)
        self._reductions.update(dict.fromkeys(bucket.parameters(), reduction))
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        done.set_result(buffer)
        return done

    @override
    @torch.compiler.disable
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.finish_update()
        self._wait_for_gradients()
        self._reductions.clear()
        super().pre_backward(closure_loss)

    @override
    @torch.compiler.disable
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._communicator is not None:
            self._communicator.release()
        if self._hides_use and not self._is_automatic:
            self._wait_for_gradients()  # the compiled step goes on to use them, unseen

    @override
    @torch.compiler.disable
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._communicator is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        output = closure()

        def whole_step() -> None:
            # The precision plugin unscales, calls the hooks, clips and steps, in Lightning's own order. The closure
            # returns the loss, for None would mean that there was no backward.
            DDPStrategy.optimizer_step(self, optimizer, lambda: output, model, **kwargs)

        if not self._postponed:
            self._wait_for_gradients()
            whole_step()
            return output
        assert self.lightning_module is not None
        by_bucket = not self._whole_update and not kwargs and steps_by_bucket(optimizer, self.lightning_module.trainer)
        self._parameter_watch.paused = True  # else taking the gradients would wait for them
        try:
            self._updates.stage(PendingUpdate(optimizer, dict(self._reductions), None if by_bucket else whole_step))
        finally:
            self._parameter_watch.paused = False
        return output

    def _wait_for_gradients(self) -> None:
        for reduction in set(self._reductions.values()):
            reduction.wait()

    def _wait_for_kept_gradients(self) -> None:
        """Wait for gradients that accumulate in manual optimization: DDP may move them to new buckets in a forward."""
        for parameter, reduction in self._reductions.items():
            if parameter not in self._updates:
                reduction.wait()

    @property
    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    def finish_update(self) -> None:
        """Apply what is left of the postponed update; afterwards the parameters are those of synchronous SGD."""
        self._updates.finish()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._whole_update or self._updates.are_whole:
            self.finish_update()
        if not self._is_automatic:
            self._wait_for_kept_gradients()
        with self._unwatched() if self._hides_use else nullcontext():
            return super().training_step(*args, **kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._communicator is not None:
            self._watch(True)

    @override
    def on_train_end(self) -> None:
        self.finish_update()
        self._wait_for_gradients()  # that manual optimization has left; nobody watches who reads them from here on
        self._watch(False)
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        # Nothing becomes pending during validation, so there is nothing to watch for.
        self.finish_update()
        self._wait_for_gradients()
        self._validating = self._unwatched()
        self._validating.__enter__()
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._validating is not None:
            self._validating.__exit__(None, None, None)
            self._validating = None

    def _watch(self, on: bool) -> None:
        if on != self._watching:
            self._watching = on
            self._parameter_watch.__enter__() if on else self._parameter_watch.__exit__(None, None, None)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        before = self._watching
        self._watch(False)
        try:
            yield
        finally:
            self._watch(before)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.finish_update()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        self.finish_update()
        return super().optimizer_state(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        try:
            self.finish_update()
        except Exception as error:  # the exception that is being handled matters more
            log.warning(f"{type(self).__name__}: the update of the last step is lost: {error}")

    @override
    def teardown(self) -> None:
        self._validating = None
        self._watch(False)
        self._reductions.clear()
        self._updates.clear()
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        super().teardown()


def _require(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, allowed))}")


def _refuse_conflicts(ddp_kwargs: dict[str, Any]) -> None:
    for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"):
        if ddp_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} cannot be given: layered SGD reduces the gradients itself; use DDPStrategy for it"
            )
    if not ddp_kwargs.pop("gradient_as_bucket_view", True):
        raise ValueError(
            "gradient_as_bucket_view=False cannot work: the gradients must be views of the buckets, which are summed "
            "in place after backward; leave the option out"
        )
