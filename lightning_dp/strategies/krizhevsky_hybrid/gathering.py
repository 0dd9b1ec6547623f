"""When the whole head is gathered for use outside of training steps: in hooks that Lightning calls on all ranks.

Checkpoints gather the head on rank 0 only, see `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dp._lightning import Callback, LightningModule
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import SharedByCopies


class GatherHead(SharedByCopies, Callback):
    """Gathers the head when training or a validation begins, and when training ends.

    It is a callback because Lightning calls the hooks of callbacks first, then those of the module, and those of the
    strategy last. From a hook of the strategy, the gather would come after the ``on_validation_start`` and
    ``on_train_end`` of all others, which may call the head.

    Args:
        gather: gathers the head. All ranks must call it.
        is_known: returns whether the head has been gathered since the last training step, the same on all ranks.
    """

    def __init__(self, gather: Callable[[], None], is_known: Callable[[], bool]) -> None:
        self._gather = gather
        self._is_known = is_known

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather if a checkpoint was loaded after set-up. Lightning calls this on all ranks."""
        if not self._is_known():
            self._gather()

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather. Lightning calls this on all ranks, also on those without a batch."""
        self._gather()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather. Lightning calls this on all ranks."""
        self._gather()

    @contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Be the first of the Trainer's callbacks within the context."""
        # A new list each time, because Lightning may be iterating over the old one.
        trainer.callbacks = [self, *trainer.callbacks]
        try:
            yield
        finally:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
