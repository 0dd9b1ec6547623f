"""What surrounds a forward pass changes before its backward: dtypes, statistics, vectors, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_dp.recompute import activation_bytes, apply_recompute, plan_recompute
from lightning_dp.recompute.policies import Cheap
from tests.recompute.counting import OperatorCounts, count_closures, differing, state_of
from tests.recompute.models import Model, batch, build

POLICIES = ("cheap", "sublinear")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def steps_of(build: Callable[[], nn.Module], policy: str | None, width: int = 16, dtype: torch.dtype = torch.float32):
    """Two forward passes in ``dtype`` before one backward in the dtype of before, twice."""
    model = build().to(dtype)
    if policy:
        apply_recompute(model, policy)
    torch.manual_seed(5)
    for step in range(2):
        with default_dtype(dtype):
            out = [model(numbers(2 * step + place, 64, width).to(dtype)) for place in range(2)]
        (out[0].square().mean() + out[1].sin().mean()).backward()
    assert torch.get_default_dtype() is torch.float32
    return state_of(model)


def constants_in_the_default_dtype(model: Model, x: Tensor) -> Tensor:
    positions = torch.arange(64 * 16).view(64, 16) / 7
    constants = torch.full((64, 16), 0.1) * torch.zeros(64, 16).add_(0.3)
    return model.last(torch.sigmoid(model.first(x) + positions.sin()) * constants)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_default_dtype_of_the_forward_pass_is_that_of_recomputation(policy):
    """Lightning's precisions "64-true" and "bf16-true" set it for the training step, and not for backward."""
    for dtype in (torch.float64, torch.bfloat16):
        plain = steps_of(lambda: Model(constants_in_the_default_dtype), None, dtype=dtype)
        found = steps_of(lambda: Model(constants_in_the_default_dtype), policy, dtype=dtype)
        assert differing(found, plain) == []


def running_statistics_before_they_move(model: Model, x: Tensor) -> Tensor:
    x = model.first(x)
    mean, var = model.norm.running_mean[None].expand(64, 16), model.norm.running_var
    return model.last(torch.sigmoid((x - mean) / torch.sqrt(var + 1e-5))) + model.norm(x * 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_running_statistics_are_read_as_they_were(policy):
    """Batch norm moves them without a new version."""
    plain = steps_of(lambda: Model(running_statistics_before_they_move), None)
    found = steps_of(lambda: Model(running_statistics_before_they_move), policy)
    assert differing(found, plain) == []


def wide_spectral_norm() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(spectral_norm(nn.Linear(20000, 8)), nn.Sigmoid(), nn.Linear(8, 4))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_vectors_of_spectral_norm_may_move_in_a_second_forward(policy):
    """A discriminator sees real and generated images before its backward."""
    found = steps_of(wide_spectral_norm, policy, width=20000)
    assert differing(found, steps_of(wide_spectral_norm, None, width=20000)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_a_buffer_stays_when_the_buffer_changes(policy):
    """As the queue of MoCo: read from a copy, since it changes before backward."""

    def gradients(policy: str | None) -> list[Tensor]:
        model = Model(lambda model, x: torch.sigmoid(model.first(x) @ queue.t().clone()))
        queue = torch.eye(16)
        if policy:
            apply_recompute(model, policy)
        loss = model(torch.eye(16)).sum()
        queue += 1
        loss.backward()
        return [parameter.grad for parameter in model.first.parameters()]

    for plain, found in zip(gradients(None), gradients(policy), strict=True):
        assert torch.equal(plain, found)


def test_a_buffer_that_changes_between_forward_and_backward_is_refused_as_in_plain_training():
    for policy in (None, *POLICIES):
        model = Model(lambda model, x: model.first(x) * model.norm.running_mean)
        if policy:
            apply_recompute(model, policy)
        out = model(numbers(0, 64, 16))
        model.norm.running_mean.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def halve(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


@pytest.mark.parametrize("change", [halve, lambda tensor: tensor.data.mul_(0.5)], ids=["in place", "by data"])
@pytest.mark.parametrize("policy", POLICIES)
def test_targets_stay_when_what_they_were_computed_from_moves_before_backward(policy, change):
    """As Lightning's ``on_before_zero_grad`` moves a teacher, prototypes and centers, in the module or elsewhere."""

    def forward(model: Model, x: Tensor) -> Tensor:
        student = model.first(x)
        with torch.no_grad():
            target = torch.sigmoid(model.teacher[0](x))
            scaled = torch.sigmoid(x * model.scale)
        prototypes = F.normalize(model.prototypes, dim=1)
        loss = F.mse_loss(student, target) + (student @ prototypes.t()).sin().mean() + (student * scaled).mean()
        return loss + (student * (x - model.center))

    def gradients(policy: str | None, is_elsewhere: bool) -> list[Tensor]:
        model = Model(forward)
        model.scale = nn.Parameter(numbers(3, 16))  # it may be trained elsewhere
        prototypes, center, teacher = numbers(1, 16, 16), numbers(2, 64, 16), model.last
        if is_elsewhere:
            model.last = nn.Identity()  # a list of modules, and plain attributes, are no parts of the model
            model.teacher, model.prototypes, model.center = [teacher], prototypes, center
        else:
            model.teacher = nn.ModuleList([teacher.requires_grad_(False)])
            model.prototypes = nn.Parameter(prototypes, requires_grad=False)
            model.register_buffer("center", center)
        if policy:
            apply_recompute(model, policy)
        loss = model(numbers(0, 64, 16)).sum()
        for moved in (*teacher.parameters(), model.scale, model.prototypes, model.center):
            change(moved)
        loss.backward()
        return [parameter.grad for parameter in model.first.parameters()]

    for is_elsewhere in (False, True):
        for plain, found in zip(gradients(None, is_elsewhere), gradients(policy, is_elsewhere), strict=True):
            assert torch.equal(plain, found)


@pytest.mark.parametrize("change", [halve, lambda tensor: tensor.data.mul_(0.5)], ids=["in place", "by data"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_parameter_that_plain_training_does_not_keep_may_change_before_backward(policy, change):
    """As Lightning's ``on_before_zero_grad`` clamps the scale and the bias of the logits of CLIP and SigLIP."""

    def forward(model: Model, x: Tensor) -> Tensor:
        logits = torch.sigmoid(model.first(x) + model.bias) * model.scale.exp()
        return F.gelu(model.norm(logits) + model.bias.view(1, 1)) * model.scale.exp()

    def gradients(policy: str | None) -> list[Tensor]:
        model = Model(forward)
        model.bias, model.scale = nn.Parameter(torch.full((1,), 0.5)), nn.Parameter(torch.tensor(0.7))
        if policy:
            apply_recompute(model, policy)
        loss = model(numbers(0, 64, 16)).square().sum()
        for moved in (model.bias, model.scale):
            change(moved)
        loss.backward()
        return [parameter.grad for parameter in (*model.first.parameters(), model.bias, model.scale)]

    for plain, found in zip(gradients(None), gradients(policy), strict=True):
        assert torch.equal(plain, found)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_center_may_move_in_the_forward_and_again_before_backward(policy):
    def gradients(policy: str | None) -> list[Tensor]:
        def forward(model: Model, x: Tensor) -> Tensor:
            halve(center)
            return model.first(x) * (x - center)

        model, center = Model(forward), numbers(2, 2, 16)[0]
        if policy:
            apply_recompute(model, policy)
        loss = model(numbers(0, 64, 16)).sum()
        halve(center)
        loss.backward()
        return [parameter.grad for parameter in model.first.parameters()]

    for plain, found in zip(gradients(None), gradients(policy), strict=True):
        assert torch.equal(plain, found)


@pytest.mark.parametrize("change", [halve, lambda tensor: tensor.data.mul_(0.5)], ids=["in place", "by data"])
@pytest.mark.parametrize("is_first", [False, True], ids=["moved", "assigned"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_running_mean_that_the_forward_moves_may_change_before_backward(policy, is_first, change):
    """By a hook, or by the next forward pass of a discriminator: plain training keeps the difference alone."""

    def forward(model: Model, x: Tensor) -> Tensor:
        x = model.first(x)
        mean = x.detach().mean(0)
        model.mean = mean if is_first else model.mean.lerp_(mean, 0.1)
        return F.gelu(x) + F.gelu(x - model.mean)

    def gradients(policy: str | None) -> list[Tensor]:
        model = Model(forward)
        model.mean = torch.zeros(16)
        if policy:
            apply_recompute(model, policy)
        loss = model(numbers(0, 64, 16)).square().sum()
        change(model.mean)
        loss.backward()
        return [parameter.grad for parameter in model.first.parameters()]

    for plain, found in zip(gradients(None), gradients(policy), strict=True):
        assert torch.equal(plain, found)


def test_a_model_on_a_device_without_autocast_works():
    """The meta device: shapes and operators are counted there before a model is trained."""
    model, x = (
        Model(lambda model, x: torch.sigmoid(model.norm(model.first(x)))).to("meta"),
        numbers(0, 64, 16).to("meta"),
    )
    handle = apply_recompute(model)
    model(x).square().sum().backward()
    assert handle.dropped_bytes > 0
    assert model.first.weight.grad.is_meta


def test_measuring_puts_buffers_back_that_the_model_replaces():
    pytest.importorskip("scipy")

    def count(model: Model, x: Tensor) -> Tensor:
        model.norm.running_mean = model.norm.running_mean + 1
        return torch.sigmoid(model.first(x)) * model.norm.running_mean

    model, x = Model(count), numbers(0, 64, 16)
    before = state_of(model)
    plan_recompute(model, x, 10**6)
    activation_bytes(model, x)
    assert differing(state_of(model), before) == []


def test_measuring_puts_parameters_back_that_the_model_changes():
    """The forward pass of a momentum encoder moves frozen parameters; another may train a part of itself."""
    pytest.importorskip("scipy")

    def move(model: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.last.bias.mul_(0.9).add_(1)
        model.last.weight.data = 0.9 * model.last.weight.data + 0.1 * model.first.weight.data
        model.first(x).square().mean().backward()
        return torch.sigmoid(model.first(x)) * model.last(x)

    model, x = Model(move), numbers(0, 64, 16)
    model.last.requires_grad_(False)
    model.first(x).sum().backward()
    before = state_of(model)
    memory = model.last.weight.data_ptr()
    plan_recompute(model, x, 10**6)
    activation_bytes(model, x)
    assert differing(state_of(model), before) == []
    assert model.last.weight.data_ptr() == memory


@pytest.mark.ci
def test_a_loop_that_backward_reads_at_each_step_runs_again_in_linear_time():
    """No operator saves the numbers that lead from one step to the next, so none of them would stay by itself."""

    def num_reruns(num_steps: int) -> int:
        def loop(model: Model, x: Tensor) -> Tensor:
            total = model.first(x) * 0
            for _ in range(num_steps):
                x = x * 0.999
                total = total + torch.sigmoid(x + model.first.bias)
            return total

        model = Model(loop)
        apply_recompute(model, "sublinear")
        out = model(numbers(0, 64, 16)).sum()
        with OperatorCounts() as operators:
            out.backward()
        return operators.counts["mul"]

    # 80 steps more take about twice as many more as 40; without a limit they would take four times as many.
    assert num_reruns(160) - num_reruns(80) < 2.5 * (num_reruns(80) - num_reruns(40))


def test_a_long_chain_that_backward_does_not_need_is_searched_to_its_limit_alone(monkeypatch):
    visited = count_closures(monkeypatch)

    def chain(model: Model, x: Tensor) -> Tensor:
        for _ in range(60):
            x = x * 0.999
            out = torch.sigmoid(x + model.first.bias)
        return out

    model = Model(chain)
    apply_recompute(model, "cheap")
    model(numbers(0, 64, 16))
    assert max(visited) == Cheap.max_calls + 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older ones run it without compiling it, and do not ask the mode (2.8, 2.10)"
)
def test_a_compiled_function_within_the_model_is_refused_by_name():
    """It would run without being compiled, also after recomputation is removed: Dynamo remembers that it gave up."""
    compiled = torch.compile(lambda x: torch.tanh(x) * torch.sigmoid(x), backend="eager")
    model = Model(lambda model, x: model.last(compiled(model.first(x))))
    apply_recompute(model)
    with pytest.raises(ValueError, match=r"forward of Model, which recomputes, calls a function that torch\.compile"):
        model(numbers(0, 64, 16))


@pytest.mark.parametrize("budget_bytes", [0, -1, 2.5, float("nan"), float("inf"), "5", True, [1], None])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget_bytes):
    with pytest.raises(ValueError, match=r"budget_bytes=.* must be a whole number of bytes"):
        plan_recompute(Model(lambda model, x: model.first(x)), numbers(0, 64, 16), budget_bytes)


def test_other_arguments_are_refused_by_name():
    model = Model(lambda model, x: torch.sigmoid(model.first(x)))
    for policy in ([], {}, None, "budget"):
        with pytest.raises(ValueError, match=r"policy=.* must be one of 'cheap', 'sublinear'"):
            apply_recompute(model, policy)
    for method in ("backwards", "training", "first"):
        with pytest.raises(ValueError, match=f"method='{method}' is no method of Model"):
            apply_recompute(model, method=method)
    with pytest.raises(ValueError, match="time_limit_s=0 must be greater than 0 seconds"):
        plan_recompute(model, numbers(0, 64, 16), 10**6, time_limit_s=0)


def test_a_plan_that_is_not_found_in_time_is_refused_by_name():
    pytest.importorskip("scipy")
    model = build("residual")
    with pytest.raises(ValueError, match=r"no plan of \d+ operators was found within time_limit_s=1e-09"):
        plan_recompute(model, batch()[0], 50_000, time_limit_s=1e-9)
