"""One gradient bucket on its way through the hierarchical all-reduce."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.host_copy import HostCopy
from lightning_dp.collectives.tracing import OnStage

WAIT = "wait"


class BucketReduction:
    """One gradient bucket on its way: summed inside the group, between the groups, and handed back to the group."""

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        inside: str = "",
        on_stage: OnStage | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self.buffer = buffer
        self._release = release  # whoever waits before backward has ended must not wait for its end
        self._inside = inside  # names the group, for errors
        self._on_stage = on_stage
        self.on_host: HostCopy | None = None  # summed in place of the buffer, until the sum is in the buffer
        self.works: list[dist.Work] = []  # first of the reduction inside the group, then of the broadcast
        self.produced: torch.cuda.Event | None = None  # on a GPU: backward has filled the buffer
        self.delivered: torch.cuda.Event | None = None  # on a GPU: the sum is in the buffer
        self._settled = threading.Event()
        self._error: Exception | None = None

    @property
    def carried(self) -> Tensor:
        """What the communicator sums: the buffer, or its copy on the host."""
        return self.buffer if self.on_host is None else self.on_host.tensor

    def settle(self, error: Exception | None = None) -> None:
        """Called by the communicator once nothing is left to do but to wait for ``works``, or when it failed."""
        self._error = error
        self._settled.set()

    def wait(self) -> None:
        """Return when ``buffer`` holds the sum over all ranks. Raises what went wrong on the way."""
        start = time.perf_counter()
        if self._release is not None and not self._settled.is_set():
            self._release()
        self._settled.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if self.delivered is not None:
            torch.cuda.current_stream(self.buffer.device).wait_event(self.delivered)
        else:
            self.wait_for_works()
            self._bring_back()
        if self._on_stage is not None:
            self._on_stage(WAIT, start, time.perf_counter())

    def _bring_back(self) -> None:
        # Once: what the rank does to its gradients afterwards must stay. And by the rank itself: the communicator would
        # have to wait for the broadcast, while the link between the groups idles.
        if self.on_host is not None:
            self.on_host.copy_back()
            self.on_host = None
            if self.buffer.is_cuda:
                self.delivered = torch.cuda.current_stream(self.buffer.device).record_event()

    def wait_for_works(self) -> None:
        """Wait for what is under way inside the group."""
        with self.named(self._inside):
            for work in self.works:
                work.wait()

    def named(self, where: str) -> AbstractContextManager[None]:
        """Let an error say that it is about this bucket, and where."""
        return named(f"the sum of gradient bucket {self.index}, {where}")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say of a backend's error what it was about and who may be to blame."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed: one of these ranks has died, or has been silent for longer than the strategy's timeout; "
            f"look at its log first. The backend says: {error}"
        ) from error
