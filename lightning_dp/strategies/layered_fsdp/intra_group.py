"""FSDP2's collectives inside a group on the CPU: started, and awaited when their result is used.

On a GPU, FSDP2 queues them on streams of their own. On the CPU it has no streams, and the training thread waits for
each one, although forward and backward could hide it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp._private.torch_names import local_part, version_of, without_torch_function
from lightning_dp.collectives.groups import all_gather_single

if TYPE_CHECKING:
    from lightning_dp.strategies.layered_fsdp.reduction import Unit

# Sums of units that may be under way before backward waits for the first of them. Each holds the gradients of its unit
# twice: a rank that is ahead of the others must not fill its memory.
MAX_UNDER_WAY = 2


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer, as FSDP2's own collectives do."""
        return torch.empty(*size, dtype=dtype, device=device)


class StartedAllGather(_Allocates):
    """FSDP2's all-gather, which its caller does not wait for: FSDP2 does, when it uses the parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Gather ``input_tensor``, (n,), into ``output_tensor``, (ranks * n,)."""
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


class ShardSum:
    """A reduce-scatter that is under way: each rank sends every other one its shard, and adds what it receives.

    gloo's own is an all-reduce, which sends twice the bytes. The backend's thread adds, as soon as all shards are here.

    Args:
        output: (n,), gets the sum of this rank's shards, times ``scale``.
        input: (ranks * n,), kept until it is sent.
        group: all its ranks make the same sums in the same order.
        scale: factor of the sum. Applied to each shard, so that 16-bit sums do not overflow.
    """

    def __init__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, scale: float) -> None:
        received = torch.empty_like(input)

        def add(sent: torch.futures.Future[Any]) -> None:
            sent.value()  # raises if it has failed
            first, *others = received.chunk(group.size()) if received.numel() else [received]
            torch.mul(first, scale, out=output)
            for shard in others:
                output.add_(shard, alpha=scale)

        work = dist.all_to_all_single(received, input, group=group, async_op=True)
        self._added: torch.futures.Future[None] = work.get_future().then(add)

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, immediately."""
        return self._added.done()

    def wait(self) -> None:
        """Return when ``output`` holds the sum."""
        self._added.wait()


class StartedReduceScatter(_Allocates):
    """FSDP2's reduce-scatter of one unit, as an average over the group.

    Args:
        may_start: told the output, says whether the caller waits for the sum before it reads the output. Then
            `under_way` is the sum, and the average is over ``num_groups`` groups.
        num_groups: number of groups.
        others: the sums of all units that are under way; shared by them.
    """

    def __init__(self, may_start: Callable[[Tensor], bool], num_groups: int, others: deque[ShardSum]) -> None:
        self._may_start = may_start
        self._num_groups = num_groups
        self._others = others
        self.under_way: ShardSum | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Average ``input_tensor``, (ranks * n,), over the group; ``output_tensor``, (n,), gets this rank's shard."""
        assert op == dist.ReduceOp.SUM, "FSDP2 was told to divide nothing"
        starts = self._may_start(output_tensor)
        while len(self._others) >= MAX_UNDER_WAY:
            self._others.popleft().wait()
        num_groups = self._num_groups if starts else 1
        shard_sum = ShardSum(output_tensor, input_tensor, group, 1 / (group.size() * num_groups))
        if starts:
            self._others.append(shard_sum)
            self.under_way = shard_sum
        else:
            shard_sum.wait()

    def take(self) -> ShardSum | None:
        """Return the sum that is under way, if any, to the one who waits for it."""
        shard_sum, self.under_way = self.under_way, None
        return shard_sum


class Prefetch:
    """Starts to gather a unit while the one that runs before it computes, in the order of the last step.

    All ranks of a group gather the same units in the same order: whether a unit is gathered ahead depends on the order
    of the forward alone, never on what has arrived at a rank. A unit that is gathered ahead and then does not run is
    freed when backward has ended, or before the next step.
    """

    def __init__(self) -> None:
        self._last_order: list[Unit] = []
        self._order: list[Unit] = []  # of this step, so far
        self._ahead: dict[Unit, list[int]] = {}  # with `_versions` when it was gathered
        self._thread = 0  # that runs the step; 0: none does

    def begin_step(self) -> None:
        """Begin to gather ahead. This thread runs the forward."""
        self.drop()
        self._last_order, self._order = self._order, []
        self._thread = threading.get_ident()

    def before_gather(self, unit: Unit) -> None:
        """Free what was gathered ahead of ``unit`` if its parameters have changed since."""
        versions = self._ahead.get(unit)
        if versions is not None and versions != _versions(unit):
            self._free(unit)

    def after_gather(self, unit: Unit) -> None:
        """Note that ``unit`` runs now, and start to gather what ran after it in the last step."""
        if self._thread != threading.get_ident():
            return
        self._ahead.pop(unit, None)
        place = len(self._order)
        self._order.append(unit)
        if self._last_order[: place + 1] != self._order or len(self._last_order) == place + 1:
            return  # other parts run than in the last step, or this is the last one
        following = self._last_order[place + 1]
        if following is not unit and following not in self._ahead:
            following.part.unshard(async_op=True)
            self._ahead[following] = _versions(following)

    def drop(self) -> None:
        """Stop to gather ahead, and free what was."""
        self._thread = 0
        for unit in list(self._ahead):
            self._free(unit)

    def _free(self, unit: Unit) -> None:
        del self._ahead[unit]
        unit.part.unshard()  # FSDP2 frees what has arrived
        unit.part.reshard()


def _versions(unit: Unit) -> list[int]:
    """Return how often the parameters, and the local parts that they hold, were changed in place.

    An operation on the parameter counts on it alone, and one on ``to_local()`` on the local part alone. Parameters of
    units inside are not looked at: to look at a local part would wait for its sum.
    """
    with without_torch_function():
        return [version_of(tensor) for parameter in unit.parameters for tensor in (parameter, local_part(parameter))]
