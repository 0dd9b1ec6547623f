"""A trial run leaves a module as it was."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_dp.trial_run import unchanged, unchanged_parameters


class Recording(nn.Module):
    """Keeps something of each run in every way that Python offers a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen, self.lazy = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.LazyLinear(2)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.metric, self.listed = MeanMetric(), [MeanMetric()]
        self.register_buffer("given_memory", torch.zeros(3))
        self.calls, self.last = 0, None
        self.array, self.constant = np.zeros(3), np.broadcast_to(0, 3)
        self.kept: dict[str, Any] = {"list": [torch.zeros(3)], "tuple": (deque([1], maxlen=2), {1})}
        self.counts, self.of, self.order = Counter(a=1), defaultdict(list, a=[1]), OrderedDict(b=1, a=2)

    def forward(self, x: Tensor) -> Tensor:
        self.train()
        y = self.lazy(self.frozen(self.norm(x + torch.rand(3) + random.random() + np.random.rand())))
        self.replaced = self.replaced + x.mean(0)
        self.given_memory.data = x.mean(0)
        self.metric.update(x.mean())
        self.listed[0].update(x.mean())
        self.calls, self.last = self.calls + 1, y
        self.array += 1
        self.kept["list"][0] += 1
        self.kept["list"].append(y)
        self.kept["tuple"][0].append(self.calls)
        self.kept["tuple"][1].add(self.calls)
        self.kept["new"] = self.new = y
        self.counts["b"] += 1
        self.of["b"].append(1)
        self.order.move_to_end("b")
        return y


def content(module: Recording) -> str:
    state = {name: value.tolist() for name, value in module.state_dict().items() if not name.startswith("lazy")}
    metrics = [(metric.update_count, float(metric.mean_value)) for metric in (module.metric, *module.listed)]
    kept = [module.calls, module.last, module.array.tolist(), module.kept, module.counts, module.of, list(module.order)]
    modes = [part.training for part in module.modules()]
    numbers = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return str([state, metrics, kept, modes, numbers, hasattr(module, "new")])


@pytest.mark.parametrize("fails", [False, True])
def test_all_that_a_module_keeps_is_put_back(fails):
    module = Recording()
    before = content(module)
    buffer, tensors = module.replaced, module.kept["list"]
    try:
        with unchanged(module):
            for _ in range(2):
                module(torch.randn(4, 3))
            assert content(module) != before
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert content(module) == before
    assert module.replaced is buffer
    assert module.kept["list"] is tensors
    assert module(torch.randn(4, 3)).shape == (4, 2)  # the lazy layer has become a linear one


def test_what_was_computed_before_a_trial_run_can_run_backward():
    layer = nn.BatchNorm1d(3, affine=False)
    layer.running_mean.add_(1)
    x = torch.randn(4, 3, requires_grad=True)
    loss = (x * layer.running_mean).sum()
    with unchanged(layer):
        layer(x.detach())
    loss.backward()
    assert torch.equal(x.grad, torch.ones(4, 3))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_cannot_be_written_is_left_alone(tmp_path):
    np.save(tmp_path / "weights.npy", np.ones(3))
    module = nn.Identity()
    module.weights = torch.from_numpy(np.load(tmp_path / "weights.npy", mmap_mode="r"))
    with unchanged(module):
        module(module.weights)
    assert torch.equal(module.weights, torch.ones(3, dtype=torch.float64))


def test_a_trial_run_on_the_meta_device_has_nothing_to_put_back():
    layer = nn.BatchNorm1d(3, device="meta")
    with unchanged(layer):
        layer(torch.zeros(4, 3, device="meta"))
    assert layer.num_batches_tracked.is_meta


def test_parameters_and_gradients_are_put_back():
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    weight, gradient = layer.weight.detach().clone(), layer.weight.grad
    with unchanged_parameters(layer):
        layer(torch.ones(1, 2)).sum().backward()
        layer.weight.data = torch.zeros(1, 2)
    assert torch.equal(layer.weight, weight)
    assert layer.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(1, 2))


class MovesMemory(nn.Module):
    """Gives its buffers other memory, in three ways, each of which keeps the tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("assigned", "set", "resized"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: Tensor) -> None:
        self.assigned.data = self.assigned + x
        self.set.set_(self.set + x)
        self.resized.resize_(6).fill_(1)


def test_a_buffer_that_gets_other_memory_is_put_back():
    module = MovesMemory()
    with unchanged(module):
        module(torch.ones(3))
        assert module.resized.shape == (6,)
    assert [(name, buffer.tolist()) for name, buffer in module.named_buffers()] == [
        (name, [0.0, 0.0, 0.0]) for name in ("assigned", "set", "resized")
    ]


def test_a_tensor_kept_from_an_earlier_step_has_its_graph_afterwards():
    module, weight = nn.Module(), torch.ones(3, requires_grad=True)
    module.last = (weight * 2).exp()
    with unchanged(module):
        module.last.data.zero_()
    module.last.sum().backward()
    assert torch.equal(weight.grad, 2 * torch.full((3,), 2.0).exp())


def test_generators_and_arrays_that_a_module_keeps_are_put_back():
    module = nn.Module()
    module.torch, module.python, module.numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)
    module.counts, module.constant = np.zeros(3), np.zeros(3)
    module.constant.flags.writeable = False

    def numbers() -> list[float]:
        module.counts[0] += 1
        return [
            float(torch.rand((), generator=module.torch)),
            module.python.random(),
            module.numpy.random(),
            *module.counts,
        ]

    with unchanged(module):
        first = numbers()
        assert numbers() != first
    assert numbers() == first


def test_batch_norm_within_a_scripted_part_is_put_back():
    part = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))
    with unchanged(nn.Sequential(part)):
        part(torch.ones(4, 3))
        assert part.state_dict()["0.num_batches_tracked"] == 1
    assert part.state_dict()["0.num_batches_tracked"] == 0
    assert not part.state_dict()["0.running_mean"].any()


def test_lazy_batch_norm_begins_with_no_statistics():
    lazy = nn.LazyBatchNorm1d()
    with unchanged(nn.Sequential(lazy)):
        lazy(torch.ones(4, 3))
    assert lazy.num_batches_tracked == 0
    assert not lazy.running_mean.any()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_parameters_that_cannot_be_written_to_need_not_be(tmp_path):
    np.zeros((3, 3), np.float32).tofile(tmp_path / "weight")
    read_only = torch.from_numpy(np.memmap(tmp_path / "weight", dtype=np.float32, mode="r", shape=(3, 3)))
    with torch.device("meta"):
        on_meta = nn.Linear(2, 2)
    module = nn.ParameterList([nn.Parameter(read_only), nn.Parameter(torch.ones(1).expand(3)), *on_meta.parameters()])
    with unchanged(module), unchanged_parameters(module):
        module[0].sum()
    assert not module[0].any()


def test_lazy_batch_norm_keeps_what_it_has():
    trained = nn.BatchNorm1d(3)
    trained.running_mean.fill_(5.0)
    loaded, not_reached = nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d()
    loaded.load_state_dict(trained.state_dict())
    with unchanged(nn.ModuleList([loaded, not_reached])):
        loaded(torch.randn(4, 3))
    assert loaded.running_mean.tolist() == [5.0, 5.0, 5.0]
    assert not_reached.has_uninitialized_params()


def test_generators_of_older_kinds_and_of_the_system():
    module = nn.Module()
    module.system, module.legacy, module.square = random.SystemRandom(), np.random.RandomState(1), torch.eye(2)
    with unchanged(module):
        first = module.legacy.rand()
        module.square[0, 1] = 1
        module.square.t_()
    assert module.legacy.rand() == first
    assert torch.equal(module.square, torch.eye(2))
