"""What ``state_dict``, ``load_state_dict`` and ``copy.deepcopy`` make of a head while ranks hold rows of it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_dp.strategies.krizhevsky_hybrid.gathered_head import GatheredHead
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies

log = logging.getLogger(__name__)


class StateDictHooks(SharedByCopies):
    """Whole tensors in and out of the head, where they are known.

    Users save ``module.state_dict()`` by hand, on one rank, and expect what DDP gives. That rank cannot ask the others.
    Where the head is gathered, it gets whole tensors; elsewhere its own rows, and a warning.

    Args:
        head: in its sharded state.
        gathered: returns the whole head, or None where it is not known.
    """

    def __init__(self, head: ShardedHead, gathered: Callable[[], GatheredHead | None]) -> None:
        self._head = head
        self._gathered = gathered
        self._leaves_rows = False  # changed by `leaving_rows`
        self._has_warned = False
        self._registered = ExitStack()  # hooks of the layers, to be removed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the hooks in place within."""
        attributes = vars(self._head.head)
        self._register()
        attributes["__deepcopy__"] = self._deepcopy  # copy.deepcopy asks the instance, not its class
        try:
            yield
        finally:
            attributes.pop("__deepcopy__", None)
            self._registered.close()

    def _register(self) -> None:
        for layer in self._head.linears:
            # partial, because torch sets an attribute on the hook, which methods do not have.
            self._registered.callback(layer.register_state_dict_post_hook(partial(self._on_state_dict)).remove)
            self._registered.callback(layer.register_load_state_dict_pre_hook(self._on_load).remove)

    @contextmanager
    def leaving_rows(self) -> Iterator[None]:
        """Within, ``state_dict`` gives this rank's rows, without a warning: for checkpoints, which gather them."""
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
            # keep_vars=True asks for the objects themselves; and a copy of a single layer has parameters of its own.
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
            if value.shape == self._head.whole_shape(parameter):
                state[prefix + name] = self._head.own_rows(value, parameter)

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the head as an ordinary module that belongs to no strategy; where it is not known, as one of rows."""
        head, gathered = self._head.head, self._known()
        if gathered is not None:
            for parameter in self._head.parameters:
                memo[id(parameter)] = nn.Parameter(gathered.value_of(parameter).clone(), parameter.requires_grad)
        duplicate = copy.copy(head)  # a new object with the same attributes, of which some must not be copied on
        for name in ("forward", "__deepcopy__"):
            vars(duplicate).pop(name, None)
        self._registered.close()  # or the copy's layers would have the hooks, too
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
                f"state_dict() holds rank {self._head.channel.rank}'s rows of {self._head.name!r} only, for each rank "
                "has its own while fitting; use trainer.save_checkpoint(...) on all ranks, or have all ranks call "
                "trainer.strategy.gather_head() first"
            )
            self._has_warned = True


class _RowsOnly:
    """The ``forward`` of a copy that holds one rank's rows, which would give logits of a few classes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> Tensor:
        raise RuntimeError(
            f"this copy of {self._name!r} was made while fitting, on a rank that held its own rows only; copy it "
            "before fit, in validation, or after all ranks have called trainer.strategy.gather_head()"
        )
