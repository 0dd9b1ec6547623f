"""Plans within a budget: exact, within the budget, saved and loaded, and equal to an exhaustive search where small."""

from __future__ import annotations

import builtins
import copy
import itertools
import json

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from lightning_dp.recompute import RecomputePlan, activation_bytes, apply_recompute, plan_recompute
from lightning_dp.recompute.profile import Operation
from lightning_dp.recompute.solvers import WINDOW, solve_graph
from tests.recompute.counting import counted_step, differing, recomputed, small_parameter_bytes, state_of
from tests.recompute.models import batch, build, loss_of
from tests.recompute.test_exact import train

pytest.importorskip("scipy")
IMAGES = batch()[0]


def plain_bytes(name: str) -> int:
    return plan_recompute(build(name), IMAGES, 10**9).plain_bytes


@pytest.mark.ci
@pytest.mark.parametrize(("name", "share"), [("residual", 0.4), ("in place", 0.6), ("dropout", 0.7), ("shared", 0.6)])
def test_ten_steps_with_a_plan_are_bitwise_the_same(name, share):
    model = build(name)
    plain = copy.deepcopy(model)
    plan = plan_recompute(model, IMAGES, int(share * plain_bytes(name)))
    assert differing(state_of(model), state_of(plain)) == [], "making a plan changes nothing"
    apply_recompute(model, plan)
    assert differing(train(model), train(plain)) == []


@pytest.mark.ci
def test_a_plan_keeps_its_budget_and_uses_it():
    plain = counted_step(build("residual"), loss_of)
    total = plain_bytes("residual")
    for share in (0.9, 0.7, 0.5, 0.35):
        plan = plan_recompute(build("residual"), IMAGES, int(share * total))
        model = build("residual")
        apply_recompute(model, plan)
        _, backward, kept_bytes, peak_bytes = counted_step(model, loss_of)
        # Statistics, logits and copies of small parameters, of which the plan does not speak.
        small_bytes = plain[2] - total + small_parameter_bytes(model)
        assert kept_bytes - small_bytes <= plan.peak_bytes <= share * total
        assert recomputed(plain[1], backward)
        # Not less than with the budget before: what a plan saves beyond its budget depends on the times it measured.
        assert peak_bytes < plain[3]


def test_with_enough_memory_nothing_runs_twice():
    plan = plan_recompute(build("residual"), IMAGES, 10**9)
    model = build("residual")
    apply_recompute(model, plan)
    assert plan.recompute_s == 0
    assert recomputed(counted_step(build("residual"), loss_of)[1], counted_step(model, loss_of)[1]) == {}


@pytest.mark.ci
def test_an_impossible_budget_is_refused_with_the_least_one():
    with pytest.raises(ValueError, match=r"budget_bytes=1000 is less than the \d+ bytes that a plan needs") as error:
        plan_recompute(build("residual"), IMAGES, 1000)
    least = int(str(error.value).split("than the ")[1].split()[0])
    plan_recompute(build("residual"), IMAGES, least)


def chain() -> nn.Sequential:
    """Equal convolutions, of which each output is kept by an activation."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Sigmoid()]
    for _ in range(5):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers)


def test_each_operator_of_a_chain_runs_again_at_most_once():
    def loss(model: nn.Module) -> torch.Tensor:
        return model(IMAGES).square().sum()

    plain = counted_step(chain(), loss)
    for num_kept in (6, 4, 3):
        model = chain()
        plan = plan_recompute(model, IMAGES, num_kept * 4 * 4 * 12 * 12 * 4)
        apply_recompute(model, plan)
        _, backward, _, _ = counted_step(model, loss)
        found = recomputed(plain[1], backward)
        assert differing(state_of(model), state_of(stepped(chain(), loss))) == []
        again = found.get("convolution", 0), found.get("sigmoid", 0) + found.get("tanh", 0)
        assert all(6 - num_kept <= count <= 6 for count in again), (num_kept, found)


def stepped(model: nn.Module, loss) -> nn.Module:
    loss(model).backward()
    return model


def operations() -> list[Operation]:
    """Two blocks with a shortcut around each: 0 and 3 are like convolutions, 2 and 5 like additions."""
    return [
        Operation("a", "expensive", 5.0, 4, [], 0, [0]),
        Operation("b", "cheap", 1.0, 4, [0], 0, [0, 1]),
        Operation("c", "expensive", 6.0, 4, [1], 1, [1]),
        Operation("d", "cheap", 1.0, 4, [2, 1], 1, [1, 2]),
        Operation("e", "expensive", 2.0, 8, [3], 2, [2]),
        Operation("f", "cheap", 1.0, 8, [4], 2, [2]),
    ]


def exhaustive(operations: list[Operation], budget: int) -> float | None:
    """The least time of all choices of what is kept, by simulation of backward, block by block."""
    best = None
    for keeps in itertools.product((False, True), repeat=len(operations)):
        again: set[int] = set()
        live: set[int] = set()
        peak = 0
        for step in reversed(range(3)):
            wanted = [i for i, op in enumerate(operations) if step in op.uses and not keeps[i]]
            while wanted:
                i = wanted.pop()
                if i not in live and not keeps[i]:
                    again.add(i)
                    live.add(i)
                    wanted.extend(operations[i].inputs)
            kept = sum(op.num_bytes for i, op in enumerate(operations) if keeps[i] and op.segment <= step)
            peak = max(peak, kept + sum(operations[i].num_bytes for i in live))
            live = {i for i in live if operations[i].segment < step}
        time_s = sum(operations[i].time_s for i in again)
        if peak <= budget and (best is None or time_s < best):
            best = time_s
    return best


@pytest.mark.parametrize("budget", range(16, 34, 2))
def test_the_linear_program_finds_the_optimum_of_a_small_graph(budget):
    expected = exhaustive(operations(), budget)
    solution = solve_graph(operations(), budget)
    assert (solution and solution.recompute_s) == expected
    assert solution is None or solution.peak_bytes <= budget


@pytest.mark.parametrize("distance", [WINDOW, WINDOW + 1])
def test_an_output_that_is_used_within_the_window_alone_may_be_computed_again(distance):
    found = solve_graph(
        [
            Operation("a", "expensive", 5.0, 1, [], 0, [0]),
            Operation("b", "cheap", 1.0, 100, [0], 0, [distance]),
            Operation("c", "expensive", 5.0, 100, [], distance + 1, [distance + 1]),
        ],
        None,
    )
    is_within = distance == WINDOW
    assert found is not None
    assert found.keeps[1] is not is_within
    assert found.peak_bytes == (101 if is_within else 200)  # "b" stays beside "c", and "a" may run again


def test_a_view_that_is_used_far_behind_keeps_what_it_is_a_view_of():
    last = WINDOW + 1
    found = solve_graph(
        [
            Operation("a", "expensive", 5.0, 4, [], 0, []),
            Operation("b", "view", 0.0, 0, [0], 0, []),
            Operation("c", "view", 0.0, 0, [1], 0, [last]),
            Operation("d", "view", 0.0, 0, [], 0, [last]),  # of an input
            Operation("e", "expensive", 5.0, 8, [2], last, [last]),
        ],
        None,
    )
    assert found is not None
    assert found.keeps[:4] == (True, False, False, False)
    assert found.peak_bytes == 12


def test_a_plan_is_short_where_it_is_logged():
    """`Memonger` names its policy in a log record."""
    assert len(repr(plan_recompute(build("residual"), IMAGES, 10**9))) < 250


def test_a_plan_is_saved_as_json_and_loaded(tmp_path):
    plan = plan_recompute(build("residual"), IMAGES, int(0.5 * plain_bytes("residual")))
    plan.save(tmp_path / "plan.json")
    json.loads((tmp_path / "plan.json").read_text())
    other = RecomputePlan.load(tmp_path / "plan.json")
    assert other == plan
    model = build("residual")
    apply_recompute(model, other)
    plain = counted_step(build("residual"), loss_of)[1]
    assert recomputed(plain, counted_step(model, loss_of)[1])
    of_another_solver = (tmp_path / "plan.json").read_text().replace('"graph"', '"chain"')
    for text in ("", "[]", '{"version": 99}', '{"version": 1, "operations": []}', of_another_solver):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="is no plan of this version"):
            RecomputePlan.load(tmp_path / "bad.json")


@pytest.mark.ci
def test_the_trade_off_is_drawn_and_falls(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: drawn.append(self) or save(self, *args, **options)
    )
    plan = plan_recompute(build("residual"), IMAGES, int(0.5 * plain_bytes("residual")))
    points = plan.frontier(3)
    assert [p.recompute_s for p in points] == sorted((p.recompute_s for p in points), reverse=True)
    plan.plot(tmp_path / "plan.png", num_points=3)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn[0].axes[0].lines}
    assert lines["this plan"] == [[plan.peak_bytes / 1e6, 1e3 * plan.recompute_s]]
    assert len(lines["other budgets"]) == 3
    assert [p.budget_bytes for p in plan.frontier(1)] == [points[0].budget_bytes]


def test_without_scipy_the_error_names_it(monkeypatch):
    real_import = builtins.__import__

    def no_scipy(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_scipy)
    with pytest.raises(ModuleNotFoundError, match="needs SciPy: pip install scipy"):
        plan_recompute(build("residual"), IMAGES, 10**5)


class TimesInput(torch.autograd.Function):
    """Of a user: what it saves is kept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return TimesInput.apply(torch.sigmoid(x * self.weight))


def test_a_plan_does_not_count_on_dropping_what_a_function_of_the_user_saves():
    model, x = nn.Sequential(*[Part() for _ in range(6)]), torch.randn(64, 64)
    kept_bytes = activation_bytes(model, x).total_bytes
    assert plan_recompute(model, x, kept_bytes).peak_bytes == kept_bytes
    with pytest.raises(ValueError, match=f"is less than the {kept_bytes} bytes that a plan needs"):
        plan_recompute(model, x, int(0.8 * kept_bytes))


class HalfPrecision(nn.Module):
    """Drops a product, which has half the bytes of the output, before the next layer asks for the output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x):
        product = x.bfloat16() @ self.weight.bfloat16()
        return x + product.float()


def test_what_a_plan_keeps_is_kept_where_the_model_drops_it():
    model, x = nn.Sequential(HalfPrecision(), nn.GELU(), HalfPrecision(), nn.GELU()), torch.randn(256, 64)
    plan = plan_recompute(model, x, activation_bytes(model, x).total_bytes)
    plan.levels = {key: int(":aten::mm:" not in key) for key in plan.levels}
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    plain(x).sum().backward()
    apply_recompute(planned, plan)
    _, _, kept_bytes, _ = counted_step(planned, lambda model: model(x).sum())
    product_bytes, loss_bytes = 2 * x.numel(), 4
    assert kept_bytes == 2 * product_bytes + loss_bytes
    assert not differing(state_of(planned), state_of(plain))


class ChangedProduct(nn.Module):
    """The product has the memory of one of matrices, though PyTorch does not call it a view of that."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        product = x @ self.weight
        before = torch.sigmoid(product)
        return before + nn.functional.gelu(product.clamp_(-0.1, 0.1)).sin()


def test_a_product_that_a_plan_keeps_is_not_changed_when_a_change_of_it_runs_again():
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2))
    plan = plan_recompute(ChangedProduct(), x, 10**6)
    plan.levels = {key: int(":aten::mm:" not in key) for key in plan.levels}
    plain, planned = ChangedProduct(), ChangedProduct()
    plain(x).square().sum().backward()
    apply_recompute(planned, plan)
    planned(x).square().sum().backward()
    assert not differing(state_of(planned), state_of(plain))
