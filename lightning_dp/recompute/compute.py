"""Compute a value again: which operators lead to it, and what stays of what they compute on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dp.recompute.operators import Kind
from lightning_dp.recompute.values import Call, Value

Retain = Callable[[Value, int], bool]
"""Whether a value that is computed on the way to another one stays until backward asks for it, too. Its arguments are
the value, which backward may not ask for itself, and the number of operators that would have to run again to compute
it."""


def closure(
    value: Value, stops: Callable[[Value], bool] = lambda value: False, max_calls: int | None = None
) -> tuple[list[Call], list[Value]]:
    """Return what computes ``value`` again: the calls, in order, and the values that must have their tensors.

    Args:
        value: has no tensor.
        stops: whether a value without a tensor is not to be computed again either.
        max_calls: the search ends, incomplete, at one more than that.
    """
    calls: dict[Call, None] = {}
    sources: dict[Value, None] = {}
    to_visit = [value]
    while to_visit:
        at = to_visit.pop()
        if at.is_held or at.call is None or (at is not value and stops(at)):
            sources[at] = None
        elif at.call not in calls:
            calls[at.call] = None
            if max_calls is not None and len(calls) > max_calls:
                break
            to_visit.extend(at.call.inputs)
    return sorted(calls, key=lambda call: call.number), list(sources)


def compute(target: Value, retain: Retain) -> Tensor:
    """Compute ``target`` again, and keep what ``retain`` names of the values on the way, until they are asked for."""
    calls, _ = closure(target)
    num_readers: dict[Value, int] = {}  # calls that have not run yet
    for call in calls:
        for value in call.inputs:
            num_readers[value] = num_readers.get(value, 0) + 1
    viewed = {value for call in calls if call.kind is Kind.VIEW for value in call.inputs}
    present: dict[Value, Tensor] = {}
    distance: dict[Value, int] = {}  # how many calls lead to a value from values that stay

    def tensor_of(value: Value) -> Tensor:
        return present[value] if value in present else value.get()

    with torch.no_grad(), torch.autocast(target.device_type, enabled=False):
        for call in calls:
            changed = call.changed
            may_change = (
                changed is not None
                and changed is not target
                and changed in present
                and num_readers[changed] == 1
                # Others may have its memory: whoever asks for it later, and views.
                and not changed.is_held
                and changed not in viewed
                and _owns_memory(changed)
            )
            outputs = call.run(tensor_of, may_change)
            length = 1 + sum(distance.get(value, 0) for value in call.inputs)
            for reference, tensor in zip(call.outputs, outputs, strict=False):
                output = None if reference is None else reference()
                if output is None or output.is_held:
                    continue
                output.num_runs += 1
                is_kept = output.num_uses > 0 if output is target else retain(output, length)
                distance[output] = 0 if is_kept else length
                if is_kept:
                    output.keep_own(tensor)
                if output is target or output in num_readers:
                    present[output] = tensor
            for read in call.inputs:
                num_readers[read] -= 1
                if num_readers[read] == 0 and read is not target:
                    present.pop(read, None)
    return present[target]


def _owns_memory(value: Value) -> bool:
    """Return whether the operator that computes ``value`` again gives it memory of its own."""
    return value.call is not None and value.call.kind is not Kind.VIEW
