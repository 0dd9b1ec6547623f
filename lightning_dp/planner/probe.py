"""Measures latency and bandwidth between the ranks of a job."""

from __future__ import annotations

import os
import time
from statistics import median

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import create_groups, destroy_group
from lightning_dp.planner.checks import require_count
from lightning_dp.planner.network import Link, Network

# From a message that only latency matters to, to one that only bandwidth does.
SIZES_BYTES = (1024, 64 * 1024, 512 * 1024, 4 * 1024 * 1024)


def probe_network(
    device: torch.device | str = "cpu", ranks_per_node: int | None = None, repeats: int = 4, num_elements: int = 0
) -> Network:
    """Time all-reduces of a few sizes, and return the network that explains them. All ranks must call it.

    The links are those that a ring all-reduce would need to take as long. With several nodes, an all-reduce over all
    ranks gives the NIC's, and one within each node the inner link. All ranks return the same.

    Args:
        device: of the messages; CUDA for NCCL.
        ranks_per_node: by default, ``LOCAL_WORLD_SIZE``, or all ranks.
        repeats: all-reduces of each size that are timed; the median counts.
        num_elements: ignored if 0; else the largest message, for tests.

    Raises:
        ValueError: there is one rank only, or ``ranks_per_node`` does not divide the number of ranks.
    """
    require_count("repeats", repeats)
    world_size = dist.get_world_size()
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size == 1 or world_size % per_node:
        raise ValueError(
            f"world_size={world_size} and ranks_per_node={per_node}: the probe needs two ranks or more, and the same "
            "number on each node"
        )
    sizes = SIZES_BYTES if not num_elements else (256, 4 * num_elements)
    all_ranks = _measure(None, sizes, device, repeats)
    if per_node == world_size:
        return Network(all_ranks, all_ranks, per_node)
    if per_node == 1:
        return Network(all_ranks, all_ranks, 1)
    nodes = [range(first, first + per_node) for first in range(0, world_size, per_node)]
    own = create_groups(nodes, dist.get_rank())
    inner = _measure(own, sizes, device, repeats)
    destroy_group(own)
    return Network(all_ranks, _slowest(inner, device), per_node)


def _measure(group: dist.ProcessGroup | None, sizes: tuple[int, ...], device: torch.device | str, repeats: int) -> Link:
    """Return the link of a ring over ``group``. All its ranks get the same."""
    size = dist.get_world_size(group)
    times_s = []
    for num_bytes in sizes:
        message = torch.zeros(num_bytes // 4, device=device)
        measured = []
        for _ in range(repeats + 1):
            _synchronize(device)
            begin_s = time.perf_counter()
            dist.all_reduce(message, group=group)
            _synchronize(device)
            measured.append(time.perf_counter() - begin_s)
        times_s.append(median(measured[1:]))  # the first one sets connections up
    shared = torch.tensor(times_s, dtype=torch.float64, device=device)
    dist.all_reduce(shared, group=group)
    # 2(N-1) messages, each with an N-th of the bytes.
    steps = 2 * (size - 1)
    return _fit([num_bytes / size for num_bytes in sizes], [time_s / size / steps for time_s in shared.tolist()])


def _fit(sizes: list[float], times_s: list[float]) -> Link:
    try:
        return Link.fit(sizes, times_s)
    except ValueError:
        # On a busy machine a large message may be as fast as a small one: then the largest tells all.
        return Link(min(times_s), sizes[-1] / times_s[-1])


def _slowest(link: Link, device: torch.device | str) -> Link:
    """Return the slowest of all ranks' links: the nodes must agree on one network."""
    values = torch.tensor([link.latency_s, 1 / link.bytes_per_s], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    latency_s, seconds_per_byte = values.tolist()
    return Link(latency_s, 1 / seconds_per_byte)


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
