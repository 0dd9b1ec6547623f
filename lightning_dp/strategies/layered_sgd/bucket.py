"""One gradient bucket on its way through the hierarchical all-reduce."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives import streams
from lightning_dp.collectives.compression.stages import CompressedStages
from lightning_dp.collectives.compression.wire import complete
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.collectives.host_copy import HostCopy
from lightning_dp.collectives.tracing import OnStage

INTRA_GROUP_REDUCE = "intra-group reduce"
INTER_GROUP_ALL_REDUCE = "inter-group all-reduce"
INTRA_GROUP_BROADCAST = "intra-group broadcast"
WAIT = "wait"


class Stage(enum.Enum):
    """What has happened to a bucket. `BucketReduction` moves through the members in this order."""

    SUBMITTED = enum.auto()
    """Backward has filled the buffer, or on a GPU has launched the kernels that fill it and the copy to the host."""
    REDUCED = enum.auto()
    """Each carrier (the leader, or every member its shard) has the sum over its group."""
    CROSSING = enum.auto()
    """The last messages between the groups are under way, or have arrived."""
    CROSSED = enum.auto()
    """Each carrier has the sum over all ranks."""
    SETTLED = enum.auto()
    """The broadcast is under way, and the communicator is done. `wait` waits for the rest."""
    DELIVERED = enum.auto()
    """The buffer holds the sum over all ranks."""
    FAILED = enum.auto()
    """A stage has raised, and `wait` raises the error."""


_FOLLOWS = {
    Stage.REDUCED: Stage.SUBMITTED,
    Stage.CROSSING: Stage.REDUCED,
    Stage.CROSSED: Stage.CROSSING,
    Stage.SETTLED: Stage.CROSSED,
    Stage.DELIVERED: Stage.SETTLED,
}


class BucketReduction:
    """The sum of one gradient bucket over all ranks: three collectives, started on one thread and awaited on another.

    The training thread calls the constructor, every thread that needs the sum `wait`, and the communicator's threads
    the other methods: one after the other, but one may call `fail` while another works on the bucket. So only
    `_advance` and `fail` change the stage, under a lock.

    Args:
        index: DDP's number of the bucket; the highest index holds the layers nearest the input.
        buffer: (numel,) the bucket's gradients, changed in place.
        collective: performs the stages.
        stream: of the copy to host memory, if the buffer is on a GPU; then ``on_host`` must be given as well.
        on_host: sum a copy of the buffer in host memory, and copy the sum back in `wait`.
        release: called by `wait` if the bucket has not settled: lets the communicator begin with a bucket that it holds
            back until backward ends. Without it, a hook that reads a gradient during backward would wait forever.
        on_stage: called with name, start and end of each stage, and of the time that `wait` blocks.
    """

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        collective: HierarchicalAllReduce | CompressedStages,
        stream: streams.Stream | None = None,
        on_host: bool = False,
        release: Callable[[], None] | None = None,
        on_stage: OnStage | None = None,
    ) -> None:
        self.index = index
        self.buffer = buffer
        self.stage = Stage.SUBMITTED
        self._collective = collective
        self._stream = stream
        self._release = release
        self._on_stage = on_stage
        self._host_copy: HostCopy | None = None
        self._works: list[dist.Work] = []  # of the collective that is under way inside the group
        self._rest: Iterator[None] | None = None  # of the all-reduce between groups
        self._crossing_since_s = 0.0
        self._delivered: streams.Event | None = None  # the sum is on the GPU again
        self._transition = threading.Lock()
        self._settled_or_failed = threading.Event()
        self._delivery = threading.Lock()
        self._error: Exception | None = None
        if on_host:
            # What NCCL has summed within the node need not be copied by each of its ranks, and gloo has less to sum.
            self._host_copy = HostCopy(buffer, stream, self._reduce_on_device if collective.reduces_on_device else None)
        if stream is None:
            # The data is complete. The copy of a GPU's buffer is not: this thread would have to wait for it, so the
            # communicator starts the reduce.
            self._start_intra_group_reduce()

    @property
    def _payload(self) -> Tensor:
        """What the collectives change: the buffer, or its copy in host memory."""
        return self.buffer if self._host_copy is None else self._host_copy.tensor

    def _advance(self, stage: Stage) -> None:
        with self._transition:
            assert self.stage is _FOLLOWS[stage], f"bucket {self.index} cannot go from {self.stage} to {stage}"
            self.stage = stage

    def _start_intra_group_reduce(self) -> None:
        self._works = self._collective.intra_group_reduce(self._payload)

    def _reduce_on_device(self, buffer: Tensor) -> slice:
        try:
            return self._collective.reduce_on_device(buffer)
        except RuntimeError:
            with self._named(self._collective.describe("inside")):
                raise

    @property
    def copy_is_done(self) -> bool:
        """Whether the data to sum is in host memory."""
        return self._host_copy is None or self._host_copy.is_done

    def wait_for_copy(self) -> None:
        """Return when the data to sum is in host memory."""
        if self._host_copy is not None:
            self._host_copy.wait()

    def reduce_intra_group(self) -> None:
        """Wait until the carriers have the sum over their group."""
        with self._stage_reported(INTRA_GROUP_REDUCE):
            if self._stream is not None:
                self.wait_for_copy()
                self._start_intra_group_reduce()
            self._wait_for_works()
        self._advance(Stage.REDUCED)

    def start_inter_group(self) -> bool:
        """Begin to sum this rank's shard over the groups. Return whether messages are still under way."""
        self._crossing_since_s = time.perf_counter()
        with self._named(self._collective.describe("between")):
            self._rest = self._collective.inter_group_all_reduce(self._payload)
        self._advance(Stage.CROSSING)
        return self._rest is not None

    def finish_inter_group(self) -> None:
        """Wait until this rank's shard is summed; nothing to do for a rank that carries none."""
        if self._rest is not None:
            with self._named(self._collective.describe("between")):
                complete(self._rest)
            self._rest = None
        if self._on_stage is not None:
            self._on_stage(INTER_GROUP_ALL_REDUCE, self._crossing_since_s, time.perf_counter())
        self._advance(Stage.CROSSED)

    def start_broadcast(self) -> None:
        """Start the broadcast of the sum within the group. Not awaited: the next bucket's all-reduce runs meanwhile."""
        start_s = time.perf_counter()
        self._works = self._collective.intra_group_broadcast(self._payload)
        if self._works and (on_stage := self._on_stage) is not None:
            done = self._works[-1].get_future()
            done.add_done_callback(lambda _: on_stage(INTRA_GROUP_BROADCAST, start_s, time.perf_counter()))
        self._advance(Stage.SETTLED)
        self._settled_or_failed.set()

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the threads that wait for the bucket. Once it has settled they get their sum."""
        with self._transition:
            if self.stage in (Stage.SETTLED, Stage.DELIVERED):
                return
            self.stage = Stage.FAILED
            self._error = error
        self._settled_or_failed.set()

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return immediately."""
        if self.stage is Stage.DELIVERED:
            return True
        return self.stage is Stage.SETTLED and all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Return when ``buffer`` holds the sum over all ranks; on a GPU, when the current stream will see it.

        Raises:
            RuntimeError: a stage failed; the message names the bucket, the stage and the ranks that took part.
        """
        start_s = time.perf_counter()
        if self._release is not None and not self._settled_or_failed.is_set():
            self._release()
        self._settled_or_failed.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        with self._delivery:  # a second thread must not see half of it, nor deliver again
            if self._delivered is not None:
                # In each call, not only in the first: the current stream may be another one.
                streams.current_stream(self.buffer.device).wait_event(self._delivered)
            if self.stage is Stage.SETTLED:
                self._finish_delivery()
        if self._on_stage is not None:
            self._on_stage(WAIT, start_s, time.perf_counter())

    def _finish_delivery(self) -> None:
        self._wait_for_works()
        if self._host_copy is not None:
            # The waiting thread copies the sum back, not the communicator: that would have to wait for the broadcast
            # while the link between the groups is idle. And only once: later changes to the gradients must stay.
            self._host_copy.copy_back()
            self._host_copy = None
            if self._stream is not None:
                self._delivered = streams.record_event(streams.current_stream(self.buffer.device))
        self._advance(Stage.DELIVERED)

    def _wait_for_works(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError:
            # Named only now: that takes longer than to see that a bucket has arrived, which is asked for each of them.
            with self._named(self._collective.describe("inside")):
                raise

    @contextmanager
    def _stage_reported(self, stage: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        if self._on_stage is not None:
            self._on_stage(stage, start_s, time.perf_counter())

    @contextmanager
    def _named(self, where: str) -> Iterator[None]:
        with blame(f"the sum of gradient bucket {self.index}, {where}"):
            yield


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Let a backend's error say which operation failed, between which ranks."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed: one of these ranks has died, or has been silent for longer than the strategy's timeout; "
            f"look at its log first. The backend says: {error}"
        ) from error
