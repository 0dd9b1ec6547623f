"""Which uses of a watched parameter the watch sees."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_dp.strategies.layered_sgd import parameter_watch
from lightning_dp.strategies.layered_sgd.parameter_watch import ParameterWatch
from tests.strategies.layered_sgd.staged import is_watched


class Watched:
    """A layer whose parameters are watched; a use takes the watch off and sets the value to 7, as an update would."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 3)
        self.used: list[torch.Tensor] = []
        self.asked_for_gradient: list[torch.Tensor] = []
        self.watch = ParameterWatch(self.use, self.asked_for_gradient.append)
        self.watch.add(self.layer.parameters())

    def use(self, parameter: torch.Tensor) -> None:
        self.watch.remove([parameter])
        self.used.append(parameter)
        parameter.data.fill_(7.0)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


USES = {
    "forward": lambda layer: layer(torch.ones(1, 3)),
    "function": lambda layer: torch.linalg.norm(layer.weight),
    "list": lambda layer: torch._foreach_norm([layer.weight]),
    "nested list": lambda layer: torch.block_diag(*[layer.weight]),
    "method": lambda layer: layer.weight.detach(),
    "index": lambda layer: layer.weight[0],
    "data": lambda layer: layer.weight.data,
    "T": lambda layer: layer.weight.T,
    "mT": lambda layer: layer.weight.mT,
    "H": lambda layer: layer.weight.H,
    "assigned": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "in place": lambda layer: nn.init.zeros_(layer.weight),
    "item": lambda layer: layer.weight[0, 0].item(),
    "operator": lambda layer: 2 * layer.weight,
    "comparison": lambda layer: layer.weight == 1,
    "keyword": lambda layer: torch.nn.functional.linear(torch.ones(1, 3), weight=layer.weight),
    "out": lambda layer: torch.add(torch.ones(3, 3), layer.weight.detach(), out=torch.empty(3, 3)),
    "state dict": lambda layer: layer.state_dict(),
    "copy": lambda layer: torch.empty(3, 3).copy_(layer.weight),
    "numpy": lambda layer: layer.weight.detach().numpy(),
    "print": lambda layer: repr(layer.weight),
    "custom function": lambda layer: Double.apply(layer.weight),
    "operator of torch.ops": lambda layer: torch.ops.aten.mul(layer.weight, 2),
    "iteration": lambda layer: list(layer.weight),
    "address": lambda layer: layer.weight.data_ptr(),
    "version": lambda layer: layer.weight._version,
    "subclass": lambda layer: layer.weight.as_subclass(torch.Tensor),
    "parameter": lambda layer: nn.Parameter(layer.weight),
    "storage": lambda layer: layer.weight.untyped_storage(),
    "deepcopy": lambda layer: copy.deepcopy(layer.weight),
    "deepcopy of the layer": lambda layer: copy.deepcopy(layer),
    "pickle": lambda layer: pickle.dumps(layer.weight),
    "torch.save": lambda layer: torch.save(layer, io.BytesIO()),
    "vector": lambda layer: nn.utils.parameters_to_vector([layer.weight]),
    "functional call": lambda layer: torch.func.functional_call(
        layer, dict(layer.named_parameters()), torch.ones(1, 3)
    ),
    "inference mode": lambda layer: torch.inference_mode()(lambda: layer.weight + 1)(),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_is_seen_before_the_value_is_read(use):
    watched = Watched()
    USES[use](watched.layer)
    assert any(used is watched.layer.weight for used in watched.used)
    assert not is_watched(watched.layer.weight)


def test_the_reader_gets_the_value_that_the_hook_left():
    watched = Watched()
    assert torch.equal(watched.layer.weight.sum(), torch.tensor(63.0))
    assert torch.equal(copy.deepcopy(Watched().layer.weight), torch.full((3, 3), 7.0))
    copied = pickle.loads(pickle.dumps(Watched().layer.weight))  # noqa: S301  made a line above
    assert torch.equal(copied, torch.full((3, 3), 7.0))
    assert type(copy.deepcopy(Watched().layer.weight)) is nn.Parameter


def test_a_parameter_that_is_made_of_a_watched_one_shares_its_memory():
    layer = Watched().layer
    made = nn.Parameter(layer.weight, requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad
    assert made.data_ptr() == layer.weight.data_ptr()
    assert nn.Parameter(Watched().layer.weight).requires_grad


def test_a_parameter_stays_watched_while_only_its_shape_is_read(monkeypatch):
    """Another thread may use it at that moment."""
    monkeypatch.setattr(parameter_watch, "_HARMLESS_METHODS", {is_watched})
    weight = Watched().layer.weight
    assert torch.overrides.handle_torch_function(is_watched, (weight,), weight)


def test_a_parameter_s_own_torch_function_is_asked_while_it_is_watched():
    class Reshaped(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return (*result, "own") if func == torch.Tensor.shape.__get__ else result

    watched = Watched()
    parameter = Reshaped(torch.ones(2))
    watched.watch.add([parameter])
    assert parameter.shape == (2, "own")
    assert watched.used == []


def test_scalars_in_nested_lists_are_seen():
    watched = Watched()
    p, q = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
    watched.watch.add([p, q])
    with pytest.warns(UserWarning, match="requires_grad=True to a scalar"):
        got = torch.tensor([[p, q], [q, p]])
    assert torch.equal(got, torch.full((2, 2), 7.0))


def test_parameters_in_nested_arguments_are_seen():
    watched = Watched()
    lstm = nn.LSTM(2, 3, num_layers=2)
    watched.watch.add(lstm.parameters())
    lstm(torch.ones(4, 1, 2))
    assert len(watched.used) == 8


def test_a_use_on_another_thread_is_seen():
    watched = Watched()
    thread = threading.Thread(target=lambda: watched.layer.weight.sum())
    thread.start()
    thread.join()
    assert len(watched.used) == 1


HARMLESS = {
    **{name: (lambda p, name=name: getattr(p, name)) for name in ("shape", "dtype", "device", "requires_grad")},
    **{name: (lambda p, name=name: getattr(p, name)) for name in ("is_leaf", "ndim", "grad_fn")},
    "size": lambda p: p.size(),
    "numel": lambda p: p.numel(),
    "len": lambda p: len(p),
    "requires_grad_": lambda p: p.requires_grad_(True),
    "hook": lambda p: p.register_hook(lambda gradient: None),
    "hash": lambda p: hash(p),
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "in a set": lambda p: p in {p},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_asking_for_anything_but_the_value_is_no_use(name):
    watched = Watched()
    HARMLESS[name](watched.layer.weight)
    assert watched.used == []
    assert watched.asked_for_gradient == []
    assert is_watched(watched.layer.weight)


def test_using_other_tensors_is_no_use():
    watched = Watched()
    (torch.ones(3) @ torch.ones(3)).sum()
    assert watched.used == []


def test_a_gradient_that_is_read_is_asked_for():
    watched = Watched()
    _ = watched.layer.weight.grad
    assert [p is watched.layer.weight for p in watched.asked_for_gradient] == [True]
    assert watched.used == []


@pytest.mark.parametrize(
    "zero_grad",
    [
        lambda layer: layer.zero_grad(),
        lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).zero_grad(),
        lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0, foreach=True).zero_grad(set_to_none=True),
    ],
)
def test_dropping_gradients_waits_for_nothing(zero_grad):
    watched = Watched()
    with torch._C.DisableTorchFunctionSubclass():
        watched.layer.weight.grad = torch.ones(3, 3)
    zero_grad(watched.layer)
    assert watched.asked_for_gradient == []
    assert watched.layer.weight.grad is None


def test_a_parameter_is_as_before_when_it_is_not_watched_any_more():
    class Special(nn.Parameter):
        pass

    watched = Watched()
    special = Special(torch.ones(2))
    special.tag = "kept"
    watched.watch.add([special])
    assert isinstance(special, Special)
    watched.watch.remove([special])
    assert type(special) is Special
    assert special.tag == "kept"


def test_a_user_s_mode_and_subclass_see_what_they_would_see_without_the_watch():
    class Noting(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        pass

    x = torch.ones(3, 3).as_subclass(Tagged)
    watched = Watched()
    with Noting() as mode:
        out = x + watched.layer.weight
    assert type(out) is Tagged
    assert mode.names.count("add") == 1
    assert len(watched.used) == 1
    with Noting() as mode:
        watched.watch.add([watched.layer.weight])
        assert mode in torch.overrides._get_current_function_mode_stack()


def test_the_fused_path_of_a_frozen_encoder_stays_on():
    teacher = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval().requires_grad_(False)
    watched = Watched()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), torch.profiler.profile() as profile:
        teacher(x)
    assert is_watched(watched.layer.weight)
    assert any("_transformer_encoder_layer_fwd" in event.name for event in profile.events())
