"""What is measured of a forward pass in place: time and bytes of each operator. A tape tells it what it sees."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.recompute.operators import Kind, is_batch_norm, rerun
from lightning_dp.recompute.values import Value, outputs_of, tensors_in


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


@dataclass
class Operation:
    """One call of an operator.

    Attributes:
        key: module, operator and count; see `policies.Policy.decide`.
        kind: of the operator, the value of a `Kind`.
        time_s: of running it again.
        num_bytes: of its outputs; 0 for a view.
        inputs: places of the operations whose outputs it needs.
        segment: block of the model in which it runs.
        uses: blocks whose backward asks for an output.
    """

    key: str
    kind: str
    time_s: float
    num_bytes: int
    inputs: list[int]
    segment: int
    uses: list[int]

    @property
    def is_fixed(self) -> bool:
        """Whether it must not run again."""
        return self.kind == Kind.FIXED.value

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return asdict(self)


class Profiler(Observer):
    """Measures each operator of a forward pass, and what autograd keeps.

    Attributes:
        operations: one for each operator whose output is not small, in order.
        forward_s: time of all operators.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.forward_s = 0.0
        self._place_of: dict[int, int] = {}  # number of a call -> place in `operations`
        self._large: set[tuple[int, int]] = set()  # call and place of each output that is not small

    @override
    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        device = next((tensor.device for tensor in tensors_in([args, kwargs])), torch.device("cpu"))
        result, time_s = _timed(func, args, kwargs, device)
        self.forward_s += time_s
        if is_batch_norm(func) and args[5]:
            # It is computed again from its statistics, which takes less time.
            statistics = [tensor for tensor in outputs_of(result)[1:3] if isinstance(tensor, Tensor)]
            _, time_s = _timed(rerun, (func, args, kwargs, statistics), {}, device)
        return result, time_s

    @override
    def on_call(self, seen: Seen) -> None:
        outputs = [value for value in seen.outputs if value is not None and not value.is_small]
        if not outputs:
            return
        self._place_of[seen.number] = len(self.operations)
        self._large.update((value.number, value.place) for value in outputs)
        inputs = {self._place_of[v.number] for v in seen.inputs if v is not None and v.number in self._place_of}
        is_view = seen.kind is Kind.VIEW
        num_bytes = 0 if is_view else sum(value.num_bytes for value in outputs)
        time_s = 0.0 if is_view else seen.time_s
        self.operations.append(
            Operation(seen.key, seen.kind.value, time_s, num_bytes, sorted(inputs), seen.segment, [])
        )

    @override
    def on_pack(self, value: Value, segment: int) -> None:
        if (value.number, value.place) in self._large:
            uses = self.operations[self._place_of[value.number]].uses
            if segment not in uses:
                uses.append(segment)


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
        outputs = [value for value in seen.outputs if value is not None and not value.is_small]
        self.by_key[seen.key] = 0 if seen.kind is Kind.VIEW else sum(value.num_bytes for value in outputs)

    @override
    def on_pack(self, value: Value, segment: int) -> None:
        pass


def _timed(function: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    result = function(*args, **kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start_s
