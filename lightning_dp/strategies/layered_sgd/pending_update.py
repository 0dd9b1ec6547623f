"""The postponed update: staged when backward has ended, applied when the averaged gradients are there and needed.

Algorithm 3 of arXiv 1906.05936 postpones the update of step t past the loading of batch t+1 (line 10). Here it is
postponed until somebody needs the parameters, which `ParameterWatch` sees: whoever reads them (the next forward, a
callback, a checkpoint) gets the updated ones, so nothing can tell a postponed update from one that was done at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._private.torch_names import mark_stepped
from lightning_dp.strategies.layered_sgd.bucket import BucketReduction


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of everything in the parameter groups but the parameters; schedules change some of it in place."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class PendingUpdate:
    """One step of one optimizer, with the gradients and hyperparameters of the moment it was staged.

    Staging takes the gradients off the parameters (``.grad`` is None afterwards, as after ``zero_grad``).

    Args:
        optimizer: the optimizer.
        reductions: for each parameter, the bucket that carries its gradient.
        whole_step: performs the step, all gradients being in place. None if the optimizer may step some parameters
            before others: then each bucket's parameters are updated on their own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reductions: dict[Tensor, BucketReduction],
        whole_step: Callable[[], Any] | None,
    ) -> None:
        self.optimizer = optimizer
        self._whole_step = whole_step
        self._hyperparameters = hyperparameters(optimizer)
        self._reductions = reductions
        self._gradients: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._gradients[parameter] = parameter.grad
                    parameter.grad = None
        # A scheduler warns if it steps before its optimizer has. It has, as far as the schedule is concerned.
        mark_stepped(optimizer)

    @property
    def is_whole(self) -> bool:
        """Whether all parameters are updated together."""
        return self._whole_step is not None

    def parameters(self) -> list[Tensor]:
        """Those still to be updated."""
        return list(self._gradients)

    def apply_for(self, parameter: Tensor) -> None:
        """Update ``parameter``, and whatever must be updated together with it."""
        if self._whole_step is not None:
            self.finish()
            return
        bucket = self._reductions.get(parameter)
        self._apply([p for p in self._gradients if self._reductions.get(p) is bucket], self.optimizer.step)

    def finish(self) -> None:
        """Update all that is left."""
        if self._whole_step is not None:
            self._apply(list(self._gradients), self._whole_step)
            return
        while self._gradients:
            self.apply_for(next(reversed(self._gradients)))

    def _apply(self, parameters: list[Tensor], step: Callable[[], Any]) -> None:
        for bucket in {self._reductions[p] for p in parameters if p in self._reductions}:
            bucket.wait()
        for parameter in parameters:
            parameter.grad = self._gradients.pop(parameter)
        # Whoever brings the update about, it is done as after a backward: not in inference mode, not under autocast.
        device_type = parameters[0].device.type if parameters else "cpu"
        with self._as_staged(), torch.inference_mode(False), torch.autocast(device_type, enabled=False):
            step()
        for parameter in parameters:
            parameter.grad = None

    @contextmanager
    def _as_staged(self) -> Iterator[None]:
        """Put the hyperparameters back to the moment of staging; schedules may have moved on since."""
        present = hyperparameters(self.optimizer)
        # Groups may have been added meanwhile (fine-tuning), at the end.
        groups = list(zip(self.optimizer.param_groups, self._hyperparameters, present, strict=False))
        for group, staged, _ in groups:
            group.update(staged)
        try:
            yield
        finally:
            for group, staged, current in groups:
                # What a hook changed during the step stays changed.
                group.update({key: value for key, value in current.items() if group.get(key) is staged[key]})


class PendingUpdates:
    """The updates that are staged and not yet applied, found by parameter."""

    def __init__(self) -> None:
        self._by_parameter: dict[Tensor, PendingUpdate] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._by_parameter

    def __bool__(self) -> bool:
        return bool(self._by_parameter)

    @property
    def are_whole(self) -> bool:
        """Whether an optimizer waits that updates all its parameters together."""
        return any(update.is_whole for update in set(self._by_parameter.values()))

    def clear(self) -> None:
        """Give up what is pending."""
        self._by_parameter.clear()

    def stage(self, update: PendingUpdate) -> None:
        """Take charge of ``update``."""
        self._by_parameter.update(dict.fromkeys(update.parameters(), update))

    def apply_for(self, parameter: Tensor) -> None:
        """Bring ``parameter`` up to date."""
        self._run(self._by_parameter[parameter], lambda update: update.apply_for(parameter))

    def finish(self) -> None:
        """Bring everything up to date."""
        while self._by_parameter:
            self._run(next(iter(self._by_parameter.values())), PendingUpdate.finish)

    def _run(self, update: PendingUpdate, act: Callable[[PendingUpdate], None]) -> None:
        # Forgotten first, for the step itself uses the parameters.
        for parameter in update.parameters():
            del self._by_parameter[parameter]
        try:
            act(update)
        finally:
            self.stage(update)
