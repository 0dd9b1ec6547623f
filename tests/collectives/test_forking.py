"""A process that is forked while a process group is garbage goes on, though it lacks the group's threads."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch.distributed as dist

from lightning_dp.collectives.groups import create_groups, destroy_group
from tests.ranks import run_processes


def collect_in_a_fork(rank: int) -> None:
    frozen = gc.get_freeze_count()  # this process is a fork itself
    dist.init_process_group("gloo")
    group = create_groups([[0, 1]], rank)
    dist.barrier(group=group)
    gc.disable()  # until the fork
    cycle = [group]
    cycle.append(cycle)
    destroy_group(group)
    del cycle, group
    gc.enable()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends the child if it hangs
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert gc.isenabled()
    # Fewer, if frozen objects have been freed meanwhile.
    assert gc.get_freeze_count() <= frozen, "the parent collects its garbage as before"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_not_free_the_process_groups_of_its_parent():
    run_processes(2, collect_in_a_fork)
