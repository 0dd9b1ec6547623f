"""Whether a hook has changed the head between set-up and the first step, when each rank has its own rows only."""

from __future__ import annotations

import logging

import torch

from lightning_dp.strategies.krizhevsky_hybrid.gathered_head import sample_of
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies

log = logging.getLogger(__name__)


class InitialRows(SharedByCopies):
    """The values of the head's parameters at the end of set-up, of which it keeps a sample.

    ``nn.init`` in ``on_fit_start`` would draw the same numbers on all ranks, which are usually seeded alike: several
    features of a layer would begin with the same weights. It would also take the number of rows for that of features.
    """

    def __init__(self, head: ShardedHead) -> None:
        self._head = head
        self._samples = {p: sample_of(p) for p in head.parameters}

    def warn_if_changed(self) -> None:
        """Log a warning if the parameters have other values by now. Whole tensors that were loaded are no mistake."""
        is_same = all(torch.allclose(sample_of(p), before, equal_nan=True) for p, before in self._samples.items())
        if not is_same:
            log.warning(
                f"the parameters of {self._head.name!r} were changed after set-up, in a hook such as on_fit_start or "
                f"on_train_start, where rank {self._head.channel.rank} holds only its own rows. Random numbers are the "
                "same on all ranks that were seeded alike, and so would their rows be. Initialize the head in "
                "__init__, setup or configure_model, or load whole tensors with load_state_dict"
            )
