"""The only module that imports the framework, under the name that the user has imported.

Lightning is published under two names, ``pytorch_lightning`` and ``lightning.pytorch``. The code is the same and the
classes are distinct, so the Trainer of one does not accept objects of the other. All other modules of this package
import the framework's classes from here.

The name is chosen in this order: the environment variable ``LIGHTNING_DP_FRAMEWORK``; the framework that is imported
already, ``lightning.pytorch`` if both are, because its own dependencies import the other; ``pytorch_lightning``, which
is always installed: this package and ``lightning`` depend on it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

FRAMEWORKS = ("pytorch_lightning", "lightning.pytorch")
ENVIRONMENT_VARIABLE = "LIGHTNING_DP_FRAMEWORK"


def choose_framework() -> str:
    """Return ``"pytorch_lightning"`` or ``"lightning.pytorch"``, as described at the top of this module.

    Raises:
        ValueError: the environment variable has another value.
    """
    requested = os.environ.get(ENVIRONMENT_VARIABLE)
    if requested:
        if requested not in FRAMEWORKS:
            names = ", ".join(FRAMEWORKS)
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={requested!r} names no framework; use one of {names}")
        return requested
    for name in reversed(FRAMEWORKS):
        if name in sys.modules:
            return name
    return FRAMEWORKS[0]


FRAMEWORK = choose_framework()
OTHER_FRAMEWORK = next(name for name in FRAMEWORKS if name != FRAMEWORK)

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import BaseFinetuning
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
else:
    _framework = importlib.import_module(FRAMEWORK)
    BaseFinetuning = importlib.import_module(FRAMEWORK + ".callbacks").BaseFinetuning
    TorchCheckpointIO = importlib.import_module(FRAMEWORK + ".plugins.io").TorchCheckpointIO
    _strategies = importlib.import_module(FRAMEWORK + ".strategies")
    Callback = _framework.Callback
    LightningDataModule = _framework.LightningDataModule
    LightningModule = _framework.LightningModule
    Trainer = _framework.Trainer
    DDPStrategy = _strategies.DDPStrategy
    ModelParallelStrategy = _strategies.ModelParallelStrategy
    StrategyRegistry = _strategies.StrategyRegistry

__all__ = [
    "FRAMEWORK",
    "BaseFinetuning",
    "Callback",
    "DDPStrategy",
    "LightningDataModule",
    "LightningModule",
    "ModelParallelStrategy",
    "StrategyRegistry",
    "TorchCheckpointIO",
    "Trainer",
    "register_strategy",
    "require_own_trainer",
]


def require_own_trainer(component: object, trainer: object) -> None:
    """Raise TypeError if ``trainer`` belongs to the other framework. Call it in the ``setup`` of a callback."""
    if type(trainer).__module__.startswith(OTHER_FRAMEWORK + "."):
        raise TypeError(
            f"{type(component).__name__} was built on `{FRAMEWORK}`, but this Trainer comes from `{OTHER_FRAMEWORK}`: "
            f"they are two copies of Lightning and cannot be mixed. Use `from {FRAMEWORK} import Trainer`, or import "
            f"`{OTHER_FRAMEWORK}` before `lightning_dp` (or set {ENVIRONMENT_VARIABLE}={OTHER_FRAMEWORK})."
        )


def register_strategy(name: str, strategy: type, **init_params: Any) -> None:
    """Make ``Trainer(strategy=name)`` build ``strategy``. Registering the same class again has no effect.

    Raises:
        ValueError: the name belongs to another class.
    """
    if name not in StrategyRegistry or StrategyRegistry[name]["strategy"] is not strategy:
        StrategyRegistry.register(name, strategy, **init_params)
