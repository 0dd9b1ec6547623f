"""Whole steps when gradients are accumulated, and each gradient's bytes once: what `Diagnose` measures."""

from __future__ import annotations

import logging
import pickle
import time
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_dp.planner import Diagnose, Link, Network, Workload, diagnose, make_diagnosis, simulate
from lightning_dp.planner.diagnose import NOT_CALLED, WARM_UP, LayerTimes
from lightning_dp.planner.report import overrides_of
from tests.planner import test_advice, test_rows
from tests.planner.test_diagnose import BACKWARD_S, FORWARD_S, LOAD_S, NETWORK, Net, fit

UPDATE_S = 0.05


class SlowUpdate(Net):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        time.sleep(UPDATE_S)


def test_a_step_has_all_the_batches_of_its_update():
    callback = Diagnose(num_steps=2, stop=True, memonger=False)
    # An epoch of 10 batches: steps of 4, 4 and 2.
    trainer = fit(callback, SlowUpdate(), accumulate_grad_batches=4, limit_train_batches=10)
    profile = callback.diagnosis.profile
    assert trainer.global_step == 3, "the first step has the batches that do not count"
    assert (profile.accumulate, profile.batch_size, profile.num_steps) == (4, 4, 1)
    assert profile.load_s >= 4 * LOAD_S
    assert profile.forward_s >= 4 * FORWARD_S
    assert profile.backward_s >= 4 * BACKWARD_S
    assert profile.update_s >= UPDATE_S
    assert profile.step_s == pytest.approx(
        profile.load_s + profile.forward_s + profile.backward_s + profile.update_s, rel=0.01
    )
    workload = profile.workload()
    assert workload.accumulate == 4
    assert workload.compute_s == pytest.approx(profile.forward_s + profile.backward_s + profile.update_s)
    assert sum(block.forward_s for block in workload.whole().blocks) == pytest.approx(profile.forward_s / 4)


class Manual(SlowUpdate):
    """Updates after each second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_manual_optimization_has_steps_of_its_own_length():
    callback = Diagnose(num_steps=1, stop=True, memonger=False)
    fit(callback, Manual())
    profile = callback.diagnosis.profile
    assert profile.accumulate == 2
    assert profile.backward_s >= 2 * BACKWARD_S


def test_gradients_that_are_added_up_are_sent_once():
    network = Network(Link(0.0, 1e8), Link(0.0, 1e10))
    batch = {"gradient_bytes": 20e6, "forward_s": 0.1, "backward_s": 0.2, "num_blocks": 1, "batch_size": 8}
    one = simulate(Workload.uniform(**batch), network, 2, "ddp")
    four = simulate(Workload.uniform(**batch, accumulate=4), network, 2, "ddp")
    assert one.step_s == pytest.approx(0.3 + 0.2)
    assert four.step_s == pytest.approx(4 * 0.3 + 0.2)
    assert four.images_per_s == pytest.approx(2 * 4 * 8 / 1.4)
    # Four times as many batches in a step: the time of as many batches as the job's step has.
    sixteen = simulate(Workload.uniform(**batch, accumulate=4), network, 2, "ddp_accumulate_4")
    assert sixteen.step_s == pytest.approx(4 * 0.3 + 0.2 / 4)


def test_a_plan_for_more_accumulation_counts_from_what_the_job_has():
    profile = replace(test_rows.PROFILE, accumulate=2)
    assert overrides_of("ddp_accumulate_4", profile, 2)[-1] == "trainer.accumulate_grad_batches=8"
    assert overrides_of("ddp_accumulate_4", test_rows.PROFILE, 2)[-1] == "trainer.accumulate_grad_batches=4"
    assert str(make_diagnosis(profile, NETWORK)).startswith(
        "DDPStrategy, 2 ranks, 32 images per rank in each of 2 batches"
    )


# The layers.


def layers_of(model: nn.Module, *inputs: torch.Tensor):
    times = LayerTimes()
    times.start(model)
    model(*inputs)
    times.stop()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return times.profiles()


def bytes_of(model: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.logits = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, x):
        return self.logits(self.body(self.body(self.embedding(x))))


def test_a_tied_weight_counts_once_where_its_gradient_is_complete():
    model = Tied()
    layers = layers_of(model, torch.arange(4))
    assert [(layer.name, layer.num_bytes) for layer in layers] == [("embedding", 240), ("body", 168), ("logits", 0)]
    assert layers[2].forward_s > 0
    assert sum(layer.num_bytes for layer in layers) == bytes_of(model)


def test_attention_counts_the_projection_whose_module_it_does_not_call():
    model = nn.TransformerEncoderLayer(8, 2, 16)
    model.norm2.requires_grad_(False)
    layers = layers_of(model, torch.randn(3, 2, 8))
    sizes = {layer.name: layer.num_bytes for layer in layers}
    assert sizes["self_attn"] == 4 * (3 * 8 * 8 + 3 * 8 + 8 * 8 + 8)
    assert "norm2" not in sizes
    assert sum(sizes.values()) == bytes_of(model)


def test_the_parameters_of_a_scripted_part_are_those_of_the_module_around_it():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU()))
    model = nn.Sequential(nn.Sequential(scripted, nn.Linear(2, 5, bias=False)), scripted)
    times = LayerTimes()
    times.start(model)
    model[0](torch.randn(4, 3))
    times.stop()
    assert [(layer.name, layer.num_bytes) for layer in times.profiles()] == [("0", 4 * 6), ("0.1", 4 * 10)]


class Nested(nn.Module):
    """Has a parameter of its own, uses a module without calling it, and calls one that takes longer than itself."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.scale, self.used, self.slow = nn.Parameter(torch.ones(3)), nn.Linear(3, 3), Slow(clock)
        self.never, self.clock = nn.Linear(3, 3), clock

    def forward(self, x):
        self.clock[0] += 1.0
        x = self.slow(nn.functional.linear(x, self.used.weight, self.used.bias))
        self.clock[0] += 2.0
        return x * self.scale


class Slow(nn.Linear):
    def __init__(self, clock: list[float]) -> None:
        super().__init__(3, 3)
        self.clock = clock

    def forward(self, x):
        self.clock[0] += 10.0
        return super().forward(x)


def test_the_time_of_a_module_is_without_that_of_the_modules_within(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    layers = layers_of(nn.Sequential(Nested(clock), nn.ReLU(), Slow(clock)), torch.randn(2, 3))
    # As the forward meets them. The outer one has its own parameters and those of modules that it does not call.
    assert [(layer.name, layer.forward_s) for layer in layers] == [("0", 3.0), ("0.slow", 10.0), ("2", 10.0)]
    assert [layer.num_bytes for layer in layers] == [4 * (3 + 12 + 12), 4 * 12, 4 * 12]


def test_what_comes_before_the_first_trained_layer_waits_for_no_gradients(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    trunk = nn.Sequential(Slow(clock), nn.ReLU(), Slow(clock))
    trunk.requires_grad_(False)
    model = nn.Sequential(trunk, Nested(clock), Slow(clock))
    times = LayerTimes()
    times.start(model)
    model(torch.randn(2, 3))
    times.stop()
    assert [layer.name for layer in times.profiles()] == ["1", "1.slow", "2"]
    assert times.frozen_part() == pytest.approx(20 / 43)
    profile = replace(test_rows.PROFILE, layers=times.profiles(), frozen_part=times.frozen_part(), accumulate=2)
    workload = profile.workload()
    assert workload.frozen_s == pytest.approx(20 / 43 * 0.1 / 2)
    assert [block.forward_s for block in workload.blocks] == pytest.approx([t / 43 * 0.1 / 2 for t in (3, 10, 10)])
    assert sum(block.backward_s for block in workload.blocks) == pytest.approx(0.2 / 2)
    for parameter in trunk.parameters():
        parameter.requires_grad = True
    assert times.frozen_part() == 0.0


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 4), nn.Linear(4, 9)

    def forward(self, x):
        return self.head(self.trunk(x)) + self.head(input=self.trunk(x + 1))


def test_a_head_that_is_called_twice_takes_the_features_of_both_calls():
    layers = layers_of(TwoViews(), torch.randn(5, 3))
    assert [(layer.name, layer.input_bytes) for layer in layers] == [("trunk", 2 * 4 * 15), ("head", 2 * 4 * 20)]


class Checkpointed(pl.LightningModule):
    """Runs its blocks again in backward. The second linear layer of a block is not reached there to its end."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Slow(clock), nn.ReLU(), Slow(clock)) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = batch.flatten(1)[:, :3]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def test_what_a_checkpoint_runs_again_in_backward_is_no_forward_of_its_layers(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, memonger=False, stop=True, max_s=1e9)
    fit(callback, Checkpointed(clock))
    assert [layer.forward_s for layer in callback.diagnosis.profile.layers] == [10.0] * 4


class Functional(pl.LightningModule):
    """Calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(108, 5)

    def training_step(self, batch, batch_idx):
        return nn.functional.linear(batch.flatten(1), self.used.weight, self.used.bias).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def test_a_model_whose_layers_are_not_called_is_one_block():
    callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, memonger=False, stop=True)
    fit(callback, Functional())
    (layer,) = callback.diagnosis.profile.layers
    assert (layer.name, layer.num_bytes) == (NOT_CALLED, 4 * 109 * 5)
    (block,) = callback.diagnosis.profile.workload().blocks
    assert block.forward_s == pytest.approx(callback.diagnosis.profile.forward_s)
    assert "100% of the gradients' bytes belong to no module that the forward calls" in str(callback.diagnosis)


class Copying(Net):
    """Copies a part of itself in each step, and has what cannot be copied."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = self.conv.weight * 2
        copied, loaded = deepcopy(self.conv), pickle.loads(pickle.dumps(self.conv))  # noqa: S301  our own
        assert torch.equal(copied(batch), loaded(batch))
        return loss


def test_a_step_may_copy_a_part_of_the_model():
    callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, memonger=False, stop=True)
    fit(callback, Copying())
    assert [layer.name for layer in callback.diagnosis.profile.layers] == ["conv", "norm", "head"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_frozen_encoder_may_give_its_layers_nested_tensors():
    # torch's fast path for padded sequences, in evaluation.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12, batch_first=True), 1).eval()
    model, x = nn.ModuleList([encoder]), torch.randn(3, 4, 6)
    is_padding = torch.tensor([[False] * 4, [False, False, True, True], [False, True, True, True]])
    layers = LayerTimes()
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=is_padding)
        layers.start(model)
        output = encoder(x, src_key_padding_mask=is_padding)
        layers.stop()
    assert torch.allclose(output, expected, atol=1e-5)
    measured = {layer.name: layer.input_bytes for layer in layers.profiles()}
    assert measured["0.layers.0.linear1"] == 4 * 6 * (4 + 2 + 1)


class Ticking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock[0] += 10.0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock[0] += 100.0
        return grad, None


class ManualTicking(Functional):
    """Has its backward, and an update that takes time, within the step."""

    automatic_optimization = False

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.manual_backward(Ticking.apply(super().training_step(batch, batch_idx), self.clock))
        self.optimizers().step()
        self.clock[0] += 1000.0


def test_a_recorded_forward_is_timed_without_a_backward_within_the_step(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    callback = Diagnose(num_steps=1, network=NETWORK, world_size=2, stop=True, max_s=1e9)
    fit(callback, ManualTicking(clock))
    assert callback._recomputation._handle.step_s == 10.0


def test_what_fails_in_the_diagnosis_does_not_end_training(monkeypatch, caplog):
    def broken(*args):
        raise ValueError("blocks=() is empty")

    monkeypatch.setattr("lightning_dp.planner.diagnose.make_diagnosis", broken)
    callback = Diagnose(num_steps=1, memonger=False)
    with caplog.at_level(logging.WARNING, logger="lightning_dp.planner.diagnose"):
        trainer = fit(callback, limit_train_batches=WARM_UP + 4)
    assert trainer.global_step == WARM_UP + 4, "training goes on"
    assert callback.diagnosis is None
    assert callback.why_none == "the diagnosis failed: ValueError: blocks=() is empty"
    assert caplog.text.count("the diagnosis failed") == 1


# What was left out once.


def test_waits_of_batch_norm_are_in_every_row_of_a_job_that_has_them():
    network = test_advice.TWO_NODES
    # Of all ranks' images there are too few for smaller groups, so that the plan keeps the waits.
    profile = replace(test_advice.PROFILE, batch_size=2, load_s=0.0, step_s=0.4, accumulate=2)
    bare = {p.method: p.time.step_s for p in make_diagnosis(profile, network).predictions}
    waiting = {p.method: p.time for p in make_diagnosis(replace(profile, batch_norm_s=0.3), network).predictions}
    assert set(bare) - set(waiting) == {"ddp_global_batch_norm"}, "all rows have it"
    # Half of the waits are before a backward; the others, before a forward's end, can hide messages of layered SGD.
    assert all(waiting[name].step_s > bare[name] + 0.15 for name in waiting)
    assert waiting["ddp"].step_s == pytest.approx(bare["ddp"] + 0.3), "those of both batches of the step"


def test_recording_and_compressing_are_counted_for_each_batch_and_once_per_step():
    one, four = (replace(test_rows.ONE_BLOCK, load_s=0.0, accumulate=number) for number in (1, 4))
    bare = replace(test_rows.ONE_BLOCK.recomputation, record_s=0.0)
    for workload in (one, four):
        recorded = simulate(workload, NETWORK, 2, "ddp_memonger").step_s
        plain = simulate(replace(workload, recomputation=bare), NETWORK, 2, "ddp_memonger").step_s
        assert recorded - plain == pytest.approx(0.02 * workload.accumulate)
        compressed = simulate(workload, NETWORK, 2, "layered_sgd_step_int8").step_s
        free = simulate(replace(workload, codec_s={}), NETWORK, 2, "layered_sgd_step_int8").step_s
        assert compressed - free == pytest.approx(0.006)
