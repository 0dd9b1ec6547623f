"""What is measured of a forward pass in place: time and bytes of each operator. A tape tells it what it sees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dp.recompute.operators import Kind, arguments_to_keep, is_batch_norm, rerun
from lightning_dp.recompute.values import Value, outputs_of, tensors_in


@dataclass
class Operation:
    """One call of an operator.

    Attributes:
        key: module, operator and count; see `policies.Policy.keeps`.
        kind: of the operator, see `Kind`.
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


class Profiler:
    """Measures each operator of a forward pass, and what autograd keeps.

    Attributes:
        operations: one for each operator whose output is not small, in order.
        forward_s: time of all operators.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.forward_s = 0.0
        self._place_of: dict[int, int] = {}  # number of a call -> place in `operations`

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Run an operator; return its result and its time (s)."""
        device = next((tensor.device for tensor in tensors_in([args, kwargs])), torch.device("cpu"))
        result, time_s = timed(func, args, kwargs, device)
        self.forward_s += time_s
        if is_batch_norm(func) and args[5]:
            # It is computed again from its statistics, which takes less time.
            statistics = [tensor for tensor in outputs_of(result)[1:3] if isinstance(tensor, Tensor)]
            _, time_s = timed(rerun, (func, arguments_to_keep(func, args), kwargs, statistics), {}, device)
        return result, time_s

    def on_call(
        self, key: str, kind: Kind, inputs: Sequence[Value | None], outputs: Sequence[Value | None], time_s: float
    ) -> None:
        """Add an operator that has run. ``outputs`` are None where it has returned a value that was there before."""
        large = [value for value in outputs if value is not None and not value.is_small]
        if not large:
            return
        self._place_of[large[0].number] = len(self.operations)
        places = sorted({self._place_of[v.number] for v in inputs if v is not None and v.number in self._place_of})
        num_bytes = sum(value.num_bytes for value in large)
        if kind is Kind.VIEW:
            time_s, num_bytes = 0.0, 0
        self.operations.append(Operation(key, kind, time_s, num_bytes, places, large[0].segment, []))

    def on_pack(self, value: Value, segment: int) -> None:
        """Autograd keeps a value for the backward of something in ``segment``."""
        if value.number in self._place_of and not value.is_small:
            uses = self.operations[self._place_of[value.number]].uses
            if segment not in uses:
                uses.append(segment)

    def on_keep(self, value: Value) -> None:
        """A value is kept whatever a plan says: an `autograd.Function` of somebody else has saved it."""
        if value.number in self._place_of:
            self.operations[self._place_of[value.number]].kind = Kind.FIXED


def timed(function: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, float]:
    """Call ``function``; return its result and its time (s), work that it has launched on ``device`` included."""
    synchronize(device)
    start_s = time.perf_counter()
    result = function(*args, **kwargs)
    synchronize(device)
    return result, time.perf_counter() - start_s


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all that was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
