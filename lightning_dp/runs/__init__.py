"""What a run does: check, start, continue, log, compare, evaluate. Beside this folder, only `recipes/` knows Hydra.

The functions here are the console commands. The scripts in ``recipes/`` call them too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

__all__ = ["compare_command", "curves_command", "evaluate_command", "plan_command", "train_command"]

NEEDED = {"hydra": "hydra-core", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}  # module -> what pip installs


def _run(module: str) -> None:
    """Call ``main`` of a module in this folder, imported here: the library alone does not have the packages for it."""
    missing = [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: the recipes need more packages: pip install {' '.join(missing)}")
    # Python puts a script's folder first in the path. There, recipes/train.py would hide a `train.py` of the user's.
    scripts = Path(__file__).resolve().parents[2] / "recipes"
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != scripts]
    importlib.import_module(f"{__name__}.{module}").main()


def train_command() -> None:
    """``lightning-dp-train``: train and test one configuration or, with ``--multirun``, several."""
    _run("train")


def evaluate_command() -> None:
    """``lightning-dp-evaluate``: test a checkpoint."""
    _run("evaluate")


def compare_command() -> None:
    """``lightning-dp-compare``: compare the jobs of a sweep."""
    _run("compare")


def curves_command() -> None:
    """``recipes/curves.py``: plot a run again."""
    _run("metrics")


def plan_command() -> None:
    """``lightning-dp-plan``: say where a training step goes, and which strategy to use."""
    _run("plan")
