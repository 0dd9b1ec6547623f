"""What a process does only in its first fit. The server of the ranks imports this, and its forks need not do it.

Importing it runs a fit of two steps in this process: torch and Lightning import more, and fill their caches. It starts
no thread, for threads do not survive a fork.
"""

from __future__ import annotations

import logging
import warnings

import torch

from tests.strategies.modules import Net, data, trainer

torch.set_num_threads(1)
with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for optimizer in ("momentum", "adamw"):
        trainer("auto", 1, gradient_clip_val=1.0).fit(Net(optimizer), data(1, 2), data(1, 1))
    logging.disable(logging.NOTSET)
