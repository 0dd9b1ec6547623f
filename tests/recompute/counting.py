"""Counts of operators and of bytes, by a dispatch mode that sees what every other mechanism does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.recompute import tape
from lightning_dp.recompute.values import tensors_in


class OperatorCounts(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition("::")[2].partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Operators(OperatorCounts):
    """Also counts the bytes of living tensors that operators made, except those of ``known``."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A view of a tensor that was there before, such as the batch, is not made here.
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.see(tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in given)
        self.peak_bytes = max(self.peak_bytes, self.living_bytes())
        return result

    def see(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in self.known:
                self.storages[reference.cdata] = reference, tensor.untyped_storage().nbytes()

    def living_bytes(self) -> int:
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self.storages.values())


def count_closures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each search for what must run again, the number of calls that it found."""
    visited: list[int] = []
    closure = tape.closure

    def counted(*args: Any) -> Any:
        calls, sources = closure(*args)
        visited.append(len(calls))
        return calls, sources

    monkeypatch.setattr(tape, "closure", counted)
    return visited


def counted_step(model: nn.Module, loss_of: Any) -> tuple[Counter[str], Counter[str], int, int]:
    """Run forward and backward; return the operators of each, the bytes between the two, and the peak."""
    with Operators([*model.parameters(), *model.buffers()]) as operators:
        loss = loss_of(model)
        forward = operators.counts.copy()
        kept_bytes = operators.living_bytes()
        loss.backward()
    return forward, operators.counts - forward, kept_bytes, operators.peak_bytes


def saved_bytes(model: nn.Module, loss_of: Any) -> int:
    """Return the bytes that autograd keeps for backward, by its own hooks, without parameters and the batch."""
    storages: dict[int, int] = {}
    leaves = {StorageWeakRef(p.untyped_storage()).cdata for p in [*model.parameters(), *model.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        key = StorageWeakRef(tensor.untyped_storage()).cdata
        if key not in leaves:
            storages[key] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    total = sum(storages.values())
    loss.backward()
    return total


def small_parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters that recomputation may copy: a hook may change them before backward."""
    return sum(p.nbytes for p in model.parameters() if p.dim() <= 1 or p.nbytes <= 256)


def recomputed(plain: Counter[str], other: Counter[str]) -> dict[str, int]:
    """Return how often backward of ``other`` runs an operator more than that of ``plain``, views aside."""
    found = {name: n - plain[name] for name, n in other.items() if n > plain[name]}
    # A batch norm that is computed again from its statistics multiplies two vectors and makes one of ones.
    for name in ("mul", "ones_like"):
        found[name] = found.get(name, 0) - found.get("native_batch_norm", 0)
    views = {"detach", "view", "t", "transpose", "expand", "unsqueeze"}
    return {name: n for name, n in found.items() if n > 0 and name not in views}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, gradients and the state of the random number generator."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    state |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return state | {"random numbers": torch.get_rng_state()}


def differing(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of the values that are not bitwise the same."""
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]
