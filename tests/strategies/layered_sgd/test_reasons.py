"""What is not postponed, or not hidden behind the forward, says why, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import pytorch_lightning as pl

from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import logged, run_cases
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


# Name -> the module, a callback, and what the warning says.
CASES: dict[str, tuple[Callable[[], Net], Callable[[], pl.Callback] | None, str]] = {
    "SAM": (WithSAM, None, "SAM.step, which is not PyTorch's own, must run within its own step"),
    "ZeRO": (WithZeRO, None, "ZeroRedundancyOptimizer.step, which is not PyTorch's own, must run"),
    "a patched step": (PatchedStep, None, "SGD.step, which somebody has replaced, must run"),
    "a wrapped step": (WrappedStep, None, "SGD.step, which somebody has replaced, must run"),
    "a wrapped class": (Net, WrapsTheClass, "SGD.step, which somebody has replaced, must run"),
    "own clipping": (OwnClipping, None, "OwnClipping.clip_gradients must run"),
    "a step hook": (StepPreHook, None, "a hook before or after SGD.step must run"),
    "a global step hook": (Net, GlobalStepHook, "a hook before or after SGD.step must run"),
    "a compiled part": (
        CompiledPart, None, "a part of the module is compiled or scripted, so a use of parameters can go unseen"
    ),
    "a compiled method": (
        CompiledMethod, None, "training_step runs compiled code, so a use of parameters can go unseen"
    ),
    "compiled code between steps": (
        Net, CompiledBetweenSteps, "compiled code that runs between two training steps must run"
    ),
    "shared memory": (TiedThroughData, None, "copy.weight and shared.weight share memory, so a use"),
}  # fmt: skip


def say_why(rank, name):
    make, callback, reason = CASES[name]
    with logged() as records:
        fit(LayeredSGDStrategy(1), make(), [] if callback is None else [callback()])
    assert [reason in record for record in records if "LayeredSGDStrategy:" in record] == [True], records


@pytest.mark.ci
def test_a_warning_names_what_costs_the_overlap_once():
    run_cases(2, say_why, CASES)
