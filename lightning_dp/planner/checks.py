"""Checks of numbers that users pass in. Each error names the argument, its value and the rule."""

from __future__ import annotations

import math


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
