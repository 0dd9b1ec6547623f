"""What a Trainer does around the steps sees what it sees under DDP: validation, checkpoints, callbacks, exceptions."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint, WeightAveraging
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp import LayeredFSDPStrategy
from lightning_dp.strategies.layered_sgd.gradient_sum import WAIT
from tests.ranks import run_processes
from tests.strategies.layered_sgd.modules import OVERLAPS, STEPS, fit, layered
from tests.strategies.modules import Net, assert_same, data, snapshot, trainer


class Average(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class NetWithValidation(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[float] = []

    def val_dataloader(self):
        return data(2, steps=2)

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.loss(batch).item())


def watched_fit(rank, folder, strategy):
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    module = NetWithValidation(schedule="epoch")
    module, t = fit(
        strategy, 2, module, callbacks=[checkpoint, Average()], enable_checkpointing=True,
        val_check_interval=4, num_sanity_val_steps=0, max_epochs=2,
    )  # fmt: skip
    return module.seen, snapshot(module, t)


def compare_watched_fits(rank, folder):
    expected_seen, expected = watched_fit(rank, f"{folder}/ddp", DDPStrategy())
    assert len(expected_seen) == 2 * 2 * 2
    for overlap in OVERLAPS:
        seen, values = watched_fit(rank, f"{folder}/{overlap}", layered(overlap=overlap))
        assert_same(values, expected)
        torch.testing.assert_close(seen, expected_seen, rtol=1e-10, atol=0)


@pytest.mark.ci
def test_validation_checkpoints_and_weight_averaging_see_the_updated_weights(tmp_path):
    run_processes(2, compare_watched_fits, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "ddp").iterdir())
    assert len(names) == 5
    for overlap in OVERLAPS:
        for name in names:
            ours, ddps = (torch.load(tmp_path / side / name, weights_only=True) for side in (overlap, "ddp"))
            assert_same(ours["state_dict"], ddps["state_dict"])
            torch.testing.assert_close(ours["optimizer_states"], ddps["optimizer_states"], rtol=1e-10, atol=1e-12)
            assert ours["lr_schedulers"] == ddps["lr_schedulers"]


@pytest.mark.ci
def test_a_checkpoint_goes_on_in_a_plain_trainer_as_ddps_would(tmp_path):
    run_processes(2, compare_watched_fits, str(tmp_path))
    ends = []
    for side in ("ddp", *OVERLAPS):
        module = Net(schedule="epoch")
        t = trainer("auto", 1, max_epochs=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint.*")
            t.fit(module, data(1), ckpt_path=tmp_path / side / "step=15.ckpt", weights_only=True)
        ends.append(snapshot(module, t))
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


class Norms(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))


def compare_gradients(rank, callback):
    results = []
    for strategy in (DDPStrategy(), layered(overlap="load"), layered()):
        norms = callback()
        fit(strategy, 2, callbacks=[norms])
        results.append(norms.seen)
    assert len(results[0]) == STEPS
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-10, atol=0)


def test_on_before_optimizer_step_sees_averaged_gradients():
    run_processes(2, compare_gradients, Norms)


class AfterBackward(Norms):
    """Reads gradients before the strategy hears that backward has ended."""

    on_before_optimizer_step = pl.Callback.on_before_optimizer_step

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        super().on_before_optimizer_step(trainer, module, None)


def test_gradients_read_after_backward_are_averaged():
    run_processes(2, compare_gradients, AfterBackward)


def compare_hook_of_an_instance(rank):
    """LambdaCallback has its hooks on the instance."""
    seen = []
    for strategy in (DDPStrategy(), layered()):
        steps: list[int] = []
        hook = LambdaCallback(on_before_optimizer_step=lambda t, m, o, steps=steps: steps.append(t.global_step))
        fit(strategy, 2, callbacks=[hook])
        seen.append(steps)
    assert seen[1] == seen[0] == list(range(STEPS))


def test_hooks_of_an_instance_run_within_their_step():
    run_processes(2, compare_hook_of_an_instance)


class Stop(Exception):
    pass


class RaiseInForward(Net):
    """Fails in the middle of a forward, when some layers are updated and others are not."""

    def forward(self, x):
        if self.trainer.global_step == 5:
            self.first(x)
            raise Stop
        return super().forward(x)


def raise_in_mid_step(rank):
    expected = dict(fit(DDPStrategy(), 2, max_steps=5)[0].named_parameters())
    for overlap in OVERLAPS:
        module = RaiseInForward()
        with pytest.raises(Stop):
            fit(layered(overlap=overlap), 2, module)
        assert_same(dict(module.named_parameters()), expected)


def test_an_exception_in_mid_step_loses_no_update():
    run_processes(2, raise_in_mid_step)


def fit_validate_fit(rank):
    """One Trainer, used three times, as DDP would have it; no thread is left afterwards."""
    ends = []
    for strategy in (DDPStrategy(), layered()):
        module, t = fit(strategy, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            t.validate(module, data(2), verbose=False)
            t.fit_loop.max_epochs = 2
            t.fit(module, data(2))
        ends.append(snapshot(module, t))
    assert_same(ends[1], ends[0])
    assert [thread.name for thread in threading.enumerate() if "communicator" in thread.name] == []


@pytest.mark.ci
def test_a_trainer_can_be_used_again_and_leaves_no_thread():
    run_processes(2, fit_validate_fit)


class Waits(pl.Callback):
    """The time that the strategy says it has waited, and that of each wait which it reports."""

    def __init__(self) -> None:
        self.reported_s: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.on_stage = self.record

    def record(self, stage: str, start_s: float, end_s: float) -> None:
        if stage == WAIT:
            self.reported_s.append(end_s - start_s)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert len(self.reported_s) >= STEPS - 1  # the last update may still be pending
        assert min(self.reported_s) > 0
        assert trainer.strategy.exposed_communication_s == pytest.approx(sum(self.reported_s))


def add_up_waits(rank, strategy):
    fit(strategy, 2, Net(), callbacks=[Waits()])


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", [layered, LayeredFSDPStrategy])
def test_exposed_communication_is_the_sum_of_all_waits(kind, overlap):
    run_processes(2, add_up_waits, kind(group_size=1, overlap=overlap))
