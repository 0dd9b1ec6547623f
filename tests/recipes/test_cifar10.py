"""The CIFAR-10 experiment on real images, a part of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.recipes.conftest import ROOT, TRAIN, Run

UNPACK = ROOT.parent / "shared" / "data" / "unpack.py"


@pytest.mark.slow
@pytest.mark.skipif(not UNPACK.exists(), reason=f"real images are unpacked by {UNPACK}, which is not there")
def test_the_cifar10_experiment_learns(tmp_path):
    counts = ["--train", "6000", "--test", "1000"]
    subprocess.run([sys.executable, str(UNPACK), "cifar10", str(tmp_path / "data"), *counts], check=True)
    options = (
        *("experiment=cifar10_resnet20", "optim=sgd_onecycle", "strategy=layered_sgd", "callbacks=agbn"),
        *("trainer=cpu", "trainer.devices=2", "trainer.max_steps=-1", "trainer.max_epochs=8"),
    )
    run = Run(tmp_path, (str(TRAIN),), options)
    assert run.status == 0, run.err
    accuracy = float(run.out.splitlines()[-1].split()[0].removeprefix("test/acc="))
    assert accuracy > 0.45, "chance is 0.1"
