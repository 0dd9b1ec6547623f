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
        gather_if_changed: gathers it, unless what was gathered before is still the same. All ranks must call it.
    """

    def __init__(self, gather: Callable[[], None], gather_if_changed: Callable[[], None]) -> None:
        self._gather = gather
        self._gather_if_changed = gather_if_changed

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather if something has changed the rows since set-up. Lightning calls this on all ranks.

        A checkpoint may have been loaded, or a callback has put other weights in for the sanity check and back.
        """
        self._gather_if_changed()

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather. Lightning calls this on all ranks, also on those without a batch."""
        self._gather()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather. Lightning calls this on all ranks."""
        self._gather()

    @contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Be the first of the Trainer's callbacks within the context, and have `_GatherAgain` as the last."""
        again = _GatherAgain(self._gather_if_changed)
        # A new list each time, because Lightning may be iterating over the old one.
        trainer.callbacks = [self, *trainer.callbacks, again]
        try:
            yield
        finally:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback not in (self, again)]


class _GatherAgain(SharedByCopies, Callback):
    """Gathers the head once more if a callback has put averaged weights in for the validation of an epoch.

    Lightning's own callbacks of averaged weights do it in ``on_validation_epoch_start``, and others follow them.
    """

    def __init__(self, gather_if_changed: Callable[[], None]) -> None:
        self._gather_if_changed = gather_if_changed

    def on_validation_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gather if the rows have changed. Lightning calls this on all ranks."""
        self._gather_if_changed()
