"""`activation_bytes`: the table is what autograd's hooks say, and what recomputation leaves."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_dp.recompute import activation_bytes, apply_recompute
from tests.recompute.counting import differing, saved_bytes, state_of
from tests.recompute.models import Shared, batch, build

LARGE, SMALL = 4 * 8 * 10 * 10 * 4, 4 * 8 * 5 * 5 * 4
IMAGES = batch()[0]


def loss(model: nn.Module) -> torch.Tensor:
    return model(IMAGES).square().mean()


@pytest.mark.parametrize("name", ["residual", "in place", "dropout", "shared", "frozen"])
def test_the_total_is_what_autograds_hooks_count(name):
    model = build(name)
    table = activation_bytes(model, IMAGES)
    # The loss keeps the logits; the table is without the model's output.
    logits_bytes = 4 * len(IMAGES) * (8 if name == "shared" else 5)
    images_bytes = IMAGES.numel() * 4 if name != "frozen" else 0
    assert table.total_bytes == saved_bytes(model, loss) - images_bytes - logits_bytes


def test_rows_are_sorted_and_name_the_module_that_computed():
    rows = activation_bytes(build("residual"), IMAGES).rows
    assert [row.num_bytes for row in rows] == sorted((row.num_bytes for row in rows), reverse=True)
    found = {row.module: row for row in rows}
    assert found["0.0"] == ("0.0", "Conv2d", ("convolution",), LARGE)
    assert found["0.3"].num_bytes == 3 * SMALL  # the result, and indices of 8 bytes
    assert found["1.2"] == ("1.2", "Block", ("relu",), 2 * SMALL)  # the block's own forward
    assert found["1.2.bn1"].num_bytes == 2 * 8 * 4


class Refused(nn.Module):
    def forward(self, x):
        raise KeyError


class Recovering(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad, self.good = Refused(), nn.Linear(30, 30)

    def forward(self, x):
        try:
            self.bad(x)
        except KeyError:
            return self.good(x).exp() * 2


def test_a_module_that_raised_computes_nothing_afterwards():
    rows = activation_bytes(Recovering(), torch.ones(50, 30)).rows
    assert [(row.module, row.operators) for row in rows] == [("", ("exp",))]


def test_it_shows_what_recomputation_leaves():
    model = build("residual")
    before = activation_bytes(model, IMAGES)
    handle = apply_recompute(model, "sublinear")
    gc.collect()
    assert activation_bytes(model, IMAGES).total_bytes < 0.2 * before.total_bytes
    assert {row.module: row.operators for row in activation_bytes(model, IMAGES).rows if row.num_bytes == SMALL} == {
        "0.3": ("max_pool2d_with_indices",),
        "1.3": ("relu",),
    }
    handle.remove()
    assert activation_bytes(model, IMAGES) == before


def test_nothing_is_changed():
    model = build("dropout")
    model.append(nn.BatchNorm1d(5))
    before = state_of(model)
    activation_bytes(model, IMAGES)
    assert differing(state_of(model), before) == []


def test_arguments_are_a_tuple_and_another_method_may_be_meant():
    class Net(Shared):
        def step(self, x, factor):
            return self(x) * factor

    assert activation_bytes(Net(), (IMAGES, 2.0), method="step").total_bytes > 0


class Queue(nn.Linear):
    """Puts a new queue of earlier inputs in the place of the old one, in each step, as MoCo may do."""

    def __init__(self):
        super().__init__(30, 30)
        self.register_buffer("queue", torch.zeros(1000, 30))

    def forward(self, x):
        self.queue = torch.cat([self.queue[len(x) :], x.detach()])
        return super().forward(x).exp().sum()


def test_a_buffer_that_the_forward_replaces_is_no_activation():
    rows = activation_bytes(Queue(), torch.ones(50, 30)).rows
    assert [(row.operators, row.num_bytes) for row in rows] == [(("exp",), 50 * 30 * 4)]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


class EndsWithFunction(nn.Linear):
    def forward(self, x):
        return Squared.apply(super().forward(x))


def test_a_model_that_ends_with_a_function_of_the_user_keeps_its_graph():
    assert activation_bytes(EndsWithFunction(4, 3), torch.ones(2, 4)).total_bytes == 4 * 2 * 3


def test_a_model_without_a_graph_is_refused():
    with pytest.raises(ValueError, match="returned nothing that depends on a trainable parameter"):
        activation_bytes(build("residual").requires_grad_(False), IMAGES)


def test_the_table_can_be_read_and_drawn(tmp_path):
    table = activation_bytes(build("residual"), IMAGES)
    lines = str(table).splitlines()
    assert lines[0].startswith("| module | class |")
    assert lines[-1] == f"| all | | | {table.total_bytes / 1e6:.3f} | 100.0% |"
    table.plot(tmp_path / "kept.png", max_rows=5)
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_importing_the_package_loads_no_plotting_and_no_solver():
    """They are imported when they are needed. Lightning and torchmetrics may have loaded them themselves."""
    code = (
        "import sys, pytorch_lightning, torchmetrics; before = set(sys.modules); import lightning_dp.recompute; "
        "assert not (set(sys.modules) - before) & {'matplotlib.pyplot', 'scipy.optimize'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
