from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import RankTopology
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies.layered_sgd.host_communicator import HostCopy
from tests.ranks import run_processes

SIZE = 7  # no group size divides it


def value(rank: int) -> torch.Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def sum_in_stages(collective, buffer):
    for work in collective.intra_group_reduce(buffer):
        work.wait()
    collective.inter_group_all_reduce(buffer)
    for work in collective.intra_group_broadcast(buffer):
        work.wait()
    collective.close()
    return buffer


def sum_and_count(rank, world_size, group_size, communicator):
    """The buffer after all stages, and the number of calls of this rank by (collective, elements)."""
    issued: Counter = Counter()

    def counted(name):
        original = getattr(dist, name)

        def call(tensor, *args, **kwargs):
            issued[name, tensor.numel()] += 1
            return original(tensor, *args, **kwargs)

        return call

    dist.init_process_group("gloo")
    collective = HierarchicalAllReduce(RankTopology(world_size, group_size), rank, communicator)
    for name in ("reduce", "all_reduce", "broadcast"):
        setattr(dist, name, counted(name))
    buffer = sum_in_stages(collective, value(rank))
    return buffer, issued


@pytest.mark.parametrize("communicator", ["leader", "sharded"])
@pytest.mark.parametrize(("world_size", "group_size"), [(4, 2), (3, 1), (3, 3)])
def test_stages_sum_over_all_ranks(world_size, group_size, communicator):
    expected = sum(value(rank) for rank in range(world_size))
    results = run_processes(world_size, sum_and_count, world_size, group_size, communicator)
    for buffer, _ in results:
        torch.testing.assert_close(buffer, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(buffer, results[0][0])


def test_with_leader_only_leaders_run_the_inter_group_all_reduce():
    results = run_processes(4, sum_and_count, 4, 2, "leader")
    for rank, (_, issued) in enumerate(results):
        inter_group = {("all_reduce", SIZE): 1} if rank % 2 == 0 else {}
        assert issued == {("reduce", SIZE): 1, ("broadcast", SIZE): 1, **inter_group}


def test_with_sharded_each_member_all_reduces_its_shard():
    results = run_processes(4, sum_and_count, 4, 2, "sharded")
    for rank, (_, issued) in enumerate(results):
        intra_group = {(name, shard): 1 for name in ("reduce", "broadcast") for shard in (4, 3)}
        assert issued == {**intra_group, ("all_reduce", 4 if rank % 2 == 0 else 3): 1}


def test_groups_of_one_rank_send_nothing_within_them():
    for _, issued in run_processes(2, sum_and_count, 2, 1, "leader"):
        assert issued == {("all_reduce", SIZE): 1}


def broadcast_alone(rank):
    """Each group's ranks have other values than the next one's, as they never have after the stage between groups."""
    dist.init_process_group("gloo")
    collective = HierarchicalAllReduce(RankTopology(4, 2), rank)
    buffer = value(rank)
    for work in collective.intra_group_broadcast(buffer):
        work.wait()
    collective.close()
    return buffer


def test_a_broadcast_stays_within_its_group():
    for rank, buffer in enumerate(run_processes(4, broadcast_alone)):
        assert torch.equal(buffer, value(rank - rank % 2))


def sum_beside_a_bound_group(rank):
    """A sum while the default group is bound to a device, as Lightning binds it to the GPU of the rank."""
    dist.init_process_group("gloo")
    default = dist.group.WORLD
    default.bound_device_id = torch.device("cuda:0")
    collective = HierarchicalAllReduce(RankTopology(4, 2), rank, backend="gloo")
    buffer = sum_in_stages(collective, value(rank))
    assert default.bound_device_id == torch.device("cuda:0")
    return buffer


def test_gloo_groups_can_be_created_while_the_default_group_is_bound_to_a_device():
    expected = sum(value(rank) for rank in range(4))
    for buffer in run_processes(4, sum_beside_a_bound_group):
        torch.testing.assert_close(buffer, expected, rtol=1e-14, atol=1e-14)


def test_a_host_copy_does_not_change_the_buffer_before_copy_back():
    buffer = value(0)
    copy = HostCopy(buffer)
    copy.wait()
    assert torch.equal(copy.tensor, value(0))
    copy.tensor.mul_(2)
    assert torch.equal(buffer, value(0))
    copy.copy_back()
    assert torch.equal(buffer, 2 * value(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_host_copy_waits_for_queued_kernels(dtype):
    stream = torch.cuda.Stream()
    matrix = torch.full((2048, 2048), 1 / 2048, dtype=dtype, device="cuda")
    for _ in range(20):  # copies share a memory pool, and must not get memory that is in use
        busy = matrix
        for _ in range(20):
            busy = busy @ matrix
        buffer = busy.view(-1)
        copy = HostCopy(buffer, stream)
        assert copy.tensor.is_pinned()
        copy.wait()
        assert torch.equal(copy.tensor, buffer.cpu())
        copy.tensor.add_(1)
        expected = copy.tensor.clone()
        copy.copy_back()
        del copy
        assert torch.equal(buffer.cpu(), expected)
