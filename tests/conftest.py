"""Every test starts from the same state and leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def hermetic(tmp_path, monkeypatch) -> Iterator[None]:
    """Own working folder, environment, random state; no process group, thread or process left over."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    rng_state = torch.get_rng_state()
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    yield
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
