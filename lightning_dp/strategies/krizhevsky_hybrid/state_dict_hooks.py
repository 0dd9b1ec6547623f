"""``state_dict``, ``load_state_dict`` and ``copy.deepcopy`` of a head of which each rank holds rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_dp.strategies.krizhevsky_hybrid.gathered_head import GatheredHead
from lightning_dp.strategies.krizhevsky_hybrid.inner_calls import refused_inner_calls
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies

log = logging.getLogger(__name__)


class StateDictHooks(SharedByCopies):
    """Converts between rows and whole tensors where the module's state is read, loaded or copied.

    Users save ``module.state_dict()`` on one rank and expect whole tensors, as under DDP. No other rank takes part in
    that call, so nothing can be gathered in it. While the head is gathered, the whole tensors are at hand; otherwise
    the result holds this rank's rows, and a warning says so.

    Args:
        head: in its sharded state.
        gathered: returns the gathered head, or None if there is none.

    Attributes:
        has_loaded: whether ``load_state_dict`` has given values to the head.
    """

    def __init__(self, head: ShardedHead, gathered: Callable[[], GatheredHead | None]) -> None:
        self._head = head
        self._gathered = gathered
        self._leaves_rows = False  # set by `leaving_rows`
        self._has_warned = False
        self.has_loaded = False
        self._registered = ExitStack()  # hooks of the layers, to be removed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the hooks in place within the context."""
        attributes = vars(self._head.head)
        self._register()
        attributes["__deepcopy__"] = self._deepcopy  # copy.deepcopy looks it up on the instance
        try:
            yield
        finally:
            attributes.pop("__deepcopy__", None)
            self._registered.close()

    def _register(self) -> None:
        for layer in self._head.linears:
            # torch sets an attribute on the hook. A partial object takes it, a bound method does not.
            self._registered.callback(layer.register_state_dict_post_hook(partial(self._on_state_dict)).remove)
            self._registered.callback(layer.register_load_state_dict_pre_hook(self._on_load).remove)
        self._registered.enter_context(refused_inner_calls(self._head))  # here, so that copies of the head are without

    @contextmanager
    def leaving_rows(self) -> Iterator[None]:
        """Within the context ``state_dict`` returns this rank's rows, without a warning. Checkpoints gather them."""
        self._leaves_rows = True
        try:
            yield
        finally:
            self._leaves_rows = False

    def _known(self) -> GatheredHead | None:
        gathered = self._gathered()
        return gathered if gathered is not None and gathered.is_current else None

    def _on_state_dict(self, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        gathered = self._known()
        for name, parameter in layer.named_parameters(recurse=False):
            value = state.get(prefix + name)
            # With keep_vars=True the caller wants the parameters themselves. A copy of a single layer has inherited
            # this hook, but its parameters are not the head's.
            if value is None or isinstance(value, nn.Parameter) or not self._head.owns(parameter) or self._leaves_rows:
                continue
            if gathered is not None:
                state[prefix + name] = gathered.value_of(parameter)
            else:
                self._warn_of_rows()

    def _on_load(self, layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            value = state.get(prefix + name)
            if not self._head.owns(parameter) or not isinstance(value, Tensor):
                continue
            self.has_loaded = True
            if value.shape == self._head.whole_shape(parameter):
                state[prefix + name] = self._head.own_rows(value, parameter)

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the head as an ordinary module with whole tensors, or, if it is not gathered, as one that has rows."""
        head, gathered = self._head.head, self._known()
        if gathered is not None:
            for parameter in self._head.parameters:
                memo[id(parameter)] = nn.Parameter(gathered.value_of(parameter).clone(), parameter.requires_grad)
        # deepcopy would find this method again, and copy the replaced forward with all that it refers to. Therefore a
        # shallow copy comes first, without either.
        duplicate = copy.copy(head)
        for name in ("forward", "__deepcopy__"):
            vars(duplicate).pop(name, None)
        self._registered.close()  # otherwise the copy's layers would have the hooks, too
        try:
            duplicate = copy.deepcopy(duplicate, memo)
        finally:
            self._register()
        if gathered is None:
            vars(duplicate)["forward"] = _RowsOnly(self._head.name)
        return duplicate

    def _warn_of_rows(self) -> None:
        if not self._has_warned:
            log.warning(
                f"state_dict() holds only rank {self._head.channel.rank}'s rows of {self._head.name!r}, because each "
                "rank has its own during fit. Use trainer.save_checkpoint(...) on all ranks, or let all ranks call "
                "trainer.strategy.gather_head() first"
            )
            self._has_warned = True


class _RowsOnly:
    """The ``forward`` of a copy that holds one rank's rows. Without it, the copy would return logits of few classes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> Tensor:
        raise RuntimeError(
            f"this copy of {self._name!r} was made during fit, when the rank held only its own rows of it. Copy it "
            "before fit, in validation, or after all ranks have called trainer.strategy.gather_head()"
        )
