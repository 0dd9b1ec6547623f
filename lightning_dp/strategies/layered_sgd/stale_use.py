"""Detect, in backward, that a parameter was used while its update was pending, unseen by the watch."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_dp._private.torch_names import next_sequence_number, sequence_number


class StaleUseError(RuntimeError):
    """The forward used a stale parameter: a use that `ParameterWatch` cannot see."""


class Moment(NamedTuple):
    """How far a thread has come in making nodes of the autograd graph. Each thread numbers its own nodes."""

    thread: int
    number: int

    @classmethod
    def now(cls) -> Moment:
        """Return the present moment of the calling thread."""
        return cls(threading.get_ident(), next_sequence_number())


class StaleUseDetector:
    """Raises in backward when a parameter gets a gradient although it was used while its update was pending.

    A parameter is a suspect if nodes of the graph were made while its update was pending, and the watch has seen no use
    of it since the update was staged. There are two kinds: parameters whose update is still pending when backward
    begins, and those that were updated in this forward only because another parameter of their bucket was used. If a
    suspect nevertheless gets a gradient, it was used in a function that PyTorch does not show (see `parameter_watch`).

    Not every such use is wrong. A graph may have been built before the update was staged (two losses on one graph, with
    a step between their backward passes), and a use after the update has read the new value. The nodes of the graph
    tell these cases apart, because autograd numbers them in the order in which they are made.

    A parameter that is used unseen first and seen later, in one forward, is no suspect and goes unnoticed. To find it,
    the whole graph would have to be searched in each step.
    """

    def __init__(self) -> None:
        self._suspects: dict[Tensor, range] = {}  # with the numbers of the nodes that may have read the old value

    @property
    def suspects(self) -> Collection[Tensor]:
        """The parameters that may have been used unseen."""
        return self._suspects.keys()

    def note_updated(self, parameters: Iterable[Tensor], staged_at: Moment) -> None:
        """Remember that ``parameters`` are updated now. A read between ``staged_at`` and now was one too early."""
        now = Moment.now()
        # Without a node in between there was no such read. So it is if all buckets have arrived when the forward uses
        # its first parameter: then none has to be watched any longer.
        if now.thread == staged_at.thread and now.number > staged_at.number:
            self._suspects.update(dict.fromkeys(parameters, range(staged_at.number, now.number)))

    def note_seen(self, parameter: Tensor) -> None:
        """Do not suspect ``parameter``: its use was seen."""
        self._suspects.pop(parameter, None)

    def begin_forward(self) -> None:
        """Forget what was updated before: a forward that begins now reads up-to-date values."""
        self._suspects.clear()

    @contextmanager
    def watching(self, loss: Tensor, module: nn.Module) -> Iterator[None]:
        """Watch one backward pass. Call it when nothing is pending any more.

        Args:
            loss: that backward starts from.
            module: knows the names of the parameters.

        Raises:
            StaleUseError: out of backward, before the gradient is accumulated or reduced.
        """
        reads = _Reads(loss)
        handles = [
            parameter.register_hook(_Check(parameter, stale, reads, module))
            for parameter, stale in self._suspects.items()
            if parameter.requires_grad
        ]
        self._suspects.clear()
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
