"""Runs of recipes/train.py on small made-up data, shared by the tests of this folder."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "recipes" / "train.py"

TINY = (
    *("name=tiny", "data=synthetic", "data.num_train=48", "data.num_val=20", "data.num_test=21", "data.batch_size=16"),
    *("trainer=cpu", "trainer.max_epochs=2", "trainer.enable_progress_bar=false"),
)
EXPECTED = {
    *(".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", ".hydra/lock"),
    *("checkpoints/last.ckpt", "curves.png", "hparams.yaml", "metrics.csv", "train.log"),
}


class Run:
    """A finished command: its status and output, and the files it left in its folder."""

    def __init__(self, folder: Path, launcher: tuple[str, ...], arguments: tuple[str, ...]) -> None:
        self.folder = folder
        command = [sys.executable, *launcher, *arguments]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # Without GPUs, also where there are some: not every experiment says on what it runs.
        done = run_command(command, folder, {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""})
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    def files(self) -> dict[str, set[str]]:
        """Run folder -> its files. Every file that the command left must be in a run's folder."""
        found: dict[str, set[str]] = {}
        for path in self.folder.rglob("*"):
            if path.is_file():
                inside = path.relative_to(self.folder).parts
                depth = 4 if inside[2].startswith("sweep_") and len(inside) > 4 else 3
                found.setdefault("/".join(inside[:depth]), set()).add("/".join(inside[depth:]))
        return found

    def run_dir(self) -> Path:
        """The only run's folder."""
        (name,) = self.files()
        return self.folder / name


def metrics(run_dir: Path, times: bool = False) -> list[dict[str, str]]:
    """The rows of metrics.csv, without the times, which differ from run to run."""
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: text for name, text in row.items() if times or not name.startswith("time/")} for row in rows]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """``start("seed=1", ...)``: train.py on the small data, in a folder of its own."""

    def start(*arguments: str, launcher: tuple[str, ...] = ()) -> Run:
        return Run(tmp_path_factory.mktemp("run"), (*launcher, str(TRAIN)), (*TINY, *arguments))

    return start


@pytest.fixture(scope="session")
def single(start: Callable[..., Run]) -> Run:
    """A run on two ranks."""
    return start("trainer.devices=2", "seed=2", "strategy=layered_sgd", "callbacks=agbn")
