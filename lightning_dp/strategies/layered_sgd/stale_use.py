"""Find out, in backward, that a parameter was used while its update was pending and nobody saw it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp._private.torch_names import sequence_number


class StaleUseError(RuntimeError):
    """The forward used a stale parameter: a use that `ParameterWatch` cannot see."""


class StaleUseDetector:
    """Raises in backward when a parameter gets a gradient although no use of it was seen.

    A parameter whose update is still pending when backward begins was used by nobody since the update was staged, as
    far as the watch could see. If it gets a gradient all the same, the forward has used its old value, in a function
    that PyTorch does not show (see `parameter_watch`).

    One case is legitimate: a graph that was built before the update was staged, and is run through now (two losses on
    one graph, with a step between their backward passes). Under DDP that gradient is the same. The nodes of the graph
    tell the two apart, for autograd numbers them in the order in which they are made.
    """

    def __init__(self) -> None:
        self._staged_at: dict[Tensor, int] = {}

    def note_staged(self, parameters: Iterable[Tensor]) -> None:
        """Remember that updates of ``parameters`` were staged now."""
        self._staged_at.update(dict.fromkeys(parameters, _present_sequence_number()))

    @contextmanager
    def watching(self, loss: Tensor, suspects: Iterable[Tensor], module: nn.Module) -> Iterator[None]:
        """Watch one backward pass.

        Args:
            loss: that backward starts from.
            suspects: parameters whose update was pending when backward began.
            module: knows their names.

        Raises:
            StaleUseError: out of backward, before the gradient is accumulated or reduced.
        """
        handles = []
        for parameter in suspects:
            if parameter.requires_grad:
                handles.append(parameter.register_hook(_Check(parameter, self._staged_at[parameter], loss, module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Check:
    """The hook on one parameter: called with its gradient."""

    def __init__(self, parameter: Tensor, staged_at: int, loss: Tensor, module: nn.Module) -> None:
        self._parameter = parameter
        self._staged_at = staged_at
        self._loss = loss
        self._module = module

    def __call__(self, gradient: Tensor) -> None:
        reads = list(_reads(self._loss.grad_fn, self._parameter))
        if reads and max(reads) < self._staged_at:
            return
        name = next((name for name, p in self._module.named_parameters() if p is self._parameter), "a parameter")
        raise StaleUseError(
            f"{name} was used in this forward without its last update, by a function that PyTorch does not show: "
            "torch.jit.script or trace, a C++ extension, an alias of its storage, or a torch.func transform. Nothing "
            'was updated with that gradient. Use LayeredSGDStrategy(overlap="load"), which applies the whole update '
            "before the forward"
        )


# Nodes that hand an alias on and read no value: who reads it is the node that uses their output.
_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|AsStrided|T|Transpose|Permute|Expand|Squeeze|Unsqueeze|Select|Slice|Split"
    r"|SplitWithSizes|Unbind|Alias|Diagonal|Unfold|Movedim|Narrow|Chunk|Unflatten)Backward\d+$"
)


def _reads(root: Any, parameter: Tensor) -> Iterator[float]:
    """Yield the numbers of the graph's nodes that read the value of ``parameter``, directly or through views of it."""
    to_visit = [(root, math.inf)]
    seen = set(to_visit)
    while to_visit:
        node, number_of_reader = to_visit.pop()
        if node is None:
            continue
        if not _VIEWS.match(node.name()):
            number_of_reader = sequence_number(node)
        for following, _ in node.next_functions:
            if getattr(following, "variable", None) is parameter:
                yield number_of_reader
            elif following is not None and (following, number_of_reader) not in seen:
                seen.add((following, number_of_reader))
                to_visit.append((following, number_of_reader))


def _present_sequence_number() -> int:
    with torch.enable_grad(), torch.inference_mode(False):
        return sequence_number(torch.zeros((), requires_grad=True).view(()).grad_fn)
