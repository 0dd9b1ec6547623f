"""On NCCL all ranks must issue their collectives in one order, and each process from one thread at a time.

Random programs on 2 x 2 ranks, over gloo: each issues its collectives in one order, from one thread, and ends with the
parameters of DDP.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives import small_all_gather
from lightning_dp.collectives.groups import RankTopology, resolve_group
from lightning_dp.collectives.hierarchical import HierarchicalAllReduce
from lightning_dp.strategies.layered_sgd import options
from lightning_dp.strategies.layered_sgd.device_communicator import DeviceAllReduce, DeviceCommunicator, DeviceSum
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions
from tests.collective_order import recorder
from tests.collective_order.programs import MakeCommunicator, Program, make_program, run
from tests.collective_order.recorder import Call, check_order, check_threads
from tests.ranks import RankError, run_processes

# Torch 2.11 does not call a backend's reduce-scatter in Python.
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="the recorder of collectives needs torch 2.13")

TOPOLOGY = RankTopology(4, 2)
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)


class Kept(DeviceAllReduce):
    """One for all programs: creating groups takes far longer than a program."""

    def close(self) -> None:
        pass


def communicators_on_device(rank: int, timeout: timedelta) -> MakeCommunicator:
    """Return a function that chooses as the strategy does."""
    kept = Kept(TOPOLOGY, rank, timeout)
    options.DeviceAllReduce = lambda *_: kept

    def make(overlap: str, module: Any, find_unused_parameters: bool) -> Any:
        chosen = CommunicatorOptions("leader", overlap, "native", "gpu", None)
        return chosen.make_communicator(
            TOPOLOGY, rank, CPU, "recorded", timeout, lambda *_: None, module, find_unused_parameters, "test"
        )

    return make


# --- what must be seen if it goes wrong ---


def issue_on_use(rank: int, timeout: timedelta, make: MakeCommunicator) -> MakeCommunicator:
    """Let the rank that needs a sum issue it, and not all ranks at one point."""

    class Eager(DeviceSum):
        def wait(self) -> None:
            if not self._is_issued:
                self.issue(kept, None)
            super().wait()

    class Never(DeviceCommunicator):
        def submit(self, index: int, buffer: torch.Tensor, parameters: Any = ()) -> DeviceSum:
            return Eager(index, buffer)

    kept = Kept(TOPOLOGY, rank, timeout)
    return lambda overlap, module, find_unused_parameters: Never(kept, False, CPU)


def issue_early(rank: int, timeout: timedelta, make: MakeCommunicator) -> MakeCommunicator:
    """Issue in backward, also where ranks differ in the parameters that they use."""
    return lambda overlap, module, find_unused_parameters: make("step", module, False)


def sum_in_a_thread(rank: int, timeout: timedelta, make: MakeCommunicator) -> MakeCommunicator:
    """The communicator on the host, on groups like NCCL's."""

    class Open(HierarchicalAllReduce):
        def close(self) -> None:
            pass

    collective = Open(TOPOLOGY, rank, "sharded", timeout)
    return lambda overlap, module, find_unused_parameters: Communicator(collective, False, timeout, CPU)


def issue_in_own_order(rank: int, timeout: timedelta, make: MakeCommunicator) -> MakeCommunicator:
    """Let each rank issue its sums after backward in an order of its own."""

    class Own(DeviceCommunicator):
        def release(self) -> None:
            self._held.sort(key=lambda bucket: bucket.index, reverse=rank == 0)
            super().release()

    options.DeviceCommunicator = Own
    return make


CHANGES = {
    "issue on use": issue_on_use,
    "issue early": issue_early,
    "issue in own order": issue_in_own_order,
    "sum in a thread": sum_in_a_thread,
}


def run_programs(rank: int, seeds: range, change: str | None = None, timeout: timedelta = TIMEOUT) -> int:
    """Run the programs with these seeds. Raises on all ranks alike if one of them does not do as it should."""
    recorder.register()
    dist.init_process_group("recorded", timeout=timeout)
    small_all_gather._disable_sockets(resolve_group(None))
    control = dist.new_group(backend="gloo")
    make = communicators_on_device(rank, timeout)
    if change is not None:
        make = CHANGES[change](rank, timeout, make)
    num_calls = 0
    for seed in seeds:
        try:
            num_calls += run_program(rank, make_program(seed, 4), make, control)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return num_calls


def run_program(rank: int, program: Program, make: MakeCommunicator, control: dist.ProcessGroup) -> int:
    """Run one program under DDP and with ``make``, compare, and return the number of collectives."""
    expected = run(program, rank, None)
    recorder.calls.clear()
    parameters = run(program, rank, make)
    ranks: list[list[Call]] = [[]] * 4
    dist.all_gather_object(ranks, list(recorder.calls), group=control)
    try:
        check_threads(ranks)
        check_order(ranks)
        for parameter, of_ddp in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter, of_ddp, rtol=1e-10, atol=1e-12)
    except AssertionError as error:
        raise AssertionError(f"{program}: {error}") from error
    return len(ranks[rank])


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 100), marks=pytest.mark.slow)], ids=str)
def test_random_programs(seeds):
    counts = run_processes(4, run_programs, seeds, timeout=600)
    assert min(counts) > len(seeds) * 20, "the programs issue many collectives"


# Depending on which ranks are ahead, gloo also adds two collectives of one size to each other: then the numbers differ.
SEEN = "the ranks wait for each other|Timed out|Application timeout|Connection closed|died with exit code|are not close"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("change", "message", "timeout_s"),
    [
        # These three wait for ever on NCCL. gloo gives up, or finds out that messages were mixed up.
        ("issue on use", SEEN, 4),
        pytest.param("issue early", SEEN, 4, marks=pytest.mark.slow),
        ("issue in own order", SEEN, 4),
        ("sum in a thread", "has issued collectives from 2 threads", 120),
    ],
    ids=list(CHANGES),
)
def test_a_wrong_order_is_seen(change, message, timeout_s):
    with pytest.raises(RankError, match=message):
        run_processes(4, run_programs, range(200), change, timedelta(seconds=timeout_s), timeout=240)


PIECE = 500


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 10100, PIECE), ids=lambda first: f"{first}-{first + PIECE - 1}")
def test_10000_random_programs(first):
    """In pieces, so that some can be run alone: ``-m slow -k 100-599``. A failure names the program's seed."""
    run_processes(4, run_programs, range(first, first + PIECE), timeout=3600)
