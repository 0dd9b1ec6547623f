"""The hook in DistributedDataParallel, compared with one process on the concatenated batch."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dp._private.torch_names import group_timeout
from lightning_dp.collectives import RingState, comm_hooks, ring_all_reduce_hook
from tests.ranks import run_processes, run_threads

THREAD = "ring_all_reduce_hook"


def network() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))


def shard(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and a random cotangent. Rank r has r + 2 samples."""
    generator = torch.Generator().manual_seed(rank)
    shape = (rank + 2,)
    return (
        torch.randn(*shape, 6, generator=generator, dtype=torch.float64),
        torch.randn(*shape, 3, generator=generator, dtype=torch.float64),
    )


def oracle(ranks: list[int]) -> list[torch.Tensor]:
    """Gradients of the sum over all samples, divided by N because DDP averages over the ranks."""
    model = network().double()
    features, cotangents = (torch.cat(parts) for parts in zip(*map(shard, ranks), strict=True))
    ((model(features) * cotangents).sum() / len(ranks)).backward()
    return [parameter.grad for parameter in model.parameters()]


def ring_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def gradients(rank: int, state: RingState | None, group: dist.ProcessGroup | None, dtype=torch.float64):
    """Gradients of the second of two backward passes, in which each parameter has a bucket of its own."""
    model = DistributedDataParallel(network().to(dtype), process_group=group, bucket_cap_mb=1e-5)
    model.register_comm_hook(state, ring_all_reduce_hook)
    for _ in range(2):
        model.zero_grad()
        features, cotangents = (part.to(dtype) for part in shard(rank))
        (model(features) * cotangents).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_close(results, expected, **tolerance) -> None:
    for mine in results:
        for gradient, first, right in zip(mine, results[0], expected, strict=True):
            assert torch.equal(gradient, first), "not bitwise identical on all ranks"
            torch.testing.assert_close(gradient.double(), right, **tolerance)


def averaged(rank, identity=False):
    if identity:
        comm_hooks.ring_all_reduce = lambda tensor, *args, **kwargs: tensor
    dist.init_process_group("gloo")
    return gradients(rank, None, None)


def test_gradients_are_those_of_the_concatenated_batch():
    assert_close(run_processes(3, averaged), oracle([0, 1, 2]))


def averaged_in_the_hook(rank):
    """As on NCCL: the thread that calls the hook issues all messages, and none of them is read on the host."""
    issuers = set()
    ring = comm_hooks.ring_all_reduce

    def recorded(buffer, *args, check_call, **options):
        issuers.add((threading.current_thread().name == THREAD, check_call))
        return ring(buffer, *args, check_call=check_call, **options)

    comm_hooks.ring_all_reduce = recorded
    comm_hooks.sends_from_device = lambda buffer, group: True
    dist.init_process_group("gloo")
    return gradients(rank, None, None), issuers


def test_on_nccl_the_hook_issues_the_messages_itself():
    results, issuers = zip(*run_processes(3, averaged_in_the_hook), strict=True)
    assert_close(results, oracle([0, 1, 2]))
    assert list(issuers) == [{(False, False)}] * 3


def test_on_gloo_a_thread_issues_the_messages():
    def of_group(rank, group):
        return comm_hooks.sends_from_device(torch.ones(1), group)

    assert run_threads(2, of_group) == [False, False]


def test_the_comparison_fails_without_communication():
    with pytest.raises(AssertionError):
        assert_close(run_processes(2, averaged, True), oracle([0, 1]))


def averaged_in_sub_groups(rank):
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ring_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    state = RingState(ring_groups[rank % 2])
    mine = gradients(rank, state, groups[rank % 2])
    state.close()
    return mine


def test_sub_groups():
    results = run_processes(4, averaged_in_sub_groups)
    assert_close(results[0::2], oracle([0, 2]))
    assert_close(results[1::2], oracle([1, 3]))


def averaged_in_sixteen_bits(rank, wire_dtype):
    dist.init_process_group("gloo")
    return gradients(rank, RingState(wire_dtype=wire_dtype), None, torch.float32)


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16])
def test_16_bit_messages(wire_dtype):
    tolerance = 8 * torch.finfo(wire_dtype).eps
    results = run_processes(2, averaged_in_sixteen_bits, wire_dtype)
    assert_close(results, oracle([0, 1]), rtol=tolerance, atol=tolerance)
    exact = oracle([0, 1])
    assert not all(torch.equal(mine, right.float()) for mine, right in zip(results[0], exact, strict=True))


class Meeting(torch.autograd.Function):
    """Identity between two layers. Its backward waits for the start of the later layer's ring, then releases it."""

    takes_place = False
    begun = threading.Event()
    go_on = threading.Event()

    @staticmethod
    def forward(ctx, features):
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert not Meeting.takes_place or Meeting.begun.wait(20), "no bucket was started during backward"
        Meeting.go_on.set()
        return gradient


def overlapped(rank):
    dist.init_process_group("gloo")
    ring = comm_hooks.ring_all_reduce

    def ring_that_waits_for_backward(*args, **kwargs):
        Meeting.begun.set()
        assert not Meeting.takes_place or Meeting.go_on.wait(20), "backward waited for the bucket"
        return ring(*args, **kwargs)

    comm_hooks.ring_all_reduce = ring_that_waits_for_backward
    first, second = torch.nn.Linear(6, 9).double(), torch.nn.Linear(9, 3).double()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, features):
            return self.second(Meeting.apply(self.first(features)))

    model = DistributedDataParallel(Model(), bucket_cap_mb=1e-5)
    model.register_comm_hook(RingState(), ring_all_reduce_hook)
    model(shard(rank)[0]).sum().backward()  # after it DDP rebuilds its buckets in the order of backward
    Meeting.takes_place = True
    Meeting.begun.clear()
    Meeting.go_on.clear()
    model(shard(rank)[0]).sum().backward()
    return Meeting.begun.is_set() and Meeting.go_on.is_set()


def test_buckets_start_while_backward_continues():
    assert run_processes(2, overlapped) == [True, True]


def used_again(rank):
    """One state used with several default groups, closed in between or not."""
    state = RingState()
    port_store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    num_groups = []
    for run in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(run), port_store), rank=rank, world_size=2)
        first = gradients(rank, state, None)
        if run == 0:
            state.close()
            num_groups.append(len(dist.distributed_c10d._world.pg_map))
            assert all(map(torch.equal, first, gradients(rank, state, None)))
        dist.destroy_process_group()
        if run == 1:
            state.close()  # its group was destroyed with the default group
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(10)
    return num_groups, ring_threads()


def test_a_state_leaves_no_thread_or_group_behind_and_can_be_used_again():
    assert run_processes(2, used_again) == [([1], [])] * 2


def disagreeing(rank):
    dist.init_process_group("gloo")
    state = RingState(segment_bytes=1000 + rank)
    with pytest.raises(RuntimeError, match="do not make the same call"):
        gradients(rank, state, None)
    state.close()
    return ring_threads()


def test_an_error_in_the_ring_is_raised_by_backward():
    assert run_processes(2, disagreeing) == [[], []]


def test_copies_and_pickles_hold_the_options():
    state = RingState(wire_dtype=torch.bfloat16, segment_bytes=1000)
    state._error = RuntimeError("of the original")
    for copied in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):  # noqa: S301
        assert (copied.wire_dtype, copied.segment_bytes, copied.group) == (torch.bfloat16, 1000, None)
        assert copied._lock is not state._lock
        assert copied._error is None


def copied_with_group(rank, group):
    state = RingState(group, torch.float16)
    for copied in (copy.copy(state), copy.deepcopy(state)):
        assert copied.group is group
        assert copied.wire_dtype == torch.float16
    with pytest.raises(TypeError, match="cannot pickle .*ProcessGroup"):
        pickle.dumps(state)


def test_a_copy_shares_the_group_and_a_pickle_cannot_hold_it():
    run_threads(1, copied_with_group)


def timeout_of_the_ring(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=17))
    state = RingState()
    state.submit(torch.ones(3)).wait()
    (ring_group,) = (group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD)
    seconds = group_timeout(ring_group, torch.device("cpu")).total_seconds()
    state.close()
    return seconds


def test_the_ring_has_the_timeout_of_the_default_group():
    assert run_processes(2, timeout_of_the_ring) == [17, 17]


def wrong_state(rank):
    dist.init_process_group("gloo")
    with pytest.raises(TypeError, match=r"use RingState\(group=\.\.\.\) or None"):
        gradients(rank, dist.group.WORLD, None)


def test_a_state_of_another_type_is_refused():
    run_processes(1, wrong_state)
    with pytest.raises(ValueError, match=r"wire_dtype=torch.int8 is not supported; use None, torch.float16"):
        RingState(wire_dtype=torch.int8)
