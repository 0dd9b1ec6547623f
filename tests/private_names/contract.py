"""A contract: what one private name of torch or Lightning must do for this package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Contract:
    """What one private name must do.

    Attributes:
        owner: the class or module that has the name; a string for the path of a private module.
        name: the private name.
        check: fails if the name does not have the effect that `lightning_dp` needs.
        remove: removes the name, for the test that ``check`` notices. None: the name is an attribute of ``owner``.
        successor: owner and name of what other versions have in its place.
        is_needed: False: the package does not use the name with the installed version.
    """

    owner: Any
    name: str
    check: Callable[[], None]
    remove: Callable[[pytest.MonkeyPatch], None] | None = None
    successor: tuple[Any, str] | None = None
    is_needed: bool = True

    @property
    def library(self) -> str:
        path = self.owner if isinstance(self.owner, str) else getattr(self.owner, "__module__", self.owner.__name__)
        return path.partition(".")[0]

    def hold(self) -> None:
        """Run the check; say which name of which version broke it."""
        version = importlib.import_module(self.library).__version__
        try:
            self.check()
        except Exception as error:
            raise AssertionError(
                f"{self.name} of {self.library} {version} does not do what lightning_dp relies on "
                f"({type(error).__name__}: {error}); adapt lightning_dp/_private"
            ) from error


CONTRACTS: list[Contract] = []


def contract(
    owner: Any,
    name: str,
    remove: Callable[[pytest.MonkeyPatch], None] | None = None,
    successor: tuple[Any, str] | None = None,
    is_needed: bool = True,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(check: Callable[[], None]) -> Callable[[], None]:
        CONTRACTS.append(Contract(owner, name, check, remove, successor, is_needed))
        return check

    return add
