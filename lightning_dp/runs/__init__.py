"""What a run does: check, start, continue, log, compare, evaluate. Beside this folder, only `recipes/` knows Hydra.

The functions here are the console commands. The scripts in ``recipes/`` call them too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["compare_command", "curves_command", "evaluate_command", "plan_command", "train_command"]

NEEDED = {"hydra": "hydra-core", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}  # module -> what pip installs


def train_command() -> None:
    """``lightning-dp-train``: train and test one configuration or, with ``--multirun``, several."""
    _prepare()
    from lightning_dp.runs.train import main

    main()


def evaluate_command() -> None:
    """``lightning-dp-evaluate``: test a checkpoint."""
    _prepare()
    from lightning_dp.runs.evaluate import main

    main()


def compare_command() -> None:
    """``lightning-dp-compare``: compare the jobs of a sweep."""
    _prepare()
    from lightning_dp.runs.compare import main

    main()


def curves_command() -> None:
    """``recipes/curves.py``: plot a run again."""
    _prepare()
    from lightning_dp.runs.metrics import main

    main()


def plan_command() -> None:
    """``lightning-dp-plan``: say where a training step goes, and which strategy to use."""
    _prepare()
    from lightning_dp.runs.plan import main

    main()


def _prepare() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"error: the recipes need more packages: pip install {' '.join(missing)}")
    # Python puts a script's folder first in the path. There, recipes/train.py would hide a `train.py` of the user's.
    scripts = Path(__file__).resolve().parents[2] / "recipes"
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != scripts]
