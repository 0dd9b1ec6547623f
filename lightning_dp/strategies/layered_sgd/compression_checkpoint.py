"""What compression keeps between steps, on its way into checkpoints and out of them."""

from __future__ import annotations

import logging
from typing import Any

from lightning_dp.collectives.compression.checkpoint import State, gather_state, load_state
from lightning_dp.collectives.compression.options import Compression, has_error_feedback
from lightning_dp.collectives.compression.stages import CompressedAllReduce

log = logging.getLogger(__name__)

KEY = "layered_sgd_compression"


class CompressionCheckpoint:
    """Residuals and factors of a compressor: gathered for a checkpoint, and kept from loading until they can be used.

    Args:
        compression: what the user has asked for.
        strategy_name: for messages.
    """

    def __init__(self, compression: Compression | None, strategy_name: str) -> None:
        self._compression = compression
        self._strategy_name = strategy_name
        self._loaded: State | None = None
        self._last: State | None = None  # of the fit that has ended, for a checkpoint that is written after it

    def keep(self, compressed: CompressedAllReduce | None) -> None:
        """Keep the state at the end of a fit. Every rank must call it."""
        self._last = None if compressed is None else gather_state(compressed)

    def add_to(self, checkpoint: dict[str, Any], compressed: CompressedAllReduce | None, interrupted: bool) -> None:
        """Add the state to ``checkpoint``, unless it holds weights only. Every rank must call it.

        Args:
            checkpoint: changed in place.
            compressed: what sums at present, if ``fit`` is running.
            interrupted: an exception has ended ``fit``. Other ranks may be gone or still in a step, and a gather would
                wait for them; so residuals are left out, and no other rank need call this.
        """
        if "optimizer_states" not in checkpoint:
            return
        state = self._last if compressed is None else gather_state(compressed, residuals=not interrupted)
        if state is not None and any(state.values()):
            checkpoint[KEY] = state
        if interrupted and compressed is not None and has_error_feedback(self._compression):
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}): the checkpoint that is written after an "
                "exception holds no residuals, because other ranks may be gone. If training continues from it, what "
                "the last compressed step left out of its gradient is dropped"
            )

    def take_from(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state that ``checkpoint`` holds, until `restore`."""
        self._loaded = checkpoint.pop(KEY, None)

    def restore(self, compressed: CompressedAllReduce | None) -> None:
        """Continue with the loaded state; with none if none was loaded."""
        state = self._loaded
        self._loaded = None
        self._last = None
        if state is None:
            if compressed is not None:
                compressed.clear()
            return
        if compressed is not None:
            load_state(compressed, state)
        if state["residuals"] and not has_error_feedback(self._compression):
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}): the checkpoint was written with error "
                "feedback; what the last compressed step left out of its gradient is dropped"
            )

    def warn_of_no_effect(self) -> None:
        """Warn that nothing crosses groups, because there is a single one."""
        if self._compression is not None:
            log.warning(
                f"{self._strategy_name}(compression={self._compression!r}) has no effect: there is a single group of "
                "ranks, whose sums are exact; set group_size to have several groups"
            )
        if self._loaded is not None:
            self.restore(None)

    def forget(self) -> None:
        """Drop a loaded state that no fit has used."""
        self._loaded = None
