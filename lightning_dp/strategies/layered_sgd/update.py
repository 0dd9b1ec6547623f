"""The postponed update: staged when backward has ended, applied when it is needed and the gradients have arrived.

Algorithm 3 of arXiv 1906.05936 postpones the update of step t past the loading of batch t+1 (line 10). Here it is
postponed until the parameters are used: by the next forward, a callback, a checkpoint. `ParameterWatch` sees such uses,
except for those that its module lists. So a postponed update looks like one that was applied immediately: neither the
parameters, nor ``optimizer.state``, nor ``parameter.grad``, which stays as it is until it is zeroed, show a difference.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._private.torch_names import (
    has_modes,
    mark_stepped,
    step_below_hooks,
    without_modes,
    without_torch_function,
)
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientSum
from lightning_dp.strategies.layered_sgd.parameter_watch import Moment


class PendingUpdate:
    """One step of one optimizer, with the gradients and hyperparameters of the moment it was staged.

    A step of the optimizer has a fixed overhead, so each takes as many parameters as it can. And to look up a
    parameter takes as long as to update a small one, so what is kept here is kept by bucket.

    Args:
        optimizer: the optimizer. Until the update is applied, its ``state`` is replaced by a guard: reading it applies
            the whole update first.
        reductions: the bucket that carries each parameter's gradient. Must not change afterwards.
        whole_step: performs the step once all gradients are there. None if the optimizer may step some parameters
            before others, and has no step hooks: then the buckets are applied as they arrive and are needed. A hook
            that is registered later would not have seen this step if it had not been postponed.
        finish: called when ``optimizer.state`` is read; must apply the whole update.
        before_step: called before a step, with this update and the parameters of the step. Their gradients have
            arrived.

    Attributes:
        staged_at: when the update was staged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reductions: dict[Tensor, GradientSum],
        whole_step: Callable[[], Any] | None,
        finish: Callable[[], None],
        before_step: Callable[[PendingUpdate, list[Tensor]], None],
    ) -> None:
        self.optimizer = optimizer
        self.staged_at = Moment.now()
        self._reductions = reductions
        self._whole_step = whole_step
        self._before_step = before_step
        # In the order of the optimizer's parameters, which is about that in which the forward needs the buckets.
        self._parts: dict[GradientSum | None, StagedPart] = {}
        # All parts in the order of the optimizer's groups: a norm over all gradients depends on the order of summation.
        self._whole = StagedPart()
        with without_torch_function():  # the watch would wait for the gradients
            for group in map(StagedGroup, optimizer.param_groups):
                for parameter in group.original["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        bucket = reductions.get(parameter)
                        if bucket not in self._parts:
                            self._parts[bucket] = StagedPart()
                        self._parts[bucket].add(group, parameter, gradient)
                        self._whole.add(group, parameter, gradient)
        self._num_parts = len(self._parts)
        self._state = optimizer.state
        self._guard = GuardedState(optimizer, finish)
        if self._parts:
            optimizer.state = self._guard  # type: ignore[assignment]
        # A schedule warns if it steps before its optimizer has. Here the step is only postponed.
        mark_stepped(optimizer)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are updated in one step."""
        return self._whole_step is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be updated."""
        return not self._parts

    def parameters(self) -> list[Tensor]:
        """Return the parameters that are still to be updated."""
        return [parameter for part in self._parts.values() for parameter in part.parameters]

    def apply_for(self, parameter: Tensor) -> list[Tensor]:
        """Update ``parameter``, and in the same step all others in its bucket and in buckets that have arrived.

        Return the parameters that were updated.
        """
        if self._whole_step is not None:
            return self.finish()
        needed = self._reductions.get(parameter)
        _wait_for([needed])  # before the others are asked, because they may arrive meanwhile
        others = (bucket for bucket in self._parts if bucket is not needed)
        # Buckets arrive in about the order in which the forward needs them, so the search ends at the first that has
        # not. To ask all that are still to come, once for each bucket, can take longer than the whole update.
        arrived = list(takewhile(lambda bucket: bucket is None or bucket.has_arrived, others))
        _wait_for(arrived)
        return self._apply([needed, *arrived], step_below_hooks(self.optimizer))

    def finish(self) -> list[Tensor]:
        """Update all that is left, in one step. Return what was updated."""
        buckets = list(self._parts)
        _wait_for(buckets)  # raises before anything has changed
        return self._apply(buckets, self._whole_step or step_below_hooks(self.optimizer))

    def give_up(self) -> None:
        """Leave the parameters as they are."""
        self._end_guard()

    def _apply(self, buckets: list[GradientSum | None], step: Callable[[], Any]) -> list[Tensor]:
        if not buckets:
            return []
        first, *others = [self._parts.pop(bucket) for bucket in buckets]
        part = self._whole if len(buckets) == self._num_parts else first.joined_with(others)
        if not self._parts:
            self._end_guard()
        self._before_step(self, part.parameters)
        contexts = as_after_backward(part.parameters[0].device.type)
        if self.staged_at.thread != threading.get_ident():
            contexts.enter_context(without_torch_function())  # the parameters are still watched
        with contexts, part.shown_to(self.optimizer, self._state):
            step()
        return part.parameters

    def _end_guard(self) -> None:
        # If another state has been assigned since, it stays.
        if self.optimizer.state is self._guard:
            self.optimizer.state = self._state


def _wait_for(buckets: Iterable[GradientSum | None]) -> None:
    for bucket in buckets:
        if bucket is not None:
            bucket.wait()


class PendingUpdates:
    """The updates that are staged and not yet applied, found by parameter. May be used from any thread.

    Args:
        before_step: called before a step, with the parameters that it will update, whose gradients have arrived, and
            the moment when the step was staged.
    """

    def __init__(
        self, before_step: Callable[[list[Tensor], Moment], None] = lambda parameters, staged_at: None
    ) -> None:
        self._before_step = before_step
        self._updates: list[PendingUpdate] = []  # in the order of staging
        self._by_parameter: dict[Tensor, PendingUpdate] = {}
        self.lock = threading.RLock()  # held while an update is applied

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._by_parameter

    def __bool__(self) -> bool:
        return bool(self._updates)

    @property
    def are_whole(self) -> bool:
        """Whether a pending update must be applied to all its parameters in one step."""
        return any(update.is_whole for update in self._updates)

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
            if self._updates:
                self.finish_optimizer(optimizer)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        self.apply_for(parameter)
            update = PendingUpdate(
                optimizer, reductions, whole_step, lambda: self.finish_optimizer(optimizer), self._forget
            )
            parameters = update.parameters()
            if parameters:
                self._updates.append(update)
                self._by_parameter.update(dict.fromkeys(parameters, update))
            return parameters

    def apply_for(self, parameter: Tensor) -> list[Tensor]:
        """Bring ``parameter`` up to date. Return all parameters that were updated."""
        with self.lock:
            update = self._by_parameter.get(parameter)
            return [] if update is None else update.apply_for(parameter)

    def finish_optimizer(self, optimizer: Optimizer) -> None:
        """Bring all parameters of ``optimizer`` up to date."""
        with self.lock:
            for update in list(self._updates):
                if update.optimizer is optimizer:
                    update.finish()

    def finish(self) -> None:
        """Bring everything up to date."""
        with self.lock:
            while self._updates:
                self._updates[0].finish()

    def clear(self) -> None:
        """Give up what is pending."""
        with self.lock:
            for update in self._updates:
                update.give_up()
            self._updates.clear()
            self._by_parameter.clear()

    def _forget(self, update: PendingUpdate, parameters: list[Tensor]) -> None:
        # Before the step, not after it: the step itself uses the parameters.
        if update.is_done:
            self._updates.remove(update)
        if self._updates:
            for parameter in parameters:
                del self._by_parameter[parameter]
        else:
            self._by_parameter.clear()
        self._before_step(parameters, update.staged_at)


# --- A step of an optimizer as it was staged: which parameters it updates, with which gradients and hyperparameters.

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


# --- ``optimizer.state`` while an update is pending.


class GuardedState(MutableMapping[Any, Any]):
    """Stands in for ``optimizer.state`` while an update is pending, and applies the update before it shows anything."""

    def __init__(self, optimizer: Optimizer, finish: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._finish = finish

    def _up_to_date(self) -> Any:
        self._finish()
        state = self._optimizer.state
        assert state is not self, "the pending update was not applied"
        return state

    def __getitem__(self, key: Any) -> Any:
        return self._up_to_date()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._up_to_date()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._up_to_date()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._up_to_date())

    def __len__(self) -> int:
        return len(self._up_to_date())

    def __contains__(self, key: object) -> bool:
        return key in self._up_to_date()

    def __or__(self, other: Any) -> Any:
        return self._up_to_date() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._up_to_date()

    def __getattr__(self, name: str) -> Any:  # `default_factory`, `copy`
        return getattr(self._up_to_date(), name)

    def __repr__(self) -> str:
        return repr(self._up_to_date())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._up_to_date(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._up_to_date().__reduce_ex__(protocol)
