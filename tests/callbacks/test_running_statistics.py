"""Running statistics of the local phase in validation and checkpoints, and resuming from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dp.callbacks import AdaptiveGlobalBatchNorm, Plateau
from tests.callbacks.training import STEPS, Net, Probe, assert_same, fit, state_of
from tests.ranks import run_processes


def train_validate_save(rank: int, folder: str) -> dict[str, Any]:
    probe = Probe()
    # Within the epoch, at validation, and weights only at the end of the epoch.
    callbacks = [
        ModelCheckpoint(folder, "middle", every_n_train_steps=3, save_on_train_epoch_end=False),
        ModelCheckpoint(folder, "validated", monitor="val_loss"),
        ModelCheckpoint(folder, "weights", save_weights_only=True, save_on_train_epoch_end=True),
    ]
    middle: list[list[Tensor]] = []

    class Middle(pl.Callback):  # runs before the checkpoint of step 3, which averages the statistics
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 3:
                middle.append([b.clone() for b in pl_module.buffers()])

    callback = AdaptiveGlobalBatchNorm(max_batch_size=1)
    net, _ = fit(2, callback, probe, Middle(), *callbacks, validate=True)
    return {"middle": middle[0], "trained": probe.trained, "validated": probe.validated[-1], "final": state_of(net)}


def test_all_ranks_contribute_to_validation_and_checkpoints(tmp_path):
    ranks = run_processes(2, train_validate_save, str(tmp_path))

    def mean(key: str) -> list[Tensor]:
        first, second = (rank[key] for rank in ranks)
        assert not torch.allclose(first[0], second[0]), "in the local phase each rank has its own statistics"
        return [torch.stack([a.double(), b.double()]).mean(0).to(a.dtype) for a, b in zip(first, second, strict=True)]

    for rank in ranks:
        torch.testing.assert_close(rank["validated"], mean("trained"), rtol=1e-12, atol=1e-12)
        assert_same(rank["final"], ranks[0]["final"])
    for name, expected in (("middle", mean("middle")), ("validated", mean("trained")), ("weights", mean("trained"))):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        saved = [v for k, v in checkpoint["state_dict"].items() if "running" in k or "tracked" in k]
        torch.testing.assert_close(saved, expected, rtol=1e-12, atol=1e-12)


class Copies(Net):
    """A network whose state_dict holds copies, in half the precision."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        values = super().state_dict(*args, **kwargs)
        return {name: value.float() if value.is_floating_point() else value for name, value in values.items()}


def save_copies(rank: int, folder: str) -> dict[str, Tensor]:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 3:
                self.before = {name: value.clone() for name, value in Net.state_dict(pl_module).items()}
                trainer.save_checkpoint(folder + "/saved.ckpt")

    save = Save()
    fit(2, AdaptiveGlobalBatchNorm(max_batch_size=1), save, net=Copies())
    return save.before


def test_a_state_dict_that_copies_has_the_statistics_of_all_ranks(tmp_path):
    first, second = run_processes(2, save_copies, str(tmp_path))
    assert any(not torch.equal(first[name], second[name]) for name in first), "each rank has its own statistics"
    for name, saved in torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"].items():
        mean = ((first[name].double() + second[name].double()) / 2).to(saved)
        torch.testing.assert_close(saved, mean, msg=lambda text, name=name: f"{name}: {text}")


LOSSES = (3.0, 2.0, 2.0, 2.0, 2.0, 2.0)


def train_and_resume(rank: int, folder: str, at_validation: bool) -> dict[str, Any]:
    def callback() -> AdaptiveGlobalBatchNorm:
        return AdaptiveGlobalBatchNorm(convergence=Plateau("train_loss", patience=2))

    through, before, after = Probe(), Probe(), Probe()
    net, _ = fit(2, callback(), through, net=Net(LOSSES), max_epochs=6)
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=not at_validation)
    fit(2, callback(), before, save, net=Net(LOSSES), max_epochs=5, validate=at_validation)
    results = {"through": through.is_global, "net": state_of(net)}
    for epoch in (2, 3, 4):
        net, _ = fit(
            2, callback(), after, net=Net(LOSSES), max_epochs=6, validate=at_validation,
            ckpt_path=str(Path(folder, f"epoch={epoch}.ckpt")),
        )  # fmt: skip
        results[epoch], after.is_global, results[f"net{epoch}"] = after.is_global, [], state_of(net)
    return results


@pytest.mark.ci
def test_a_resumed_run_continues_in_the_same_phase(tmp_path):
    for rank in run_processes(2, train_and_resume, str(tmp_path), False):
        assert rank["through"] == [True] * 4 * STEPS + [False] * 2 * STEPS
        for epoch in (2, 3, 4):
            assert rank[epoch] == rank["through"][(epoch + 1) * STEPS :]
            assert_same(rank[f"net{epoch}"], rank["net"])


@pytest.mark.ci
def test_a_checkpoint_saved_at_validation_lacks_the_training_metrics_of_its_epoch(tmp_path):
    """Lightning reduces them after validation. The phase is restored, but the criterion misses that epoch."""
    for rank in run_processes(2, train_and_resume, str(tmp_path), True):
        assert rank[2] == [True] * 2 * STEPS + [False] * STEPS
        assert rank[3] == [True] * STEPS + [False] * STEPS
        assert rank[4] == [False] * STEPS
