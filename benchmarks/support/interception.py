"""Change what the hybrid's exchanges do for some steps, to measure steps without communication or without overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_dp.collectives.all_to_all import Channel

AllToAllFunction = Callable[[Channel, str, Sequence[Tensor], Sequence[Tensor]], Any]
FEATURES = ("features", "feature gradients")
# The ranks use these as numbers and as indices: wrong values would stop them.
ALWAYS_SENT = ("sizes", "targets")
# Comparisons between ranks, which would stop a run without features: the others appear to have said the same.
COMPARISONS = ("training step", "between training steps", "checksums", "loss of a pass", "change of the loss")


class Arrived:
    """In place of an exchange that is over."""

    def wait(self) -> None:
        """Return at once."""


class ExchangeSwitch:
    """Replaces `Channel.all_to_all` in this process while it is on.

    Args:
        replacement: makes the replacement from the original. All ranks must switch between the same two steps.
    """

    def __init__(self, replacement: Callable[[AllToAllFunction], AllToAllFunction]) -> None:
        self._original = Channel.all_to_all
        self._replacement = replacement(self._original)

    def on(self) -> None:
        """Use the replacement from now on."""
        Channel.all_to_all = cast(Any, self._replacement)  # type: ignore[method-assign]

    def off(self) -> None:
        """Use the original from now on."""
        Channel.all_to_all = self._original  # type: ignore[method-assign]


def send_nothing(original: AllToAllFunction) -> AllToAllFunction:
    """Return an exchange in which the others' parts are zero. Only `ALWAYS_SENT` is really sent.

    In `COMPARISONS` the others' parts are this rank's own.
    """

    def nothing(channel: Channel, what: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Any:
        if what in ALWAYS_SENT:
            return original(channel, what, sends, receives)
        for rank, tensor in enumerate(receives):
            if what in COMPARISONS:
                tensor.copy_(sends[rank])
            elif rank != channel.rank:
                tensor.zero_()
        return Arrived()

    return nothing


def wait_at_once(original: AllToAllFunction) -> AllToAllFunction:
    """Return an exchange that overlaps nothing: all ranks start it together, and wait for it before they go on.

    Only for `FEATURES`; all others overlap nothing anyway.
    """

    def at_once(channel: Channel, what: str, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Any:
        if what not in FEATURES:
            return original(channel, what, sends, receives)
        # Nobody starts before everybody is here: else the wait would contain the computation of a slower rank.
        channel.all_gather("meeting", torch.zeros(1))
        original(channel, what, sends, receives).wait()
        return Arrived()

    return at_once
