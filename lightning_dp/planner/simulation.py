"""Simulates training steps: how long one takes with a method, on a network, with up to 10,000 ranks and more."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_dp.collectives.compression.compressors import FLOAT_BYTES, message_bytes
from lightning_dp.collectives.compression.options import Compression, PowerSGD
from lightning_dp.planner.formulas import require_count, require_positive
from lightning_dp.planner.network import Network
from lightning_dp.planner.workload import Block, Workload, fill_buckets
from lightning_dp.strategies.layered_fsdp.sharding import NUM_UNITS

# Steps before a method that postpones work has its steady rhythm.
WARM_UP = 2


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        step_s: mean over the steps after the first ones. `Method.accumulate` steps of the job count as so many.
        busy_s: of it, the time that a rank computes, and loads in the foreground.
        images_per_s: of all ranks.
    """

    step_s: float
    busy_s: float
    images_per_s: float

    @property
    def waiting_s(self) -> float:
        """Time that a rank waits: for the network, for background loading, for slower ranks."""
        return max(0.0, self.step_s - self.busy_s)


def simulate(
    workload: Workload, network: Network, world_size: int, method: Method | str, num_steps: int = 6, seed: int = 0
) -> StepTime:
    """Return the time of a training step.

    Without jitter all ranks do the same at the same time, and one of them stands for all. With jitter each rank is
    simulated.

    Args:
        workload: what a rank computes, loads and sends.
        network: the links.
        world_size: number of ranks.
        method: a method, or its name in `METHODS`.
        num_steps: simulated steps. The first `WARM_UP` do not count.
        seed: of the ranks' jitter.

    Raises:
        ValueError: an argument is out of range, the method is unknown, the hybrid has no head to shard, or `Memonger`
            has no plan.
    """
    require_count("num_steps", num_steps, least=WARM_UP + 1)
    if not isinstance(method, Method):
        if method not in METHODS:
            raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}, or a Method")
        method = METHODS[method]
    job = _Job(workload, network, world_size, method, seed)
    for _ in range(num_steps):
        job.add_step()
    ends = job.schedule.run()
    marks = [max(ends[task] for task in tasks) for tasks in job.marks]
    step_s = (marks[-1] - marks[WARM_UP - 1]) / (num_steps - WARM_UP) / method.accumulate
    busy_s = job.busy_s / num_steps / method.accumulate
    images = world_size * job.workload.batch_size * job.workload.accumulate
    rate = images / step_s if step_s else float("inf")
    return StepTime(step_s, min(busy_s, step_s), rate)


def all_reduce_s(block: Block, method: Method, network: Network, world_size: int) -> float:
    """Return the time of DDP's all-reduces of a bucket."""
    algorithm = None if method.all_reduce == "native" else method.all_reduce
    data_s = network.all_reduce_s(sent_bytes(block, method.compression), world_size, algorithm)
    return data_s + (num_rounds(method) - 1) * network.all_reduce_s(0.0, world_size, algorithm)


def inter_group_s(block: Block, method: Method, network: Network, world_size: int) -> float:
    """Return the time of layered SGD's all-reduces of a bucket between the nodes."""
    num_bytes = sent_bytes(block, method.compression)
    if method.compression == 1.0:
        return network.inter_group_all_reduce_s(num_bytes, world_size)
    return network.compressed_all_reduce_s(num_bytes, world_size, num_rounds(method))


class _Job:
    """Adds the tasks of one step after the other to a schedule.

    Attributes:
        schedule: of all tasks.
        marks: for each step, the tasks with which its backward ends, on each lane.
        busy_s: compute, and loading in the foreground, of lane 0 in all steps.
    """

    def __init__(self, workload: Workload, network: Network, world_size: int, method: Method, seed: int) -> None:
        num_nodes = network.num_nodes(world_size)
        if method.family == "hybrid" and workload.head is None:
            raise ValueError("the workload has no head to shard; give Workload(head=Head(...)), or another method")
        self._group_size = min(world_size, network.ranks_per_node)
        self._is_sharded = method.family == "layered_fsdp"
        if method.family == "layered_sgd" and num_nodes == 1:
            # As the strategy does it: a single group has nothing to layer. The batches stay those of the method.
            method = replace(
                METHODS["ddp"],
                accumulate=method.accumulate,
                global_batch_norm=method.global_batch_norm,
                recompute=method.recompute,
            )
        if method.recompute:
            workload = workload.recomputed(larger_batch=method.recompute == LARGER_BATCH)
        self.workload = workload if method.family == "hybrid" else workload.whole()
        self.network, self.world_size, self.method = network, world_size, method
        capacity = method.bucket_bytes, method.first_bucket_bytes
        if self._is_sharded:  # the strategy's units
            capacity = (self.workload.gradient_bytes / NUM_UNITS,) * 2
        self.buckets = fill_buckets(self.workload.blocks, *capacity)
        self.schedule = Schedule()
        self.marks: list[list[int]] = []
        self.busy_s = 0.0
        num_lanes = world_size if workload.jitter else 1
        self._rng = random.Random(seed)
        self._loaders = [self.schedule.resource() for _ in range(num_lanes)]
        self._net = self.schedule.resource()
        self._codec = self.schedule.resource()  # the thread that compresses: beside compute and messages
        size = self._group_size if workload.jitter else 1
        self._groups = [range(first, first + size) for first in range(0, num_lanes, size)]
        self._intra = [self.schedule.resource() for _ in self._groups]
        self._last: list[list[int]] = [[] for _ in range(num_lanes)]  # the last task of each rank's program
        self._loaded: list[list[int]] | None = None  # what the next forward waits for
        self._begins: list[list[int]] = []  # by batch and lane: first task of the forward
        self._arrived: list[list[list[int]]] = []  # by bucket and lane: what its layers' forward waits for
        self._factors = [1.0] * num_lanes

    def add_step(self) -> None:
        """Add a step: all batches whose gradients are added up, and what follows the last one's backward."""
        if self.workload.jitter:
            self._factors = [max(0.0, self._rng.gauss(1.0, self.workload.jitter)) for _ in self._factors]
        for _ in range(self.method.accumulate * self.workload.accumulate):
            self._add_forward()
            if self.method.family == "hybrid":
                self._add_head()
            ready = self._add_backward()
        self.marks.append(ready[0])
        if self.method.family in ("layered_sgd", "layered_fsdp"):
            self._load_next()  # while the network works: that is the point of Algorithm 3
            self._reduce_in_layers(ready)
        else:
            self._reduce_at_once(ready)
        for lane in range(len(self._last)):
            self._add(lane, self.workload.rest_s)

    def _add(self, lane: int, duration_s: float, after: Sequence[int] = ()) -> int:
        """Add compute to a rank's program, which runs in the order in which its parts are added."""
        duration_s *= self._factors[lane]
        self.busy_s += duration_s if lane == 0 else 0.0
        return self._add_wait(lane, duration_s, after)

    def _add_wait(self, lane: int, duration_s: float, after: Sequence[int] = ()) -> int:
        """Add a part of a rank's program that is no compute: ranks differ in compute only."""
        task = self.schedule.add(duration_s, [*self._last[lane], *after])
        self._last[lane] = [task]
        return task

    def _load_next(self) -> None:
        """Add the loading of the next batch."""
        load_s = self.workload.load_s
        self._loaded = [[] for _ in self._last]
        if not load_s:
            return
        for lane in range(len(self._last)):
            if self.workload.loads_in_background:
                # Workers are one batch ahead: they begin the next when the forward of the one before begins.
                after = [self._begins[-2][lane]] if len(self._begins) > 1 else []
                self._loaded[lane] = [self.schedule.add(load_s, after, self._loaders[lane])]
            else:
                self.busy_s += load_s if lane == 0 else 0.0
                self._add_wait(lane, load_s)

    def _add_forward(self) -> None:
        if self._loaded is None:
            self._load_next()
        assert self._loaded is not None
        begins = [self._add(lane, 0.0, loaded) for lane, loaded in enumerate(self._loaded)]
        for lane in range(len(self._last)):
            self._add(lane, self.workload.frozen_s)
        if self._is_sharded:
            self._add_units(range(len(self.buckets)), [bucket.forward_s for bucket in self.buckets])
        for lane in range(len(self._last)):
            for place, bucket in enumerate(() if self._is_sharded else self.buckets):
                arrived = self._arrived[place][lane] if self._arrived else []
                duration_s = bucket.forward_s + (self._update_s(bucket) if arrived else 0.0)
                self._add(lane, duration_s, arrived)
            self._wait_for_statistics(lane)
        self._begins.append(begins)
        self._loaded = None
        self._arrived = []

    def _add_backward(self) -> list[list[int]]:
        """Add the backward; return for each bucket the tasks with which its gradients are ready, on each lane."""
        if self._is_sharded and self.method.reshard_after_forward:
            for lane in range(len(self._last)):
                self._wait_for_statistics(lane)
            ends = self._add_units(range(len(self.buckets))[::-1], [bucket.backward_s for bucket in self.buckets])
            return [ends[place] for place in range(len(self.buckets))]
        ready: list[list[int]] = [[] for _ in self.buckets]
        for lane in range(len(self._last)):
            self._wait_for_statistics(lane)
            for place in reversed(range(len(self.buckets))):
                ready[place].append(self._add(lane, self.buckets[place].backward_s))
        return ready

    def _add_units(self, places: Sequence[int], seconds: Sequence[float]) -> dict[int, list[int]]:
        """Add a pass through FSDP2's units in this order; return the end of each one, on each lane.

        Args:
            places: of the units.
            seconds: that each unit computes.
        """
        ends = {}
        gathered = self._gather(places[0], [[] for _ in self._last])
        for place, following in itertools.zip_longest(places, places[1:]):
            before = gathered
            if following is not None:  # it is gathered while this one computes
                gathered = self._gather(following, before)
            ends[place] = [self._add(lane, seconds[place], after) for lane, after in enumerate(before)]
        return ends

    def _gather(self, place: int, after: Sequence[Sequence[int]]) -> list[list[int]]:
        """Add the all-gather of a unit within each group, after its update; return what to wait for, on each lane."""
        bucket = self.buckets[place]
        if self._arrived:
            for lane, arrived in enumerate(self._arrived[place]):
                self._add(lane, self._update_s(bucket), [*arrived, *after[lane]])
        gather_s = self.network.intra_group_s(bucket.num_bytes, self.world_size, "sharded")
        ends: list[list[int]] = [[] for _ in self._last]
        for lanes, stream in zip(self._groups, self._intra, strict=True):
            awaited = [task for lane in lanes for task in [*self._last[lane], *after[lane]]]
            gather = self.schedule.add(gather_s, awaited, stream)
            for lane in lanes:
                ends[lane] = [gather]
        return ends

    def _wait_for_statistics(self, lane: int) -> None:
        """Add the waits for global batch norm's statistics in a forward, or in a backward.

        They are as long as measured; for a job without them, as long as the bare messages.
        """
        wait_s = self.workload.batch_norm_s / 2
        if self.method.global_batch_norm and not wait_s:
            wait_s = self.workload.num_batch_norms * self.network.small_exchange_s(self.world_size)
        if wait_s:
            self._add_wait(lane, wait_s)

    def _send(self, place: int, duration_s: float, after: Sequence[int], priority: float | None = None) -> int:
        """Add the sum of a bucket over the network. A compressor encodes it before, and decodes it afterwards."""
        codec_s = self.workload.codec_s.get(str(self.method.compression), 0.0) * self._part_of(self.buckets[place])
        if not codec_s:
            return self.schedule.add(duration_s, after, self._net, priority=priority)
        encoded = self.schedule.add(codec_s / 2, after, self._codec, priority=priority)
        sent = self.schedule.add(duration_s, [encoded], self._net, priority=priority)
        return self.schedule.add(codec_s / 2, [sent], self._codec, priority=priority)

    def _reduce_at_once(self, ready: list[list[int]]) -> None:
        """DDP: all-reduce each bucket as backward fills it; then update."""
        reduced = []
        for place in reversed(range(len(self.buckets))):
            duration_s = all_reduce_s(self.buckets[place], self.method, self.network, self.world_size)
            reduced.append(self._send(place, duration_s, ready[place]))
        for lane in range(len(self._last)):
            self._add(lane, self.workload.update_s, reduced)

    def _reduce_in_layers(self, ready: list[list[int]]) -> None:
        """Layered SGD: reduce in groups, all-reduce between them, broadcast in groups (Algorithm 3).

        Layered FSDP broadcasts nothing: each rank updates its shard, which the next forward gathers.
        """
        network, method, num_buckets = self.network, self.method, len(self.buckets)
        is_step = method.overlap == "step"
        arrived: list[list[list[int]]] = [[[] for _ in self._last] for _ in range(num_buckets)]
        for place in reversed(range(num_buckets)):
            num_bytes = self.buckets[place].num_bytes
            priority = place if is_step and method.order == "priority" else None
            communicator = "sharded" if self._is_sharded else method.communicator
            intra_s = network.intra_group_s(num_bytes, self.world_size, communicator)
            sums = [
                self.schedule.add(intra_s, [ready[place][lane] for lane in lanes], stream)
                for lanes, stream in zip(self._groups, self._intra, strict=True)
            ]
            # "load" begins after backward, in the order of submission; "step" at once.
            between_s = inter_group_s(self.buckets[place], method, network, self.world_size)
            between = self._send(place, between_s, sums if is_step else [*sums, *ready[0]], priority)
            for lanes, stream in zip(self._groups, self._intra, strict=True):
                last = between
                if not self._is_sharded:
                    last = self.schedule.add(intra_s, [between], stream, priority=priority)
                for lane in lanes:
                    arrived[place][lane] = [last]
        if is_step:
            self._arrived = arrived
            return
        for lane in range(len(self._last)):
            awaited = [task for bucket in arrived for task in bucket[lane]]
            self._add(lane, sum(map(self._update_s, self.buckets)), awaited)

    def _add_head(self) -> None:
        """Add the passes through the sharded head (arXiv 1404.5997, section 4)."""
        head, size = self.workload.head, self.world_size
        assert head is not None
        num_passes = 1 if self.method.scheme == "a" else self.method.num_passes or size
        # In a and c all ranks send at once. In b the others receive the whole batches of the ranks whose turn it is.
        part = {"a": 1.0, "b": float(math.ceil(size / num_passes)), "c": 1 / num_passes}[self.method.scheme]
        senders = 1 if self.method.scheme == "b" else None
        features_s = self.network.exchange_s((size - 1) * part * head.feature_bytes, size, senders)
        hidden_bytes = head.hidden_bytes / max(1, head.num_hidden)
        # Beside them the loss, or the logits, in two exchanges of a few bytes.
        small_s = self.network.exchange_s(0.0, size)
        hidden_s = head.num_hidden * self.network.exchange_s((size - 1) * hidden_bytes / num_passes, size) + small_s
        # The head computes the samples of all ranks with an N-th of its rows: the time of one rank's batch in all.
        forward_s, backward_s = head.forward_s / num_passes, head.backward_s / num_passes
        # Messages that travel while a rank computes still take its own time, to start them and to take them. In b it
        # sends in its own turn only.
        handled_s = self.network.overhead_s * (size - 1) / (num_passes if self.method.scheme == "b" else 1)
        lanes = range(len(self._last))
        # Batch sizes and targets travel first.
        begun = self.schedule.add(2 * small_s, [task for last in self._last for task in last], self._net)
        gathered = self.schedule.add(features_s, [begun], self._net)
        returned = []
        for number in range(num_passes):
            is_last = number + 1 == num_passes
            halves = [self._add(lane, forward_s + (0.0 if is_last else handled_s), [gathered]) for lane in lanes]
            if not is_last:  # the features of the next pass travel while this one is computed
                gathered = self.schedule.add(features_s, [gathered], self._net)
            hidden = self.schedule.add(2 * hidden_s, halves, self._net)
            # So do the gradients of the pass before.
            ends = [self._add(lane, backward_s + (handled_s if number else 0.0), [hidden]) for lane in lanes]
            returned.append(self.schedule.add(features_s, ends, self._net))
        for lane in lanes:
            self._add(lane, 0.0, returned)

    def _update_s(self, bucket: Block) -> float:
        """Return a bucket's part of a rank's update."""
        return self.workload.update_s * self._part_of(bucket)

    def _part_of(self, bucket: Block) -> float:
        """Return which part of all gradients a rank has of a bucket."""
        total = self.workload.gradient_bytes
        part = bucket.num_bytes / total if total else 1 / len(self.buckets)
        return part / (self._group_size if self._is_sharded else 1)


# A discrete-event simulation of tasks, what they wait for, and the resources that they share.

FREE = -1
"""The resource of tasks that need none: they start as soon as nothing holds them up."""


class Schedule:
    """Tasks with durations. A resource runs one task at a time, and of those that are ready the most urgent.

    Tasks are numbered in the order in which they are added. A task can only wait for earlier ones, so that there is no
    circle.
    """

    def __init__(self) -> None:
        # One list for each property, because a list of objects takes ten times the memory for a million tasks.
        self._durations: list[float] = []
        self._resources: list[int] = []
        self._priorities: list[float] = []
        self._num_awaited: list[int] = []
        self._followers: list[list[int]] = []
        self._num_resources = 0

    def __len__(self) -> int:
        return len(self._durations)

    def resource(self) -> int:
        """Return a new resource: a stream of a device, a link, a thread."""
        self._num_resources += 1
        return self._num_resources - 1

    def add(
        self, duration_s: float, after: Iterable[int] = (), resource: int = FREE, priority: float | None = None
    ) -> int:
        """Add a task, and return its number.

        Args:
            duration_s: how long it occupies its resource.
            after: numbers of the tasks that must end before it starts.
            resource: what it occupies.
            priority: of ready tasks the one with the smallest number starts first; by default, the one added first.
        """
        number = len(self._durations)
        awaited = set(after)
        assert all(0 <= other < number for other in awaited), "a task waits for earlier ones"
        self._durations.append(duration_s)
        self._resources.append(resource)
        self._priorities.append(number if priority is None else priority)
        self._num_awaited.append(len(awaited))
        self._followers.append([])
        for other in awaited:
            self._followers[other].append(number)
        return number

    def run(self) -> list[float]:
        """Return the time at which each task ends. All begin at 0."""
        ends = [0.0] * len(self)
        num_awaited = list(self._num_awaited)
        ready: list[list[tuple[float, int]]] = [[] for _ in range(self._num_resources)]
        is_busy = [False] * self._num_resources
        running: list[tuple[float, int]] = []
        touched: set[int] = set()

        def release(number: int, now_s: float) -> None:
            resource = self._resources[number]
            if resource == FREE:
                heapq.heappush(running, (now_s + self._durations[number], number))
            else:
                heapq.heappush(ready[resource], (self._priorities[number], number))
                touched.add(resource)

        def start(now_s: float) -> None:
            for resource in touched:
                if ready[resource] and not is_busy[resource]:
                    is_busy[resource] = True
                    _, number = heapq.heappop(ready[resource])
                    heapq.heappush(running, (now_s + self._durations[number], number))
            touched.clear()

        for number, count in enumerate(num_awaited):
            if count == 0:
                release(number, 0.0)
        start(0.0)
        while running:
            now_s = running[0][0]
            # First everything that ends now, then the choices of the resources, among all that is ready by now.
            while running and running[0][0] == now_s:
                _, number = heapq.heappop(running)
                ends[number] = now_s
                if self._resources[number] != FREE:
                    is_busy[self._resources[number]] = False
                    touched.add(self._resources[number])
                for follower in self._followers[number]:
                    num_awaited[follower] -= 1
                    if num_awaited[follower] == 0:
                        release(follower, now_s)
            start(now_s)
        return ends


# The ways to train that the planner compares.

MEBIBYTE = 2**20
FAMILIES = ("ddp", "layered_sgd", "layered_fsdp", "hybrid")
POWER_SGD = PowerSGD()  # of rank 4
COMPRESSORS: dict[str, Compression] = {"bf16": "bf16", "int8": "int8", "power_sgd": POWER_SGD}
SAME_BATCH, LARGER_BATCH = "same_batch", "larger_batch"


@dataclass(frozen=True)
class Method:
    """A way to train, with the options that its time depends on.

    Attributes:
        family: ``"ddp"``, ``"layered_sgd"``, ``"layered_fsdp"`` or ``"hybrid"``.
        overlap: of layered SGD and layered FSDP: ``"load"`` or ``"step"``.
        communicator: of layered SGD: ``"leader"`` or ``"sharded"``.
        order: of layered SGD and layered FSDP, with overlap ``"step"``: ``"priority"``, nearest the input first among
            the buckets that are ready, as over gloo; or ``"fifo"``, as backward produces them, as over NCCL.
        scheme: of the hybrid: ``"a"``, ``"b"`` or ``"c"``.
        num_passes: of the hybrid's schemes b and c. None: as many as there are ranks.
        compression: bytes sent between nodes over bytes of the gradients, in each direction; 0.5 for 16 bits. Or a
            compressor, whose bytes depend on the shapes of the parameters: ``"bf16"``, ``"int8"`` or ``"power_sgd"``,
            which is PowerSGD of rank 4.
        accumulate: how many times as many batches as the job's own step has are between two reductions. The time of a
            step is that of as many batches as the job's has.
        bucket_bytes: capacity of a gradient bucket. Layered FSDP has units instead.
        first_bucket_bytes: capacity of the bucket that backward fills first, so that communication starts early.
        global_batch_norm: whether each batch norm layer gathers statistics, in forward and in backward.
        all_reduce: of DDP: ``"native"``, the network's; or ``"ring"``, `ring_all_reduce_hook`. Between the groups of
            layered SGD exact sums always travel in a ring.
        recompute: whether `Memonger` recomputes activations: ``""``, no; ``"same_batch"``; or ``"larger_batch"``, as
            large as fits into the memory of the present batch's activations.
        reshard_after_forward: of layered FSDP: whether backward gathers the parameters again.
    """

    family: str = "ddp"
    overlap: str = "step"
    communicator: str = "leader"
    scheme: str = "c"
    compression: float | str = 1.0
    accumulate: int = 1
    bucket_bytes: float = 25 * MEBIBYTE
    global_batch_norm: bool = False
    order: str = "priority"
    first_bucket_bytes: float = MEBIBYTE  # DDP's constant
    all_reduce: str = "native"
    recompute: str = ""
    num_passes: int | None = None
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        require_count("accumulate", self.accumulate)
        if self.num_passes is not None:
            require_count("num_passes", self.num_passes)
        require_positive("bucket_bytes", self.bucket_bytes)
        require_positive("first_bucket_bytes", self.first_bucket_bytes)
        options: dict[str, tuple[str, ...]] = {
            "family": FAMILIES,
            "overlap": ("load", "step"),
            "communicator": ("leader", "sharded"),
            "order": ("priority", "fifo"),
            "all_reduce": ("native", "ring"),
            "recompute": ("", SAME_BATCH, LARGER_BATCH),
            "scheme": ("a", "b", "c"),
        }
        if isinstance(self.compression, str):
            options["compression"] = tuple(COMPRESSORS)
        else:
            require_positive("compression", self.compression)
        for name, known in options.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, known))}")

    @property
    def is_exact(self) -> bool:
        """Whether it computes what DDP computes with the same batches."""
        changes = (self.accumulate > 1, self.compression != 1.0, self.global_batch_norm, self.recompute == LARGER_BATCH)
        return not any(changes)

    def applies_to(self, workload: Workload) -> bool:
        """Return whether the workload has what the method needs: a head, batch norm layers, or activations to drop."""
        if self.family == "hybrid" and workload.head is None:
            return False
        # With measured waits the job has global batch norm already, and so have all its rows.
        if self.global_batch_norm and (workload.num_batch_norms == 0 or workload.batch_norm_s):
            return False
        if not self.recompute:
            return True
        plan = workload.recomputation
        return plan is not None and (self.recompute != LARGER_BATCH or plan.batch_factor > 1)


def _layered(overlap: str, communicator: str, compression: float | str = 1.0) -> Method:
    # Layered SGD makes small buckets, so that the one that the next forward needs first arrives early.
    return Method("layered_sgd", overlap, communicator, compression=compression, bucket_bytes=2 * MEBIBYTE)


# PyTorch's PowerSGD hook has all gradients in one bucket: over gloo it crashes with several.
_ONE_BUCKET = float(2**40)

METHODS = {
    "ddp": Method(),
    "ddp_ring": Method(all_reduce="ring"),
    "ddp_bf16": Method(compression="bf16"),
    "ddp_power_sgd": Method(compression="power_sgd", bucket_bytes=_ONE_BUCKET, first_bucket_bytes=_ONE_BUCKET),
    "ddp_accumulate_4": Method(accumulate=4),
    "ddp_memonger": Method(recompute=SAME_BATCH),
    "ddp_memonger_larger_batch": Method(recompute=LARGER_BATCH),
    "ddp_global_batch_norm": Method(global_batch_norm=True),
    "layered_sgd_load": _layered("load", "leader"),
    "layered_sgd_step": _layered("step", "leader"),
    "layered_sgd_step_sharded": _layered("step", "sharded"),
    "layered_sgd_step_bf16": _layered("step", "leader", "bf16"),
    "layered_sgd_step_int8": _layered("step", "leader", "int8"),
    "layered_sgd_step_power_sgd": _layered("step", "leader", "power_sgd"),
    "layered_fsdp_load": Method("layered_fsdp", "load"),
    "layered_fsdp_step": Method("layered_fsdp"),
    "layered_fsdp_step_int8": Method("layered_fsdp", compression="int8"),
    "hybrid_a": Method("hybrid", scheme="a"),
    "hybrid_b": Method("hybrid", scheme="b"),
    "hybrid_c": Method("hybrid", scheme="c"),
}
"""Methods by name. `Method.applies_to` says which of them a workload can use."""


# What a method sends of a bucket's gradients, and how often the sums wait for each other.


def sent_bytes(block: Block, compression: float | str) -> float:
    """Return the bytes of one copy of a block's gradients, as they travel. An all-reduce sends them in two directions.

    Without `Block.shapes` the gradients count as those of one square matrix: PowerSGD's factors are the smallest for
    it, and int8 has no block of scales that is not full.
    """
    if not isinstance(compression, str):
        return block.num_bytes * compression
    choice = COMPRESSORS[compression]
    if block.shapes:
        return float(message_bytes(block.shapes, choice))
    side = max(1, math.isqrt(int(block.num_bytes / FLOAT_BYTES)))
    ratio = message_bytes([(side, side)], choice) / (FLOAT_BYTES * side * side)
    return block.num_bytes * min(1.0, ratio)


def num_rounds(method: Method) -> int:
    """Return how many all-reduces of a bucket wait for each other.

    PowerSGD's second factor depends on the sum of the first one. What is not compressed travels with the first factors
    in layered SGD, and in an all-reduce of its own in PyTorch's hook.
    """
    if method.compression != "power_sgd":
        return 1
    return 2 if method.family == "layered_sgd" else 3
