"""The warning about residuals that a checkpoint holds and the training cannot use."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_dp.strategies import PowerSGD
from lightning_dp.strategies.layered_sgd.compression_checkpoint import KEY, CompressionCheckpoint

RESIDUALS = {"residuals": {"weight": torch.zeros(2, 3)}, "others": {}}
FACTORS = {"residuals": {}, "others": {"weight": {"right": torch.zeros(3, 2)}}}


@pytest.mark.parametrize(
    ("state", "compression", "warns"),
    [
        (RESIDUALS, None, True),
        (RESIDUALS, "bf16", True),
        (RESIDUALS, PowerSGD(error_feedback=False), True),
        (RESIDUALS, "int8", False),
        (RESIDUALS, PowerSGD(), False),
        (FACTORS, PowerSGD(error_feedback=False), False),  # which left nothing to the next step
        (FACTORS, "bf16", False),
    ],
)
def test_only_residuals_that_are_dropped_are_warned_of(state, compression, warns, caplog):
    checkpoint = CompressionCheckpoint(compression, "LayeredSGDStrategy")
    checkpoint.take_from({KEY: state})
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(None)
    assert ("what the last compressed step left out of its gradient is dropped" in caplog.text) == warns
