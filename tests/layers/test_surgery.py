"""Conversion of a model in place, and averaging of running statistics."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import (
    GlobalBatchNorm1d,
    GlobalBatchNorm2d,
    GlobalBatchNorm3d,
    NoEffectWarning,
    apply_global_batch_norm,
    average_running_statistics,
    global_batch_norm_layers,
    revert_global_batch_norm,
)
from tests.ranks import run_threads


class Net(nn.Module):
    """Layers of each type, one of them registered at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, affine=False))
        self.again = self.features[1]
        self.blocks = nn.ModuleDict({"flat": nn.BatchNorm1d(4, momentum=None), "deep": nn.BatchNorm3d(2)})
        self.nothing = None
        self.register_module("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.features(x))
        return self.blocks["flat"](x.mean((2, 3)))


def test_each_layer_is_replaced_by_its_counterpart_and_counted_once():
    model = Net()
    assert apply_global_batch_norm(model) == 4
    assert type(model.features[1]) is GlobalBatchNorm2d
    assert type(model.blocks["flat"]) is GlobalBatchNorm1d
    assert type(model.blocks["deep"]) is GlobalBatchNorm3d
    assert model.again is model.features[1], "a layer registered twice must stay one layer"
    assert len(global_batch_norm_layers(model)) == 4
    assert all(layer.is_global and layer.group is None for layer in global_batch_norm_layers(model))


def test_parameters_buffers_mode_and_hooks_are_the_same_objects():
    model = Net().double()
    model.features[1].eval()
    model.features[1].weight.requires_grad_(False)
    model.features[1].mark = "kept"
    calls: list[type] = []
    handle = model.features[1].register_forward_hook(lambda module, *_: calls.append(type(module)))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    keys = list(model.state_dict())
    repr_before = str(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    apply_global_batch_norm(model)

    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert list(model.state_dict()) == keys
    assert str(model).replace("GlobalBatchNorm", "BatchNorm") == repr_before
    assert not model.features[1].training
    assert model.features[3].training
    assert not model.features[1].weight.requires_grad
    assert model.features[1].mark == "kept"
    model(torch.randn(2, 3, 6, 6, dtype=torch.float64)).sin().sum().backward()
    assert calls == [GlobalBatchNorm2d, GlobalBatchNorm2d]
    handle.remove()
    assert not model.features[1]._forward_hooks
    bias = model.blocks["flat"].bias.detach().clone()
    optimizer.step()
    assert not torch.equal(model.blocks["flat"].bias, bias), (
        "an optimizer created before the conversion must still update the parameters"
    )


def test_checkpoints_load_in_both_directions(tmp_path):
    plain, converted = Net(), Net()
    apply_global_batch_norm(converted)
    for source, target in ((plain, converted), (converted, Net())):
        source(torch.randn(4, 3, 6, 6))
        torch.save(source.state_dict(), tmp_path / "model.pt")
        target.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
        for ours, theirs in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)


def test_applying_again_changes_only_the_group():
    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int, bool]:
        model = Net()
        first = apply_global_batch_norm(model)
        model.features[1].is_global = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = apply_global_batch_norm(model, group)
        assert not model.features[1].is_global
        return first, second, all(layer.group is group for layer in global_batch_norm_layers(model))

    assert run_threads(2, work) == [(4, 0, True)] * 2


def test_a_model_without_batch_norm_causes_a_warning():
    with pytest.warns(NoEffectWarning, match="Linear has no BatchNorm1d, 2d or 3d"):
        assert apply_global_batch_norm(nn.Linear(2, 2)) == 0


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def wrapped() -> nn.Module:
    layer = nn.BatchNorm2d(2)
    layer.forward = lambda x: x
    return layer


def compiled() -> nn.Module:
    layer = nn.BatchNorm2d(2)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.SyncBatchNorm(2), "layer '1', a SyncBatchNorm: its own forward would be lost"),
        (nn.LazyBatchNorm2d, "layer '1', a LazyBatchNorm2d: .*becomes a plain one in its first forward"),
        (lambda: Activated(2), "layer '1', a Activated: its own forward would be lost"),
        (wrapped, "layer '1', a BatchNorm2d: its own forward would be lost"),
        (compiled, "layer '1', a BatchNorm2d: it is compiled on its own"),
        (
            lambda: torch.compile(nn.BatchNorm2d(2), backend="eager"),
            "layer '1', a BatchNorm2d: it is compiled on its own",
        ),
        (lambda: torch.jit.script(nn.BatchNorm2d(2)), "layer '1', a BatchNorm2d: it is scripted"),
        (lambda: torch.jit.script(nn.Sequential(nn.BatchNorm2d(2))), r"layer '1\.0', a BatchNorm2d: it is scripted"),
    ],
    ids=["sync", "lazy", "subclass", "wrapped forward", "compile()", "torch.compile", "scripted", "scripted parent"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*deprecated:DeprecationWarning")
def test_layers_that_would_lose_behavior_are_refused_before_any_change(make, message):
    model = nn.Sequential(nn.BatchNorm2d(2), make())
    with pytest.raises(ValueError, match=message):
        apply_global_batch_norm(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_model_that_is_a_batch_norm_layer_is_converted():
    layer = nn.BatchNorm2d(2)
    assert apply_global_batch_norm(layer) == 1
    assert type(layer) is GlobalBatchNorm2d
    assert revert_global_batch_norm(layer) == 1
    assert type(layer) is nn.BatchNorm2d


def recorded(rank: int) -> nn.Module:
    """A converted model with different running statistics on each rank."""
    model = Net()
    apply_global_batch_norm(model)
    generator = torch.Generator().manual_seed(rank)
    for layer in global_batch_norm_layers(model):
        layer.running_mean.normal_(generator=generator)
        layer.running_var.uniform_(generator=generator)
    model.features[3] = nn.BatchNorm2d(4, track_running_stats=False)
    model.features[3].running_mean = None
    apply_global_batch_norm(model)
    return model


def averaged(world_size: int) -> list[list[Tensor]]:
    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        model = recorded(rank)
        average_running_statistics(model, group)
        return list(model.buffers())

    return run_threads(world_size, work)


def check_averaged(ranks: list[list[Tensor]]) -> None:
    own = [list(recorded(rank).buffers()) for rank in range(len(ranks))]
    for index, buffers in enumerate(zip(*own, strict=True)):
        expected = torch.stack([b.double() for b in buffers]).mean(0).to(buffers[0].dtype)
        for rank in ranks:
            torch.testing.assert_close(rank[index], expected, rtol=0, atol=0)


def test_copies_of_the_model_are_averaged_too(monkeypatch):
    calls: list[int] = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, **kwargs: (calls.append(x.numel()), all_reduce(x, **kwargs)))

    def work(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
        model, copied = recorded(rank), recorded(rank + 2)
        revert_global_batch_norm(copied)  # a copy that was made before the conversion
        average_running_statistics(model, group, [copied])
        return list(model.buffers()), list(copied.buffers())

    ranks = run_threads(2, work)
    check_averaged([model for model, _ in ranks])
    assert calls == [2 * 2 * 10] * 2, "one collective per rank"
    for index, buffers in enumerate(zip(*(recorded(rank).buffers() for rank in (2, 3)), strict=True)):
        expected = torch.stack([b.double() for b in buffers]).mean(0).to(buffers[0].dtype)
        for _, copied in ranks:
            torch.testing.assert_close(copied[index], expected, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_running_statistics_are_averaged_over_all_ranks(world_size, monkeypatch):
    calls: list[int] = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, **kwargs: (calls.append(x.numel()), all_reduce(x, **kwargs)))
    check_averaged(averaged(world_size))
    channels = 4 + 4 + 2
    assert calls == ([] if world_size == 1 else [2 * channels] * world_size), "one collective per rank"


def test_the_comparison_of_averages_fails_without_communication(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="not equal"):
        check_averaged(averaged(2))


def test_a_model_without_global_layers_is_refused():
    with pytest.raises(ValueError, match="Sequential has no global batch norm; call apply_global_batch_norm"):
        average_running_statistics(nn.Sequential(nn.BatchNorm1d(4)))


def test_averaging_more_often_does_not_change_the_result():
    """Running statistics are linear in the statistics of the batches, with and without momentum."""
    data = torch.randn(6, 2, 8, 4, dtype=torch.float64)

    def work(rank: int, group: dist.ProcessGroup, often: bool, momentum: float | None) -> Tensor:
        layer = GlobalBatchNorm1d(4, momentum=momentum).double()
        model = nn.Sequential(layer)
        for step in range(6):
            model(data[step, rank] * (rank + 1))
            if often and step in (1, 2):
                average_running_statistics(model, group)
        average_running_statistics(model, group)
        return torch.stack([layer.running_mean, layer.running_var])

    for momentum in (0.2, None):
        often, once = (run_threads(2, work, often, momentum) for often in (True, False))
        torch.testing.assert_close(often[0], once[1], rtol=1e-12, atol=1e-12)


class WithList(nn.Module):
    """Calls its layer through a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.norms = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[0](x)


def test_a_layer_that_a_plain_list_holds_is_global_and_what_is_set_there_counts():
    x = torch.randn(8, 3, dtype=torch.float64)

    def work(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = WithList()
        apply_global_batch_norm(model, group)
        model.norms[0].momentum = 0.5
        return model(x[4 * rank : 4 * rank + 4]), model.norm.running_mean

    plain = WithList()
    plain.norm.momentum = 0.5
    expected = plain(x)
    for rank, (output, running_mean) in enumerate(run_threads(2, work)):
        torch.testing.assert_close(output, expected[4 * rank : 4 * rank + 4])
        torch.testing.assert_close(running_mean, plain.norm.running_mean)
