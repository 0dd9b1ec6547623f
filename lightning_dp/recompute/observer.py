"""What a tape tells others while it records: to measure operators, and to compare them with a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.values import Value


class Seen(NamedTuple):
    """One call of an operator, as an observer is told of it."""

    number: int
    key: str
    func: Any
    kind: Kind
    inputs: list[Value | None]
    outputs: list[Value | None]
    segment: int
    time_s: float


class Observer(ABC):
    """Is told what a tape sees."""

    @abstractmethod
    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Run an operator; return its result and its time (s)."""

    @abstractmethod
    def on_call(self, seen: Seen) -> None:
        """An operator has run."""

    @abstractmethod
    def on_pack(self, value: Value, segment: int) -> None:
        """Autograd keeps a value for the backward of something in ``segment``."""


class OutputSizes(Observer):
    """Adds up what each call of an operator computes.

    Attributes:
        by_key: bytes of the outputs that are not small, by the key of the call. A view has none.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, int] = {}

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **kwargs), 0.0

    @override
    def on_call(self, seen: Seen) -> None:
        outputs = [value for value in seen.outputs if value is not None and not value.is_held]
        self.by_key[seen.key] = 0 if seen.kind is Kind.VIEW else sum(value.num_bytes for value in outputs)

    @override
    def on_pack(self, value: Value, segment: int) -> None:
        pass
