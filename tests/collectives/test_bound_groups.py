"""Groups of all methods, while the default group is bound to a device, as Lightning binds it to the GPU of the rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives import RingState
from lightning_dp.collectives.groups import create_groups
from tests.ranks import run_processes


def sums(rank: int) -> int:
    dist.init_process_group("gloo")
    default = dist.group.WORLD
    default.bound_device_id = torch.device("cuda:0")
    of_batch_norm = create_groups([[0, 1], [2, 3]], rank)  # without a backend, as the callback creates them
    state = RingState()
    of_hook = state._require_group()
    assert default.bound_device_id == torch.device("cuda:0")
    total = torch.tensor(rank)
    dist.all_reduce(total, group=of_batch_norm)
    dist.all_reduce(total, group=of_hook)
    state.close()
    return int(total)


def test_groups_of_batch_norm_and_of_the_hook_can_be_made_over_gloo():
    """Torch tries to split a bound default group, which only NCCL can."""
    assert run_processes(4, sums) == [2 * (0 + 1) + 2 * (2 + 3)] * 4
