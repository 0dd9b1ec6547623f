"""The postponed update: what is pending, and when each part of it is applied. `UpdateQueue` owns all of it.

Algorithm 3 of arXiv 1906.05936 postpones the update of step t past the loading of batch t+1 (line 10). Here it is
postponed until the parameters are used: by the next forward, a callback, a checkpoint. `ParameterWatch` sees such uses,
except for those that its module lists. So a postponed update looks like one that was applied immediately: neither the
parameters, nor ``optimizer.state``, nor ``parameter.grad``, which stays as it is until it is zeroed, show a difference.

A signal handler can interrupt any line of this file and call it again, for it may save a checkpoint. Therefore nothing
here relies on what it has read before it waited, and the user's optimizer is never changed, not even for a moment: a
step runs on a shallow copy of it.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dp._lightning import FRAMEWORK
from lightning_dp._private.torch_names import (
    has_modes,
    is_in_backward,
    local_part,
    mark_stepped,
    shallow_copy_of,
    step_below_hooks,
    without_modes,
    without_torch_function,
)
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientSum
from lightning_dp.strategies.layered_sgd.parameter_watch import AutogradPosition, ParameterWatch, StaleUseDetector

log = logging.getLogger(__name__)


class UpdateQueue:
    """Gradient sums that are under way, and the updates that wait for them. Any thread may call its methods.

    A parameter is watched from the moment backward hands its bucket over until the sum has arrived and the update, if
    one was staged, is applied.

    Args:
        module: the module that is trained.
        keeps_gradients: each backward has new memory for gradients (FSDP2), so one that somebody has read may stay
            where it is. If a copy took its place on the ranks that read it, backward would sum other buffers there.

    Attributes:
        lock: held while an update is applied.
        is_in_training_step: whether this is within ``training_step``, which may wait for sums.
        early_user: the first function since this was None that had to wait for a sum between two training steps.
    """

    def __init__(self, module: nn.Module, keeps_gradients: bool = False) -> None:
        self.lock = threading.RLock()
        self._module = module
        self._keeps_gradients = keeps_gradients
        self._read: set[Tensor] = set()  # parameters whose gradient of the last backward stays, and somebody may keep
        self._sums: dict[Tensor, GradientSum] = {}  # of the last backward pass, by parameter
        self._updates: list[PendingUpdate] = []  # in the order of staging
        self._by_parameter: dict[Tensor, PendingUpdate] = {}
        self._watch = ParameterWatch(self._before_use, self._before_gradient)
        self._stale_uses = StaleUseDetector()
        self._of_this_backward = ExitStack()
        self._load_hooks: dict[Optimizer, list[Any]] = {}  # of the optimizers whose state is guarded
        self._is_stepping = False
        self.is_in_training_step = False
        self.early_user: str | None = None
        _queues.add(self)

    def __bool__(self) -> bool:
        return bool(self._updates)

    @property
    def is_interrupted(self) -> bool:
        """Whether the calling thread is in the middle of a step: the caller is a signal handler."""
        with self.lock:  # another thread's step is waited for
            return self._is_stepping

    # Backward: sums begin.

    def begin_backward(self, loss: Tensor) -> None:
        """Free the buckets, which backward is going to refill, and start to check for uses of stale parameters."""
        self._of_this_backward.close()  # an earlier backward may have raised
        self.bring_up_to_date()
        self._sums.clear()
        self._read.clear()
        with self.lock:  # another thread may be about to use a suspect
            self._of_this_backward.enter_context(self._stale_uses.watching(loss, self._module))

    def add_sum(self, parameters: Sequence[Tensor], gradient_sum: GradientSum) -> None:
        """Note that the gradients of ``parameters`` are being summed."""
        self._sums.update(dict.fromkeys(parameters, gradient_sum))
        self._watch.add(parameters)

    def end_backward(self) -> None:
        """End what `begin_backward` has begun."""
        self._of_this_backward.close()

    # The optimizer's step: it is staged.

    def guard(self, optimizer: Optimizer) -> None:
        """Let each look at ``optimizer.state`` apply the optimizer's update first, until `unguard`."""
        if not isinstance(optimizer.state, GuardedState):
            guard: Any = GuardedState(optimizer.state, lambda: _before_state_of(optimizer))
            optimizer.state = guard
        if optimizer not in self._load_hooks:
            self._load_hooks[optimizer] = [
                # A pending step must not overwrite a state that is loaded later.
                optimizer.register_load_state_dict_pre_hook(lambda each, _: self.finish(each)),
                optimizer.register_load_state_dict_post_hook(self.guard),
            ]

    def guards(self, optimizer: Optimizer) -> bool:
        """Whether `guard` was called, and not undone."""
        return optimizer in self._load_hooks

    def unguard(self, optimizer: Optimizer) -> None:
        """Undo `guard`. A reference to the guarded state that somebody has kept goes on to work."""
        for handle in self._load_hooks.pop(optimizer, ()):
            handle.remove()
        # The optimizer may have parameters of several models, and steps pending in the queue of another one.
        if isinstance(optimizer.state, GuardedState) and not _queues_that_guard(optimizer):
            optimizer.state = optimizer.state.plain

    def stage(
        self, optimizer: Optimizer, step: Callable[[Optimizer], Any] | None = None, by_bucket: bool = True
    ) -> None:
        """Postpone a step of ``optimizer`` until its parameters are used; see `PendingUpdate`.

        What is pending for the optimizer, or for one of its parameters, is applied first.
        """
        self.guard(optimizer)
        # An optimizer may have parameters of several models, each with a queue of its own. This one takes over their
        # watch, and knows nothing of their sums.
        for other in list(_queues):
            if other is not self and other.has_sums_of(optimizer):
                other.bring_up_to_date()
        with self.lock:
            if self._updates:
                self.finish(optimizer)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        self._apply_for(parameter)
            update = PendingUpdate(optimizer, dict(self._sums), step, by_bucket)
            # A schedule warns if it steps before its optimizer has. Here the step is only postponed.
            mark_stepped(optimizer)
            parameters = update.parameters()
            if not parameters:
                return
            self._by_parameter.update(dict.fromkeys(parameters, update))
            self._updates.append(update)
            self._watch.add(parameters)  # waiting for their gradients may have ended the watch
            # A gradient outside of its bucket was read, or set by hand. Its holder may change it after the step, for
            # example zero a buffer for accumulation. Little is lost: a reader has waited for the sum of the bucket.
            with without_torch_function():
                elsewhere = [parameter for parameter in parameters if not self._is_in_bucket(parameter)]
            for parameter in elsewhere:
                self._apply_for(parameter)

    def _is_in_bucket(self, parameter: Tensor) -> bool:
        """Return whether the gradient lies in its bucket, and nobody but the strategy has it."""
        if parameter in self._read:
            return False
        gradient_sum, gradient = self._sums.get(parameter), parameter.grad
        if gradient_sum is None or gradient is None:
            return False
        own = local_part(gradient)
        offset = own.data_ptr() - gradient_sum.buffer.data_ptr()
        return 0 <= offset < gradient_sum.buffer.nbytes or not own.numel()

    # The next forward, or another use: the update is applied.

    @contextmanager
    def running_forward(self, finish: bool) -> Iterator[None]:
        """Run a training step within the context, after the updates that must come before it. ``finish``: all must."""
        # One that cannot be split by bucket must be applied to all its parameters in one step.
        if finish or not all(update.by_bucket for update in self._updates):
            self.finish()
        # A parameter that is up to date now cannot be used too early in this forward.
        with self.lock:  # another thread may use a suspect meanwhile
            suspects = list(self._stale_uses.suspects)
            self._watch.remove(parameter for parameter in suspects if parameter not in self._by_parameter)
            self._stale_uses.begin_forward()
        self.is_in_training_step = True
        try:
            yield
        finally:
            self.is_in_training_step = False

    def _before_use(self, parameter: Tensor) -> None:
        with self.lock:
            if not is_in_backward():
                self._note_early_use([parameter])
            if torch.jit.is_tracing():
                # `torch.jit.trace` runs twice and compares the lines that call operators, so the watch must stay.
                self._watch.add([parameter, *self._apply_for(parameter)])
                return
            if parameter in self._by_parameter:
                self._apply_for(parameter)
            elif parameter not in self._stale_uses.suspects and parameter in self._sums:
                # No update is staged. The caller may run its own backward, which would accumulate into a gradient that
                # is still being reduced. Within backward it must not wait: the next bucket in rank 0's order may be one
                # that this rank fills only when the caller, a signal handler say, has returned.
                if not is_in_backward():
                    self._sums[parameter].wait()
                return
            self._stale_uses.note_seen(parameter)
            self._watch.remove([parameter])

    def _before_gradient(self, parameter: Tensor) -> None:
        with self.lock:
            self._note_early_use([parameter])
            # The reader of a gradient may change it, which must not change an earlier update.
            self._apply_for(parameter)
            if parameter in self._sums:
                self._sums[parameter].wait()
                if not is_in_backward():  # at whose end DDP requires that each gradient lies in its bucket
                    self._own_gradient(parameter)

    def before_state(self, optimizer: Optimizer) -> None:
        """Apply what is pending for ``optimizer``, whose state somebody is about to see."""
        with self.lock:
            self._note_early_use([p for p, update in list(self._by_parameter.items()) if update.optimizer is optimizer])
            self.finish(optimizer)

    def _note_early_use(self, parameters: Iterable[Tensor]) -> None:
        if self.is_in_training_step or self.early_user is not None:
            return
        sums = {self._sums[parameter] for parameter in parameters if parameter in self._sums}
        if not all(each.has_arrived for each in sums):
            self.early_user = _user_on_stack()

    def _apply_for(self, parameter: Tensor) -> list[Tensor]:
        """Bring ``parameter`` up to date. Return all parameters that were updated."""
        update = self._by_parameter.get(parameter)
        if update is None:
            return []
        updated = self._apply(update, update.needed_for(parameter))
        # Suspects stay watched until they are used: an unseen use before this has read old values.
        if suspects := self._stale_uses.suspects:
            self._watch.add(each for each in updated if each in suspects)
        return updated

    def _apply(self, update: PendingUpdate, buckets: list[GradientSum | None]) -> list[Tensor]:
        """Update the parameters of ``buckets`` in one step; their sums have arrived. Return what was updated."""
        was_stepping = self._is_stepping
        self._is_stepping = True  # from here on: a signal handler does not see what is taken and not yet applied
        try:
            part = update.take(buckets)
            if not part:
                return []
            parameters = [staged.parameter for staged in part]
            # Before the step, not after it: the step itself uses the parameters.
            if update.is_done and update in self._updates:
                self._updates.remove(update)
            for parameter in parameters:
                self._by_parameter.pop(parameter, None)
            contexts = as_after_backward(part[0].gradient.device.type)
            if update.staged_at.is_of_this_thread:
                self._watch.remove(parameters)
                if update.default_dtype != (present := torch.get_default_dtype()):
                    contexts.callback(torch.set_default_dtype, present)
                    torch.set_default_dtype(update.default_dtype)
            else:
                # They stay watched: the thread that trains may use one of them meanwhile, and then waits for the lock.
                contexts.enter_context(without_torch_function())
            self._stale_uses.note_updated(parameters, update.staged_at)
            with contexts:
                update.step(part)
            return parameters
        finally:
            self._is_stepping = was_stepping

    def finish(self, optimizer: Optimizer | None = None) -> None:
        """Bring all parameters of ``optimizer`` up to date; None: all. They are those of synchronous SGD then."""
        with self.lock:
            for update in list(self._updates):
                if optimizer is None or update.optimizer is optimizer:
                    self._apply(update, update.all_arrived())

    # Gradients.

    def wait_for_gradients(self) -> None:
        """Wait until all gradients are averaged."""
        for gradient_sum in set(self._sums.values()):
            gradient_sum.wait()
        # Parameters with a pending update must remain watched.
        self._watch.remove(parameter for parameter in self._sums if parameter not in self._by_parameter)

    def bring_up_to_date(self) -> None:
        """Finish all updates and all gradients. Afterwards nothing is pending or watched."""
        self.finish()
        self.wait_for_gradients()
        with self.lock:
            self._watch.remove(list(self._stale_uses.suspects))

    def with_own_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that runs ``closure``, and waits for its gradients, which each parameter then owns.

        Under DDPStrategy a gradient that somebody keeps survives the next backward, and may be replaced through
        ``p.grad.data``. A view would be overwritten by the next backward, or leave the bucket with its old value.
        """

        def closure_then_gradients() -> Any:
            output = closure()
            self.wait_for_gradients()
            for parameter in self._sums:
                self._own_gradient(parameter)
            return output

        return closure_then_gradients

    def _own_gradient(self, parameter: Tensor) -> None:
        """Give ``parameter`` a gradient of its own, instead of a view of the bucket."""
        if self._keeps_gradients:
            self._read.add(parameter)
            return
        bucket = self._sums[parameter].buffer.untyped_storage().data_ptr()
        with without_torch_function():  # the watch would come here again
            gradient = parameter.grad
            if gradient is not None and local_part(gradient).untyped_storage().data_ptr() == bucket:
                with as_after_backward(gradient.device.type):  # who reads it may do so in inference mode
                    parameter.grad = gradient.clone()

    def has_sums_of(self, optimizer: Optimizer) -> bool:
        """Whether the last backward pass has summed a gradient of a parameter of ``optimizer``."""
        return any(parameter in self._sums for group in optimizer.param_groups for parameter in group["params"])

    def close(self) -> None:
        """Give up what is pending."""
        _queues.discard(self)
        self._of_this_backward.close()
        with self.lock:
            self._watch.remove([*self._sums, *self._stale_uses.suspects, *self._by_parameter])
            self._updates.clear()
            self._by_parameter.clear()
            self._sums.clear()
            for optimizer in list(self._load_hooks):
                self.unguard(optimizer)


_STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen ")
_FOLDERS_BELOW_USERS = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (torch.__file__, Path(__file__).parent, inspect.getfile(sys.modules[FRAMEWORK]))
)


def _user_on_stack() -> str:
    """Name the function that uses something: the innermost one outside of torch, Lightning and this package."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        is_library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        is_below = file.startswith(_FOLDERS_BELOW_USERS) and f"{os.sep}callbacks{os.sep}" not in file
        if not is_library and not is_below:
            return f"{frame.f_code.co_qualname} ({file}:{line})"
    return FRAMEWORK


class Staged(NamedTuple):
    """A parameter whose update is pending.

    Attributes:
        place: in the order of the optimizer's groups.
        group: index of its group.
        parameter: the parameter.
        gradient: the one that was staged.
    """

    place: int
    group: int
    parameter: Tensor
    gradient: Tensor


class PendingUpdate:
    """One step of one optimizer, with the gradients and hyperparameters of the moment it was staged.

    A step of the optimizer has a fixed overhead, so each takes as many parameters as it can. And to look up a
    parameter takes as long as to update a small one, so what is kept here is kept by bucket.

    Args:
        optimizer: the optimizer. It is not changed; a shallow copy of it takes the step.
        sums: the bucket that carries each parameter's gradient, on the host a `BucketReduction`. Must not change
            afterwards.
        step: performs the step of the copy that it is given. None: the optimizer's own, below its hooks: it has none,
            and a hook that is registered later would not have seen this step if it had not been postponed.
        by_bucket: the step may update some parameters before others, so the buckets are applied as they arrive and are
            needed. Else it needs all gradients.

    Attributes:
        staged_at: when the update was staged.
        default_dtype: of then, for states that the step makes. Lightning's "64-true" has another one in forwards.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sums: dict[Tensor, GradientSum],
        step: Callable[[Optimizer], Any] | None,
        by_bucket: bool,
    ) -> None:
        self.optimizer = optimizer
        self.by_bucket = by_bucket
        self._step = step
        self.staged_at = AutogradPosition.now()
        self.default_dtype = torch.get_default_dtype()
        self._sums = sums
        # In the order of the optimizer's parameters, which is about that in which the forward needs the buckets.
        self._parts: dict[GradientSum | None, list[Staged]] = {}
        places = count()
        with without_torch_function():  # the watch would wait for the gradients
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if (gradient := parameter.grad) is not None:
                        staged = Staged(next(places), index, parameter, gradient)
                        self._parts.setdefault(sums.get(parameter), []).append(staged)
        # Schedules and users change the groups afterwards, tensors in place. Plain values cannot change.
        self._groups = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        state: Any = optimizer.state
        self._state = state.plain if isinstance(state, GuardedState) else state

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be updated."""
        return not self._parts

    def parameters(self) -> list[Tensor]:
        """Return the parameters that are still to be updated."""
        return [staged.parameter for part in self._parts.values() for staged in part]

    def needed_for(self, parameter: Tensor) -> list[GradientSum | None]:
        """Wait for the bucket of ``parameter``. Return it, and all buckets that have arrived.

        Raises:
            RuntimeError: a sum failed. Nothing has changed then.
        """
        if not self.by_bucket:
            return self.all_arrived()
        needed = self._sums.get(parameter)
        _wait_for([needed])  # before the others are asked, because they may arrive meanwhile
        others = (bucket for bucket in list(self._parts) if bucket is not needed)
        # Buckets arrive in about the order in which the forward needs them, so the search ends at the first that has
        # not. To ask all that are still to come, once for each bucket, can take longer than the whole update.
        arrived = list(takewhile(lambda bucket: bucket is None or bucket.has_arrived, others))
        _wait_for(arrived)
        return [needed, *arrived]

    def all_arrived(self) -> list[GradientSum | None]:
        """Wait for all buckets that are left, and return them."""
        buckets = list(self._parts)
        _wait_for(buckets)
        return buckets

    def take(self, buckets: list[GradientSum | None]) -> list[Staged]:
        """Take the parameters of ``buckets`` out of the update.

        A signal handler may have taken some or all of them while the caller waited.
        """
        if not self.by_bucket:
            # At once: a signal handler in between would apply the rest by itself, with a norm of those gradients alone.
            taken, self._parts = self._parts, {}
            parts = list(taken.values())
        else:
            parts = [part for bucket in buckets if (part := self._parts.pop(bucket, None)) is not None]
        # In the order of the optimizer: a norm over all gradients depends on the order of summation.
        return sorted((staged for part in parts for staged in part), key=lambda staged: staged.place)

    def step(self, part: list[Staged]) -> None:
        """Update the parameters of ``part`` by their staged gradients, also those that were zeroed since."""
        by_group: dict[int, list[Tensor]] = {}
        for staged in part:
            by_group.setdefault(staged.group, []).append(staged.parameter)
        stepping = shallow_copy_of(self.optimizer)
        stepping.param_groups = [{**self._groups[index], "params": each} for index, each in by_group.items()]
        stepping.state = self._state
        with ExitStack() as undo:
            for staged in part:
                present = staged.parameter.grad
                if present is not staged.gradient:
                    undo.callback(setattr, staged.parameter, "grad", present)
                    staged.parameter.grad = staged.gradient
            if self._step is not None:
                self._step(stepping)
            else:
                step_below_hooks(stepping)()


def _wait_for(buckets: Iterable[GradientSum | None]) -> None:
    for bucket in buckets:
        if bucket is not None:
            bucket.wait()


def as_after_backward(device_type: str) -> ExitStack:
    """Apply an update as if right after backward, in whatever context the parameter is first used.

    That may be inference mode, autocast, inside a `torch.func` transform, while `torch.jit.trace` records, or under a
    dispatch mode of the user's that would record the optimizer's operations (selective checkpointing caches them, and
    then refuses the update). Each of these contexts takes some microseconds to leave, and an update may have as many
    steps as there are buckets.
    """
    contexts = ExitStack()
    if torch.is_inference_mode_enabled():
        contexts.enter_context(torch.inference_mode(False))
    if torch.is_autocast_enabled(device_type):
        contexts.enter_context(torch.autocast(device_type, enabled=False))
    if has_modes():
        contexts.enter_context(without_modes())
    return contexts


class GuardedState(MutableMapping[Any, Any]):
    """Stands in for ``optimizer.state`` in training, and applies a pending update before it shows anything.

    It stays there from the start of a fit to its end, so a reference that a callback keeps shows each step's state.

    Args:
        plain: the optimizer's own state.
        finish: applies the update.
    """

    def __init__(self, plain: Any, finish: Callable[[], None]) -> None:
        self.plain = plain
        self._finish = finish

    def _up_to_date(self) -> Any:
        self._finish()
        return self.plain

    def __getitem__(self, key: Any) -> Any:
        return self._up_to_date()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._up_to_date()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._up_to_date()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._up_to_date()))  # a list, because the first steps add keys, maybe in another thread

    def __len__(self) -> int:
        return len(self._up_to_date())

    def __contains__(self, key: object) -> bool:
        return key in self._up_to_date()

    # Not those of `MutableMapping`: they ask by ``[]``, and the state of an optimizer, a `defaultdict`, makes an entry.

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        return self._up_to_date().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dictionary."""
        return self._up_to_date().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        return self._up_to_date().setdefault(key, default)

    def __or__(self, other: Any) -> Any:
        return self._up_to_date() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._up_to_date()

    def __getattr__(self, name: str) -> Any:  # `default_factory`, `copy`
        if name in ("plain", "_finish"):  # an unpickled or half-made guard has neither
            raise AttributeError(name)
        return getattr(self._up_to_date(), name)

    def __repr__(self) -> str:
        return repr(self._up_to_date())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._up_to_date(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._up_to_date().__reduce_ex__(protocol)


# --- What concerns all queues: an optimizer of several models, and forks. A forked process, such as a loader's worker,
# starts with everything up to date: it has no communicator.

_queues: WeakSet[UpdateQueue] = WeakSet()  # that are not closed
_locks = ExitStack()


def _queues_that_guard(optimizer: Optimizer) -> list[UpdateQueue]:
    return [queue for queue in list(_queues) if queue.guards(optimizer)]


def _before_state_of(optimizer: Optimizer) -> None:
    """Apply what is pending for ``optimizer`` in any queue: the loops of several models may step it in turn."""
    for queue in _queues_that_guard(optimizer):
        queue.before_state(optimizer)


def _before_fork() -> None:
    for queue in list(_queues):
        # Held during the fork: the child lacks the other threads, and would find a lock of theirs taken for ever.
        _locks.enter_context(queue.lock)
        try:
            queue.bring_up_to_date()
        except Exception as error:  # Python would only print it, and fork
            log.warning(f"a process is forked while an update is pending that failed: {error}")


def _after_fork() -> None:
    _locks.close()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
