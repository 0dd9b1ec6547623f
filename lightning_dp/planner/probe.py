"""Probes of the machine: the network between the ranks of a job, and the processor time of compressing gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dp._private.torch_names import device_types
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.collectives.compression.compressors import make_compressor
from lightning_dp.collectives.compression.layout import BucketShard, ParameterTable, whole_shard
from lightning_dp.collectives.compression.options import Compression
from lightning_dp.collectives.compression.wire import Transport, complete
from lightning_dp.collectives.groups import all_gather, create_groups, destroy_group, resolve_group
from lightning_dp.collectives.point_to_point import Transfer
from lightning_dp.planner.convolutions.measure import measure_time_s
from lightning_dp.planner.network import Link, Network
from lightning_dp.planner.simulation import COMPRESSORS

# The network: latency and bandwidth between the ranks of the job.

SMALLEST_BYTES = 1024  # only latency matters
# Larger and larger messages, until one takes this long. The link's burst no longer matters then.
LONG_ENOUGH_S = 0.2
LARGEST_BYTES = 64 * 1024 * 1024
# Rows of the square matrices that a rank multiplies between exchanges: 34 million operations, as many as a layer of
# 1024 x 1024 that four ranks share takes for 64 samples.
PRODUCT_SIZE = 256


def probe_network(
    device: torch.device | str = "cpu", ranks_per_node: int | None = None, repeats: int = 4, num_elements: int = 0
) -> Network:
    """Time all-reduces of growing size, and return the network that explains them. All ranks must call it.

    The links are those that a ring all-reduce would need to take as long. With several nodes, an all-reduce over all
    ranks gives the NIC's, and one within each node the inner link. An exchange of a few bytes between all ranks gives
    the overhead of its messages, of which the hybrid and global batch norm make many. Between three nodes or more, sums
    in direct messages, as compressors make them, are timed as well. All ranks return the same.

    Args:
        device: of the messages; CUDA for NCCL.
        ranks_per_node: by default, ``LOCAL_WORLD_SIZE``, or all ranks.
        repeats: all-reduces of each size that are timed; the median counts.
        num_elements: ignored if 0; else the only large message, for tests.

    Raises:
        ValueError: there is one rank only, or ``ranks_per_node`` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size == 1 or world_size % per_node:
        raise ValueError(
            f"world_size={world_size} and ranks_per_node={per_node}: the probe needs two ranks or more, and the same "
            "number on each node"
        )
    bounds = (4 * num_elements, 4 * num_elements) if num_elements else (64 * SMALLEST_BYTES, LARGEST_BYTES)
    all_ranks, largest_bytes = _measure(None, bounds, device, repeats)
    overhead_s = _exchange_s(device, repeats) / (world_size - 1)
    direct_bytes_per_s = _direct_bytes_per_s(range(0, world_size, per_node), largest_bytes, all_ranks, device, repeats)
    if per_node in (1, world_size):
        return Network(all_ranks, all_ranks, per_node, "ring", overhead_s, direct_bytes_per_s)
    nodes = [range(first, first + per_node) for first in range(0, world_size, per_node)]
    own = create_groups(nodes, dist.get_rank())
    inner, _ = _measure(own, bounds, device, repeats)
    destroy_group(own)
    # The nodes must agree on one network: that with the slowest of their links.
    latency_s, seconds_per_byte = largest_of_ranks([inner.latency_s, 1 / inner.bytes_per_s], torch.device(device))
    return Network(all_ranks, Link(latency_s, 1 / seconds_per_byte), per_node, "ring", overhead_s, direct_bytes_per_s)


def _measure(
    group: dist.ProcessGroup | None, bounds: tuple[int, int], device: torch.device | str, repeats: int
) -> tuple[Link, int]:
    """Return the link of a ring over ``group``, and the bytes of the largest message. All its ranks get the same."""
    size = dist.get_world_size(group)
    steps = 2 * (size - 1)  # messages one after the other, each with one of as many parts as there are ranks

    def message_s(num_bytes: int) -> float:
        return _all_reduce_s(group, num_bytes, device, repeats) / steps

    smallest_s = message_s(SMALLEST_BYTES)
    num_bytes, largest_bytes = bounds
    while (largest_s := message_s(num_bytes)) * steps < LONG_ENOUGH_S and num_bytes < largest_bytes:
        num_bytes = min(4 * num_bytes, largest_bytes)
    try:
        return Link.fit([SMALLEST_BYTES / size, num_bytes / size], [smallest_s, largest_s]), num_bytes
    except ValueError:
        # On a busy machine a large message may be as fast as a small one: then the large one tells all.
        return Link(largest_s, num_bytes / size / largest_s), num_bytes


def _direct_bytes_per_s(
    carriers: Sequence[int], num_bytes: int, ring: Link, device: torch.device | str, repeats: int
) -> float:
    """Return how fast a NIC is in sums as compressors make them, of ``num_bytes``, over one rank of each node.

    Two nodes swap all they have, as in a ring, so nothing is measured: 0. All ranks must call it, and get the same.
    """
    num_nodes = len(carriers)
    if num_nodes <= 2:
        return 0.0
    group = create_groups([carriers], dist.get_rank(), backend="gloo")
    seconds = 0.0
    if group is not None:
        wire = Transport(group)
        gradients = torch.zeros(num_bytes // 4, dtype=torch.float32)  # in host memory, whatever the device
        seconds = measure_time_s(
            lambda: complete(wire.all_reduce(gradients, gradients.dtype, gradients.dtype)), repeats=repeats
        )
        destroy_group(group)
    (seconds,) = largest_of_ranks([seconds], torch.device(device))
    sent = 2 * (num_nodes - 1) / num_nodes * num_bytes
    return min(ring.bytes_per_s, sent / seconds)


def _all_reduce_s(group: dist.ProcessGroup | None, num_bytes: int, device: torch.device | str, repeats: int) -> float:
    """Return the time of one all-reduce, as all ranks of ``group`` get it."""
    message = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    return _shared_time_s(lambda: dist.all_reduce(message, group=group), group, device, repeats)


def _exchange_s(device: torch.device | str, repeats: int) -> float:
    """Return the time in which each rank sends a small message to each other one, and has theirs.

    Each rank computes before it, as between the exchanges of a head. Where ranks share cores, one that gets a core late
    sends late, and all wait for it.
    """
    channel = Channel(resolve_group(None))
    message = torch.zeros(SMALLEST_BYTES // 4, dtype=torch.float32, device=device)
    matrix = torch.zeros(PRODUCT_SIZE, PRODUCT_SIZE, device=device)

    def compute() -> None:
        matrix.matmul(matrix)

    def exchange() -> None:
        channel.all_gather("probe", message)

    # Both are short, so that more of them cost little, and a busy machine spreads them.
    return _added_s(compute, (compute, exchange), device, 16 * repeats)


def _added_s(
    alone: Callable[[], object], both: Sequence[Callable[[], object]], device: torch.device | str, repeats: int
) -> float:
    """Return how much longer ``both`` take in turn than the one of them that is given as ``alone``."""
    both_s = _shared_time_s(lambda: [call() for call in both], None, device, repeats)
    return max(0.0, both_s - _shared_time_s(alone, None, device, repeats))


def _shared_time_s(
    call: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device | str, repeats: int
) -> float:
    """Return the time of one call: the mean over the ranks of their medians, which all of them get."""
    # The call that does not count sets connections up, and takes what the link lets pass at once.
    time_s = measure_time_s(call, device, repeats)
    shared = torch.tensor(time_s, dtype=torch.float64, device=device)
    dist.all_reduce(shared, group=group)
    return shared.item() / dist.get_world_size(group)


def largest_of_ranks(
    values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the largest of each value over the ranks of ``group``. All of them must call it.

    Args:
        values: as many on all ranks.
        device: of the message, if the group has a backend for it; otherwise the CPU.
        group: None: the default group, or this process alone if there is none.
    """
    if group is None and not dist.is_initialized():
        return list(values)
    group = resolve_group(group)
    has_device = device.type in {torch.device(known).type for known in device_types(group)}
    tensor = torch.tensor(values, dtype=torch.float64, device=device if has_device else "cpu")
    return all_gather(tensor, group).amax(0).tolist()


# Compressors: the time in which one rank encodes and decodes the job's gradients, without sending them.

# Of the gradients, the first ones whose elements fit. The time of all is larger by as much as they are.
PROBED_ELEMENTS = 8 * 1024 * 1024


def probe_compressors(
    shapes: Sequence[Sequence[int]], repeats: int = 3, device: torch.device | str | None = None
) -> dict[str, float]:
    """Time each compressor on gradients of these shapes, in host memory, as one of two carriers.

    Nothing is sent: what arrives from the other carrier is a copy of one's own message. Among more carriers a rank
    encodes and decodes about as much. Ranks that share cores encode at the same time, and wait for the last one. So
    they begin each sum together here, if a device is given.

    Args:
        shapes: of the parameters.
        repeats: timed sums; the median counts.
        device: of the messages with which the ranks meet; CUDA for NCCL. All ranks must call it. None: this process
            measures alone.

    Returns:
        Seconds for all gradients of a step, by the name of `Method.compression`. Empty without parameters.
    """
    probed: list[Tensor] = []
    total = sum(torch.Size(shape).numel() for shape in shapes)
    for shape in shapes:
        if not probed or sum(map(Tensor.numel, probed)) + torch.Size(shape).numel() <= PROBED_ELEMENTS:
            probed.append(torch.empty(tuple(shape), device="meta"))
    measured = sum(map(Tensor.numel, probed))
    if not measured:
        return {}
    infos = ParameterTable((str(index), parameter) for index, parameter in enumerate(probed)).all()
    gradients = torch.randn(measured, generator=torch.Generator().manual_seed(0))
    return {
        name: total / measured * _compress_s(choice, gradients, whole_shard(infos), repeats, device)
        for name, choice in COMPRESSORS.items()
    }


def _compress_s(
    choice: Compression, gradients: Tensor, piece: BucketShard, repeats: int, device: torch.device | str | None
) -> float:
    compressor = make_compressor(choice)
    bucket = gradients.clone()

    def compress() -> None:
        compressor.all_reduce(bucket, piece, _Loopback())

    # The first sum, which is not timed, has no residuals yet.
    if device is None:
        return measure_time_s(compress, repeats=repeats)
    message = torch.zeros(1, device=device)

    def meet() -> None:
        dist.all_reduce(message)
        message.item()  # the host of a GPU would go on

    return _added_s(meet, (compress, meet), device, repeats)


class _Loopback(Transport):
    """Two carriers of which the other one always sends what this one does."""

    def __init__(self) -> None:
        self.num_ranks = 2
        self.rank = 0
        self.bytes_sent = 0

    @override
    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Transfer]:
        for sent, received in zip(outgoing, incoming, strict=True):
            received.copy_(sent)
        return []
