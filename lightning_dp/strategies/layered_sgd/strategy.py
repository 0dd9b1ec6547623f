"""Layered SGD (Yu et al., arXiv 1906.05936): hierarchical all-reduce, overlapped with other work. Lightning's hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._lightning import DDPStrategy, OwnTrainerOnly
from lightning_dp._private.lightning_names import ddp_options, register_ddp_hooks, strategy_timeout, wrap_in_ddp
from lightning_dp.collectives.hierarchical import AllReduce, HierarchicalAllReduce, native_all_reduce
from lightning_dp.collectives.ring import ring_all_reduce
from lightning_dp.collectives.topology import RankTopology
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.layered_sgd.bucket import WAIT, blame
from lightning_dp.strategies.layered_sgd.communicator import Communicator
from lightning_dp.strategies.layered_sgd.policy import check_options, check_supported
from lightning_dp.strategies.layered_sgd.postponement import Postponement
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from lightning_dp.strategies.unfreezing import ReducedParameters

log = logging.getLogger(__name__)

# Small enough that the first layers' gradients need not wait long for their bucket's turn, large enough for the link.
BUCKET_CAP_MB = 2.0

ALL_REDUCES: dict[str, AllReduce] = {"native": native_all_reduce, "ring": ring_all_reduce}


class LayeredSGDStrategy(OwnTrainerOnly, DDPStrategy):
    """Synchronous SGD with a hierarchical all-reduce whose inter-group stage is hidden behind other work.

    The parameters are those of `DDPStrategy`, up to rounding in another order of summation. Updates are postponed; a
    use of a parameter, a gradient or the optimizer's state in Python code first applies its pending update. See arXiv
    1906.05936, Algorithm 3; ``docs/methods/layered_sgd.md`` says when it pays, and which uses are not seen.

    Args:
        group_size: number of ranks in a group. Groups are consecutive ranks; must divide the world size. None: the
            ranks of one node. With a single group there is nothing to hide, and this is DDPStrategy.
        communicator: which ranks run the inter-group all-reduce. ``"leader"``: one rank of each group, as published.
            ``"sharded"``: every rank, for its shard of the bucket, so that every NIC works.
        overlap: ``"load"``: the inter-group all-reduce starts after backward and is hidden behind the loading of the
            next batch, as published. ``"step"``: it starts as backward fills the buckets, the bucket of the layers
            nearest the input first, and each layer is updated just before its next use: backward and the next forward
            hide it, too.
        all_reduce: the algorithm between groups: ``"native"``, the backend's, or ``"ring"``, this package's.
        communicator_device: where gradients are summed. ``"cpu"``: in host memory, over gloo, in all three stages, as
            published; on GPUs each bucket is first copied to pinned host memory. ``"gpu"``: where they are, by the
            job's own backend. On NCCL that can deadlock, and a warning says so: the communicator's collectives and
            DDP's are issued by two threads, in no fixed order.
        **ddp_kwargs: options of DDPStrategy and DistributedDataParallel. With several groups, ``bucket_cap_mb``
            defaults to 2.

    Raises:
        ValueError: a value is not one of those above, the world size is not a multiple of ``group_size``,
            ``communicator_device="gpu"`` without GPUs, or an option of DDP takes the place of the communication hook
            (``ddp_comm_hook``, ``gradient_as_bucket_view=False``, ...).

    Overrides of DDPStrategy, and why:

    - ``_configure_launcher``: knows the number of ranks before any process starts, so it checks the groups.
    - ``setup``, ``teardown``: make and close the communicator, and the communication hook that feeds it.
    - ``training_step``: applies an update that cannot be split by bucket before the forward; adds unfrozen parameters
      to the reduction.
    - ``pre_backward``, ``post_backward``: backward refills the buckets, so their sums must have been used before it.
      With ``overlap="load"`` the inter-group stage starts after it.
    - ``optimizer_step``: stages the update instead of applying it.
    - ``on_train_end``, ``on_validation_start``, ``lightning_module_state_dict``, ``optimizer_state``, ``on_exception``:
      apply what is pending, so that nothing is lost and evaluation runs without a watch over the parameters.
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
        check_options(
            ddp_kwargs,
            communicator=(communicator, ("leader", "sharded")),
            overlap=(overlap, ("load", "step")),
            all_reduce=(all_reduce, tuple(ALL_REDUCES)),
            communicator_device=(communicator_device, ("cpu", "gpu")),
        )
        super().__init__(gradient_as_bucket_view=True, **ddp_kwargs)
        self._group_size = group_size
        self._communicator_mode = communicator
        self._overlap = overlap
        self._all_reduce = ALL_REDUCES[all_reduce]
        self._communicator_device = communicator_device
        self._reduced: ReducedParameters | None = None  # only while fitting
        # None outside of fit, and with a single group.
        self._reduction: LayeredReduction | None = None
        self._postponement: Postponement | None = None
        self._waited_s = 0.0
        self.on_stage: OnStage | None = None
        """Told of each stage of the reduction: its name, start and end (s, `time.perf_counter`). For plots."""

    @property
    def topology(self) -> RankTopology:
        """The groups of ranks."""
        return self.topology_of(self.num_nodes, self.num_processes)

    def topology_of(self, num_nodes: int, num_processes: int) -> RankTopology:
        """Return the groups that ``num_processes`` ranks on each of ``num_nodes`` nodes would form.

        Raises:
            ValueError: the groups would not be equal.
        """
        return RankTopology(num_nodes * num_processes, num_processes if self._group_size is None else self._group_size)

    @property
    def exposed_communication_s(self) -> float | None:
        """Total time that this rank has waited for gradients (s); None with a single group, where DDP reduces them."""
        return None if self._reduction is None else self._waited_s

    @override
    def _configure_launcher(self) -> None:
        _ = self.topology  # raises where the groups would not be equal
        devices = self.parallel_devices or []
        if self._communicator_device == "gpu" and any(device.type == "cpu" for device in devices):
            raise ValueError(
                "communicator_device='gpu' needs gradients on GPUs, but this job trains on CPU; remove the option"
            )
        super()._configure_launcher()

    @override
    def setup(self, trainer: Any) -> None:
        several_groups = self.topology.num_groups > 1
        if several_groups:
            ddp_options(self).setdefault("bucket_cap_mb", BUCKET_CAP_MB)
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel):
            assert self.lightning_module is not None
            self._reduced = ReducedParameters(self.lightning_module)
            if several_groups:
                self._start(trainer, self.model)

    def _start(self, trainer: Any, model: DistributedDataParallel) -> None:
        module = self.lightning_module
        assert module is not None
        check_supported(module, self.optimizers, type(self).__name__)
        self._reduction = LayeredReduction(self._make_communicator(), self.world_size, module)
        self._reduction.feed_from(model)
        self._postponement = Postponement(
            self._reduction, trainer, module, self._overlap == "load", type(self).__name__
        )

    def _make_communicator(self) -> Communicator:
        timeout = strategy_timeout(self)
        on_host = self._communicator_device == "cpu" and self.root_device.type != "cpu"
        if not on_host and "nccl" in str(self.process_group_backend):
            log.warning(
                f"{type(self).__name__}(communicator_device='gpu'): NCCL may deadlock, because the communicator and "
                "DDP issue collectives in an order that differs between ranks; use communicator_device='cpu', the "
                "default, which does not use NCCL"
            )
        backend = "gloo" if on_host else None
        collective = HierarchicalAllReduce(
            self.topology, self.global_rank, self._communicator_mode, timeout, backend, self._all_reduce
        )
        prioritized = self._overlap == "step"
        return Communicator(collective, prioritized, timeout, self.root_device, on_host, self._report_stage)

    def _report_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if stage == WAIT:
            self._waited_s += end_s - start_s
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._reduced is not None and (unfrozen := self._reduced.unfrozen()):
            self._reduce_unfrozen(self._reduced, unfrozen)
        if self._reduction is None or self._postponement is None:
            return super().training_step(*args, **kwargs)
        self._reduction.before_forward()
        with self._postponement.training_step():
            return super().training_step(*args, **kwargs)

    def _reduce_unfrozen(self, reduced: ReducedParameters, names: list[str]) -> None:
        """Wrap the module in a new DDP that reduces the gradients of the parameters that have become trainable."""
        module, model = self.lightning_module, self.model
        assert module is not None
        assert isinstance(model, DistributedDataParallel)
        log.info(f"{type(self).__name__}: {len(names)} parameters have become trainable, {names[0]} first")
        if self._reduction is not None:
            self._reduction.bring_up_to_date()
        with blame(f"taking {names[0]}, which has become trainable, into the reduction, with all ranks,"):
            self.model = reduced.wrap_anew(model, lambda: wrap_in_ddp(self, module))
        if self._reduction is not None:
            self._reduction.feed_from(self.model)
        else:
            register_ddp_hooks(self)

    @override
    @torch.compiler.disable  # a compiled training_step may call this method and the next two
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._reduced is not None:
            self._reduced.require_none_unfrozen()
        if self._reduction is not None:
            self._reduction.begin_backward(closure_loss)
        super().pre_backward(closure_loss)

    @override
    @torch.compiler.disable
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._reduction is not None and self._postponement is not None:
            self._reduction.end_backward()
            if self._postponement.is_use_hidden and not self._is_automatic:
                self._reduction.wait_for_gradients()  # the compiled training_step then uses them unseen

    @override
    @torch.compiler.disable
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        reduction, postponement = self._reduction, self._postponement
        if reduction is None or postponement is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not postponement.is_allowed(optimizer):
            reduction.finish_update()

            def closure_then_gradients() -> Any:
                output = closure()
                reduction.wait_for_gradients()
                reduction.own_gradients()
                return output

            return super().optimizer_step(optimizer, closure_then_gradients, model, **kwargs)
        output = closure()

        def whole_step() -> None:
            # The precision plugin unscales, clips and steps, in Lightning's own order. The closure returns the loss:
            # None would mean that there was no backward.
            DDPStrategy.optimizer_step(self, optimizer, lambda: output, model, **kwargs)

        by_bucket = postponement.goes_by_bucket and not kwargs
        reduction.stage(optimizer, None if by_bucket else postponement.with_present_clipping(whole_step))
        return output

    @property
    def _is_automatic(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    def finish_update(self) -> None:
        """Apply what is left of the postponed update. Afterwards the parameters are those of synchronous SGD."""
        if self._reduction is not None:
            self._reduction.finish_update()

    def _bring_up_to_date(self) -> None:
        if self._reduction is not None:
            self._reduction.bring_up_to_date()

    @override
    def on_train_end(self) -> None:
        self._bring_up_to_date()  # also gradients that manual optimization leaves
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        self._bring_up_to_date()
        super().on_validation_start()

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
        except Exception as error:  # do not hide the original exception
            log.warning(f"{type(self).__name__}: the update of the last step is lost: {error}")

    @override
    def teardown(self) -> None:
        self._reduced = None
        if self._postponement is not None:
            self._postponement.close()
            self._postponement = None
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None
        super().teardown()
