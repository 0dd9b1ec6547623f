"""Detect, in backward, that a parameter was used while its update was pending, unseen by the watch."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_dp._private.torch_names import next_sequence_number, sequence_number


class StaleUseError(RuntimeError):
    """The forward used a stale parameter: a use that `ParameterWatch` cannot see."""


class StaleUseDetector:
    """Raises in backward when a parameter gets a gradient although it was used while its update was pending.

    Two kinds of parameters are suspects: those whose update is still pending when backward begins, and those that were
    updated in this forward only because another parameter of their bucket was used. The watch has seen no use of either
    since their update was staged. If such a parameter nevertheless gets a gradient, it was used in a function that
    PyTorch does not show (see `parameter_watch`).

    Not every such use is wrong. A graph may have been built before the update was staged (two losses on one graph, with
    a step between their backward passes), and a use after the update has read the new value. The nodes of the graph
    tell these cases apart, because autograd numbers them in the order in which they are made.

    A parameter that is used unseen first and seen later, in one forward, is no suspect and goes unnoticed. To find it,
    the whole graph would have to be searched in each step.
    """

    def __init__(self) -> None:
        self._thread = 0  # that staged: each thread numbers its own nodes
        self._staged_at: dict[Tensor, int] = {}
        self._updated_at: dict[Tensor, int] = {}  # in this forward, and not seen since

    def note_staged(self, parameters: Iterable[Tensor]) -> None:
        """Remember that updates of ``parameters`` were staged now."""
        self._thread = threading.get_ident()
        self._staged_at.update(dict.fromkeys(parameters, next_sequence_number()))

    def note_updated(self, parameters: Iterable[Tensor]) -> None:
        """Remember that ``parameters`` were updated now. A read between their staging and now was one too early."""
        if threading.get_ident() == self._thread:
            self._updated_at.update(dict.fromkeys(parameters, next_sequence_number()))

    def note_seen(self, parameter: Tensor) -> None:
        """Do not suspect ``parameter``: its use was seen."""
        self._updated_at.pop(parameter, None)

    def begin_forward(self) -> None:
        """Forget what was updated before: a forward that begins now reads up-to-date values."""
        self._updated_at.clear()

    @contextmanager
    def watching(self, loss: Tensor, pending: Iterable[Tensor], module: nn.Module) -> Iterator[None]:
        """Watch one backward pass.

        Args:
            loss: that backward starts from.
            pending: parameters whose update was pending when backward began.
            module: knows their names.

        Raises:
            StaleUseError: out of backward, before the gradient is accumulated or reduced.
        """
        self.note_updated(pending)
        reads = _Reads(loss)
        handles = []
        for parameter, updated_at in self._updated_at.items():
            if parameter.requires_grad and parameter in self._staged_at:
                check = _Check(parameter, range(self._staged_at[parameter], updated_at), reads, module)
                handles.append(parameter.register_hook(check))
        self._updated_at.clear()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Check:
    """The hook on one parameter: called with its gradient.

    Args:
        parameter: the parameter.
        stale: the numbers of the nodes that were made while its update was pending.
        reads: finds the nodes that read it.
        module: knows its name.
    """

    def __init__(self, parameter: Tensor, stale: range, reads: _Reads, module: nn.Module) -> None:
        self._parameter = parameter
        self._stale = stale
        self._reads = reads
        self._module = module

    def __call__(self, gradient: Tensor) -> None:
        numbers = self._reads.of(self._parameter)
        # Without any node the graph has been changed by somebody: then a gradient is not to be trusted either.
        if numbers and not any(number in self._stale for number in numbers):
            return
        name = next((name for name, p in self._module.named_parameters() if p is self._parameter), "a parameter")
        raise StaleUseError(
            f"{name} was used in this forward without its last update, by a function that PyTorch does not show: "
            "torch.jit.script or trace, a C++ extension, an alias of its storage, or a torch.func transform. Nothing "
            'was updated with that gradient. Use LayeredSGDStrategy(overlap="load"), which applies the whole update '
            "before the forward"
        )


# Nodes that return an alias and read no value. The value is read by the node that uses their output.
_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|AsStrided|T|Transpose|Permute|Expand|Squeeze|Unsqueeze|Select|Slice|Split"
    r"|SplitWithSizes|Unbind|Alias|Diagonal|Unfold|Movedim|Narrow|Chunk|Unflatten)Backward\d+$"
)


class _Reads:
    """The nodes of a graph that read each parameter, directly or through views of it.

    The graph is searched once, for all parameters, when somebody asks for the first.
    """

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss
        self._numbers: dict[Tensor, set[float]] | None = None

    def of(self, parameter: Tensor) -> set[float]:
        """Return the sequence numbers of the nodes that read the value of ``parameter``."""
        if self._numbers is None:
            self._numbers = {}
            self._search(self._numbers)
        return self._numbers.get(parameter, set())

    def _search(self, numbers: dict[Tensor, set[float]]) -> None:
        to_visit: list[tuple[Any, float]] = [(self._loss.grad_fn, math.inf)]
        seen = set(to_visit)
        while to_visit:
            node, number_of_reader = to_visit.pop()
            if node is None:
                continue
            if not _VIEWS.match(node.name()):
                number_of_reader = sequence_number(node)
            for following, _ in node.next_functions:
                variable = getattr(following, "variable", None)
                if variable is not None:
                    numbers.setdefault(variable, set()).add(number_of_reader)
                elif following is not None and (following, number_of_reader) not in seen:
                    seen.add((following, number_of_reader))
                    to_visit.append((following, number_of_reader))
