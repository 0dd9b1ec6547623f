"""ResNet-50 on the 1,000 real images, at a small image size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.conftest import ROOT, TRAIN, Run, metrics

UNPACK = ROOT.parent / "shared" / "data" / "unpack.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not UNPACK.exists(), reason=f"real images are unpacked by {UNPACK}, which is not there"),
]
QUIET = ("trainer=cpu", "trainer.enable_progress_bar=false", "~callbacks.progress_bar", "data.num_workers=1")


def unpack(folder: Path, classes: int) -> Path:
    subprocess.run([sys.executable, str(UNPACK), "imagenet", str(folder), "--classes", str(classes)], check=True)
    return folder


def train(folder: Path, *arguments: str) -> Run:
    return Run(
        folder, (str(TRAIN),), ("experiment=imagenet_resnet50", f"data.root={folder / 'data'}", *QUIET, *arguments)
    )


def test_it_trains_on_real_images_in_two_processes(tmp_path):
    unpack(tmp_path / "data", 1000)
    run = train(
        tmp_path, "trainer.devices=2", "data.image_size=32", "data.batch_size=64", "trainer.max_epochs=1",
        "trainer.limit_train_batches=3", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
        "callbacks.time_to_accuracy.threshold=0", "~callbacks.checkpoint", "trainer.enable_checkpointing=false",
    )  # fmt: skip
    assert run.status == 0, run.err
    assert "reached 0 after" in run.out
    assert "the loader alone:" in run.out
    (folder,) = (tmp_path / "runs" / "imagenet_resnet50").iterdir()
    logged = {name for row in metrics(folder) for name, value in row.items() if value}
    assert logged >= {"train/loss", "val/acc", "test/acc5", "images_per_s/train", "images_per_s/loader", "time/to_0_s"}


def test_it_overfits_64_real_images(tmp_path):
    unpack(tmp_path / "data", 64)
    run = train(
        tmp_path, "num_classes=64", "data.image_size=32", "data.crop=null", "data.batch_size=32",
        "data.eval_batch_size=64", "trainer.max_epochs=30", "trainer.check_val_every_n_epoch=30",
        "optim=sgd_onecycle", "optim.lr=0.05", "~callbacks.checkpoint", "trainer.enable_checkpointing=false",
    )  # fmt: skip
    assert run.status == 0, run.err
    assert run.out.splitlines()[-1].startswith("test/acc=1.0000 "), run.out
