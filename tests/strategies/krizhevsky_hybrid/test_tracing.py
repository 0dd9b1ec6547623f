"""Loggers and summaries see the module as it is before `fit`: whole layers, which one rank alone can trace."""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import StepNet, batches
from tests.strategies.modules import CLASSES, FEATURES, trainer

X = torch.randn(4, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
STEPS = 4
PLACES = ["on_fit_start", "on_train_start", "on_validation_start", "on_validation_epoch_end", "on_train_epoch_end"]
PLACES += ["on_validation_end", "on_train_end"]


class Described(StepNet):
    """What ModelSummary and a logger's graph need."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = X


class GraphLogger(pl.loggers.CSVLogger):
    """As TensorBoardLogger(log_graph=True): rank 0 traces the model."""

    traced: Tensor | None = None

    @pl.utilities.rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of the tracer
            self.traced = torch.jit.trace(model, X, check_trace=False)(X).detach()


def _described(rank: int, folder: str) -> tuple[Tensor | None, str]:
    logger = GraphLogger(folder)
    sizes: list[str] = []

    class Sizes(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            summary = pl.utilities.model_summary.ModelSummary(module, max_depth=-1)
            sizes.extend(f"{name}: {layer.out_size}" for name, layer in summary._layer_summary.items())

    runner = trainer(
        KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, max_steps=1, logger=logger, callbacks=[Sizes()],
        log_every_n_steps=1,
    )  # fmt: skip
    runner.fit(Described(), batches(rank, 2, steps=STEPS))
    return logger.traced, "\n".join(sizes)


def test_a_logger_can_trace_the_model_on_rank_0_and_a_summary_sees_whole_layers(tmp_path):
    (traced, sizes), (none, other_sizes) = run_processes(2, _described, str(tmp_path))
    assert none is None
    with torch.no_grad():
        torch.testing.assert_close(traced, Described()(X), rtol=1e-12, atol=1e-12)
    assert sizes == other_sizes
    assert f"head.4: [4, {CLASSES}]" in sizes
    assert "head.1: [4, 7]" in sizes
