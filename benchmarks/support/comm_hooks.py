"""Communication hooks of DDP that compress or count gradients, as they run on CPU and under Lightning.

This file must not postpone the evaluation of annotations: DDP compares a hook's annotations as objects and refuses
text.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined, unused-ignore]  # torch does not re-export it
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWER_SGD_RANK = 4
# torch allows no compression before the third step with error feedback or warm start. The benchmarks warm up for three
# steps, so every measured step compresses.
POWER_SGD_START = 2
# One bucket holds all gradients. torch's hook starts its second and third all-reduce in callbacks of futures, which
# gloo runs in its own threads: with several buckets their order differs between ranks, and the job crashes or hangs. It
# costs hardly any overlap: with DDP's default of 25 MB, the last bucket would hold most of the 25.5 MB anyway.
POWER_SGD_BUCKET_MB = 4096

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]


def bf16_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Torch's bf16 hook under another name: DDP refuses it off CUDA by the name of the function alone."""
    return default_hooks.bf16_compress_hook(group or _world(), bucket)


def counting_hook(counts: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own all-reduce, which adds the bytes that it is handed to the last of ``counts``."""
    counts[-1] += bucket.buffer().nbytes
    return default_hooks.allreduce_hook(_world(), bucket)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def power_sgd_state() -> powerSGD_hook.PowerSGDState:
    """Return a state with what torch recommends: error feedback and warm start."""
    return powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=POWER_SGD_RANK,
        start_powerSGD_iter=POWER_SGD_START,
        use_error_feedback=True,
        warm_start=True,
    )


class HookedDDPStrategy(DDPStrategy):
    """DDP with a communication hook on every device. Lightning's own option drops the hook off CUDA, silently.

    Args:
        hook: a communication hook.
        make_state: returns the hook's state, once a process group exists.
        **ddp_kwargs: of DDPStrategy.
    """

    def __init__(self, hook: Hook, make_state: Callable[[], Any] = lambda: None, **ddp_kwargs: Any) -> None:
        super().__init__(**ddp_kwargs)
        self._hook = hook
        self._make_state = make_state
        self.state: Any = None  # the hook's

    def configure_ddp(self) -> None:
        """Wrap the module in DDP and register the hook."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.state = self._make_state()
        self.model.register_comm_hook(self.state, self._hook)
