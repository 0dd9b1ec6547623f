"""The only module that imports the framework, under the name that the user has imported.

Lightning is published under two names, ``pytorch_lightning`` and ``lightning.pytorch``. The code is the same and the
classes are distinct, so the Trainer of one does not accept objects of the other. All other modules of this package
import the framework's classes from here.

The name is chosen in this order: the environment variable ``LIGHTNING_DP_FRAMEWORK``; the framework that is imported
already, ``lightning.pytorch`` if both are, because its own dependencies import the other; the framework that is
installed, ``pytorch_lightning`` if both are.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

FRAMEWORKS = ("pytorch_lightning", "lightning.pytorch")
ENVIRONMENT_VARIABLE = "LIGHTNING_DP_FRAMEWORK"


def choose_framework() -> str:
    """Return ``"pytorch_lightning"`` or ``"lightning.pytorch"``, as described at the top of this module.

    Raises:
        ValueError: the environment variable has another value.
        ModuleNotFoundError: neither framework is installed.
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
    for name in FRAMEWORKS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError("lightning_dp needs PyTorch Lightning: pip install pytorch-lightning")


FRAMEWORK = choose_framework()
_FABRICS = ("lightning_fabric.connector", "lightning.fabric.connector")
OTHER_FRAMEWORK = next(name for name in FRAMEWORKS if name != FRAMEWORK)

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
    from pytorch_lightning.callbacks import BaseFinetuning
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
else:
    _framework = importlib.import_module(FRAMEWORK)
    BaseFinetuning = importlib.import_module(FRAMEWORK + ".callbacks").BaseFinetuning
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
    "OwnTrainerOnly",
    "StrategyRegistry",
    "Trainer",
    "register_strategy",
    "require_own_trainer",
]


def mismatch_message(name: str) -> str:
    """Return the error message for an object ``name`` of one framework that was passed to the other's Trainer."""
    return (
        f"{name} was built on `{FRAMEWORK}`, but this Trainer comes from `{OTHER_FRAMEWORK}`: they are two copies of "
        f"Lightning and cannot be mixed. Use `from {FRAMEWORK} import Trainer`, or import `{OTHER_FRAMEWORK}` before "
        f"`lightning_dp` (or set {ENVIRONMENT_VARIABLE}={OTHER_FRAMEWORK})."
    )


def require_own_trainer(component: object, trainer: object) -> None:
    """Raise TypeError if ``trainer`` belongs to the other framework. Call it in the ``setup`` of a callback."""
    if type(trainer).__module__.startswith(OTHER_FRAMEWORK + "."):
        raise TypeError(mismatch_message(type(component).__name__))


def fabric_message(name: str) -> str:
    """Return the error message for a strategy ``name`` that was passed to Fabric."""
    return (
        f"{name} works in Lightning's Trainer only, not in Fabric: it acts in the Trainer's hooks. In Fabric use "
        "DDPStrategy; lightning_dp.layers, lightning_dp.recompute and ring_all_reduce_hook work in any loop"
    )


class OwnTrainerOnly:
    """A mixin for strategies that raises a clear error in Fabric and in the Trainer of the other framework.

    These would report an invalid strategy name, because the strategy is no instance of their own base class. They call
    none of our methods before they raise, but they compare the strategy with the names that they know. So the
    comparison is where the strategy can detect them.

    Args:
        **options: options of DDPStrategy and DistributedDataParallel.

    Raises:
        TypeError: neither of them has such an option. They would find out in the ranks, long after this.
    """

    def __init__(self, **options: Any) -> None:
        known = {*_parameters(type(self)), *_parameters(DDPStrategy), *_parameters(DistributedDataParallel)}
        known -= {"self", "module", "device_ids"}
        for name in options.keys() - known:
            similar = difflib.get_close_matches(name, sorted(known), n=1)
            suggestion = f"; did you mean {similar[0]}?" if similar else "."
            raise TypeError(
                f"{type(self).__name__} has no option {name}{suggestion} Its options are its own and those of "
                "DDPStrategy and DistributedDataParallel"
            )
        super().__init__(**options)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller in _FABRICS:
                raise TypeError(fabric_message(type(self).__name__))
            if caller.startswith(OTHER_FRAMEWORK + "."):
                raise TypeError(mismatch_message(type(self).__name__))
        return self is other

    __hash__ = object.__hash__


def _parameters(of: type) -> list[str]:
    """Return the names of a constructor's arguments, except ``**kwargs``."""
    parameters = inspect.signature(of.__init__).parameters  # type: ignore[misc]
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]


def register_strategy(name: str, strategy: type, **init_params: Any) -> None:
    """Make ``Trainer(strategy=name)`` build ``strategy``. Registering the same class again has no effect.

    If the other framework is imported as well, its registry gets the name with a function that raises an error. So do
    the registries of Fabric.

    Raises:
        ValueError: the name belongs to another class.
    """
    if name in StrategyRegistry:
        registered = StrategyRegistry[name]["strategy"]
        if registered is not strategy:
            raise ValueError(f"strategy name {name!r} is taken by {registered}; choose another name")
        return
    StrategyRegistry.register(name, strategy, **init_params)
    _register_refusal(OTHER_FRAMEWORK + ".strategies", "StrategyRegistry", name, mismatch_message(strategy.__name__))
    for connector in _FABRICS:
        module = connector.replace("connector", "strategies")
        _register_refusal(module, "STRATEGY_REGISTRY", name, fabric_message(strategy.__name__))


def _register_refusal(module: str, registry: str, name: str, message: str) -> None:
    """Make the registry of ``module``, if that is imported, raise an error for a name."""

    def refuse(**_: Any) -> None:
        raise TypeError(message)

    imported = sys.modules.get(module)
    if imported is not None and name not in getattr(imported, registry):
        getattr(imported, registry).register(name, refuse)
