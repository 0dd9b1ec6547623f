"""The console commands: each runs the script of ``recipes/`` of the same name.

In a wheel the scripts are the folder ``lightning_dp/recipes``, beside ``lightning_dp/conf``. In a clone both are beside
the package.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path


def recipes_folder() -> Path:
    """Return the folder of the scripts."""
    package = Path(__file__).resolve().parent
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def train() -> None:
    """``lightning-dp-train``: train and test one configuration or, with ``--multirun``, several."""
    _run("train.py")


def evaluate() -> None:
    """``lightning-dp-evaluate``: test a checkpoint."""
    _run("evaluate.py")


def compare() -> None:
    """``lightning-dp-compare``: compare the jobs of a sweep."""
    _run("compare.py")


def plan() -> None:
    """``lightning-dp-plan``: say where a training step goes, and which strategy to use."""
    _run("plan.py")


def _run(script: str) -> None:
    missing = [name for name in ("hydra", "matplotlib", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: {', '.join(missing)} missing; pip install lightning-dp[recipes]")
    folder = recipes_folder()
    # The scripts import each other by name, as Python lets them when it runs one of them.
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / script), run_name="__main__")
