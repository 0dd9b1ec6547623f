"""DDP whose all-reduce stays in flight after backward, as a rival of layered SGD's ``overlap="load"``.

From torch 2.15 on, DDP can leave the end of a backward pass to its caller. Here that is after the next batch has been
loaded, just before its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

HAS_MANUAL_END = hasattr(DistributedDataParallel, "finalize_backward")


class FinalizedAfterLoading(DDPStrategy):
    """Waits for the gradients, and takes the optimizer's step, when the next batch has been loaded."""

    def __init__(self) -> None:
        super().__init__(gradient_as_bucket_view=True)
        self._step: Callable[[], Any] | None = None

    def configure_ddp(self) -> None:
        super().configure_ddp()
        model: Any = self.model
        model.require_manual_backward_finalization = True

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = closure()
        step = super().optimizer_step
        self._step = lambda: step(optimizer, lambda: output, model, **kwargs)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._finish()
        return super().training_step(*args, **kwargs)

    def on_train_end(self) -> None:
        self._finish()
        super().on_train_end()

    def _finish(self) -> None:
        if self._step is not None:
            model: Any = self.model
            model.finalize_backward()
            self._step()
            self._step = None
