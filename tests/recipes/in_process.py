"""Recipes without a command line: compose a configuration, and train with it in this process or in ranks of a test."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure

from lightning_dp.runs import train as training
from lightning_dp.runs.hydra_versions import VERSION_BASE
from lightning_dp.runs.validation import resolved
from tests.ranks import environment_of_rank
from tests.recipes.conftest import ROOT, TINY

QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


def composed(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The configuration of a run in ``run_dir``, as train.py gives it to each rank."""
    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        return resolved(compose("train", [*overrides, f"run_dir={run_dir}"]))


def tiny(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The same on small made-up data."""
    return composed(run_dir, *TINY, *QUIET, *overrides)


def leave_empty(figure: Figure, path: Path, **_: Any) -> None:
    """Stand for `Figure.savefig`, which takes half the time of so small a run. test_curves.py draws."""
    Path(path).touch()


def train(config: dict[str, Any]) -> dict[str, float]:
    """Train and test in this process. Its plots are empty files."""
    with warnings.catch_warnings(), patch.object(Figure, "savefig", leave_empty):
        # Of Lightning: a small run has few batches, and the like.
        warnings.simplefilter("ignore")
        level = logging.root.level
        try:
            return training.train(config, None)
        finally:
            logging.root.setLevel(level)


def train_rank(rank: int, config: dict[str, Any]) -> dict[str, float]:
    """The same as a rank of ``run_processes``."""
    return train(config)


def run_script(rank: int, script: str, folder: Path, *arguments: str) -> tuple[Any, list[str]]:
    """Run a script of ``recipes/`` in ``folder``, as a rank that nobody has launched; return its status and output."""
    for name in environment_of_rank(0, 1, 1, 0):
        del os.environ[name]
    os.chdir(folder)
    sys.argv = [str(ROOT / "recipes" / script), *arguments]
    warnings.simplefilter("default")
    status = None
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
    return status, output.getvalue().splitlines()
