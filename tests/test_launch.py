from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import lightning_dp.launch
from lightning_dp.launch import LaunchError, external_rank, launch

ROOT = Path(__file__).parents[1]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def forked(monkeypatch):
    """Let ranks be forks of the tests' server. New interpreters, as in the recipes' tests, take ten times as long."""
    config = partial(lightning_dp.launch.LaunchConfig, start_method="forkserver")
    monkeypatch.setattr(lightning_dp.launch, "LaunchConfig", config)


def sum_of_ranks(offset: float) -> tuple[float, int, list[str]]:
    """Return a sum over all ranks, and the variables that a rank should have and does not."""
    dist.init_process_group("gloo")
    total = torch.tensor(offset + dist.get_rank())
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    return total.item(), world_size, [name for name in NAMES if name not in os.environ]


@pytest.mark.ci
def test_ranks_communicate_and_rank_0_returns_its_result_with_the_environment_restored(forked):
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    assert launch(sum_of_ranks, 10.0, num_processes=2) == (21.0, 2, [])
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGINT) is handler


def rows_of_workers() -> list[int]:
    rows = DataLoader(range(2), num_workers=1, collate_fn=lambda rows: rows)  # no lambda can be sent to a new process
    return [row for batch in rows for row in batch]


@pytest.mark.ci
@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="the platform does not fork")
def test_ranks_start_workers_as_the_platform_does(forked):
    """As under torchrun. A process has the start method by which it was started itself, unless it is told another."""
    assert launch(rows_of_workers, num_processes=2) == [0, 1]


def pollute() -> int:
    os.environ["LOCAL_RANK"] = "5"
    del os.environ["GIVEN"]
    return os.getpid()


def test_a_single_process_is_this_one_and_its_changes_to_the_environment_are_undone(monkeypatch):
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # an earlier Trainer of this process may have left it
    assert launch(pollute, num_processes=1) == os.getpid()
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["GIVEN"] == "1"


OF_ANOTHER_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables_of_a_rank() -> list[str]:
    return [name for name in OF_ANOTHER_JOB if name in os.environ]


def test_a_single_process_is_rank_0_whatever_another_launcher_has_left_in_the_shell(monkeypatch):
    """Lightning would also wait for an address that belongs to another job."""
    for name in OF_ANOTHER_JOB:
        monkeypatch.setenv(name, "1")
    assert launch(variables_of_a_rank, num_processes=1) == []
    assert os.environ["RANK"] == "1"


def fail_on_1(folder: str) -> None:
    dist.init_process_group("gloo")
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has no data; give it some")
    dist.all_reduce(torch.zeros(1))  # waits for rank 1


@pytest.mark.ci
def test_a_failed_rank_stops_the_others_and_its_message_comes_back(tmp_path, capfd, forked):
    with pytest.raises(LaunchError) as caught:
        launch(fail_on_1, str(tmp_path), num_processes=2)
    assert str(caught.value) == "rank 1 of 2: ValueError: rank 1 has no data; give it some"
    assert "in fail_on_1" in caught.value.traceback
    assert_gone(tmp_path, 2)
    output = capfd.readouterr()
    assert "====" not in output.err + output.out, "the banner of the elastic agent"


def move(parts: dict[str, nn.Module], data: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Change parameters and data in place on one rank, and return what another rank has then."""
    dist.init_process_group("gloo")
    net = parts["net"]
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[0].weight.add_(1)
            data.add_(1)
    dist.barrier()
    dist.destroy_process_group()
    return torch.stack([net[0].weight.detach(), data]), net[1].weight is net[0].weight


def test_each_rank_has_its_own_copy_of_a_model_and_the_caller_keeps_its_own(forked):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    data = torch.randn(2, 2)
    expected = torch.stack([net[0].weight.detach(), data]).clone()
    values, is_tied = launch(partial(move, {"net": net}), data, num_processes=2)
    assert torch.equal(values, expected)
    assert torch.equal(torch.stack([net[0].weight.detach(), data]), expected)
    assert is_tied


def make_closure() -> object:
    return lambda: 0


def make_graph() -> object:
    return torch.ones(1, requires_grad=True) * 2


@pytest.mark.ci
@pytest.mark.parametrize(("function", "message"), [(make_closure, "make_closure"), (make_graph, "return x.detach()")])
def test_a_result_that_cannot_be_sent_is_named(forked, function, message):
    with pytest.raises(LaunchError, match=rf"rank 0 of 2: .*{re.escape(message)}"):
        launch(function, num_processes=2)


def make_many_tensors() -> list[torch.Tensor]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, hard))
    return [torch.ones(1) for _ in range(250)]


@pytest.mark.ci
def test_a_result_of_many_tensors_needs_no_more_descriptors_than_to_send_it(forked):
    assert len(launch(make_many_tensors, num_processes=2)) == 250


def assert_gone(folder: Path, num_processes: int) -> None:
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert len(pids) == num_processes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def die_on_1() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.ci
def test_a_killed_rank_is_named_and_not_the_peer_that_lost_its_connection(forked):
    with pytest.raises(LaunchError, match=r"rank 1 of 2 was killed by SIGKILL \(often: out of memory\)"):
        launch(die_on_1, num_processes=2)


INTERRUPTED = """
import os, sys, time
from pathlib import Path
from lightning_dp.launch import launch

def wait(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    try:
        launch(wait, sys.argv[1], num_processes=2)
    except KeyboardInterrupt:
        sys.exit(3)
"""


@pytest.mark.slow
def test_ctrl_c_leaves_no_processes(tmp_path):
    script, ranks = tmp_path / "script.py", tmp_path / "ranks"
    script.write_text(INTERRUPTED)
    ranks.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(ranks)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    while len([p for p in ranks.iterdir() if p.read_text()]) < 2:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 3, errors.decode()
    assert_gone(ranks, 2)


KILLED = """
import os, signal, sys, threading
from lightning_dp.launch import launch

def wait():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where torch connects: Python's handlers do not run there
    os.write(1, b"ready")
    threading.Event().wait()

if __name__ == "__main__":
    launch(wait, num_processes=2)
"""


EARLY = """
import os, sys, time
from lightning_dp.launch import launch

if __name__ != "__main__":  # a rank, which imports this file
    parent = os.getppid()
    os.write(1, b"ready")
    while os.getppid() == parent:
        time.sleep(0.01)

def run():
    os.write(1, b"running")

if __name__ == "__main__":
    launch(run, num_processes=2)
"""


@pytest.mark.ci
@pytest.mark.parametrize("text", [KILLED, EARLY], ids=["running", "importing"])
def test_to_kill_the_process_that_starts_the_ranks_kills_them(tmp_path, text):
    """Else they could write to the folder of a run that is started again meanwhile.

    The kernel tells a rank of its parent's death only after the rank has asked for that.
    """
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout.read(10) == 2 * b"ready"
        process.kill()
        assert process.communicate(timeout=60)[0] == b""  # the output ends when all that write to it have ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_a_worker_of_joblib_can_start_ranks():
    """Its start method is called "loky", which the ranks do not know."""
    pytest.importorskip("joblib.externals.loky.backend.context")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("loky", force=True)
    try:
        assert launch(sum_of_ranks, 10.0, num_processes=2)[0] == 21.0
        assert multiprocessing.get_start_method() == "loky"
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_ranks_that_exist_already_are_used(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert external_rank() == 1
    assert launch(os.getpid, num_processes=2) == os.getpid()
    with pytest.raises(ValueError, match="2 processes were started, for 3 devices on each of 1 nodes"):
        launch(os.getpid, num_processes=3)


def test_slurm_tasks_are_ranks_but_an_allocation_with_one_task_is_not(monkeypatch):
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    assert external_rank() == 3
    assert launch(os.getpid, num_processes=2, num_nodes=2) == os.getpid()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert external_rank() is None
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert external_rank() is None


@pytest.mark.parametrize(("sign", "name"), [("TORCHELASTIC_RUN_ID", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID")])
def test_a_shell_of_a_launcher_that_has_not_started_this_process_is_named(monkeypatch, sign, name):
    monkeypatch.setenv(sign, "4")
    monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=f"{sign}=4 is in the environment without {name}.*env -u {sign}"):
        external_rank()


def test_several_nodes_need_a_launcher():
    with pytest.raises(ValueError, match="torchrun --nnodes=2"):
        launch(os.getpid, num_processes=1, num_nodes=2)
    with pytest.raises(ValueError, match="at least 1"):
        launch(os.getpid, num_processes=0)
