"""The fastest batch size that fits on every rank, by trial, and without a hang if it does not fit on one of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dp._private.torch_names import device_types
from lightning_dp.collectives.groups import all_gather, resolve_group
from lightning_dp.planner.checks import require_count
from lightning_dp.planner.measure import measure_time_s
from lightning_dp.planner.out_of_memory import unless_out_of_memory

FITS, OUT_OF_MEMORY, FAILED = 0, 1, 2


@dataclass(frozen=True)
class BatchSizeTrials:
    """What was tried.

    Attributes:
        batch_size: the fastest size.
        images_per_s: of each size that fits, per rank, on the slowest rank.
        too_large: the smallest size that did not fit on some rank, None if all did.
    """

    batch_size: int
    images_per_s: dict[int, float]
    too_large: int | None

    def table(self) -> str:
        """Return the trials as a Markdown table."""
        lines = ["| batch size per rank | images/s per rank |", "|---|---|"]
        lines += [f"| {size} | {rate:.1f} |" for size, rate in self.images_per_s.items()]
        return "\n".join([*lines, *([f"| {self.too_large} | does not fit |"] if self.too_large else [])])


def try_batch_sizes(
    step: Callable[[int], Any],
    batch_sizes: Sequence[int],
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    repeats: int = 3,
) -> BatchSizeTrials:
    """Run a step at each batch size, from the smallest, until one does not fit; return the fastest.

    Every rank of ``group`` must call it. After each size the ranks tell each other whether it fitted and how long it
    took: it fits if it fits on all of them, and takes as long as on the slowest. So all ranks return the same, and
    none waits for one that is out of memory.

    Args:
        step: called with a batch size per rank. It must contain no collective: a rank that is out of memory in the
            middle would leave the others waiting in it.
        batch_sizes: the same on all ranks.
        device: that the step works on.
        group: None: the default group, or this process alone if there is none.
        repeats: steps that are timed for each size.

    Raises:
        ValueError: not even the smallest size fits, the ranks give different sizes, or a size is less than 1.
        RuntimeError: the step raised another error on another rank. The rank itself raises its own.
    """
    sizes = sorted(set(batch_sizes))
    for size in sizes:
        require_count("batch_sizes", size)
    if not sizes:
        raise ValueError("batch_sizes is empty; give the sizes to try, for example (32, 64, 128)")
    device = torch.device(device)
    _require_same(sizes, device, group)
    rates: dict[int, float] = {}
    too_large = None
    for size in sizes:
        status, time_s, error = _try(step, size, device, repeats)
        worst, slowest_s = _worst([float(status), time_s], device, group)
        if error is not None:
            raise error
        if worst == FAILED:
            raise RuntimeError(f"the step with batch size {size} raised an error on another rank; its log has it")
        if worst == OUT_OF_MEMORY:
            too_large = size
            break
        rates[size] = size / slowest_s
    if not rates:
        raise ValueError(
            f"batch_sizes={sizes}: not even {sizes[0]} images per rank fit into memory; add smaller sizes, or keep "
            "fewer activations (Memonger)"
        )
    return BatchSizeTrials(max(rates, key=lambda size: rates[size]), rates, too_large)


def _try(
    step: Callable[[int], Any], size: int, device: torch.device, repeats: int
) -> tuple[int, float, Exception | None]:
    """Run the step, and return how it went, its time, and an error that is not about memory."""
    try:
        time_s = unless_out_of_memory(lambda: measure_time_s(lambda: step(size), device, repeats))
    except Exception as error:
        return FAILED, 0.0, error
    return (OUT_OF_MEMORY, 0.0, None) if time_s is None else (FITS, time_s, None)


def _worst(values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Return the largest of each value over all ranks."""
    if group is None and not dist.is_initialized():
        return list(values)
    group = resolve_group(group)
    has_device = device.type in {torch.device(known).type for known in device_types(group)}
    tensor = torch.tensor(values, dtype=torch.float64, device=device if has_device else "cpu")
    return all_gather(tensor, group).amax(0).tolist()


def _require_same(sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None) -> None:
    # Ranks with different lists would make different numbers of collectives, and wait for each other.
    checksum = float(zlib.crc32(str(list(sizes)).encode()))
    highest, lowest = _worst([checksum, -checksum], device, group)
    if highest != -lowest:
        raise ValueError(f"batch_sizes={list(sizes)} differ between the ranks; give all ranks the same")
