"""State dicts and copies that users make by hand while fitting: whole tensors, or a warning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_dp import KrizhevskyHybridStrategy
from tests.ranks import logged, run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, batches
from tests.strategies.modules import FEATURES, assert_same, trainer

X = torch.randn(4, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
STEPS = 4
PLACES = ["on_fit_start", "on_train_start", "on_validation_start", "on_validation_epoch_end", "on_train_epoch_end"]
PLACES += ["on_validation_end", "on_train_end"]


class StateDict(pl.Callback):
    """Saves the module by hand on one rank."""

    def __init__(self) -> None:
        self.saved: dict[str, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: HybridNet, *_: Any) -> None:
        self.saved["rows"] = module.state_dict()

    def on_train_end(self, trainer: Any, module: HybridNet) -> None:
        if trainer.global_rank == 0:
            self.saved["whole"] = {name: value.clone() for name, value in module.state_dict().items()}
            self.saved["head"] = module.head.state_dict()


def _state_dict(rank: int) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    callback, module = StateDict(), StepNet()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[callback])
    with logged() as said:
        runner.fit(module, batches(rank, 2, steps=STEPS))
    return callback.saved, dict(module.state_dict()), said


@pytest.mark.ci
def test_a_state_dict_saved_by_hand_is_whole_at_the_end_and_else_there_is_a_warning():
    for rank, (saved, after, said) in enumerate(run_processes(2, _state_dict)):
        assert len(saved["rows"]["head.1.weight"]) < 7
        assert sum("holds only rank" in text and "trainer.save_checkpoint" in text for text in said) == 1
        if rank == 0:
            assert_same(saved["whole"], after, 0.0)
            assert_same({f"head.{name}": value for name, value in saved["head"].items()},
                        {name: value for name, value in after.items() if name.startswith("head.")}, 0.0)  # fmt: skip


def _loads(rank: int, assign: bool) -> dict[str, Tensor]:
    module = StepNet()
    before = {name: value.clone() for name, value in module.state_dict().items()}

    class Load(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: HybridNet, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                module.load_state_dict(module.state_dict())  # rows stay rows
                module.load_state_dict(before, assign=assign)

    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[Load()], max_steps=3)
    runner.fit(module, batches(rank, 2, steps=STEPS))
    return dict(module.state_dict())


@pytest.mark.ci
@pytest.mark.parametrize("assign", [False, True])
def test_whole_tensors_can_be_loaded_by_hand_while_fitting(assign):
    for after in run_processes(2, _loads, assign):
        assert_same(after, dict(StepNet().state_dict()), 0.0)


class Copies(pl.Callback):
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.errors: list[str] = []

    def on_train_start(self, trainer: Any, module: HybridNet) -> None:
        teacher = copy.deepcopy(module)
        assert "forward" not in vars(teacher.head)
        assert teacher.head[1].weight.shape == (7, 6)
        self.outputs.append(teacher(X).detach())
        assert teacher.head[1].weight is not module.head[1].weight

    def on_train_batch_end(self, trainer: Any, module: HybridNet, *_: Any) -> None:
        copied = copy.deepcopy(trainer.callbacks)
        assert copied[0] is trainer.callbacks[0]  # the strategy's own
        assert any(isinstance(one, pl.callbacks.ProgressBar) for one in copied)
        student = copy.deepcopy(module)
        with pytest.raises(RuntimeError) as error:
            student(X)
        self.errors.append(str(error.value))


def _copies(rank: int) -> tuple[list[Tensor], list[str]]:
    copies = Copies()
    runner = trainer(
        KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[copies], max_steps=2,
        enable_progress_bar=True,
    )  # fmt: skip
    runner.fit(StepNet(), batches(rank, 2, steps=STEPS))
    return copies.outputs, copies.errors


@pytest.mark.filterwarnings("ignore")
def test_copies_made_while_fitting():
    with torch.no_grad():
        expected = StepNet()(X)
    for outputs, errors in run_processes(2, _copies):
        torch.testing.assert_close(outputs, [expected], rtol=1e-12, atol=1e-12)
        assert len(errors) == 2
        assert all("copy of 'head'" in error for error in errors)
