"""How far off predicted step times are: all measured errors, in one place.

They are mean absolute errors over the 20 cells of ``benchmarks/planner_choices.py`` (2026-11-22), which
docs/measurements/planner.md lists: predicted against measured step times.
"""

from __future__ import annotations

from lightning_dp.planner.simulation import METHODS

# (data-parallel methods and the hybrid's scheme a; schemes b and c, compressors but those of 16 bits, layered FSDP)
OWN_CORES = (0.033, 0.147)  # the cells of four hosts with one rank each
SHARED_CORES = (0.094, 0.272)  # the cells of two ranks on a host, and of eight hosts: more ranks than cores are free
# Beside its computation a rank needs a core for messages.
ENOUGH_CORES = 2


def expected_error(name: str, cores_per_rank: float | None) -> float:
    """Return the expected relative error of a predicted step time.

    Args:
        name: in `METHODS`.
        cores_per_rank: processor cores of a machine over its ranks. None: enough.
    """
    method = METHODS[name]
    is_plain = method.scheme not in ("b", "c") or method.family != "hybrid"
    is_plain = is_plain and method.compression not in ("int8", "power_sgd") and method.family != "layered_fsdp"
    errors = OWN_CORES if cores_per_rank is None or cores_per_rank >= ENOUGH_CORES else SHARED_CORES
    return errors[0] if is_plain else errors[1]


def was_measured(name: str) -> bool:
    """Return whether the method was among those of the cells. Others are given the error of those like them."""
    method = METHODS[name]
    return not method.recompute and not method.global_batch_norm and method.family != "layered_fsdp"
