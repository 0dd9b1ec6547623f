"""How gradient shards leave FSDP2: each unit's are summed between groups once no more will be added to them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp._private.torch_names import (
    backward_number,
    call_after_backward,
    is_in_backward,
    local_part,
    num_gradient_listeners,
    replace_fsdp_collectives,
    without_torch_function,
)
from lightning_dp.collectives.point_to_point import naming_backend_errors, raised_by_signal_handler
from lightning_dp.strategies.layered_fsdp.intra_group import (
    Prefetch,
    ShardSum,
    StartedAllGather,
    StartedReduceScatter,
)
from lightning_dp.strategies.layered_fsdp.sharding import own_parameters, padded_numel
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientCommunicator, GradientSum
from lightning_dp.strategies.layered_sgd.update import UpdateQueue

BufferKey = tuple[int, ...]
"""Size of a buffer, and the places in the unit of the parameters whose gradients it holds."""
Residuals = dict[str, dict[BufferKey, Tensor]]
"""What compression has left out of a rank's shards: name of a unit -> buffer -> (numel,)."""


class Unit:
    """What FSDP2 gathers and reduces at once.

    Attributes:
        name: in the module.
        index: place among the units.
        part: the module: a part of the trained one, and an ``FSDPModule``.
        first_number: of its sums.
        parameters: the DTensors, of this unit and no other, each with its place.
        num_forwards: forward passes with gradients enabled since the last backward.
        ready: parameters whose gradient shard is there, in this backward.
        kept: those of earlier backward passes, whose gradients are not summed yet (accumulation).
        is_submitted: whether this backward's sum has begun.
        reduce_scatter: where FSDP2's need not be awaited at once.
    """

    def __init__(self, name: str, index: int, part: Any) -> None:
        self.name = name
        self.index = index
        self.part = part
        self.first_number = 0
        self.parameters = {parameter: place for place, parameter in enumerate(own_parameters(part))}
        self.num_forwards = 0
        self.ready: dict[Tensor, None] = {}
        self.kept: dict[Tensor, None] = {}
        self.is_submitted = False
        self.reduce_scatter: StartedReduceScatter | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are there, and no more will be added to them in this backward.

        FSDP2 reduces a unit once for each of its forward passes. One that runs several times, or that was not seen to
        run, is complete when backward has ended.
        """
        return self.num_forwards == 1 and len(self.ready) == len(self.trainable)

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters that get a gradient if all are used."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def is_completed_by(self, output: Tensor) -> bool:
        """Whether FSDP2 will call `ShardReduction`'s hooks for all parameters when it has reduced into ``output``.

        Without another look at its values: they stay what is reduced, in this dtype, and nobody else has a hook.
        """
        with without_torch_function():
            parameters = self.trainable
            return (
                self.num_forwards == 1
                and output.numel() == sum(map(padded_numel, parameters))
                and all(p.grad is None and p.dtype == output.dtype for p in parameters)
                and all(num_gradient_listeners(p) == 1 for p in parameters)
            )


class Comparison:
    """What the ranks sum in one backward pass, compared while the sums are under way.

    Sums meet by their place in the order of backward. Ranks that use other parts of the module would add gradients of
    different parameters, or wait for each other until the timeout, or gloo would end the process, where their sizes
    differ. So what is summed for the first time is compared before.

    Args:
        names: of the units.
        group: all ranks, on the host.
        known: what all ranks have summed before, as index and mark of a unit.

    Attributes:
        sums: that are under way.
    """

    def __init__(self, names: Sequence[str], group: dist.ProcessGroup, known: set[tuple[int, int]]) -> None:
        self._names = names
        self._group = group
        self._known = known
        self._num_noted = 0
        self._own = [0] * len(names)  # marks of this rank; 0: nothing of this unit is summed
        self._marks = torch.empty(0)
        self._work: dist.Work | None = None
        self._is_same = False
        self.sums: list[GradientSum] = []

    def note(self, index: int, buffers: object) -> bool:
        """Note that the unit with this index is summed next, and which parameters its buffers hold.

        Returns whether all ranks have summed the same in an earlier backward.
        """
        self._num_noted += 1
        self._own[index] = (self._num_noted << 32) + zlib.crc32(repr(buffers).encode())
        return (index, self._own[index]) in self._known

    @property
    def has_begun(self) -> bool:
        """Whether anything is summed in this backward."""
        return self._num_noted > 0

    def start(self) -> None:
        """Begin to compare. All ranks call it when backward has ended."""
        marks = torch.tensor(self._own)
        self._marks = torch.cat([marks, -marks])
        with naming_backend_errors(lambda: "the comparison of what the ranks sum"):
            self._work = dist.all_reduce(self._marks, dist.ReduceOp.MAX, group=self._group, async_op=True)

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return, or raise, immediately."""
        return self._work is not None and self._work.is_completed()

    def wait(self) -> None:
        """Return when the ranks are known to sum the same, or backward has not ended yet.

        Raises:
            RuntimeError: they do not, or a rank has died.
        """
        if self._is_same or self._work is None:
            return
        try:
            with naming_backend_errors(lambda: "the comparison of what the ranks sum"):
                self._work.wait()
        except RuntimeError as error:
            if not raised_by_signal_handler(error):
                for gradient_sum in self.sums:  # a sum with the rank that has died fails, too, and names that rank
                    gradient_sum.wait()
            raise
        largest, negated_smallest = self._marks.chunk(2)
        differs = (largest + negated_smallest).nonzero().flatten().tolist()
        if differs:
            raise RuntimeError(
                f"{', '.join(self._names[index] for index in differs)}: backward gave gradients to other parameters, "
                "or in another order, on some ranks than on others, or only some ranks have used a gradient between "
                "two backward passes, and nothing was updated with these gradients; let all ranks run the same "
                "parts, or use DDPStrategy(find_unused_parameters=True)"
            )
        self._is_same = True
        self._known.update(enumerate(self._own))
        self.sums.clear()


class ComparedSum:
    """A `GradientSum` that is used when the ranks are known to have summed the same."""

    def __init__(self, gradient_sum: GradientSum, comparison: Comparison) -> None:
        self._sum = gradient_sum
        self._comparison = comparison
        comparison.sums.append(gradient_sum)

    @property
    def buffer(self) -> Tensor:
        """See `GradientSum`."""
        return self._sum.buffer

    @property
    def has_arrived(self) -> bool:
        """See `GradientSum`."""
        return self._comparison.has_arrived and self._sum.has_arrived

    def wait(self) -> None:
        """See `GradientSum`."""
        self._comparison.wait()
        self._sum.wait()


class ShardReduction:
    """Sums gradient shards between groups in the background, and keeps the updates that wait for them.

    Args:
        communicator: sums the buffers; closed by `close`.
        num_groups: number of groups, that the averages within groups are averaged over.
        module: the module that is trained.
        units: its units, in the order of the forward.
        timeout: of the comparison of what the ranks sum.

    Attributes:
        compressed: the compressed all-reduce, with what it keeps between steps; None if sums are exact.
        updates: what is pending.
    """

    def __init__(
        self,
        communicator: GradientCommunicator,
        num_groups: int,
        module: nn.Module,
        units: Sequence[tuple[str, Any]],
        timeout: timedelta,
    ) -> None:
        self._communicator = communicator
        self._num_groups = num_groups
        self.compressed = communicator.compressed
        self.updates = UpdateQueue(module, keeps_gradients=True)
        self._is_accumulating = False
        self._will_release = False
        self._backward: int | None = None  # number of the one that runs, without those within it
        self._keys: dict[tuple[str, BufferKey], Tensor] = {}  # what stands for a buffer in a compressor's table
        self._undo: list[Callable[[], None]] = []
        self._hooked: set[Tensor] = set()
        self._units = [Unit(name, index, part) for index, (name, part) in enumerate(units)]
        self._unit_names = [name for name, _ in units]
        # The highest for the units nearest the input, as DDP numbers its buckets. Each unit has numbers of its own, as
        # many as parameters, so that no unit is summed with another one.
        number = 0
        for unit in reversed(self._units):
            unit.first_number = number
            number += len(unit.parameters)
        self._prefetch = Prefetch()
        self._all_ranks = dist.new_group(timeout=timeout, backend="gloo")
        self._known: set[tuple[int, int]] = set()
        self._comparison = Comparison(self._unit_names, self._all_ranks, self._known)  # of this backward
        self._held: list[Callable[[], None]] = []  # begin the sums that wait for the comparison
        self._last_comparison: Comparison | None = None
        self._has_compared = False  # since the last forward began
        for unit in self._units:
            self._call_before_forward(unit, _count_forward)

    def overlap_intra_group(self) -> None:
        """Let FSDP2's collectives on the CPU run while the rank computes."""
        under_way: deque[ShardSum] = deque()
        for unit in self._units:
            reduce_scatter = StartedReduceScatter(partial(self._may_start, unit), self._num_groups, under_way)
            undo = replace_fsdp_collectives(unit.part, StartedAllGather(), reduce_scatter)
            if undo is not None:
                unit.reduce_scatter = reduce_scatter
                self._undo.append(undo)
            self._call_before_forward(unit, self._prefetch.before_gather, prepend=True)
            self._call_before_forward(unit, self._prefetch.after_gather)

    def _call_before_forward(self, unit: Unit, act: Callable[[Unit], None], prepend: bool = False) -> None:
        """Call ``act`` before each forward that a backward may follow; ``prepend``: before the unit is gathered."""
        hook = partial(_unless_recomputed, act, unit)
        self._undo.append(unit.part.register_forward_pre_hook(hook, prepend=prepend).remove)

    def _may_start(self, unit: Unit, output: Tensor) -> bool:
        return not self._is_accumulating and is_in_backward() and unit.is_completed_by(output)

    def stop_prefetch(self) -> None:
        """Free what was gathered ahead: parameters may change now."""
        self._prefetch.drop()

    def before_forward(self) -> None:
        """Look for parameters that have become trainable, and prepare for a forward and its backward."""
        if self._last_comparison is not None and self._last_comparison.has_arrived:
            self._last_comparison.wait()  # this rank may have nothing else to wait for
        self._has_compared = False
        self._prefetch.begin_step()
        self.forget_backward()  # one that the step has called by itself may have raised
        self._hook_trainable()

    def forget_backward(self) -> None:
        """Begin anew after a backward that has raised. The step may have caught the exception, and go on."""
        self._backward = None
        self._will_release = False
        self._comparison = Comparison(self._unit_names, self._all_ranks, self._known)
        self._held.clear()
        for unit in self._units:
            self._begin(unit)
            if unit.reduce_scatter is not None:
                unit.reduce_scatter.take()
        self.updates.end_backward()

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward from ``loss``. The step itself may have unfrozen parameters."""
        if loss.requires_grad:  # else backward raises
            loss.register_hook(self._note_backward)
        self._hook_trainable()

    def _note_backward(self, _: Tensor) -> None:
        self._backward = backward_number()

    def _hook_trainable(self) -> None:
        with without_torch_function():
            for unit in self._units:
                for parameter in unit.parameters:
                    if parameter.requires_grad and parameter not in self._hooked:
                        self._hooked.add(parameter)
                        hook = partial(self._gradient_is_there, unit)
                        self._undo.append(parameter.register_post_accumulate_grad_hook(hook).remove)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let gradients of the backward passes within stay in their group: another backward adds to them."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def _begin(self, unit: Unit) -> None:
        unit.ready.clear()
        unit.is_submitted = False
        unit.num_forwards = 0

    def _gradient_is_there(self, unit: Unit, parameter: Tensor) -> None:
        """FSDP2 has reduced a gradient within the group: the hook on a DTensor."""
        if unit.is_submitted:
            raise RuntimeError(
                f"{unit.name} got another gradient after its sum over the groups had begun: backward uses it more "
                "often than its forward has run; call its forward for each use, or give wrap= a part around it"
            )
        if not self._will_release and is_in_backward():
            # Not as late as `post_backward`: before that Lightning calls `on_after_backward`, which may read gradients.
            # After FSDP2's own callbacks, which reduce the units whose inputs need no gradient: those are queued by now
            # or, if the module's parts begin passes of their own, until backward has ended.
            self._will_release = True
            call_after_backward(lambda: call_after_backward(self.release))
        unit.ready[parameter] = None
        if not self._is_accumulating and unit.is_complete:
            self._submit(unit)

    @torch.compiler.disable
    def release(self) -> None:
        """Sum what is not summed yet, when backward has ended, and release what was held back until then."""
        self._will_release = False
        # A reentrant checkpoint runs a backward of its own. The one around it still needs what is gathered.
        if not is_in_backward() or self._backward in (None, backward_number()):
            self._backward = None
            self.stop_prefetch()
            for unit in self._units:
                unit.part.reshard()  # FSDP2 keeps what no backward has used: `on_after_backward` would write to a copy
        for unit in reversed(self._units):  # the order of backward
            if self._is_accumulating:
                unit.kept.update(unit.ready)
            elif (unit.ready or unit.kept) and not unit.is_submitted:
                self._submit(unit)
            self._begin(unit)
        if self._comparison.has_begun:
            self._compare(waits=bool(self._held))
            for begin in self._held:
                begin()
            self._held.clear()
        self._communicator.release()

    def _compare(self, waits: bool) -> None:
        comparison, self._comparison = self._comparison, Comparison(self._unit_names, self._all_ranks, self._known)
        self._last_comparison = comparison
        self._has_compared = True
        comparison.start()
        if waits:
            comparison.wait()

    def before_step(self, parameters: Iterable[Tensor]) -> None:
        """Sum what earlier backward passes have left, if ``parameters`` are among it: they are to be updated now.

        With manual optimization a window may end without a backward that sums: its last batch has no loss, say.
        """
        kept = {parameter for unit in self._units for parameter in unit.kept}
        if not kept.isdisjoint(parameters):
            self.release()
        if not self._has_compared:
            # This rank's loss has reached no parameter. If those of others have, their sums wait for this rank, and
            # would meet those of its next step.
            self._compare(waits=True)

    def _submit(self, unit: Unit) -> None:
        unit.is_submitted = True
        with without_torch_function():
            # What backward leaves out now may have got its gradient earlier in the window. Or it was zeroed since.
            kept = [p for p in unit.kept if p not in unit.ready and p.grad is not None]
            if any(p.grad is None for p in unit.ready):
                raise RuntimeError(
                    f"{unit.name} has lost a gradient before it was summed over the groups: a hook of "
                    "register_post_accumulate_grad_hook has taken it; step, and zero gradients, when backward has ended"
                )
        unit.kept.clear()
        buffers = buffers_of([*unit.ready, *kept])
        shard_sum = None if unit.reduce_scatter is None else unit.reduce_scatter.take()
        assert shard_sum is None or len(buffers) == 1, "a reduce-scatter under way fills the whole buffer"
        content = [[unit.parameters[parameter] for parameter in parameters] for parameters, _ in buffers]
        begin = partial(self._begin_sums, unit, buffers, shard_sum, self._comparison)
        is_known = self._comparison.note(unit.index, content)
        if is_known and not self._held:  # all ranks submit in the order of backward
            begin()
        else:
            self._held.append(begin)

    def _begin_sums(
        self,
        unit: Unit,
        buffers: list[tuple[list[Tensor], Tensor]],
        shard_sum: ShardSum | None,
        comparison: Comparison,
    ) -> None:
        for number, (parameters, buffer) in enumerate(buffers, unit.first_number):
            # Divided before the sum, as DDP does, so that 16-bit sums do not overflow.
            if shard_sum is None:
                buffer.div_(self._num_groups)
            # A step may use other parameters of the unit than the one before, whose residuals are not theirs.
            place = (unit.name, (buffer.numel(), *(unit.parameters[parameter] for parameter in parameters)))
            key = self._keys.setdefault(place, torch.empty_like(buffer, device="meta"))
            gradient_sum = self._communicator.submit(number, buffer, [key], [] if shard_sum is None else [shard_sum])
            self.updates.add_sum(parameters, ComparedSum(gradient_sum, comparison))

    def residuals(self) -> Residuals:
        """Return what compression has left out of this rank's shards so far."""
        found: Residuals = {}
        if self.compressed is not None:
            for (name, of_buffer), key in self._keys.items():
                info = self.compressed.parameters(key)
                if self.compressed.carried_ranges(info) is not None:
                    found.setdefault(name, {})[of_buffer] = self.compressed.compressor.residuals.expanded(info)
        return found

    def load_residuals(self, residuals: Residuals) -> None:
        """Continue with these, in place of the present ones. Call it while nothing is pending."""
        assert self.compressed is not None
        self.compressed.clear()
        for name, buffers in residuals.items():
            for of_buffer, residual in buffers.items():
                key = self._keys.setdefault((name, of_buffer), residual.to("meta"))
                self.compressed.load_residual(self.compressed.parameters(key), residual.clone())

    def close(self) -> None:
        """Give up what is pending, leave FSDP2 as it was, and stop the communicator."""
        self.updates.close()
        self.stop_prefetch()
        for undo in self._undo:
            undo()
        self._undo.clear()
        for unit in self._units:  # it refers to this object, whose group would keep its threads until the next gc
            unit.reduce_scatter = None
        self._communicator.close()
        if self._last_comparison is None or self._last_comparison.has_arrived:
            dist.destroy_process_group(self._all_ranks)


def _count_forward(unit: Unit) -> None:
    unit.num_forwards += 1


@torch.compiler.disable
def _unless_recomputed(act: Callable[[Unit], None], unit: Unit, *_: object) -> None:
    """Call ``act`` before a forward with gradients, not before one that runs again in backward."""
    if torch.is_grad_enabled() and not is_in_backward():
        act(unit)


def buffers_of(parameters: list[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Return flat buffers that hold the gradients' local parts, each with its parameters.

    FSDP2 puts the shards of a unit into one buffer, with padding between them, and a gradient stays a view of it while
    others are added. One that somebody has replaced is a buffer of its own. Where a gradient lies between two others
    that is not to be summed, because an earlier backward of this step has summed it, the buffer is cut.
    """
    by_storage: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        part = local_part(parameter.grad)
        # A gradient that somebody has replaced, and of which this rank has no row, has no address. Two of them are two
        # buffers, as on the ranks that have rows.
        place = part.untyped_storage().data_ptr() or -id(parameter)
        by_storage.setdefault(place, []).append((parameter, part))
    buffers = []
    for members in by_storage.values():
        members.sort(key=lambda member: member[1].storage_offset())
        runs = [members[:1]]
        for (parameter, part), following in pairwise(members):
            if following[1].storage_offset() > part.storage_offset() + padded_numel(parameter):
                runs.append([])
            runs[-1].append(following)
        buffers += [([parameter for parameter, _ in run], _span([part for _, part in run])) for run in runs]
    return buffers


def _span(parts: list[Tensor]) -> Tensor:
    """Return the memory from the first of ``parts`` to the last as one vector."""
    assert all(part.is_contiguous() for part in parts)
    first, last = parts[0], parts[-1]
    numel = last.storage_offset() + last.numel() - first.storage_offset()
    return first.as_strided((numel,), (1,), first.storage_offset())
