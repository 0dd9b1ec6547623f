"""Layered SGD and the hybrid's sharded head in a training loop of your own, without a Trainer.

The reduction, the postponed update and the passes are those of `LayeredSGDStrategy` and `KrizhevskyHybridStrategy`.
What the strategies do around them is left to the loop: checkpoints, precision, metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dp._private.torch_names import group_timeout, release_reducer
from lightning_dp.collectives.groups import RankTopology, resolve_group
from lightning_dp.strategies.base import hides_parameter_use, overlapping_parameters
from lightning_dp.strategies.krizhevsky_hybrid import checks
from lightning_dp.strategies.krizhevsky_hybrid.exchange import Scheme
from lightning_dp.strategies.krizhevsky_hybrid.fit import clip_by_global_norm, sharded_passes
from lightning_dp.strategies.krizhevsky_hybrid.passes import HeadPasses
from lightning_dp.strategies.layered_sgd.options import (
    CommunicatorOptions,
    check_ddp_options,
    check_layers,
    check_optimizers,
)
from lightning_dp.strategies.layered_sgd.postponement import why_step_is_not_postponed
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from lightning_dp.strategies.layered_sgd.strategy import BUCKET_CAP_MB


class LayeredSGDLoop:
    """Layered SGD (arXiv 1906.05936) without a Trainer: wraps a model as DistributedDataParallel does.

    Every rank makes it, after `torch.distributed.init_process_group`, and makes the same calls. Call it for the
    forward, then `backward` and `step`. Call ``model`` itself to evaluate. At the end of the context, also after an
    exception, what is pending is applied; before a checkpoint, call `finish`.

    Args:
        model: on this rank's device. Ranks start from rank 0's parameters.
        group_size: number of ranks in a group. There must be several groups.
        overlap, communicator: as for `LayeredSGDStrategy`.
        **ddp_options: of DistributedDataParallel. ``bucket_cap_mb`` defaults to 2. Gradients are summed over all ranks,
            so ``process_group`` and ``device_mesh`` are refused.

    Raises:
        ValueError: there is a single group, groups would not be equal, an option is not known or takes the place of the
            communication hook, or a layer has sparse gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        group_size: int,
        overlap: Literal["load", "step"] = "step",
        communicator: Literal["leader", "sharded"] = "leader",
        **ddp_options: Any,
    ) -> None:
        name = type(self).__name__
        options = CommunicatorOptions(communicator, overlap, "native", "auto", None)
        topology = RankTopology(dist.get_world_size(), group_size)
        if topology.num_groups == 1:
            raise ValueError(
                f"group_size={group_size} makes a single group of {topology.world_size} ranks, where there is nothing "
                "to hide; use DistributedDataParallel"
            )
        check_ddp_options(ddp_options)
        check_layers(model, name)
        device, backend = next(model.parameters()).device, dist.get_backend()
        options.prepare_environment([device], backend, name)
        communicator_of_rank = options.make_communicator(
            topology, dist.get_rank(), device, backend, group_timeout(resolve_group(None), device),
            lambda *_: None, model, bool(ddp_options.get("find_unused_parameters")), name,
        )  # fmt: skip
        ddp_options.setdefault("bucket_cap_mb", BUCKET_CAP_MB)
        self._model = model
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **ddp_options)
        self._reduction = LayeredReduction(communicator_of_rank, topology.world_size, model)
        self._reduction.feed_from(self._ddp)
        self._updates = self._reduction.updates
        self._overlap = overlap

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``model(*args, **kwargs)``, with each update applied before its parameters are used."""
        self._reduction.before_forward()
        # In compiled code, or through another parameter's memory, a use would go unseen.
        is_hidden = hides_parameter_use(self._model) or any(True for _ in overlapping_parameters(self._model))
        with self._updates.running_forward(finish=self._overlap == "load" or is_hidden):
            output = self._ddp(*args, **kwargs)
        # Also parts that this forward left out: a ``loss.backward()``, as under DDP, overwrites their gradients.
        self._updates.bring_up_to_date()
        return output

    def backward(self, loss: Tensor) -> None:
        """Take the place of ``loss.backward()``: begin to sum gradients, and do not wait for the sums."""
        self._updates.begin_backward(loss)
        loss.backward()
        self._updates.end_backward()
        self._reduction.release()

    def step(self, optimizer: Optimizer) -> None:
        """Take the place of ``optimizer.step()``: postpone it, or take it at once where postponing would show.

        Raises:
            ValueError: the optimizer calls its closure several times.
        """
        check_optimizers([optimizer], type(self).__name__)
        if why_step_is_not_postponed(optimizer) is None:
            self._updates.stage(optimizer)
            return
        self._updates.finish()
        self._updates.unguard(optimizer)
        self._updates.with_own_gradients(lambda: None)()
        optimizer.step()

    def finish(self) -> None:
        """Apply what is pending. Afterwards the parameters are those of synchronous SGD."""
        self._updates.bring_up_to_date()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            else:
                self._updates.finish()  # not the gradients of a backward that has failed: nobody may send them
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"{type(self).__name__}: the update of the last step is lost: {failure}")
        finally:
            self._reduction.close()
            release_reducer(self._ddp)


class ShardedHeadLoop:
    """What a training loop does with a head that `sharded_head` has sharded. All ranks make the same calls.

    Args:
        model: contains the head.
        passes: the passes of a scheme through it.
    """

    def __init__(self, model: nn.Module, passes: HeadPasses) -> None:
        self._model = model
        self._passes = passes

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for the head."""
        return sum(self._passes.bytes_sent.values())

    def backward(self, loss: Tensor) -> None:
        """Take the place of ``loss.backward()``. ``loss`` is the mean over this rank's samples.

        Raises:
            ValueError: the loss leaves out what the head has returned, and the other ranks would wait.
            RuntimeError: the head has other parameters than those that were sharded.
        """
        self._passes.require_part_in(loss)
        loss.backward()
        self._passes.begin_training_step(self._model)

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clip the model's gradients by their whole norm. `torch.nn.utils.clip_grad_norm_` knows one rank's rows."""
        clip_by_global_norm(self._model.parameters(), max_norm, self._passes.head)

    def step(self, optimizer: Optimizer) -> None:
        """Take the place of ``optimizer.step()``.

        Raises:
            ValueError: the optimizer computes with whole parameters, of which a rank holds some rows.
        """
        checks.check_optimizer(optimizer, self._passes.head)
        optimizer.step()


@contextmanager
def sharded_head(
    model: nn.Module, head: str, scheme: Scheme = "c", num_passes: int | None = None
) -> Iterator[ShardedHeadLoop]:
    """Let each rank hold its rows of a head of ``model`` within the context (arXiv 1404.5997, section 4).

    Every rank enters and leaves it. Calls of the head are collective within it; wrap ``model`` in
    DistributedDataParallel there, which leaves the head out, and make the optimizer there. Afterwards the head is
    whole, in host memory, and the optimizer cannot be used any more. After an exception the head keeps this rank's
    rows, because other ranks may be gone.

    Args:
        model: on this rank's device. Ranks start from rank 0's head.
        head: dotted name of the submodule: an nn.Linear, or an nn.Sequential of them and of elementwise layers.
        scheme: "a", "b" or "c".
        num_passes: of b and c. None: as many as there are ranks.

    Raises:
        ValueError: the head cannot be sharded, or not in this model.
    """
    device = next(checks.check_head(model, head).parameters()).device
    timeout = group_timeout(resolve_group(None), device)
    with sharded_passes(model, head, scheme, num_passes, device, timeout) as (passes, parameters):
        parameters.keep()
        with passes.head.forwarding_to(passes.forward_local_batch):
            yield ShardedHeadLoop(model, passes)
        parameters.unshard()
