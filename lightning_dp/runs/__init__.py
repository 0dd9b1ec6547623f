"""What a run does: check, start, continue, log, compare, evaluate. Beside this folder, only `recipes/` knows Hydra.

The functions here are the console commands. The scripts in ``recipes/`` call them too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["compare_command", "curves_command", "evaluate_command", "plan_command", "train_command"]

NEEDED = {"hydra": "hydra-core", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}  # module -> what pip installs


def _prepare() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"error: the recipes need more packages: pip install {' '.join(missing)}")
    # Python puts a script's folder first in the path. There, recipes/train.py would hide a `train.py` of the user's.
    scripts = Path(__file__).resolve().parents[2] / "recipes"
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != scripts]


def _command(module: str, about: str) -> Callable[[], None]:
    """Return the function that runs ``main`` of a module in this folder, with a docstring.

    It imports the module when it is called: the library alone does not have the packages for it.
    """

    def command() -> None:
        _prepare()
        importlib.import_module(f"{__name__}.{module}").main()

    command.__doc__ = about
    return command


train_command = _command(
    "train", "``lightning-dp-train``: train and test one configuration or, with ``--multirun``, several."
)
evaluate_command = _command("evaluate", "``lightning-dp-evaluate``: test a checkpoint.")
compare_command = _command("compare", "``lightning-dp-compare``: compare the jobs of a sweep.")
curves_command = _command("metrics", "``recipes/curves.py``: plot a run again.")
plan_command = _command("plan", "``lightning-dp-plan``: say where a training step goes, and which strategy to use.")
