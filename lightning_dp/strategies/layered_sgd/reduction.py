"""What happens to gradients and updates between a backward pass and the next use of the parameters."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dp._private.torch_names import call_after_backward, is_in_backward, without_torch_function
from lightning_dp.collectives import streams
from lightning_dp.collectives.compression.stages import CompressedAllReduce
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientCommunicator, GradientSum
from lightning_dp.strategies.layered_sgd.parameter_watch import Moment, ParameterWatch, StaleUseDetector
from lightning_dp.strategies.layered_sgd.update import PendingUpdates

# No `from __future__ import annotations`: DDP checks the communication hook's annotations as objects.


class LayeredReduction:
    """Sums gradient buckets in the background, and holds the updates that wait for them. Independent of Lightning.

    The parameters of a bucket are watched from the moment backward hands the bucket over until its sum has arrived and
    the update, if one was staged, is applied.

    Args:
        communicator: sums the buckets; closed by `close`.
        world_size: number of ranks that the gradients are averaged over.
        module: the module that is trained.
    """

    def __init__(self, communicator: GradientCommunicator, world_size: int, module: nn.Module) -> None:
        self._communicator = communicator
        self._world_size = world_size
        self._module = module
        self._reductions: dict[Tensor, GradientSum] = {}  # of the last backward pass, by parameter
        self._has_final_buckets = False
        self._watch = ParameterWatch(self._before_use, self._before_gradient)
        self.updates = PendingUpdates(self._before_update)
        self._stale_uses = StaleUseDetector()
        self._of_this_backward = ExitStack()
        self.is_in_backward = False
        self._will_release = False
        self._issue_order = communicator.issue_order
        # In one forward parameters stay watched until they are used, also if another use has updated them.
        self._is_measuring = False
        self._fork_guard = ForkGuard(self.updates.lock, self.bring_up_to_date)
        self._load_hooks: dict[Optimizer, Any] = {}

    def feed_from(self, model: DistributedDataParallel) -> None:
        """Take the gradient buckets of ``model`` from now on."""
        self._has_final_buckets = False
        model.register_comm_hook(None, self._reduce_bucket)

    # Dynamo must not trace what follows: it runs in the middle of backward, or inside a compiled training step.

    @torch.compiler.disable
    def _reduce_bucket(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: hand the bucket to the communicator, and let backward continue.

        DDP is told that the bucket is done. Its gradients are views of the buffer that the communicator works on.
        """
        # Divided before the sum, as DDP does, so that 16-bit sums do not overflow (Algorithm 3 divides after it).
        buffer = bucket.buffer().div_(self._world_size)
        parameters = bucket.parameters()
        reduction = self._communicator.submit(bucket.index(), buffer, parameters)
        self._reductions.update(dict.fromkeys(parameters, reduction))
        self._watch.add(parameters)
        if not self._will_release and is_in_backward():
            # Not as late as `end_backward`: before that Lightning calls `on_after_backward`, which may read gradients.
            self._will_release = True
            call_after_backward(self._release)
        done = streams.new_future(buffer.device)
        done.set_result(buffer)
        return done

    @torch.compiler.disable
    def _release(self) -> None:
        """Release the buckets that the communicator has held back until the end of backward."""
        self._will_release = False
        self._communicator.release()

    @torch.compiler.disable
    def begin_backward(self, loss: Tensor) -> None:
        """Free the buckets, which backward is going to refill, and start to check for uses of stale parameters."""
        self._of_this_backward.close()  # an earlier backward may have raised
        self._is_measuring = False
        self._will_release = False
        self.bring_up_to_date()
        self._reductions.clear()
        with self.updates.lock:  # another thread may be about to use a suspect
            self._of_this_backward.enter_context(self._stale_uses.watching(loss, self._module))
        self.is_in_backward = True

    @torch.compiler.disable
    def end_backward(self) -> None:
        """End what `begin_backward` has begun."""
        self._of_this_backward.close()
        self.is_in_backward = False
        self._release()

    def stage(self, optimizer: Optimizer, whole_step: Callable[[], Any] | None) -> None:
        """Postpone a step of ``optimizer`` until its parameters are used; see `PendingUpdates.stage`."""
        if optimizer not in self._load_hooks:
            # A pending step must not overwrite a state that is loaded later.
            self._load_hooks[optimizer] = optimizer.register_load_state_dict_pre_hook(
                lambda optimizer, _: self.updates.finish_optimizer(optimizer)
            )
        with self.updates.lock:
            staged = self.updates.stage(optimizer, dict(self._reductions), whole_step)
            self._watch.add(staged)  # waiting for their gradients may have ended the watch
            for parameter in self._with_gradient_elsewhere(staged):
                self._apply_for(parameter)

    def _with_gradient_elsewhere(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient does not lie in its bucket: it was read, or set by hand.

        Somebody may hold such a gradient and change it after the step, for example zero a buffer for accumulation. The
        update must come before that. Little is lost: whoever reads a gradient has waited for the sum of its bucket.
        """
        with without_torch_function():
            return [parameter for parameter in parameters if not self._is_in_bucket(parameter)]

    def _is_in_bucket(self, parameter: Tensor) -> bool:
        reduction, gradient = self._reductions.get(parameter), parameter.grad
        if reduction is None or gradient is None:
            return False
        offset = gradient.data_ptr() - reduction.buffer.data_ptr()
        return 0 <= offset < reduction.buffer.nbytes or not gradient.numel()

    def finish_update(self) -> None:
        """Apply what is pending. Afterwards the parameters are those of synchronous SGD."""
        self.updates.finish()

    def wait_for_gradients(self) -> None:
        """Wait until all gradients are averaged."""
        for reduction in set(self._reductions.values()):
            reduction.wait()
        if self.updates:  # parameters with a pending update must remain watched
            self._watch.remove(parameter for parameter in self._reductions if parameter not in self.updates)
        else:
            self._watch.remove(self._reductions)

    def begin_forward(self) -> None:
        """Note that the forward begins. Call it after the updates that must come before the forward."""
        with self.updates.lock:  # another thread may use a suspect meanwhile
            self._watch.remove(parameter for parameter in self._stale_uses.suspects if parameter not in self.updates)
            self._stale_uses.begin_forward()
            if self.updates and self._issue_order is not None and not self._issue_order.is_measured:
                self._is_measuring = True
                self._watch.add(self._reductions)

    def before_forward(self) -> None:
        """Prepare for DDP rebuilding its buckets.

        DDP does so once, in the forward after the first backward pass, which shows in which order gradients become
        ready. It copies the gradients into the new buckets, so they must have been averaged by then.
        """
        if self._reductions and not self._has_final_buckets:
            self.wait_for_gradients()
            self._has_final_buckets = True

    def bring_up_to_date(self) -> None:
        """Finish all updates and all gradients. Afterwards nothing is pending or watched."""
        self.finish_update()
        self.wait_for_gradients()
        with self.updates.lock:
            self._watch.remove(self._stale_uses.suspects)

    @property
    def compressed(self) -> CompressedAllReduce | None:
        """The compressed all-reduce, with what it keeps between steps; None if sums are exact."""
        return self._communicator.compressed

    def own_gradients(self) -> None:
        """Give each parameter a gradient of its own, instead of a view of the bucket. Call `wait_for_gradients` first.

        Under DDPStrategy a gradient that somebody keeps survives the next backward, and may be replaced through
        ``p.grad.data``. A view would be overwritten by the next backward, or leave the bucket with its old value.
        """
        for parameter in self._reductions:
            self._own_gradient(parameter)

    def with_own_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that runs ``closure``, and waits for its gradients, which each parameter then owns."""

        def closure_then_gradients() -> Any:
            output = closure()
            self.wait_for_gradients()
            self.own_gradients()
            return output

        return closure_then_gradients

    def _own_gradient(self, parameter: Tensor) -> None:
        bucket = self._reductions[parameter].buffer.untyped_storage().data_ptr()
        with without_torch_function():  # the watch would come here again
            gradient = parameter.grad
            if gradient is not None and gradient.untyped_storage().data_ptr() == bucket:
                parameter.grad = gradient.clone()

    def _before_use(self, parameter: Tensor) -> None:
        with self.updates.lock:
            if self._is_measuring and self._issue_order is not None:
                self._issue_order.note_use(parameter)
            if parameter in self.updates:
                self._apply_for(parameter)
            elif parameter not in self._stale_uses.suspects and parameter in self._reductions:
                # No update is staged. Whoever uses the parameter may go on to a backward of his own, which would add
                # to a gradient that is being summed.
                self._reductions[parameter].wait()
                return
            self._stale_uses.note_seen(parameter)
            self._watch.remove([parameter])

    def _apply_for(self, parameter: Tensor) -> None:
        updated = self.updates.apply_for(parameter)
        if self._is_measuring:
            self._watch.add(parameter for parameter in updated if parameter in self._reductions)
        # Suspects stay watched until they are used: an unseen use before this has read old values.
        suspects = self._stale_uses.suspects
        if suspects:
            self._watch.add(parameter for parameter in updated if parameter in suspects)

    def _before_update(self, parameters: list[Tensor], staged_at: Moment) -> None:
        if staged_at.thread == threading.get_ident():
            self._watch.remove(parameters)
        # Else they stay watched: the thread that trains may use one of them meanwhile, and then waits for the lock.
        self._stale_uses.note_updated(parameters, staged_at)

    def _before_gradient(self, parameter: Tensor) -> None:
        with self.updates.lock:
            # The reader of a gradient may change it, which must not change an earlier update.
            self._apply_for(parameter)
            if parameter in self._reductions:
                self._reductions[parameter].wait()
                self._own_gradient(parameter)

    def __reduce__(self) -> Any:
        # The DDP keeps this object, with its hook. A copy of the DDP has a reducer of its own, without the hook.
        return object.__new__, (type(self),)

    def close(self) -> None:
        """Give up what is pending, and stop the communicator."""
        self._of_this_backward.close()
        self._fork_guard.close()
        self._watch.remove([*self._reductions, *self._stale_uses.suspects, *self.updates.parameters()])
        self.updates.clear()
        self._reductions.clear()
        for handle in self._load_hooks.values():
            handle.remove()
        self._load_hooks.clear()
        self._communicator.close()


# --- Forked processes start with everything up to date: they have no communicator that they could wait for.

log = logging.getLogger(__name__)


class ForkGuard:
    """From its construction to `close`, calls ``bring_up_to_date`` before this process forks (a loader's worker, say).

    Args:
        lock: held during the fork, so that no thread is in the middle of an update then: the child has no such thread,
            and would find the lock taken for ever.
        bring_up_to_date: leaves nothing pending.
    """

    def __init__(self, lock: AbstractContextManager[object], bring_up_to_date: Callable[[], None]) -> None:
        self.lock = lock
        self.bring_up_to_date = bring_up_to_date
        _guards.add(self)

    def close(self) -> None:
        """Stop guarding."""
        _guards.discard(self)


_guards: WeakSet[ForkGuard] = WeakSet()
_locks = ExitStack()


def _before_fork() -> None:
    for guard in list(_guards):
        _locks.enter_context(guard.lock)
        try:
            guard.bring_up_to_date()
        except Exception as error:  # Python would only print it, and fork
            log.warning(f"a process is forked while an update is pending that failed: {error}")


def _after_fork() -> None:
    _locks.close()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
