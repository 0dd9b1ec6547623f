"""Every test starts from the same state and leaves no process, thread or process group behind."""

from __future__ import annotations

import os

# Tests run side by side on tiny tensors: a second thread would only wait. Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# torch is imported where it is used: with pytest-xdist this file is also imported by a process that runs no test.

# These files take longest. They come first, so that no worker of pytest-xdist begins one of them at the end.
LONGEST = (
    "tests/recipes/test_train.py",
    "tests/strategies/krizhevsky_hybrid/test_training.py",
    "tests/test_launch.py",
    "tests/recipes/test_mistakes.py",
    "tests/strategies/krizhevsky_hybrid/test_head_step_property.py",
    "tests/strategies/krizhevsky_hybrid/test_strategy.py",
    "tests/recipes/test_resume.py",
    "tests/test_lightning.py",
    "tests/strategies/layered_sgd/test_equals_ddp.py",
    "tests/strategies/krizhevsky_hybrid/test_traffic.py",
    "tests/callbacks/test_memonger.py",
    "tests/recipes/test_compose.py",
    "tests/strategies/layered_sgd/test_random_programs.py",
    "tests/callbacks/test_ranks_agree.py",
    "tests/strategies/layered_sgd/test_lightning_features.py",
    "tests/collective_order/test_collective_order.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.__version__ < "2.10":
        for item in items:
            if "fsdp" in item.nodeid.lower():
                item.add_marker(pytest.mark.skip(reason="LayeredFSDPStrategy needs torch 2.10"))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of the ranks, if there are tests that need it."""
    needed = {"run_processes", "ends_of_processes", "run_cases", "run_case", "forked"}
    if any(needed & vars(module).keys() for module in {item.module for item in session.items}):
        from tests.ranks import start_server

        if not session.config.option.collectonly:
            start_server()


def unused_port() -> int:
    """Return a port that stays free until a fit listens there, in seconds.

    Lightning asks the system for one, and lets it go. The system may give it to a connection of another test.
    """
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(20_000, first_of_system))
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


@pytest.fixture(autouse=True)
def hermetic(tmp_path, monkeypatch) -> Iterator[None]:
    """Give each test its own working folder, environment and random state, and see that it leaves nothing behind."""
    import torch
    import torch.distributed as dist
    from lightning_fabric.utilities.rank_zero import rank_zero_only

    environment = dict(os.environ)
    threads = set(threading.enumerate())
    rng_state = torch.get_rng_state()
    # A Trainer of rank 3 (of an emulated SLURM job, say) would silence the loggers of all later tests.
    rank = rank_zero_only.rank
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_fabric.plugins.environments.lightning.find_free_network_port", unused_port)
    yield
    rank_zero_only.rank = rank
    torch.set_rng_state(rng_state)
    os.environ.clear()
    os.environ.update(environment)
    group_left = dist.is_initialized()
    if group_left:
        dist.destroy_process_group()
    assert not group_left, "the test left a process group behind"
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    assert not left, f"the test left threads behind: {left}"
    for child in multiprocessing.active_children():
        child.join(30)  # a worker of a loader that was told to end; on busy cores torch does not wait for it
    children = multiprocessing.active_children()
    assert not children, f"the test left processes behind: {children}"
