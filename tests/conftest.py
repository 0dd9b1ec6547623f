"""Every test starts from the same state and leaves no process, thread or process group behind."""

from __future__ import annotations

import os

# Tests run side by side on tiny tensors: a second thread would only wait. Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lightning_fabric.utilities.rank_zero import rank_zero_only

from tests.ranks import start_server

# These files take longest. They come first, so that no worker of pytest-xdist begins one of them at the end.
LONGEST = (
    "tests/strategies/krizhevsky_hybrid/test_training.py",
    "tests/strategies/krizhevsky_hybrid/test_strategy.py",
    "tests/test_launch.py",
    "tests/recipes/test_train.py",
    "tests/strategies/layered_sgd/test_equals_ddp.py",
    "tests/test_lightning.py",
    "tests/strategies/layered_sgd/test_lightning_features.py",
    "tests/recipes/test_resume.py",
    "tests/strategies/krizhevsky_hybrid/test_checkpoint.py",
    "tests/strategies/layered_sgd/test_optimizers_of_users.py",
    "tests/callbacks/test_memonger.py",
    "tests/collective_order/test_collective_order.py",
    "tests/strategies/test_launchers.py",
    "tests/recipes/test_options.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of the ranks import the tests that need it, while the others run."""
    modules = {item.module for item in session.items}
    needed = {each.__name__ for each in modules if {"run_processes", "run_cases"} & vars(each).keys()}
    if needed and not session.config.option.collectonly:
        start_server(needed)


@pytest.fixture(autouse=True)
def hermetic(tmp_path, monkeypatch) -> Iterator[None]:
    """Give each test its own working folder, environment and random state, and see that it leaves nothing behind."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    rng_state = torch.get_rng_state()
    # A Trainer of rank 3 (of an emulated SLURM job, say) would silence the loggers of all later tests.
    rank = rank_zero_only.rank
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
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
    children = multiprocessing.active_children()
    assert not children, f"the test left processes behind: {children}"
