"""Sides of a comparison measured in turn, and their ratio with its spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, quantiles, stdev

import torch.distributed as dist


@dataclass(frozen=True)
class Spread:
    """A median, and how far the values lie from it: minimum and maximum, or the quartiles, as the maker says."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """Return "median (low-high)"."""
        middle, low, high = (f"{scale * value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{middle} ({low}-{high})"

    def as_json(self) -> dict[str, float]:
        """Return the three numbers by name."""
        return asdict(self)


def min_max(values: Iterable[float]) -> Spread:
    """Return the median with the minimum and the maximum."""
    known = list(values)
    return Spread(median(known), min(known), max(known))


def quartiles(values: Iterable[float]) -> Spread:
    """Return the median with the first and the third quartile; a single value is all three."""
    known = list(values)
    if len(known) == 1:
        return Spread(known[0], known[0], known[0])
    low, _, high = quantiles(known, n=4, method="inclusive")  # of few values the other method extrapolates
    return Spread(median(known), low, high)


def median_interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the interval that contains the true median with a confidence of 95 %.

    How many values lie below the true median is binomial (n, 1/2), approximately normal with standard deviation
    sqrt(n) / 2. So order statistics are the bounds, and nothing is assumed about the values' distribution.
    """
    ordered = sorted(values)
    reach = 0.98 * len(ordered) ** 0.5  # 1.96 standard deviations
    first = math.floor(len(ordered) / 2 - reach)
    last = math.ceil(len(ordered) / 2 + reach)
    return ordered[max(0, first)], ordered[min(len(ordered) - 1, last)]


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Return the ratio of each round. Both sides of a round are neighbors in time, so a slow spell hits both."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def turn_order(names: Iterable[str], turn: int) -> list[str]:
    """Return the order of the sides in a round: forward and backward in turn.

    A side that always came second would always pay, or gain, for what the first one leaves behind: heat, caches,
    memory.
    """
    order = list(names)
    return order if turn % 2 == 0 else order[::-1]


def alternate(sides: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Call every side once a round, in the order of `turn_order`; return each side's values, one a round.

    A first round warms up and is not counted. Under torch.distributed, every rank calls this, and the ranks start each
    side together.
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(num_rounds + 1):
        for name in turn_order(sides, turn):
            if dist.is_initialized():
                dist.barrier()
            value = sides[name]()
            if turn > 0:
                values[name].append(value)
    return values


def summary(values: Iterable[float]) -> dict[str, float]:
    """Return mean, standard deviation and the mean's standard error; the latter two need two values."""
    values = list(values)
    spread = stdev(values) if len(values) > 1 else math.nan
    return {"mean": mean(values), "sd": spread, "se": spread / math.sqrt(len(values)), "seeds": len(values)}
