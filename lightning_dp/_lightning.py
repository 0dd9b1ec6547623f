"""The one place that imports the framework, under whichever of its two names the user has loaded.

Lightning is published twice, as ``pytorch_lightning`` and as ``lightning.pytorch``, with the same code and distinct
classes: an object of one is a stranger to the other's Trainer. Everything else in this package takes the framework's
classes from here.

Which name: the environment variable ``LIGHTNING_DP_FRAMEWORK`` if it is set; else the one already imported
(``lightning.pytorch`` if both are, for its own dependencies import the other); else the one that is installed,
``pytorch_lightning`` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

FRAMEWORKS = ("pytorch_lightning", "lightning.pytorch")
ENVIRONMENT_VARIABLE = "LIGHTNING_DP_FRAMEWORK"


def choose_framework() -> str:
    """Return ``"pytorch_lightning"`` or ``"lightning.pytorch"``: see the head of this module.

    Raises:
        ValueError: the environment variable names something else.
        ModuleNotFoundError: neither is installed.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE)
    if asked:
        if asked not in FRAMEWORKS:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}={asked!r} names no framework; use one of {', '.join(FRAMEWORKS)}")
        return asked
    for name in reversed(FRAMEWORKS):
        if name in sys.modules:
            return name
    for name in FRAMEWORKS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError("lightning_dp needs PyTorch Lightning: pip install pytorch-lightning")


FRAMEWORK = choose_framework()
OTHER_FRAMEWORK = next(name for name in FRAMEWORKS if name != FRAMEWORK)

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
else:
    _framework = importlib.import_module(FRAMEWORK)
    _strategies = importlib.import_module(FRAMEWORK + ".strategies")
    Callback, LightningDataModule = _framework.Callback, _framework.LightningDataModule
    LightningModule, Trainer = _framework.LightningModule, _framework.Trainer
    DDPStrategy, StrategyRegistry = _strategies.DDPStrategy, _strategies.StrategyRegistry

__all__ = [
    "FRAMEWORK",
    "Callback",
    "DDPStrategy",
    "LightningDataModule",
    "LightningModule",
    "OwnTrainerOnly",
    "StrategyRegistry",
    "Trainer",
    "register_strategy",
    "require_own_trainer",
]


def mismatch_message(name: str) -> str:
    """Say that ``name`` belongs to one framework and was handed to the other's Trainer, and what to do."""
    return (
        f"{name} was built on `{FRAMEWORK}`, but this Trainer comes from `{OTHER_FRAMEWORK}`: they are two copies of "
        f"Lightning and cannot be mixed. Use `from {FRAMEWORK} import Trainer`, or import `{OTHER_FRAMEWORK}` before "
        f"`lightning_dp` (or set {ENVIRONMENT_VARIABLE}={OTHER_FRAMEWORK})."
    )


def require_own_trainer(component: object, trainer: object) -> None:
    """Raise TypeError if ``trainer`` is of the other framework. For a callback's ``setup``."""
    if type(trainer).__module__.startswith(OTHER_FRAMEWORK + "."):
        raise TypeError(mismatch_message(type(component).__name__))


class OwnTrainerOnly:
    """Mixin for strategies: the other framework's Trainer gets a clear error.

    That Trainer would say "invalid strategy name", for it tells a strategy from a name by its own base class and hands
    the object to nothing of ours before that. What it does first is compare it with the names that it knows, and that
    comparison is where the strategy can see who asks.
    """

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            asker = sys._getframe(1).f_globals.get("__name__", "")
            if asker.startswith(OTHER_FRAMEWORK + "."):
                raise TypeError(mismatch_message(type(self).__name__))
        return self is other

    __hash__ = object.__hash__


def register_strategy(name: str, strategy: type, **init_params: Any) -> None:
    """Make ``Trainer(strategy=name)`` build ``strategy``; doing it again for the same class changes nothing.

    The other framework's registry, when that is loaded too, gets the name with an error in place of the class.

    Raises:
        ValueError: the name belongs to another class.
    """
    if name in StrategyRegistry:
        if StrategyRegistry[name]["strategy"] is not strategy:
            raise ValueError(f"strategy name {name!r} is taken by {StrategyRegistry[name]['strategy']}; choose another")
        return
    StrategyRegistry.register(name, strategy, **init_params)
    other = sys.modules.get(OTHER_FRAMEWORK + ".strategies")
    if other is not None and name not in other.StrategyRegistry:

        def refuse(**_: Any) -> None:
            raise TypeError(mismatch_message(strategy.__name__))

        other.StrategyRegistry.register(name, refuse)
