"""The worked examples in docs/examples run, each in a process as a reader starts it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.docs.pages import DOCS, ROOT

EXAMPLES = DOCS / "examples"
# Arguments -> what the last line says.
RUNS = {
    "first_steps.py ddp": r"train_loss=1\.080756",
    "first_steps.py layered_sgd": r"train_loss=1\.080756",
    "existing_trainer.py": r"train_loss=\d",
    "vgg16.py": r"train_loss=\d",
    "segmentation.py": r"train_loss=0\.\d",
    "plain_loop.py": r"hybrid: maximum difference to one process \de-1[4-9]",
    "notebook.py": r"changed by 0\.\d*[1-9]",
    "ray_train.py": r"train_loss=\d",
    "lightning_cli.py fit --config docs/examples/lightning_cli.yaml": None,
    "hydra_project/train.py": r"DDPStrategy: ModelSummary",
    "hydra_project/train.py callbacks=agbn +strategy@trainer.strategy=layered_sgd_single": (
        r"LayeredSGDStrategy: ModelSummary, AdaptiveGlobalBatchNorm"
    ),
}


def test_every_example_is_run_and_named_in_the_page():
    page = (DOCS / "lightning.md").read_text()
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert scripts == {command.split()[0] for command in RUNS}
    assert {script for script in scripts if f"docs/examples/{script}" not in page} == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_an_example_runs(command, tmp_path):
    if "cli" in command:
        pytest.importorskip("jsonargparse", reason='pip install "jsonargparse[signatures]"')
    if "ray" in command:
        pytest.importorskip("ray", reason='pip install "ray[train]"')
    script, *arguments = command.split()
    arguments = [str(ROOT / text) if text.startswith("docs/") else text for text in arguments]
    # recipes/ has the plugin that an installation puts beside the package.
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH"))))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=4"] if script == "plain_loop.py" else []
    done = run_command([sys.executable, *launcher, EXAMPLES / script, *arguments], tmp_path, {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    if RUNS[command] is not None:
        assert re.match(RUNS[command], done.stdout.splitlines()[-1])
    left = {path.name for path in Path(tmp_path).iterdir()} - {"outputs"}
    assert left == set(), "only Hydra's folder"
