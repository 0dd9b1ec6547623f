"""A tensor may be changed in place under any of its names: gradients stay bitwise those of plain training."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_dp._private.torch_names import Nnpack
from lightning_dp.recompute import apply_recompute
from tests.recompute.counting import Operators, differing, state_of
from tests.recompute.models import Model

POLICIES = ("cheap", "sublinear")


def trained(function: Callable[[Model, Tensor], Tensor], policy: str | None) -> dict[str, Tensor]:
    model = Model(function)
    if policy:
        apply_recompute(model, policy)
    model(torch.randn(32, 16, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    return state_of(model)


def changed_after(alias: Callable[[Tensor], object]) -> Callable[[Model, Tensor], Tensor]:
    """A value from which a larger one is computed again gets an alias, and then it changes in place."""

    def forward(model: Model, x: Tensor) -> Tensor:
        a = model.first(x)  # kept, although no operator saves it: what `b` needs is twice as large
        b = torch.sigmoid(torch.cat([a, a + 1], 1))
        other = alias(a)
        c = F.relu(a, inplace=True)
        del other
        return model.last(b[:, :16] * b[:, 16:] + c)

    return forward


ALIASES: dict[str, Callable[[Tensor], object]] = {
    "logged": lambda a: a.detach().mean(),
    "detached": lambda a: a.detach(),
    "viewed": lambda a: a.view(32, 16),
    "sliced": lambda a: a[:],
    "data": lambda a: a.data,
    "transposed twice": lambda a: a.t().t(),
}


def saved_alias(model: Model, x: Tensor) -> Tensor:
    """The alias is made before the value is read, and the value changes by way of the alias."""
    a = model.norm(model.first(x)).detach() * 2
    alias = a.view(-1).view(32, 16)
    out = torch.sigmoid(torch.exp(a) * model.first.weight.sum()) * torch.exp(
        torch.sin(alias) * model.last.weight.mean()
    )
    alias.mul_(3)
    return model.last(out * a)


def complex_view(model: Model, x: Tensor) -> Tensor:
    a = model.norm(model.first(x)).detach() * 2
    out = torch.sigmoid(torch.exp(a) * model.first.weight.sum())
    torch.view_as_complex(a.view(32, 8, 2)).mul_(2j)
    return model.last(out * a)


def other_thread(model: Model, x: Tensor) -> Tensor:
    a = model.norm(model.first(x)).detach() * 2
    out = torch.sigmoid(torch.exp(a) * 2)
    worker = threading.Thread(target=lambda: a.mul_(2))
    worker.start()
    worker.join()
    return model.last(out * torch.tanh(a * model.first.weight.sum()))


def gradient_within(model: Model, x: Tensor) -> Tensor:
    a = model.first(x)
    b = torch.sigmoid(torch.cat([a, a + 1], 1))
    (slope,) = torch.autograd.grad(model.last(x).square().sum(), model.last.weight)
    torch.tanh(a.detach())  # an operator after that backward
    c = F.relu(a, inplace=True)
    return model.last(b[:, :16] * b[:, 16:] + c) * slope.sum()


def statistics_read_twice(model: Model, x: Tensor) -> Tensor:
    """Batch norm moves its statistics without a new version; a view shows them before and after."""
    mean, var = torch.zeros(16), torch.ones(16)
    view = mean[None]
    a = model.first(x)
    b = torch.sigmoid(a * 2 - view)
    a = F.batch_norm(a, mean, var, training=True)
    return model.last(b * torch.sigmoid(a * 2 - view))


@torch.library.custom_op("lightning_dp_tests::add_sine", mutates_args={"x"})
def add_sine(x: Tensor, y: Tensor) -> None:
    x += y.sin()


def custom_operator(model: Model, x: Tensor) -> Tensor:
    """It gives what it changes the new version before it runs."""
    a = model.first(x)
    total = torch.ones(8, 16)
    b = F.gelu(a) + F.gelu(a.view(4, 8, 16) + total).view(32, 16)
    add_sine(total, a.detach()[:8])
    return model.last(b * torch.sigmoid(a.view(4, 8, 16) + total).view(32, 16))


PROGRAMS = {f"alias: {name}": changed_after(alias) for name, alias in ALIASES.items()} | {
    function.__name__: function
    for function in (
        saved_alias,
        complex_view,
        other_thread,
        gradient_within,
        statistics_read_twice,
        custom_operator,
    )
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_bitwise_those_of_plain_training(name, policy):
    assert differing(trained(PROGRAMS[name], policy), trained(PROGRAMS[name], None)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_change_by_data_in_the_forward_leaves_backward_what_was_read(policy):
    """Plain autograd does not see it: there, backward reads the changed memory, unless a copy was read."""

    def forward(model: Model, x: Tensor, copies: bool) -> Tensor:
        a = model.first(x)
        read = a.clone() if copies else a
        b = read * model.norm.weight
        c = torch.sigmoid(torch.cat([read, read + 1], 1))
        a.data.mul_(3)
        return model.last(b + c[:, :16] * c[:, 16:] + a.detach())

    found = trained(lambda model, x: forward(model, x, False), policy)
    assert differing(found, trained(lambda model, x: forward(model, x, True), None)) == []
    assert differing(found, trained(lambda model, x: forward(model, x, False), None)) != []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_dies_within_the_forward_frees_its_memory_at_once(policy):
    """A loss only for `.item()`, in a loop: the next one finds the memory of the one before."""

    def peak(applied: str | None, num_losses: int) -> int:
        def forward(model: Model, x: Tensor) -> Tensor:
            for _ in range(num_losses):
                model.last(torch.sigmoid(model.norm(model.first(x)))).square().mean().item()
            return model.first(x)

        model = Model(forward)
        if applied:
            apply_recompute(model, applied)
        x = torch.randn(4096, 16)
        gc.disable()
        with Operators([*model.parameters(), x]) as operators:
            model(x)
        gc.enable()
        return operators.peak_bytes

    assert peak(policy, 6) <= peak(policy, 2) + 4096
    if policy == "cheap":  # a segment of "sublinear" may need more than one graph of a single loss
        assert peak(policy, 6) <= peak(None, 6) + 4096


@pytest.mark.parametrize("backend", [torch.backends.mkldnn, Nnpack()])
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputation_runs_under_the_backends_flags_of_the_forward(policy, backend):
    seen: list[bool] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sigmoid.default:
                seen.append(backend.enabled)
            return func(*args, **(kwargs or {}))

    def forward(model: Model, x: Tensor) -> Tensor:
        backend.enabled = False  # `flags` warns of TF32 on a machine without such a device
        try:
            return model.last(torch.sigmoid(model.norm(model.first(x))) * 2)
        finally:
            backend.enabled = True

    model = Model(forward)
    apply_recompute(model, policy)
    out = model(torch.randn(32, 16)).sum()
    with Watch():
        out.backward()
    assert backend.enabled
    assert seen
    assert not any(seen)
