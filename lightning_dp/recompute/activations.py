"""What a model keeps for backward, module by module: look before you cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from typing_extensions import override

from lightning_dp._private.torch_names import TorchDispatchMode
from lightning_dp.recompute.operators import name_of
from lightning_dp.recompute.tape import Location
from lightning_dp.recompute.values import is_plain, tensors_in
from lightning_dp.trial_run import unchanged, unchanged_parameters


class ActivationRow(NamedTuple):
    """What one module keeps.

    Attributes:
        module: its name in the model; "" for the model itself, where its own forward computes.
        kind: its class.
        operators: the operators whose results are kept.
        num_bytes: of these results.
    """

    module: str
    kind: str
    operators: tuple[str, ...]
    num_bytes: int


class ActivationTable(NamedTuple):
    """What a model keeps for backward; the rows are sorted, the largest first."""

    rows: tuple[ActivationRow, ...]

    @property
    def total_bytes(self) -> int:
        """Of all modules."""
        return sum(row.num_bytes for row in self.rows)

    @override
    def __str__(self) -> str:
        lines = ["| module | class | kept results of | MB | share |", "|---|---|---|---|---|"]
        for row in self.rows:
            share = row.num_bytes / max(1, self.total_bytes)
            names = ", ".join(row.operators)
            lines.append(f"| {row.module} | {row.kind} | {names} | {row.num_bytes / 1e6:.3f} | {share:.1%} |")
        return "\n".join([*lines, f"| all | | | {self.total_bytes / 1e6:.3f} | 100.0% |"])

    def plot(self, path: str | Path, max_rows: int = 30) -> None:
        """Draw the largest rows as bars, in a file whose ending says the format. Needs matplotlib."""
        from matplotlib.figure import Figure  # not for everybody who computes a table

        rows = self.rows[:max_rows]
        figure = Figure(figsize=(8, 1.2 + 0.28 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.barh([row.module or "(model)" for row in rows], [row.num_bytes / 1e6 for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("kept for backward (MB)")
        axes.set_title(f"{len(rows)} of {len(self.rows)} modules, {self.total_bytes / 1e6:.1f} MB in all", fontsize=10)
        figure.savefig(path, dpi=120)


def activation_bytes(model: nn.Module, batch: Any, method: str = "forward") -> ActivationTable:
    """Return what ``model`` keeps for backward after one forward pass, by the module that computed it.

    Counted is the memory that exists between forward and backward because of the graph: each piece once, without
    parameters, buffers, ``batch`` and the model's output. That also holds with `apply_recompute` or
    `torch.utils.checkpoint` in the model. Parameters, gradients, buffers and random number generators are put back
    afterwards.

    Args:
        model: as it is trained: in training mode, usually.
        batch: the argument of ``method``, or a tuple of its arguments.
        method: of ``model``, whose result has the graph.

    Raises:
        ValueError: the result has no graph: nothing would be kept.
    """
    seen = _Seen(model, [*model.parameters(), *model.buffers(), *tensors_in(batch)])
    arguments = batch if isinstance(batch, tuple) else (batch,)
    with unchanged(model), unchanged_parameters(model), torch.enable_grad():
        with seen.location.followed(), seen:
            outputs = tensors_in(getattr(model, method)(*arguments))
        # With a node behind each output: in torch 2.8, that of an `autograd.Function` dies with its output.
        graph = [tensor.sum().grad_fn for tensor in outputs if tensor.grad_fn is not None]
        if not graph:
            raise ValueError(
                f"{type(model).__name__}.{method} returned nothing that depends on a trainable parameter; give a batch "
                "on which it computes a loss or logits, and parameters with requires_grad=True"
            )
        del outputs
    # Not earlier: the model may keep other tensors, such as a new buffer. What is left belongs to the graph.
    return ActivationTable(seen.rows())


class _Seen(TorchDispatchMode):
    """Remembers, without keeping it, the memory that operators allocate, and the module that asked for it."""

    def __init__(self, model: nn.Module, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.location = Location(model, frozenset())
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._known = {tensor.untyped_storage() for tensor in known}
        self._found: WeakKeyDictionary[UntypedStorage, tuple[str, str]] = WeakKeyDictionary()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in filter(is_plain, tensors_in(result)):
            storage = tensor.untyped_storage()  # one object for as long as the memory exists
            # The first operator has allocated the memory; later ones are views, or change it in place.
            if storage not in self._known:
                self._found.setdefault(storage, (self.location.module, name_of(func)))
        return result

    def rows(self) -> tuple[ActivationRow, ...]:
        """Return what still exists."""
        by_module: dict[str, tuple[dict[str, None], int]] = {}
        for storage, (module, operator) in self._found.items():
            if storage.nbytes():
                operators, total = by_module.get(module, ({}, 0))
                by_module[module] = {**operators, operator: None}, total + storage.nbytes()
        rows = [
            ActivationRow(module, self._kinds[module], tuple(operators), total)
            for module, (operators, total) in by_module.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.module)))
