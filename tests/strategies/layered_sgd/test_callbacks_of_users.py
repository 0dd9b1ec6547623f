"""Callbacks that keep the optimizer's state, trace or compile, and modules with parts that have no gradient."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_dp.strategies.layered_sgd.postponement import Postponement
from tests.ranks import RankError, logged, run_processes
from tests.strategies.layered_sgd.user_cases import (
    Case,
    Manual,
    compare_on_a_slow_network,
    fit,
    layered,
    on_a_slow_network,
)
from tests.strategies.modules import FEATURES, Net

EXAMPLE = torch.ones(2, FEATURES, dtype=torch.float64)


class Noting(pl.Callback):
    """Notes a number after each batch, and puts their sum into a bias, where the comparison of parameters sees it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of tracing
            self.seen.append(float(self.look(module)))

    def look(self, module: Any) -> Any:
        raise NotImplementedError

    def on_train_end(self, t: Any, module: Any) -> None:
        with torch.no_grad():
            module.first.bias.fill_(sum(self.seen))


class KeepsState(Noting):
    def on_train_start(self, t: Any, module: Any) -> None:
        self.state = t.optimizers[0].state

    def look(self, module: Any) -> Any:
        state = self.state.get(module.first.weight, {})
        return state["momentum_buffer"].square().sum() if state else -1.0


class KeepsLoadedState(KeepsState):
    """Loading a state replaces it."""

    def on_train_start(self, t: Any, module: Any) -> None:
        t.optimizers[0].load_state_dict(t.optimizers[0].state_dict())
        super().on_train_start(t, module)


class CopiesTrainer(Noting):
    """As a copy of the callbacks does: the progress bar has the trainer."""

    def look(self, module: Any) -> Any:
        return copy.deepcopy(module.trainer).lightning_module.first.weight.detach().square().sum()


class Traces(Noting):
    def look(self, module: Any) -> Any:
        return module.to_torchscript(method="trace", example_inputs=EXAMPLE)(EXAMPLE).square().sum()


class Resets(Noting):
    def look(self, module: Any) -> Any:
        torch.compiler.reset()
        return module.first.weight.detach().square().sum()


class Exports(Noting):
    def look(self, module: Any) -> Any:
        if self.seen:
            return 0.0
        layers = nn.Sequential(module.first, nn.Tanh(), module.shared)
        return torch.export.export(layers, (EXAMPLE,), strict=True).module()(EXAMPLE).square().sum()


class WithoutGradients(Net):
    """Quantized weights and a sparse table, both frozen, as in a backbone that is only used."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized = nn.Parameter(torch.arange(8, dtype=torch.int8), requires_grad=False)
        self.table = nn.Embedding(4, 8, sparse=True).double().requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.first(x)) + self.quantized * 0.1 + self.table(torch.tensor(2))
        return self.last(torch.tanh(self.shared(x)))


class OverlappingViews(Net):
    def __init__(self) -> None:
        super().__init__()
        memory = torch.linspace(-1, 1, 72, dtype=torch.float64)
        self.one, self.two = nn.Parameter(memory[:64]), nn.Parameter(memory[8:72])

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.one.view(8, 8)
        return self.last(torch.tanh(self.shared(torch.tanh(x @ self.two.view(8, 8)))))


EACH_ITS_BUCKET = {"ddp": {"bucket_cap_mb": 1e-6}}
CASES: dict[str, Case] = {
    "state that is kept": (Net, (KeepsState,), {}),
    "state that is loaded and kept": (Net, (KeepsLoadedState,), {}),
    "a copy of the trainer": (Net, (CopiesTrainer,), {}),
    "a trace": (Net, (Traces,), {}),
    "a reset of the compiler": (Net, (Resets,), {}),
    "an export": (Net, (Exports,), {}),
    "parts without gradients": (WithoutGradients, (), EACH_ITS_BUCKET),
    "manual optimization of a static graph": (Manual, (), {"ddp": {"static_graph": True}}),
    "overlapping views": (OverlappingViews, (), EACH_ITS_BUCKET),
}


def compare_all(rank: int) -> None:
    for name, case in CASES.items():
        try:
            compare_on_a_slow_network(case)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.ci
def test_it_ends_as_under_ddp():
    run_processes(2, compare_all)


def compare_views_without_the_search(rank: int) -> None:
    Postponement._look_for_shared_memory = lambda self: None
    compare_on_a_slow_network(CASES["overlapping views"])


@pytest.mark.ci
def test_overlapping_views_differ_without_the_search_for_shared_memory():
    with pytest.raises(RankError, match="not close|modified by an inplace operation"):
        run_processes(2, compare_views_without_the_search)


def fit_compressed(rank: int) -> None:
    fit(layered(compression="int8"), WithoutGradients())


def test_compression_takes_parameters_without_gradients_as_they_are():
    run_processes(2, fit_compressed)


# --- what costs the overlap in step after step is named ---


class ReadsWeights(pl.Callback):
    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        self.average = module.first.weight.detach().clone()


class ReadsGradients(pl.Callback):
    def on_after_backward(self, t: Any, module: Any) -> None:
        self.norm = module.last.weight.grad.norm()


class ReadsState(pl.Callback):
    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        self.state = t.optimizers[0].state_dict()


class ReadsRarely(ReadsWeights):
    def on_train_batch_end(self, t: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 0:
            super().on_train_batch_end(t, module)


USERS = [
    ([ReadsWeights], {}, ["ReadsWeights.on_train_batch_end"]),
    ([ReadsGradients], {}, ["ReadsGradients.on_after_backward"]),
    ([ReadsState], {}, ["ReadsState.on_train_batch_end"]),
    ([ReadsRarely], {}, []),
    ([], {}, []),
    ([], {"gradient_clip_val": 0.1}, ["clipping by the norm"]),
    ([], {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, []),
]


def name_users(rank: int) -> None:
    on_a_slow_network()
    for callbacks, options, expected in USERS:
        with logged() as records:
            fit(layered(), Net(), [make() for make in callbacks], **options)
        said = [record for record in records if "LayeredSGDStrategy:" in record]
        assert len(said) == len(expected), (callbacks, options, said)
        assert all(name in text for name, text in zip(expected, said, strict=True)), said


@pytest.mark.ci
def test_who_costs_the_overlap_in_step_after_step_is_named_once():
    run_processes(2, name_users)
