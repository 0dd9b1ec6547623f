"""How gradient buckets leave DDP: the communication hook, and what surrounds a backward pass."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp._private.torch_names import call_after_backward, is_in_backward
from lightning_dp.collectives import streams
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientCommunicator
from lightning_dp.strategies.layered_sgd.update import UpdateQueue

# No `from __future__ import annotations`: DDP checks the communication hook's annotations as objects.


class LayeredReduction:
    """Sums gradient buckets in the background, and keeps the updates that wait for them. Independent of Lightning.

    Args:
        communicator: `Communicator` in host memory, `DeviceCommunicator` on GPUs; closed by `close`.
        world_size: number of ranks that the gradients are averaged over.
        module: the module that is trained.

    Attributes:
        compressed: the compressed all-reduce, with what it keeps between steps; None if sums are exact.
        updates: what is pending.
    """

    def __init__(self, communicator: GradientCommunicator, world_size: int, module: nn.Module) -> None:
        self._communicator = communicator
        self._world_size = world_size
        self._has_reduced = False  # a bucket of the present DDP
        self._has_final_buckets = False
        self._will_release = False
        self.compressed = communicator.compressed
        self.updates = UpdateQueue(module)

    def feed_from(self, model: DistributedDataParallel) -> None:
        """Take the gradient buckets of ``model`` from now on."""
        self._has_reduced = self._has_final_buckets = False
        model.register_comm_hook(None, self._reduce_bucket)

    def before_forward(self) -> None:
        """Prepare for DDP rebuilding its buckets.

        DDP does so once, in the forward after the first backward pass, which shows in which order gradients become
        ready. It copies the gradients into the new buckets, so they must have been averaged by then.
        """
        self._will_release = False  # an earlier backward may have raised
        if self._has_reduced and not self._has_final_buckets:
            self.updates.wait_for_gradients()
            self._has_final_buckets = True

    # Dynamo must not trace what follows: it runs in the middle of backward, or inside a compiled training step.

    @torch.compiler.disable
    def _reduce_bucket(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: hand the bucket to the communicator, and let backward continue.

        DDP is told that the bucket is done. Its gradients are views of the buffer that the communicator works on.
        """
        self._has_reduced = True
        # Divided before the sum, as DDP does, so that 16-bit sums do not overflow (Algorithm 3 divides after it).
        buffer = bucket.buffer().div_(self._world_size)
        parameters = bucket.parameters()
        self.updates.add_sum(parameters, self._communicator.submit(bucket.index(), buffer, parameters))
        if not self._will_release and is_in_backward():
            # Not as late as `post_backward`: before that Lightning calls `on_after_backward`, which may read gradients.
            self._will_release = True
            call_after_backward(self.release)
        done = streams.new_future(buffer.device)
        done.set_result(buffer)
        return done

    @torch.compiler.disable
    def release(self) -> None:
        """Release the buckets that the communicator has held back until the end of backward."""
        self._will_release = False
        self._communicator.release()

    def __reduce__(self) -> Any:
        # The DDP keeps this object, with its hook. A copy of the DDP has a reducer of its own, without the hook.
        return object.__new__, (type(self),)

    def close(self) -> None:
        """Give up what is pending, and stop the communicator."""
        self.updates.close()
        self._communicator.close()
