"""Matplotlib without a display; imported when something is drawn, for ranks that draw nothing need not load it."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` with a backend that writes files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
