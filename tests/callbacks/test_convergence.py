"""The policy of adaptive global batch norm, without a Trainer."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_dp.callbacks import Plateau
from lightning_dp.callbacks.adaptive_global_batch_norm import in_global_phase, local_batch_size
from lightning_dp.callbacks.convergence import Monitor, ask


def epochs(plateau: Plateau, values: list[float]) -> list[bool]:
    return [plateau.update({"train_loss": torch.tensor(value)}) for value in values]


@pytest.mark.parametrize(
    ("options", "values", "converged_from"),
    [
        ({}, [3.0, 2.0, 1.0, 1.0, 1.0, 1.0], 5),
        ({}, [3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0], 6),  # an improvement restarts the count
        ({"patience": 1}, [1.0, 1.0], 1),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.4, 2.0], 2),  # better by 0.4 is not an improvement
        ({"patience": 1, "min_delta": 0.0}, [3.0, 3.0], 1),  # an equal value is not an improvement
        ({"patience": 2, "min_delta": 0.1}, [1.0, 0.95, 0.89, 0.88, 0.87], 4),  # slow progress adds up
        ({"patience": 1, "mode": "max"}, [0.1, 0.5, 0.4], 2),
        ({"patience": 2}, [1.0, float("nan"), float("inf"), 1.0, float("nan"), 1.0], 5),  # diverging is not converging
        ({"patience": 1}, [1.0, 1.0, 0.0, -1.0], 1),  # it stays met
        ({"patience": 3}, [1.0, 0.5, 0.2], None),
    ],
)
def test_plateau(options, values, converged_from):
    expected = [converged_from is not None and epoch >= converged_from for epoch in range(len(values))]
    assert epochs(Plateau(**options), values) == expected


def test_plateau_continues_from_its_state():
    first, second = Plateau(patience=2), Plateau(patience=2)
    epochs(first, [1.0, 1.0])
    second.load_state_dict(first.state_dict())
    assert epochs(second, [1.0]) == [True]
    assert epochs(Plateau(patience=2), [1.0]) == [False]


def test_plateau_names_the_available_metrics():
    with pytest.raises(ValueError, match="monitor='val_los' was not logged; available: train_acc, val_loss"):
        Plateau("val_los").update({"val_loss": 1.0, "train_acc": 0.5})


def test_monitor_is_due_when_its_metric_was_logged_again():
    monitor, value = Monitor(Plateau("val_loss")), torch.tensor(1.0)
    assert not monitor.is_due({}, may_be_missing=True)
    assert monitor.is_due({"val_loss": value}, may_be_missing=True)
    assert not monitor.is_due({"val_loss": value, "other": torch.tensor(2.0)}, may_be_missing=True)
    assert not monitor.is_due({"val_loss": value.detach()}, may_be_missing=True), "Lightning returns a new view"
    assert monitor.is_due({"val_loss": torch.tensor(1.0)}, may_be_missing=False), "logged again with the same value"
    assert monitor.is_due({}, may_be_missing=False), "the criterion raises the error"


def test_a_criterion_without_monitor_is_always_due():
    for criterion in (lambda metrics: True, None):
        assert Monitor(criterion).is_due({}, may_be_missing=True)


def test_ask_accepts_objects_and_functions_and_reports_exceptions():
    plateau = Plateau(patience=1)
    assert ask(plateau, {"train_loss": 1.0}) == (False, "")
    assert ask(plateau, {"train_loss": 1.0}) == (True, "")
    assert ask(lambda metrics: metrics["acc"] > 0.9, {"acc": torch.tensor(0.95)}) == (True, "")
    converged, failure = ask(plateau.update, {})
    assert not converged
    assert failure.startswith("monitor='train_loss' was not logged; available: none at all"), "in one line"
    converged, failure = ask(lambda metrics: metrics["acc"] > 0.9, {})
    assert not converged
    assert failure.startswith("Traceback")


@pytest.mark.parametrize(
    ("phase", "before", "after"),
    [("until_converged", True, False), ("after_converged", False, True), ("always", True, True)],
)
def test_phases(phase, before, after):
    assert in_global_phase(phase, converged=False) is before
    assert in_global_phase(phase, converged=True) is after


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any


def test_local_batch_size():
    images = torch.zeros(5, 3, 8, 8)
    assert local_batch_size(images) == local_batch_size([images, torch.zeros(5)]) == 5
    assert local_batch_size({"name": "x", "scale": torch.tensor(2.0), "x": (images, None)}) == 5
    assert local_batch_size(torch.zeros(0, 3)) == 0
    assert local_batch_size([Pair("x", images)]) == local_batch_size(Pair({"x": images}, None)) == 5
    assert local_batch_size([UserDict(name="x", pixels=images)]) == 5  # as Hugging Face's BatchEncoding
    with pytest.raises(ValueError, match="a list without tensors does not have one"):
        local_batch_size([1, 2])


def test_a_list_of_images_does_not_tell_its_size_by_its_channels():
    images = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)]  # as for detection
    boxes = [{"boxes": torch.zeros(2, 4)}]
    for batch in (images, (images, boxes), {"images": images}, ("name", images), (torch.tensor(2.0), images)):
        with pytest.raises(ValueError, match=r"2 tensors of shapes such as \(3, 8, 8\) may hold single images"):
            local_batch_size(batch)
    noisy_and_clean = [torch.zeros(8, 2, 100), torch.zeros(8, 2, 100)]
    assert local_batch_size(noisy_and_clean) == 8
