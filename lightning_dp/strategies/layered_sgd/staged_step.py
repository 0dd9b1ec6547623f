"""A step of an optimizer as it was staged: which parameters it updates, with which gradients and hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._private.torch_names import has_modes, without_modes

Group = dict[str, Any]


class StagedGroup:
    """A parameter group with its hyperparameters of the moment of staging; schedules change the group afterwards."""

    def __init__(self, original: Group) -> None:
        self.original = original
        self._staged = {
            # Tensors are copied, because schedules and users may change them in place. Plain values cannot change.
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in original.items()
            if key != "params"
        }

    def restricted_to(self, parameters: list[Tensor]) -> Group:
        """Return the group as staged, with some of its parameters."""
        return {**self._staged, "params": parameters}

    def keep_changes(self, restricted: Group) -> None:
        """Write what the step itself has changed (a hook that sets the rate, say) into the original group."""
        for key, value in restricted.items():
            if key != "params" and value is not self._staged.get(key):
                self._staged[key] = value
                self.original[key] = value


class StagedPart:
    """Some parameters of an optimizer, with the gradients that were staged. They are updated in one step.

    Attributes:
        parameters: the parameters.
        gradients: the gradient of each.
        groups: the parameters again, by group.
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.groups: dict[StagedGroup, list[Tensor]] = {}

    def add(self, group: StagedGroup, parameter: Tensor, gradient: Tensor) -> None:
        """Add a parameter of ``group``."""
        self.parameters.append(parameter)
        self.gradients.append(gradient)
        self.groups.setdefault(group, []).append(parameter)

    def joined_with(self, others: list[StagedPart]) -> StagedPart:
        """Return a part with the parameters of this one and those of ``others``."""
        if not others:
            return self
        joined = StagedPart()
        for part in (self, *others):
            joined.parameters += part.parameters
            joined.gradients += part.gradients
            for group, parameters in part.groups.items():
                joined.groups.setdefault(group, []).extend(parameters)
        return joined

    @contextmanager
    def shown_to(self, optimizer: Optimizer, state: Any) -> Iterator[None]:
        """Within the context, show ``optimizer`` these parameters alone, as they were staged, and its ``state``."""
        restricted = [(group, group.restricted_to(parameters)) for group, parameters in self.groups.items()]
        present_groups = optimizer.param_groups
        present_state = optimizer.state
        optimizer.param_groups = [group for _, group in restricted]
        optimizer.state = state
        others = self._put_back_gradients()
        try:
            yield
        finally:
            optimizer.param_groups = present_groups
            optimizer.state = present_state
            for staged, group in restricted:
                staged.keep_changes(group)
            for parameter, gradient in others:
                parameter.grad = gradient

    def _put_back_gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Give the parameters the gradients that were staged. Return those that were zeroed or replaced since."""
        others = []
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            present = parameter.grad
            if present is not gradient:
                others.append((parameter, present))
                parameter.grad = gradient
        return others


def as_after_backward(device_type: str) -> ExitStack:
    """Apply an update as if right after backward, in whatever context the parameter is first used.

    That may be inference mode, autocast, inside a `torch.func` transform, or under a dispatch mode of the user's that
    would record the optimizer's operations (selective checkpointing caches them, and then refuses the update). Each of
    these contexts takes some microseconds to leave, and an update may have as many steps as there are buckets.
    """
    contexts = ExitStack()
    if torch.is_inference_mode_enabled():
        contexts.enter_context(torch.inference_mode(False))
    if torch.is_autocast_enabled(device_type):
        contexts.enter_context(torch.autocast(device_type, enabled=False))
    if has_modes():
        contexts.enter_context(without_modes())
    return contexts
