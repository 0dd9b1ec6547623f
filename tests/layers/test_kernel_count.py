"""How many kernels a layer launches on CUDA, in forward and backward: counted as operators, on meta tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules._functions import SyncBatchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp.collectives import small_all_gather
from lightning_dp.layers.fused_batch_norm import FusedGlobalBatchNormFunction

pytestmark = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"),
    reason="this torch has no collectives on meta tensors",
)
C, WORLD_SIZE = 64, 8
# These launch nothing: they only describe memory.
NO_KERNEL = {
    *("view", "split", "slice", "select", "unbind", "detach", "expand", "as_strided", "alias", "split_with_sizes"),
    *("unsqueeze", "squeeze", "_unsafe_view", "reshape", "empty", "empty_like", "new_empty", "view_as", "chunk"),
}


class Launches(TorchDispatchMode):
    """Counts operators by name, and answers for the kernels that torch has for CUDA alone."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in NO_KERNEL:
            self.counts[name] += 1
        if name == "batch_norm_stats":
            return tuple(args[0].new_empty(C, dtype=torch.float32) for _ in range(2))
        if name == "batch_norm_gather_stats_with_counts":
            return tuple(args[1].new_empty(C) for _ in range(2))
        if name == "batch_norm_elemt":
            return torch.empty_like(args[0])
        if name == "batch_norm_backward_reduce":
            weight = args[4]
            sums = [torch.empty_like(args[2]) if args[5] else None for _ in range(2)]
            return *sums, *(torch.empty_like(weight) if needed else None for needed in args[6:8])
        if name == "batch_norm_backward_elemt":
            return torch.empty_like(args[1])
        if name == "index":  # SyncBatchNorm asks the GPU which batches are not empty; here none is
            self.counts["nonzero"] += 1
            return args[0].new_empty(args[0].shape)
        return func(*args, **(kwargs or {}))


class Context:
    """In place of autograd's, which refuses CUDA's kernels in a build without CUDA."""

    needs_input_grad = (True, True, True, *[False] * 6)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


@pytest.fixture
def default_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def launches(kind: str, dtype: torch.dtype, layout: torch.memory_format, group: Any) -> Counter[str]:
    with torch.no_grad(), torch.device("meta"):
        weight, bias, mean, var = (torch.ones(C) for _ in range(4))
        num_batches = torch.zeros((), dtype=torch.long)
        x = torch.empty((32, C, 56, 56), dtype=dtype).contiguous(memory_format=layout)
        context: Any = Context()
        with Launches() as mode:
            num_batches.add_(1)
            if kind == "fused":
                y = FusedGlobalBatchNormFunction.forward(context, x, weight, bias, mean, var, 1e-5, 0.1, group)
                gradients = FusedGlobalBatchNormFunction.backward(context, torch.empty_like(y))
            else:
                y = SyncBatchNorm.forward(context, x, weight, bias, mean, var, 1e-5, 0.1, group, WORLD_SIZE)
                gradients = SyncBatchNorm.backward(context, torch.empty_like(y))
    dx, dweight, dbias = gradients[:3]
    assert dx.dtype == y.dtype == dtype
    assert all(t.is_contiguous(memory_format=layout) for t in (y, dx))
    assert dweight.dtype == dbias.dtype == weight.dtype
    return mode.counts


EXPECTED = {
    "batch_norm_stats": 1,
    "new_full": 1,  # the count
    "cat": 2,  # one message for the statistics, one for the sums of the gradients
    "_allgather_base_": 1,
    "batch_norm_gather_stats_with_counts": 1,
    "_to_copy": 1,  # the counts as integers
    "batch_norm_elemt": 1,
    "batch_norm_backward_reduce": 1,
    "allreduce_": 1,
    "batch_norm_backward_elemt": 1,
    "add_": 1,  # the number of batches
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_launches_no_more_kernels_than_sync_batch_norm(dtype, layout, default_group, monkeypatch):
    monkeypatch.setattr(
        small_all_gather, "backend_name", lambda group, device: "nccl"
    )  # none is there for meta tensors
    ours, theirs = (launches(kind, dtype, layout, default_group) for kind in ("fused", "sync"))
    print(ours, theirs, sep="\n")
    assert ours.total() < theirs.total()
    assert ours == EXPECTED
    assert not {"nonzero", "item", "_local_scalar_dense"} & ours.keys(), "these wait for the GPU"
