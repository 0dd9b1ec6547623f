"""Ring all-reduce as a communication hook of `DistributedDataParallel`.

    model = DistributedDataParallel(module)
    model.register_comm_hook(RingState(wire_dtype=torch.bfloat16), ring_all_reduce_hook)

The ring of each gradient bucket starts as soon as backward has filled the bucket: on gloo in a worker thread, on NCCL
on a side stream. Backward continues meanwhile.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, and would find strings.

import torch
import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from lightning_dp.collectives.bucket_queue import BucketQueue, issues_in_hook
from lightning_dp.collectives.ring import SEGMENT_BYTES, WIRE_DTYPES, ring_all_reduce


class RingState(BucketQueue):
    """State of `ring_all_reduce_hook`: its options, its process group, and the queue of buckets.

    Args:
        group: as in `BucketQueue`.
        wire_dtype: None, float16 or bfloat16, as in `ring_all_reduce`.
        segment_bytes: as in `ring_all_reduce`.

    Copies and pickles hold the options only, so that they create a queue and a process group of their own. A copy
    shares ``group``, if it was given; such a state cannot be pickled.

    Raises:
        ValueError: ``wire_dtype`` is not supported.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        wire_dtype: torch.dtype | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype={wire_dtype} is not supported; use None, torch.float16 or torch.bfloat16")
        super().__init__(group, "ring_all_reduce_hook")
        self.wire_dtype = wire_dtype
        self.segment_bytes = segment_bytes

    def __copy__(self) -> "RingState":
        return type(self)(self.group, self.wire_dtype, self.segment_bytes)

    def __deepcopy__(self, memo: dict[int, object]) -> "RingState":
        return self.__copy__()

    def __reduce__(self) -> tuple[type["RingState"], tuple[None, torch.dtype | None, int]]:
        if self.group is not None:
            # Without its group, the unpickled state would average over all ranks.
            raise TypeError(
                "RingState(group=...) cannot be pickled, because a process group belongs to one process; create the "
                "state in each process, or leave group out to average over all ranks"
            )
        return type(self), (None, self.wire_dtype, self.segment_bytes)

    @override
    def _average(self, buffer: torch.Tensor, parameters: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        # DDP has compared the parameters of the ranks. To read the headers would stop the launch of backward's kernels.
        check_call = not issues_in_hook(buffer, group)
        ring_all_reduce(
            buffer,
            group,
            "mean",
            wire_dtype=self.wire_dtype,
            segment_bytes=self.segment_bytes,
            check_call=check_call,
        )


_default_state = RingState()


def ring_all_reduce_hook(state: RingState | None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of ``bucket`` over the ranks with `ring_all_reduce`, while backward continues.

    Pass it to ``DistributedDataParallel.register_comm_hook(state, ring_all_reduce_hook)``. With Lightning on GPUs, use
    ``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=ring_all_reduce_hook)``. On CPU that strategy ignores
    communication hooks, so register the hook on ``trainer.strategy.model`` in ``on_train_start``. On NCCL, DDP's own
    all-reduce is a ring already, and takes less of the host's time; the hook is for a 16-bit ``wire_dtype``.

    Args:
        state: None is a shared `RingState` with no options, for the default group.
        bucket: gradients of one floating-point dtype. Changed in place.

    Returns:
        A future of the bucket's buffer. ``backward()`` raises the errors of `ring_all_reduce`.

    Raises:
        TypeError: ``state`` is not a `RingState` or None.
    """
    if state is None:
        state = _default_state
    if not isinstance(state, RingState):
        raise TypeError(f"the state of ring_all_reduce_hook is {state!r}; use RingState(group=...) or None")
    return state.submit(bucket.buffer())
