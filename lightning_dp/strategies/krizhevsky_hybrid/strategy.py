"""One weird trick (Krizhevsky, arXiv 1404.5997): data parallelism in the trunk, model parallelism in the head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dp._lightning import DDPStrategy, LightningModule, OwnTrainerOnly
from lightning_dp._private.lightning_names import clip_gradients, strategy_timeout
from lightning_dp._private.torch_names import ignore_in_ddp, scaler_device, stop_ignoring_in_ddp
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.tracing import OnStage
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import make_whole, own_state, whole_state
from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses, HeadStep
from lightning_dp.strategies.krizhevsky_hybrid.policy import (
    check_module,
    check_optimizers,
    check_precision,
    find_head,
    warn_of_requeue,
)
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SCHEMES
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead

log = logging.getLogger(__name__)


class KrizhevskyHybridStrategy(OwnTrainerOnly, DDPStrategy):
    """Data parallelism in the convolutional trunk, model parallelism in the fully-connected head.

    The gradients of the head, most of a network like AlexNet, are never sent: each rank holds a slice of every layer of
    the head and computes it for the examples of all ranks. Parameters equal those of synchronous SGD on the batches of
    all ranks, unless ``variable_batch`` is on. See arXiv 1404.5997; ``docs/krizhevsky_hybrid.md`` says when it pays.

    While fitting, the head's parameters (and ``state_dict()``) are this rank's rows; checkpoints, and the module after
    `fit`, hold all of them. Norms over parameters or gradients then differ between ranks: clip with
    ``Trainer(gradient_clip_val=...)`` or ``self.clip_gradients``, which know; torch's ``clip_grad_norm_`` does not.

    Overrides of DDPStrategy, and why:

    - ``setup``: says what cannot work, before and after there are optimizers.
    - ``configure_ddp``: divides the head, before DDP and the optimizers see its parameters.
    - ``teardown``: puts the head together again.
    - ``lightning_module_state_dict``, ``load_model_state_dict``, ``optimizer_state``, ``load_optimizer_state_dict``:
      checkpoints hold the whole.

    Args:
        head: dotted name of the submodule to divide: an nn.Linear, or nn.Sequential of it and of elementwise
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
            cannot be divided, or the module or Trainer has something that cannot work with it, by name.
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
        self._head_name, self._scheme, self._variable_batch = head, scheme, variable_batch
        self._head: ShardedHead | None = None  # only while fitting
        self._passes: HeadPasses | None = None
        self._head_step: HeadStep | None = None  # the module's own
        self._restore: list[Callable[[], object]] = []
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
        self._take_over(module, head)
        trunk = [p for p in module.parameters() if not self._head.owns(p)]
        if any(p.requires_grad for p in trunk):
            super().configure_ddp()
        else:  # DDP takes no module without a gradient to reduce; all start from rank 0's all the same
            for tensor in (*trunk, *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    def _take_over(self, module: LightningModule, head: nn.Module) -> None:
        """Put this strategy's ways in place of the module's and Lightning's, and remember how to undo it."""
        assert self._passes is not None
        self._replace(head, "forward", self._passes)
        if hasattr(module, "head_step"):
            self._head_step = cast(HeadStep, module.head_step)
            self._replace(module, "head_step", self._run_head_step)
        self._replace(self.precision_plugin, "clip_grad_by_norm", self._clip_grad_by_norm)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            # An overflow in one rank's slice must skip the step on all.
            sharded = ShardedGradScaler(scaler_device(scaler))
            sharded.load_state_dict(scaler.state_dict())
            self._replace(self.precision_plugin, "scaler", sharded)
            self._restore.append(lambda: scaler.load_state_dict(sharded.state_dict()))
        names = list(self._names())
        ignore_in_ddp(module, names)
        self._restore.append(lambda: stop_ignoring_in_ddp(module, names))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)
        object.__setattr__(owner, name, value)
        if before is None:
            self._restore.append(lambda: object.__delattr__(owner, name))
        else:
            self._restore.append(lambda: object.__setattr__(owner, name, before))

    def _names(self) -> dict[str, Tensor]:
        """The head's parameters by their names in the module."""
        module, head = self.lightning_module, self._head
        assert module is not None
        assert head is not None
        named = module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if head.owns(parameter)}

    def _record_stage(self, stage: str, start_s: float, end_s: float) -> None:
        if self.on_stage is not None:
            self.on_stage(stage, start_s, end_s)

    def _run_head_step(self, features: Tensor, target: Any) -> Tensor:
        """``head_step`` on the examples of all ranks, pass by pass; outside of training, on this rank's own."""
        assert self._passes is not None
        assert self.lightning_module is not None
        assert self._head_step is not None
        if not (torch.is_grad_enabled() and self.lightning_module.trainer.training):
            return self._head_step(features, target)
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = {} if scaler is None else {"scale": scaler.scale}
        update = self._update_head if self._variable_batch else None
        head = self._passes.head
        others = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad and not head.owns(p)}
        return self._passes.step(features, target, self._head_step, update, others=others, **scale)

    def _update_head(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of the head alone, by the optimizers that hold it: they skip what has no gradient."""
        module = self.lightning_module
        assert module is not None
        assert self._head is not None
        own = dict(zip(self._head.parameters, gradients, strict=True))
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(p in own for p in parameters):
                continue
            accumulated = {p: p.grad for p in parameters if p not in own}  # of earlier batches, for the trunk's step
            for p in parameters:
                p.grad = own.get(p)
            trainer = module.trainer
            clip_gradients(
                self.precision_plugin,
                module,
                optimizer,
                trainer.gradient_clip_val,
                trainer.gradient_clip_algorithm,
            )
            optimizer.step()
            for p in parameters:
                p.grad = accumulated.get(p)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of the whole gradient, of which ranks hold parts."""
        assert self._head is not None
        parameters = list(self.precision_plugin.main_params(optimizer))
        ours = [p.grad for p in parameters if p.grad is not None and self._head.owns(p)]
        rest = [p.grad for p in parameters if p.grad is not None and not self._head.owns(p)]
        square = torch.nn.utils.get_total_norm(ours).to(self.root_device) ** 2
        squares = self._head.channel.all_gather("norm", square).sum()
        norm = (torch.nn.utils.get_total_norm(rest).to(self.root_device) ** 2 + squares).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._head is not None and self._head.is_sharded:
            self._require_all_ranks()
            self._require_one_trunk(self._head)
            state |= {name: self._head.whole(p.data, p) for name, p in self._names().items()}
        return state

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        head = self._head
        if head is not None and head.is_sharded:
            state = checkpoint["state_dict"]
            own = {name: head.own_rows(state[name], p) for name, p in self._names().items() if name in state}
            checkpoint = {**checkpoint, "state_dict": state | own}
        super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._head is None or not self._head.is_sharded:
            return state
        self._require_all_ranks()
        return whole_state(optimizer, state, self._head)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        head = self._head
        if head is not None and head.is_sharded:
            both = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            own = [own_state(optimizer, state, head) for optimizer, state in both]
            checkpoint = {**checkpoint, "optimizer_states": own}
        super().load_optimizer_state_dict(checkpoint)

    def _require_all_ranks(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.interrupted:
            self._undo()  # Lightning would not come to teardown
            raise RuntimeError(
                f"{type(self).__name__} cannot save a checkpoint after an exception: the head's parameters lie on all "
                "ranks, and the others may be gone. Save every few steps: ModelCheckpoint(every_n_train_steps=...)"
            )

    def _require_one_trunk(self, head: ShardedHead) -> None:
        """Raise RuntimeError if the ranks' trunks have drifted apart, so that one of them would not stand for all."""
        assert self.lightning_module is not None
        trunk = [p.detach().double().abs().sum() for p in self.lightning_module.parameters() if not head.owns(p)]
        sums = head.channel.all_gather("checksums", torch.stack(trunk)) if trunk else torch.zeros(1)
        if not torch.allclose(sums, sums[:1].expand_as(sums), rtol=1e-6, equal_nan=True):
            raise RuntimeError(
                "the trunk's parameters are not the same on all ranks. Something in the module scales or skips their "
                "gradients by what a rank sees of the head's, as torch.nn.utils.clip_grad_norm_ does: use "
                "self.clip_gradients(optimizer, gradient_clip_val=...), or Trainer(gradient_clip_val=...)"
            )

    @override
    def teardown(self) -> None:
        if self._head is not None:
            self._put_together(self._head)
        self._undo()
        super().teardown()

    def _undo(self) -> None:
        while self._restore:
            self._restore.pop()()
        for channel in self._channels:
            dist.destroy_process_group(channel.group)
        self._head = self._passes = None

    def _put_together(self, head: ShardedHead) -> None:
        """The whole parameters, and optimizer states, on every rank."""
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
