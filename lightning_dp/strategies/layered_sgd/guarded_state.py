"""``optimizer.state`` while an update is pending."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer


class GuardedState(MutableMapping[Any, Any]):
    """Stands in for ``optimizer.state`` while an update is pending, and applies the update before it shows anything."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._finish = finish

    def _up_to_date(self) -> Any:
        self._finish()
        state = self._optimizer.state
        assert state is not self, "the pending update was not applied"
        return state

    def __getitem__(self, key: Any) -> Any:
        return self._up_to_date()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._up_to_date()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._up_to_date()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._up_to_date())

    def __len__(self) -> int:
        return len(self._up_to_date())

    def __contains__(self, key: object) -> bool:
        return key in self._up_to_date()

    def __or__(self, other: Any) -> Any:
        return self._up_to_date() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._up_to_date()

    def __getattr__(self, name: str) -> Any:  # `default_factory`, `copy`
        return getattr(self._up_to_date(), name)

    def __repr__(self) -> str:
        return repr(self._up_to_date())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._up_to_date(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._up_to_date().__reduce_ex__(protocol)
