"""The postponed update: staged when backward has ended, applied when it is needed and the gradients have arrived.

Algorithm 3 of arXiv 1906.05936 postpones the update of step t past the loading of batch t+1 (line 10). Here it is
postponed until the parameters are used: by the next forward, a callback, a checkpoint. `ParameterWatch` sees such uses,
except for those that its module lists. So a postponed update looks like one that was applied immediately: neither the
parameters, nor ``optimizer.state``, nor ``parameter.grad``, which stays as it is until it is zeroed, show a difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._private.torch_names import has_modes, mark_stepped, without_modes, without_torch_function
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientSum
from lightning_dp.strategies.layered_sgd.guarded_state import GuardedState

Group = dict[str, Any]


class PendingUpdate:
    """One step of one optimizer, with the gradients and hyperparameters of the moment it was staged.

    Args:
        optimizer: the optimizer. Until the update is applied, its ``state`` is replaced by a guard: reading it applies
            the whole update first.
        reductions: the bucket that carries each parameter's gradient.
        whole_step: performs the step once all gradients are there. None if the optimizer may step some parameters
            before others: then the buckets are applied as they arrive and are needed.
        finish: called when ``optimizer.state`` is read; must apply the whole update.
        before_step: called before a step, with the parameters that it will update. Their gradients have arrived.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reductions: dict[Tensor, GradientSum],
        whole_step: Callable[[], Any] | None,
        finish: Callable[[], None],
        before_step: Callable[[list[Tensor]], None],
    ) -> None:
        self.optimizer = optimizer
        self._whole_step = whole_step
        self._before_step = before_step
        self._entries: dict[Tensor, _Entry] = {}
        # The parameters of each bucket, so that the time to apply one depends on its own size only.
        self._parameters_in: dict[GradientSum | None, list[Tensor]] = {}
        with without_torch_function():  # the watch would wait for the gradients
            for group in map(_StagedGroup, optimizer.param_groups):
                for parameter in group.original["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        bucket = reductions.get(parameter)
                        self._entries[parameter] = _Entry(len(self._entries), group, bucket, gradient)
                        self._parameters_in.setdefault(bucket, []).append(parameter)
        self._state = optimizer.state
        self._guard = GuardedState(optimizer, finish)
        if self._entries:
            optimizer.state = self._guard  # type: ignore[assignment]
        # A schedule warns if it steps before its optimizer has. Here the step is only postponed.
        mark_stepped(optimizer)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are updated in one step."""
        return self._whole_step is not None

    def parameters(self) -> list[Tensor]:
        """Return the parameters that are still to be updated."""
        return list(self._entries)

    def apply_for(self, parameter: Tensor) -> list[Tensor]:
        """Update ``parameter``, and in the same step all others in its bucket and in buckets that have arrived.

        Return the parameters that were updated.

        Each step of the optimizer has a fixed overhead, so one step takes as many parameters as it can.
        """
        if self._whole_step is not None:
            return self.finish()
        needed = self._entries[parameter].bucket
        buckets = [b for b in self._parameters_in if b is needed or b is None or b.has_arrived]
        return self._apply(buckets, self.optimizer.step)

    def finish(self) -> list[Tensor]:
        """Update all that is left, in one step. Return what was updated."""
        return self._apply(list(self._parameters_in), self._whole_step or self.optimizer.step)

    def give_up(self) -> None:
        """Leave the parameters as they are."""
        self._end_guard()

    def _apply(self, buckets: list[GradientSum | None], step: Callable[[], Any]) -> list[Tensor]:
        for bucket in buckets:
            if bucket is not None:
                bucket.wait()  # raises before anything has changed
        parameters = [parameter for bucket in buckets for parameter in self._parameters_in.pop(bucket)]
        entries = {parameter: self._entries.pop(parameter) for parameter in parameters}
        if not self._entries:
            self._end_guard()
        self._before_step(parameters)
        if entries:
            with _as_after_backward(parameters[0].device.type), self._restricted_to(entries):
                step()
        return parameters

    @contextmanager
    def _restricted_to(self, entries: dict[Tensor, _Entry]) -> Iterator[None]:
        """Show the optimizer only these parameters, with the gradients and hyperparameters that were staged."""
        optimizer = self.optimizer
        # In the order of the optimizer's own groups: a norm over all gradients depends on the order of summation.
        parts: dict[_StagedGroup, list[Tensor]] = {}
        for parameter, entry in sorted(entries.items(), key=lambda item: item[1].place):
            parts.setdefault(entry.group, []).append(parameter)
        restricted = [(group, group.restricted_to(part)) for group, part in parts.items()]
        present_groups = optimizer.param_groups
        present_state = optimizer.state
        optimizer.param_groups = [group for _, group in restricted]
        optimizer.state = self._state
        others: dict[Tensor, Tensor | None] = {}  # gradients that were zeroed or replaced since the staging
        for parameter, entry in entries.items():
            gradient = parameter.grad
            if gradient is not entry.gradient:
                others[parameter] = gradient
                parameter.grad = entry.gradient
        try:
            yield
        finally:
            optimizer.param_groups = present_groups
            optimizer.state = present_state
            for staged, group in restricted:
                staged.keep_changes(group)
            for parameter, gradient in others.items():
                parameter.grad = gradient

    def _end_guard(self) -> None:
        # If another state has been assigned since, it stays.
        if self.optimizer.state is self._guard:
            self.optimizer.state = self._state


class _Entry(NamedTuple):
    """What an update keeps for one parameter."""

    place: int
    group: _StagedGroup
    bucket: GradientSum | None
    gradient: Tensor


class _StagedGroup:
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


def _as_after_backward(device_type: str) -> ExitStack:
    """Apply an update as if right after backward, in whatever context the parameter is first used.

    That may be inference mode, autocast, inside a `torch.func` transform, or under a dispatch mode of
    the user's that would record the optimizer's operations (selective checkpointing caches them, and then refuses the
    update). Each of these contexts takes some microseconds to leave, and a step has many buckets.
    """
    contexts = ExitStack()
    if torch.is_inference_mode_enabled():
        contexts.enter_context(torch.inference_mode(False))
    if torch.is_autocast_enabled(device_type):
        contexts.enter_context(torch.autocast(device_type, enabled=False))
    if has_modes():
        contexts.enter_context(without_modes())
    return contexts


class PendingUpdates:
    """The updates that are staged and not yet applied, found by parameter. May be used from any thread.

    Args:
        before_step: called before a step, with the parameters that it will update. Their gradients have arrived.
    """

    def __init__(self, before_step: Callable[[list[Tensor]], None] = lambda parameters: None) -> None:
        self._before_step = before_step
        self._by_parameter: dict[Tensor, PendingUpdate] = {}
        self.lock = threading.RLock()  # held while an update is applied

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._by_parameter

    def __bool__(self) -> bool:
        return bool(self._by_parameter)

    @property
    def are_whole(self) -> bool:
        """Whether a pending update must be applied to all its parameters in one step."""
        return any(update.is_whole for update in set(self._by_parameter.values()))

    def parameters(self) -> list[Tensor]:
        """Return the parameters that have a pending update."""
        return list(self._by_parameter)

    def stage(
        self,
        optimizer: Optimizer,
        reductions: dict[Tensor, GradientSum],
        whole_step: Callable[[], Any] | None = None,
    ) -> list[Tensor]:
        """Postpone a step of ``optimizer``; see `PendingUpdate`. Return the parameters that it will update.

        What is pending for the optimizer, or for one of its parameters, is applied first.
        """
        with self.lock:
            if self._by_parameter:
                self.finish_optimizer(optimizer)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        self.apply_for(parameter)
            update = PendingUpdate(
                optimizer, reductions, whole_step, lambda: self.finish_optimizer(optimizer), self._forget
            )
            self._by_parameter.update(dict.fromkeys(update.parameters(), update))
            return update.parameters()

    def apply_for(self, parameter: Tensor) -> list[Tensor]:
        """Bring ``parameter`` up to date. Return all parameters that were updated."""
        with self.lock:
            update = self._by_parameter.get(parameter)
            return [] if update is None else update.apply_for(parameter)

    def finish_optimizer(self, optimizer: Optimizer) -> None:
        """Bring all parameters of ``optimizer`` up to date."""
        with self.lock:
            for update in set(self._by_parameter.values()):
                if update.optimizer is optimizer:
                    update.finish()

    def finish(self) -> None:
        """Bring everything up to date."""
        with self.lock:
            while self._by_parameter:
                next(iter(self._by_parameter.values())).finish()

    def clear(self) -> None:
        """Give up what is pending."""
        with self.lock:
            for update in set(self._by_parameter.values()):
                update.give_up()
            self._forget(list(self._by_parameter))

    def _forget(self, parameters: list[Tensor]) -> None:
        # Before the step, not after it: the step itself uses the parameters.
        for parameter in parameters:
            del self._by_parameter[parameter]
        self._before_step(parameters)
