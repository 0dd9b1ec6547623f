"""When the head is gathered while fitting: at points that all ranks pass, before anybody can ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dp._lightning import Callback, LightningModule
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import SharedByCopies


class GatherHead(SharedByCopies, Callback):
    """Gathers the head when training or a validation begins, and when training ends.

    A callback, and not a hook of the strategy, because Lightning calls the strategy last: other callbacks' and the
    module's ``on_validation_start`` and ``on_train_end`` would come before it.

    Args:
        gather: a collective that gathers the head.
        is_known: returns whether it has been gathered since the last training step. The same on all ranks.
    """

    def __init__(self, gather: Callable[[], None], is_known: Callable[[], bool]) -> None:
        self._gather = gather
        self._is_known = is_known

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather, if a checkpoint was loaded after set-up; Lightning calls this on all ranks."""
        if not self._is_known():
            self._gather()

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather; Lightning calls this on all ranks, also on those without a batch."""
        self._gather()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather; Lightning calls this on all ranks."""
        self._gather()

    @contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Be the first of the Trainer's callbacks within."""
        # A new list each time: Lightning may be in the middle of the old one.
        trainer.callbacks = [self, *trainer.callbacks]
        try:
            yield
        finally:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
