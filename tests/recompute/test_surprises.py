"""What models do that once gave other numbers, more memory or an unclear error with recomputation."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.recompute import RecomputePlan, apply_recompute, plan_recompute
from tests.ranks import run_processes
from tests.recompute.counting import Operators, count_closures, differing, recomputed, state_of
from tests.recompute.models import Model


def numbers(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def trained(function: Callable[[Model, Tensor], Tensor], policy: str | None) -> dict[str, Tensor]:
    model = Model(function)
    if policy:
        apply_recompute(model, policy)
    torch.manual_seed(5)
    for step in range(2):
        model(numbers(step, 6, 20, 16)).square().mean().backward()
    return state_of(model)


def norm_of_a_transposed_input(model: Model, x: Tensor) -> Tensor:
    return model.last(F.silu(model.norm(model.first(x).transpose(1, 2)[:, :, ::2])).transpose(1, 2))


def norm_without_weight_in_bf16(model: Model, x: Tensor) -> Tensor:
    """The type of the running statistics is that in which batch norm computes. The kernel of transposed inputs runs."""
    with torch.autocast("cpu", torch.bfloat16):
        x = model.first(x).transpose(1, 2)
        x = F.batch_norm(x, model.norm.running_mean, model.norm.running_var, training=True)
        return model.last(torch.sigmoid(x).transpose(1, 2)).float()


def evaluation_before_training(model: Model, x: Tensor) -> Tensor:
    x = model.first(x[0])
    model.norm.eval()
    before = torch.sigmoid(model.norm(x))
    model.norm.train()
    return model.last(before) + torch.sigmoid(model.norm(x + 3))


def two_views_that_differ_in_sign(model: Model, x: Tensor) -> Tensor:
    z = torch.view_as_complex(model.first(x).view(6, 20, 8, 2))
    part, negative = z.imag, z.conj().imag
    return part * model.last.weight[:20, :8].sum() + negative * part.cos() + model.last(x).mean()


def teacher_in_inference_mode(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = model.last(x).relu_() * 2
        scale = target.mean()
    return torch.sigmoid(model.first(x) + target) * target.clone() * scale.item()


def random_slopes(model: Model, x: Tensor) -> Tensor:
    return model.last(F.rrelu(model.first(x), training=True))


def view_at_an_offset(model: Model, x: Tensor) -> Tensor:
    x = numbers(9, 40, 16)[2:]
    windows = x.as_strided((60, 8), (8, 1), 48)
    out = torch.sigmoid(windows + model.first.weight[0, :8])
    x.zero_()
    return out


def change_of_every_second_column(model: Model, x: Tensor) -> Tensor:
    x = numbers(9, 40, 32)[:, ::2]
    out = torch.sigmoid(torch.exp(x).sum(0) + model.first(x.cumsum(0)))
    x.zero_()
    return torch.tanh(out)


def parameter_with_other_memory_for_a_while(model: Model, x: Tensor) -> Tensor:
    """Weights are swapped by an assignment to `.data`: before, while and after autograd asks for what they led to."""
    weight = model.last.weight
    before = weight + 1
    original = weight.data
    weight.data = original / 2
    factor = (weight + 1).exp().sum() / 1000 + before.sigmoid().sum()
    weight.data = original
    return model.first(x) * factor


def nested_tensors(model: Model, x: Tensor) -> Tensor:
    """They are strided, but have neither sizes nor strides of their own."""
    first = model.first(x[0])
    nested = torch.nested.as_nested_tensor([first[:4], first[4:]])
    return model.last(torch.nested.to_padded_tensor(F.relu(nested) * 2, 0.0).sin().sum(0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("policy", ["cheap", "sublinear"])
@pytest.mark.parametrize(
    "function",
    [
        nested_tensors,
        norm_of_a_transposed_input,
        norm_without_weight_in_bf16,
        evaluation_before_training,
        two_views_that_differ_in_sign,
        teacher_in_inference_mode,
        random_slopes,
        view_at_an_offset,
        change_of_every_second_column,
        parameter_with_other_memory_for_a_while,
    ],
)
def test_gradients_are_bitwise_the_same(function, policy):
    assert differing(trained(function, policy), trained(function, None)) == []


def with_collectives(rank: int) -> list[list[str]]:
    dist.init_process_group("gloo")

    def forward(model: Model, x: Tensor) -> Tensor:
        hidden = model.first(x + rank)
        summed = hidden.detach() * 2
        dist.all_reduce(summed)
        sent = torch.tanh(hidden.detach())
        dist.broadcast(sent, 0)
        return model.last(torch.sigmoid(hidden * summed) * sent)

    plain = trained(forward, None)
    return [differing(trained(forward, policy), plain) for policy in ("cheap", "sublinear")]


def test_a_collective_that_changes_a_tensor_in_place_is_seen():
    assert run_processes(2, with_collectives) == [[[], []], [[], []]]


class Chunks(nn.Module):
    """Each chunk of the sequence has its own backward, in the recorded method, as with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Sigmoid()) for _ in range(4)]
        self.net = nn.Sequential(*(layer for group in layers for layer in group))

    def forward(self, num_chunks: int) -> None:
        hidden = torch.zeros(64, 32)
        for _ in range(num_chunks):
            hidden = self.net(hidden.detach() + 1)
            hidden.square().mean().backward()


@pytest.mark.parametrize("policy", ["cheap", "sublinear"])
def test_several_backward_passes_in_one_step_hold_the_memory_of_one(policy):
    def peak(num_chunks: int, policy: str | None) -> int:
        model = Chunks()
        if policy:
            apply_recompute(model, policy)
        gc.disable()
        with Operators([*model.parameters(), *model.buffers()]) as operators:
            model(num_chunks)
        gc.enable()
        return operators.peak_bytes

    assert peak(6, policy) < peak(6, None)
    assert peak(6, policy) <= peak(2, policy)


def test_a_long_loop_is_recorded_in_linear_time(monkeypatch):
    visited = count_closures(monkeypatch)
    model = nn.GRUCell(8, 8)
    model.forward = lambda x: _loop(model, x)
    apply_recompute(model, "sublinear")
    model(torch.ones(16, 8))
    assert len(visited) > 100
    assert sum(visited) < 20 * len(visited)


def _loop(cell: nn.GRUCell, x: Tensor) -> Tensor:
    hidden = torch.zeros_like(x)
    for _ in range(40):
        hidden = type(cell).forward(cell, x, hidden)
    return hidden.mean()


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Sigmoid(), nn.Tanh())))


def test_threads_may_use_one_model():
    model, x = layers(), numbers(0, 8, 16)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    apply_recompute(model, "sublinear")
    start = threading.Barrier(3)
    found: list[bool] = []

    def work() -> None:
        start.wait()
        for _ in range(10):
            gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            found.append(all(map(torch.equal, gradients, expected)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30


def operators_of_backward(model: nn.Module) -> dict[str, int]:
    model.zero_grad()
    with Operators() as operators:
        loss = model(numbers(0, 8, 16)).sum()
        operators.counts.clear()
        loss.backward()
    return operators.counts


def test_a_pickled_model_is_plain_and_one_that_was_wrapped_after_it_was_applied_can_be_removed():
    plain = operators_of_backward(layers())
    model = layers()
    handle = apply_recompute(model)
    assert recomputed(plain, operators_of_backward(pickle.loads(pickle.dumps(model)))) == {}  # noqa: S301  our own
    recorded = model.forward
    model.forward = lambda x: recorded(x)
    assert recomputed(plain, operators_of_backward(model)) != {}
    handle.remove()
    assert recomputed(plain, operators_of_backward(model)) == {}


def test_a_model_with_lazy_parameters_works():
    model = nn.Sequential(nn.LazyLinear(16), nn.Sigmoid(), nn.Tanh())
    apply_recompute(model)
    model(numbers(0, 8, 16)).sum().backward()
    assert model[0].weight.grad is not None


def test_derivatives_by_torch_func_are_refused():
    model = Model(lambda model, x: torch.func.vmap(torch.func.jacrev(lambda row: model.first(row).sum()))(x[0]))
    apply_recompute(model)
    with pytest.raises(RuntimeError, match="support saved tensor hooks"):
        model(numbers(0, 6, 20, 16))


def test_higher_order_operators_are_refused():
    model = Model(lambda model, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (model.first(x),)))
    apply_recompute(model)
    with pytest.raises(NotImplementedError, match="cond"):
        model(numbers(0, 6, 20, 16))


def test_a_parameter_that_gets_other_memory_after_the_forward_pass_is_used_as_it_was():
    """Autograd keeps the result of exp, so that plain training does not see an assignment to `.data` either."""
    found = []
    for policy in (None, "cheap", "sublinear"):
        weight = nn.Parameter(numbers(0, 200, 200))
        model = Model(lambda model, x, weight=weight: (weight.exp() * weight.sin().exp()).sigmoid())
        if policy:
            apply_recompute(model, policy)
        out = model(numbers(0, 1))
        weight.data = weight.data * 2
        out.sum().backward()
        found.append(weight.grad)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_memory_that_is_freed_after_the_forward_pass_is_an_error():
    """FSDP frees gathered parameters so. To read them would end the process."""
    weight = nn.Parameter(numbers(0, 200, 200))
    model = Model(lambda model, x: torch.sigmoid(weight + 1))
    apply_recompute(model, "sublinear")
    out = model(numbers(0, 1))
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"the memory of a tensor of shape \[200, 200\] was freed"):
        out.sum().backward()


def test_a_plan_for_another_model_is_refused_and_for_a_smaller_batch_warned_of(tmp_path):
    pytest.importorskip("scipy")
    plan = plan_recompute(layers(), numbers(0, 8, 16), 10**6)
    plan.save(tmp_path / "plan.json")
    plan = RecomputePlan.load(tmp_path / "plan.json")
    other = Model(lambda model, x: model.last(torch.sigmoid(model.first(x))))
    apply_recompute(other, plan)
    with pytest.raises(ValueError, match=r"none of the \d+ operators of the plan ran in Model\.forward"):
        other(numbers(0, 6, 20, 16))
    model = layers()
    apply_recompute(model, plan)
    with pytest.warns(UserWarning, match=r"It may hold more than budget_bytes=1000000"):
        model(numbers(0, 80, 16))
