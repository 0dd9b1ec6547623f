"""How many GPUs, and how many parameter servers (arXiv 1709.06622, Lemmas 3.1 and 3.2). Pure functions.

The *overhead ratio* R_O = T_O / T_C is the time of a step that does not shrink when GPUs are added (loading that is not
hidden, exposed communication) over the time of its computation, which does. `StepTimer` measures both parts.
"""

from __future__ import annotations

import math

# Rounding errors of a few operations. A demand that is met up to this is met.
TOLERANCE = 1e-12


def amdahl_efficiency(num_gpus: int, overhead_ratio: float) -> float:
    """Return the part of ``num_gpus``-fold speedup that is reached: (1 + R) / (1 + G R), equation 13 (Lemma 3.1).

    Args:
        num_gpus: G.
        overhead_ratio: R_O, overhead over computation of a step on one GPU.

    Raises:
        ValueError: ``num_gpus`` is less than 1, or ``overhead_ratio`` is negative.
    """
    require_count("num_gpus", num_gpus)
    require_not_negative("overhead_ratio", overhead_ratio)
    return (1 + overhead_ratio) / (1 + num_gpus * overhead_ratio)


def amdahl_speedup(num_gpus: int, overhead_ratio: float) -> float:
    """Return the speedup over one GPU: the efficiency of Lemma 3.1 times ``num_gpus``."""
    return num_gpus * amdahl_efficiency(num_gpus, overhead_ratio)


def max_overhead_ratio(num_gpus: int, efficiency: float) -> float:
    """Return the largest overhead ratio that allows ``efficiency``: (1 - a) / (a G - 1), equation 12 (Lemma 3.1).

    With four GPUs and an efficiency of 0.8 it is 0.09. It is infinite where ``efficiency`` is at most 1 / G: the
    efficiency of G GPUs is never less than that.

    Raises:
        ValueError: ``num_gpus`` is less than 1, or ``efficiency`` is not in (0, 1].
    """
    require_count("num_gpus", num_gpus)
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency={efficiency} must be greater than 0 and at most 1, for example 0.8")
    if efficiency * num_gpus <= 1:
        return math.inf
    return (1 - efficiency) / (efficiency * num_gpus - 1)


def choose_num_gpus(speedup: float, overhead_ratio: float) -> int:
    """Return the smallest number of GPUs with this speedup over one GPU (Lemma 3.1).

    With an overhead ratio of 0.1, a threefold speedup needs four GPUs.

    Raises:
        ValueError: an argument is negative, or no number of GPUs reaches the speedup. Amdahl's law limits it to
            1 + 1 / R, which the message names.
    """
    require_positive("speedup", speedup)
    require_not_negative("overhead_ratio", overhead_ratio)
    limit = 1 + 1 / overhead_ratio if overhead_ratio > 0 else math.inf
    if speedup >= limit * (1 - TOLERANCE):
        raise ValueError(
            f"speedup={speedup} is out of reach: with overhead_ratio={overhead_ratio} Amdahl's law limits the speedup "
            f"of any number of GPUs to less than {limit:.6g}; ask for less, or reduce the overhead"
        )
    # S = G (1 + R) / (1 + G R), solved for G.
    num_gpus = max(1, math.ceil(speedup / (1 + overhead_ratio - speedup * overhead_ratio)))
    # Near the limit the quotient is sensitive to rounding: see whether one GPU less would do.
    if num_gpus > 1 and amdahl_speedup(num_gpus - 1, overhead_ratio) >= speedup * (1 - TOLERANCE):
        return num_gpus - 1
    return num_gpus


def choose_num_parameter_servers(
    param_bytes: float, num_workers: int, bandwidth_bytes_per_s: float, compute_s: float
) -> int:
    """Return the smallest number of parameter servers that hides their traffic: 2 S N / (B T), Lemma 3.2.

    The lemma assumes that the load is spread evenly, and that pulls and pushes overlap with computation. Training in
    this package uses all-reduce; the figure is for comparison with a system that has parameter servers.

    Args:
        param_bytes: S, the size of all parameters.
        num_workers: N, each of which pulls and pushes all parameters in a step.
        bandwidth_bytes_per_s: B, of one server.
        compute_s: T, the time that a worker computes in a step.

    Raises:
        ValueError: ``num_workers`` is less than 1, or another argument is not positive.
    """
    require_positive("param_bytes", param_bytes)
    require_count("num_workers", num_workers)
    require_positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    require_positive("compute_s", compute_s)
    exact = 2 * param_bytes * num_workers / (bandwidth_bytes_per_s * compute_s)
    return max(1, math.ceil(exact * (1 - TOLERANCE)))


# Checks of numbers that users pass in. Each error names the argument, its value and the rule.


def require_count(name: str, value: int, least: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``least``.

    Raises:
        TypeError: it is no integer.
        ValueError: it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is no integer; use an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name}={value} is too small; use an integer of at least {least}")


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is finite and greater than 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} must be finite and greater than 0")


def require_not_negative(name: str, value: float) -> None:
    """Raise ValueError unless ``value`` is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value} must be finite and at least 0")
