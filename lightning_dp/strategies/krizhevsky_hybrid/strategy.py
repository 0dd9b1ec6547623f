"""One weird trick (Krizhevsky, arXiv 1404.5997): data parallelism in the trunk, model parallelism in the head."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._lightning import DDPStrategy, OwnTrainerOnly
from lightning_dp._private.lightning_names import strategy_timeout
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import (
    make_whole,
    own_optimizer_state,
    own_parameters,
    require_all_ranks,
    whole_optimizer_state,
    whole_parameters,
)
from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses
from lightning_dp.strategies.krizhevsky_hybrid.policy import (
    check_module,
    check_optimizers,
    check_precision,
    find_head,
    warn_of_requeue,
)
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SCHEMES
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.takeover import Takeover

log = logging.getLogger(__name__)


class KrizhevskyHybridStrategy(OwnTrainerOnly, DDPStrategy):
    """Data parallelism in the convolutional trunk, model parallelism in the fully-connected head.

    The gradients of the head, most of a network like AlexNet, are never sent: each rank holds a slice of every layer of
    the head and computes it for the examples of all ranks. Parameters equal those of synchronous SGD on the batches of
    all ranks, unless ``variable_batch`` is on. See arXiv 1404.5997; ``docs/krizhevsky_hybrid.md`` says when it pays.

    While fitting, the head's parameters (and ``state_dict()``) are this rank's rows; checkpoints, and the module after
    `fit`, hold all of them. Norms over parameters or gradients then differ between ranks: clip with
    ``Trainer(gradient_clip_val=...)`` or ``self.clip_gradients``, which take the norm over all ranks; torch's
    ``clip_grad_norm_`` does not.

    Overrides of DDPStrategy, and why:

    - ``setup``: refuses optimizers that cannot work on rows.
    - ``configure_ddp``: refuses modules that cannot work, and shards the head before DDP and the optimizers see its
      parameters.
    - ``teardown``: makes the head whole again.
    - ``lightning_module_state_dict``, ``load_model_state_dict``, ``optimizer_state``, ``load_optimizer_state_dict``:
      checkpoints hold whole tensors.

    Args:
        head: dotted name of the submodule to shard: an nn.Linear, or an nn.Sequential of nn.Linear and elementwise
            layers.
        scheme: how features reach the head, section 4: ``"a"``: all at once; ``"b"``: ranks take turns; ``"c"``: each
            rank sends 1/K of its examples for each of K passes. In (b) and (c) the next pass's features travel while
            the head works on the present one's.
        variable_batch: update the head after each of its K passes (section 4.2): batch n in the head, nK in the trunk.
            The module must have ``head_step(features, target) -> loss``. Where it has, each pass goes forward and
            backward at once, which takes a K-th of the memory, without ``variable_batch`` too.
        **ddp_kwargs: of DDPStrategy and DistributedDataParallel, for the trunk.

    Raises:
        ValueError: a value is not one of those above, or ``model_averaging_period`` is given; in `fit`: the head
            cannot be sharded, or the module or Trainer has something that cannot work with it, by name.
    """

    def __init__(
        self,
        head: str = "head",
        scheme: Literal["a", "b", "c"] = "c",
        variable_batch: bool = False,
        **ddp_kwargs: Any,
    ) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f"scheme={scheme!r} is not known; use one of {', '.join(map(repr, SCHEMES))}")
        if variable_batch and scheme == "a":
            raise ValueError("variable_batch=True needs several passes, and scheme='a' has one; use scheme 'b' or 'c'")
        if ddp_kwargs.get("model_averaging_period") is not None:
            raise ValueError("model_averaging_period cannot be given: ranks hold different parts of the head")
        super().__init__(**ddp_kwargs)
        self._head_name = head
        self._scheme = scheme
        self._variable_batch = variable_batch
        self._head: ShardedHead | None = None  # only while fitting, as the two that follow
        self._passes: HeadPasses | None = None
        self._takeover: Takeover | None = None
        self.on_stage: OnStage | None = None  # told of each stage (name, start, end), to make the overlap visible

    @property
    def exposed_communication_s(self) -> float | None:
        """How long this rank has waited for features and activations, in all (s), beside DDP's wait for the trunk."""
        return None if self._passes is None else sum(channel.waited_s for channel in self._channels)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """What this rank has sent for the head while fitting, in bytes, by what it was. The trunk's are DDP's."""
        total: dict[str, int] = {}
        for channel in self._channels:
            for what, count in channel.bytes_sent.items():
                total[what] = total.get(what, 0) + count
        return total

    @property
    def _channels(self) -> list[Channel]:
        return [] if self._passes is None else [self._passes.channel, self._passes.head.channel]

    @override
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self._head is not None:
            try:
                check_optimizers(self.optimizers, self._head)
            except ValueError:  # on all ranks alike
                self._head.unshard()
                raise

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        name = type(self).__name__
        head = find_head(module, self._head_name, name)
        check_module(module, module.trainer, head, self._head_name, self._variable_batch, name)
        check_precision(self.precision_plugin, self._variable_batch, name)
        warn_of_requeue(self.cluster_environment, name)
        timeout = strategy_timeout(self)
        # Two groups, since features travel while the head exchanges activations.
        hidden, features = (Channel(dist.new_group(timeout=timeout), self._record_stage) for _ in range(2))
        self._head = ShardedHead(head, hidden, self._head_name)
        self._passes = HeadPasses(self._head, self._scheme, features)
        self._head.shard()
        self._takeover = Takeover(
            module, self._passes, self.precision_plugin, self._variable_batch, lambda: self.optimizers
        )
        trunk = [p for p in module.parameters() if not self._head.owns(p)]
        if any(p.requires_grad for p in trunk):
            super().configure_ddp()
        else:  # DDP refuses a module without any gradient to reduce; its ranks must start from rank 0's values as well
            for tensor in (*trunk, *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def _record_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._head is None or not self._head.is_sharded:
            return state
        assert self.lightning_module is not None
        self._require_all_ranks()
        return state | whole_parameters(self.lightning_module, self._head)

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._head is not None and self._head.is_sharded:
            assert self.lightning_module is not None
            own = own_parameters(self.lightning_module, self._head, checkpoint["state_dict"])
            checkpoint = {**checkpoint, "state_dict": own}
        super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._head is None or not self._head.is_sharded:
            return state
        self._require_all_ranks()
        return whole_optimizer_state(optimizer, state, self._head)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        head = self._head
        if head is not None and head.is_sharded:
            both = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            own = [own_optimizer_state(optimizer, state, head) for optimizer, state in both]
            checkpoint = {**checkpoint, "optimizer_states": own}
        super().load_optimizer_state_dict(checkpoint)

    def _require_all_ranks(self) -> None:
        assert self.lightning_module is not None
        try:
            require_all_ranks(self.lightning_module)
        except RuntimeError:
            self._undo()  # this error ends Lightning's handling of the first one, so teardown is not called
            raise

    @override
    def teardown(self) -> None:
        if self._head is not None:
            self._make_whole(self._head)
        self._undo()
        super().teardown()

    def _make_whole(self, head: ShardedHead) -> None:
        """Gather parameters and optimizer states on every rank."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.interrupted:
            log.warning(
                f"{type(self).__name__}: after an exception rank {self.global_rank} is left with its part of "
                f"{self._head_name!r}: load a checkpoint before you use the module again"
            )
            return
        for optimizer in self.optimizers:
            make_whole(optimizer, head)
        head.unshard()

    def _undo(self) -> None:
        if self._takeover is not None:
            self._takeover.undo()
        for channel in self._channels:
            dist.destroy_process_group(channel.group)
        self._head = None
        self._passes = None
        self._takeover = None
