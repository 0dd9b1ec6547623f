"""The small all-gather: equal to the group's own, over sockets if possible, and an error if a rank is missing."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives import PeerError
from lightning_dp.collectives import small_all_gather as module_under_test
from lightning_dp.collectives.small_all_gather import MAX_BYTES, _socket_gathers, small_all_gather
from tests.ranks import run_processes, run_threads, thread_group

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]


def rank_tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(1000 * rank, 1000 * rank + torch.Size(shape).numel()) % 251).view(shape).to(dtype)


def gather_everything(rank: int, group: dist.ProcessGroup, over_sockets: bool) -> None:
    small_all_gather(torch.ones(1), group)
    assert (_socket_gathers[group] is not None) == over_sockets
    for dtype in DTYPES:
        for shape in ((), (1,), (7,), (2, 5), (3, 0), (MAX_BYTES // 8 + 1,)):
            gathered = small_all_gather(rank_tensor(rank, shape, dtype), group)
            expected = torch.stack([rank_tensor(r, shape, dtype) for r in range(group.size())])
            assert torch.equal(gathered, expected)
            assert gathered.dtype == dtype
            assert gathered.is_contiguous()
    turned = rank_tensor(rank, (4, 3)).requires_grad_().T
    gathered = small_all_gather(turned, group)
    assert torch.equal(gathered[-1], rank_tensor(group.size() - 1, (4, 3)).T)
    assert not gathered.requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_gathers_all_ranks_tensors_in_rank_order(world_size):
    run_threads(world_size, gather_everything, True)


def test_the_comparison_fails_without_messages(monkeypatch):
    monkeypatch.setattr("lightning_dp.collectives.small_all_gather._receive", lambda *_: None)
    with pytest.raises(AssertionError):
        run_threads(2, gather_everything, True)


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError("no")


@pytest.mark.parametrize("obstacle", ["no folder", "long path", "other host", "shared folder", "small buffers"])
def test_all_ranks_use_the_group_if_one_rank_cannot_be_reached(obstacle, monkeypatch, tmp_path):
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def folder(prefix: str) -> str:
        parent = tmp_path / ("x" * 200) / "users" if obstacle == "long path" else tmp_path
        parent.mkdir(parents=True, exist_ok=True)
        made.append(mkdtemp(prefix=prefix, dir=parent))
        return made[-1]

    monkeypatch.setattr(module_under_test.tempfile, "mkdtemp", refuse if obstacle == "no folder" else folder)

    class Socket(module_under_test.socket.socket):
        def setsockopt(self, level: int, option: int, value: Any) -> None:
            small = obstacle == "small buffers" and option == module_under_test.socket.SO_SNDBUF
            super().setsockopt(level, option, 8192 if small else value)

        def bind(self, address: str) -> None:
            assert os.path.dirname(address) in made
            super().bind("/does/not/exist" if obstacle == "other host" and address.endswith("/1") else address)

        def connect(self, address: str) -> None:
            super().connect("/does/not/exist" if obstacle == "shared folder" else address)

    monkeypatch.setattr(module_under_test.socket, "socket", Socket)
    run_threads(3, gather_everything, False)
    assert not [name for name in made if os.path.exists(name)]
    assert all(Path(name).parent.exists() for name in made), "only the created folder is removed"


def test_a_temporary_folder_with_undecodable_name_works(monkeypatch):
    folder = os.fsdecode(os.fsencode(tempfile.gettempdir()) + b"/\xff-%d" % os.getpid())
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("this file system has no such names")
    try:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        run_threads(2, gather_everything, True)
    finally:
        os.rmdir(folder)  # fails if something is left in it


def test_sending_does_not_wait_for_the_peer_to_receive():
    """Messages of the maximum size, from ranks that can be one call ahead."""

    def many(rank: int, group: dist.ProcessGroup) -> None:
        for call in range(200):
            own = torch.full((MAX_BYTES // 4,), float(10 * call + rank))
            assert small_all_gather(own, group)[:, -1].tolist() == [10 * call + r for r in range(3)]

    run_threads(3, many)


def failing(call: Callable[[dist.ProcessGroup], Any], timeout: float) -> str:
    """The error of rank 0 if rank 1 makes ``call`` instead of the second of two all-gathers."""
    store, said, done = dist.HashStore(), [], threading.Event()

    def other() -> None:
        group = thread_group(store, 1, 2, timeout)
        small_all_gather(torch.ones(3), group)
        call(group)
        done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        group = thread_group(store, 0, 2, timeout)
        small_all_gather(torch.ones(3), group)
        with pytest.raises(PeerError) as caught:
            small_all_gather(torch.ones(3), group)
        said.append(str(caught.value))
        assert caught.value.group_rank == 1
    finally:
        done.set()
        thread.join()
    return said[0]


def test_a_dead_rank_is_named():
    text = failing(lambda group: _socket_gathers.pop(group), 30)
    assert re.match("rank 0 could not (send to|receive from) rank 1 of the group", text)


@pytest.mark.ci
def test_a_silent_rank_is_named_after_the_timeout_of_the_group():
    assert "the group's timeout has expired" in failing(lambda group: None, 2.0)


OTHER_TENSORS = {
    "smaller": (torch.ones(2), "float32 [2]"),
    "of another dtype": (torch.ones(3, dtype=torch.int32), "int32 [3]"),
    "of another shape": (torch.ones(3, 1), "float32 [3, 1]"),
    "empty": (torch.ones(0, 3), "float32 [0, 3]"),
    "too large for the sockets": (torch.ones(MAX_BYTES // 4 + 1), f"float32 [{MAX_BYTES // 4 + 1}]"),
    "of many dimensions": (torch.ones([1] * 29 + [3]), "float32 [" + "1, " * 10 + "1... "),
}


@pytest.mark.parametrize("kind", OTHER_TENSORS)
def test_a_rank_that_sends_another_tensor_is_named(kind):
    tensor, description = OTHER_TENSORS[kind]

    def other(group: dist.ProcessGroup) -> None:
        with pytest.raises(PeerError, match=r"the peer sent float32 \[3\] in call 1, where this rank sent"):
            small_all_gather(tensor, group)

    text = failing(other, 10)
    assert f"the peer sent {description}" in text
    assert text.endswith("in call 1, where this rank sent float32 [3] in call 1; all ranks must make the same calls")


def test_shapes_whose_description_is_cut_off_are_told_apart():
    def gather(rank: int, group: dist.ProcessGroup) -> None:
        shape = [1] * 30
        shape[20 + rank] = 2
        with pytest.raises(PeerError, match="the peer sent float32"):
            small_all_gather(torch.ones(shape), group)

    run_threads(2, gather)


def open_and_close(rank: int) -> None:
    dist.init_process_group("gloo")
    assert small_all_gather(torch.tensor(rank)).tolist() == [0, 1, 2]
    for _ in range(2):
        group = dist.new_group([0, 2])
        if rank != 1:
            assert small_all_gather(torch.tensor(rank), group).tolist() == [0, 2]
            assert len(_socket_gathers) == 2
            (end,) = _socket_gathers[group]._sockets.values()
            dist.destroy_process_group(group)
            del group
            assert end.fileno() == -1, "the socket is still open"
        assert len(_socket_gathers) == 1
    dist.destroy_process_group()
    assert len(_socket_gathers) == 0


def test_sockets_are_closed_with_their_group():
    run_processes(3, open_and_close)


def compile_and_fall_back(rank: int) -> list[list[float]]:
    import warnings

    warnings.simplefilter("ignore")  # dynamo itself uses what it deprecates
    dist.init_process_group("gloo")

    def doubled(x: Tensor) -> Tensor:
        return 2 * small_all_gather(x * 3).sum(0)

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    results = [compiled(torch.tensor([1.0 + rank, 0.0]))]
    # As where one rank has met more shapes than dynamo compiles for.
    results += [(doubled if rank == 0 else compiled)(torch.tensor([1.0 + rank, step])) for step in (1.0, 2.0)]
    dist.destroy_process_group()
    return [result.tolist() for result in results]


@pytest.mark.ci
def test_a_rank_that_falls_back_to_eager_code_meets_the_compiled_ranks():
    expected = [[18.0, 12.0 * step] for step in range(3)]
    assert run_processes(2, compile_and_fall_back) == [expected, expected]
