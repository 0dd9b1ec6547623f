"""Names that are private in Lightning.

`LayeredSGDStrategy` also overrides a private method, ``_configure_launcher``, because Lightning calls no public one
before it starts processes. It has a contract like the names below.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_TIMEOUT = timedelta(minutes=30)


def ddp_options(strategy: Any) -> dict[str, Any]:
    """Return the keyword arguments that a DDPStrategy will pass to DistributedDataParallel.

    Changes to the dictionary count until the strategy wraps its model.
    """
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def wrap_in_ddp(strategy: Any, module: nn.Module) -> DistributedDataParallel:
    """Return ``module`` in a new DistributedDataParallel, with the options of a DDPStrategy. All ranks must call it."""
    wrapped: DistributedDataParallel = strategy._setup_model(module)
    return wrapped


def strategy_timeout(strategy: Any) -> timedelta:
    """Return the timeout that the user gave to a strategy, for every process group that is made for it.

    Strategies that take no timeout have the default.
    """
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return DEFAULT_TIMEOUT if timeout is None else timeout


def converts_batch_norm(strategy: Any) -> bool:
    """Return whether ``Trainer(sync_batchnorm=True)`` makes this strategy replace batch norm layers."""
    # A default, because strategies for one device do not have the attribute.
    return getattr(strategy, "_layer_sync", None) is not None


def is_compiled_by_lightning(module: nn.Module) -> bool:
    """Return whether ``module`` is a LightningModule that was passed through ``torch.compile``."""
    # A default, because modules that are no LightningModules do not have the attribute.
    return getattr(module, "_compiler_ctx", None) is not None


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Return a batch after the hook ``on_before_batch_transfer`` of module or data module."""
    return module._on_before_batch_transfer(batch)
