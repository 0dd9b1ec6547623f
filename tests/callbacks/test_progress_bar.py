"""A progress bar exists on rank 0 alone, and makes rank 0 synchronize metrics earlier than the other ranks do."""

from __future__ import annotations

import pytest
import torch
from pytorch_lightning.callbacks import TQDMProgressBar
from torch import Tensor

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau
from tests.callbacks.training import Net, fit, state_of
from tests.ranks import run_processes

OPTIONS = {
    "criterion": lambda: {"convergence": Plateau("train_loss", patience=1)},
    "local statistics first": lambda: {
        "convergence": Plateau("train_loss", patience=1),
        "global_phase": "after_converged",
    },
    "averages": lambda: {"max_batch_size": 1},
    "groups": lambda: {"group_size": 1},
}


def train(rank: int, options: str, show_bar: bool) -> dict[str, Tensor]:
    bar = [TQDMProgressBar()] if show_bar else []  # before the callback, which is where recipes have it
    callback = AdaptiveGlobalBatchNorm(**OPTIONS[options]())
    net, _ = fit(2, *bar, callback, net=Net((3.0, 3.0, 3.0)), max_epochs=3, enable_progress_bar=show_bar)
    return state_of(net)


@pytest.mark.ci
@pytest.mark.parametrize("options", OPTIONS)
def test_a_progress_bar_changes_nothing(options):
    """The bar reads the metrics in `on_train_epoch_end`. The callback's own collectives must not come before that."""
    shown, _ = run_processes(2, train, options, True)
    hidden, _ = run_processes(2, train, options, False)
    for name, value in hidden.items():
        assert torch.equal(value, shown[name]), name
