"""What is not postponed, or not hidden behind the forward, says why, once."""

from __future__ import annotations

import logging

import pytest

from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import run_processes
from tests.strategies.layered_sgd.test_hidden_uses import CompiledBetweenSteps, CompiledMethod, TiedThroughData
from tests.strategies.layered_sgd.test_optimizers_of_users import (
    GlobalStepHook,
    OwnClipping,
    PatchedStep,
    StepPreHook,
    WithSAM,
    WithZeRO,
    WrappedStep,
    WrapsTheClass,
)
from tests.strategies.layered_sgd.user_cases import fit
from tests.strategies.modules import Net


class CompiledPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.shared.compile(backend="eager")


def say_why(rank, make, callback):
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lightning_dp").addHandler(handler)
    fit(LayeredSGDStrategy(1), make(), [] if callback is None else [callback()])
    return [record for record in records if "LayeredSGDStrategy:" in record]


@pytest.mark.parametrize(
    ("make", "callback", "reason"),
    [
        (WithSAM, None, "SAM.step, which is not PyTorch's own, must run within its own step"),
        (WithZeRO, None, "ZeroRedundancyOptimizer.step, which is not PyTorch's own, must run"),
        (PatchedStep, None, "SGD.step, which somebody has replaced, must run"),
        (WrappedStep, None, "SGD.step, which somebody has replaced, must run"),
        (Net, WrapsTheClass, "SGD.step, which somebody has replaced, must run"),
        (OwnClipping, None, "OwnClipping.clip_gradients must run"),
        (StepPreHook, None, "a hook before or after SGD.step must run"),
        (Net, GlobalStepHook, "a hook before or after SGD.step must run"),
        (CompiledPart, None, "a part of the module is compiled or scripted, so a use of parameters can go unseen"),
        (CompiledMethod, None, "training_step runs compiled code, so a use of parameters can go unseen"),
        (Net, CompiledBetweenSteps, "compiled code that runs between two training steps must run"),
        (TiedThroughData, None, "copy.weight and shared.weight share memory, so a use"),
    ],
)
def test_a_warning_names_what_costs_the_overlap_once(make, callback, reason):
    for records in run_processes(2, say_why, make, callback):
        assert [reason in record for record in records] == [True], records
