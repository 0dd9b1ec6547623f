"""A pytest plugin: every Trainer on one CPU process becomes one on two ranks, with a given strategy.

`run.py` starts two processes of pytest with it, as ranks. Both run the same tests in lockstep, one process group each.
A line of JSON per test goes to ``FORCED_RESULTS/RANK.jsonl``: the outcome, and a `_digest` of the parameters, optimizer
states and loop state after each ``fit``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_dp import KrizhevskyHybridStrategy, LayeredSGDStrategy

RANK = int(os.environ["RANK"])
RESULTS = Path(os.environ["FORCED_RESULTS"])
TIMEOUT = timedelta(seconds=20)
# Seconds that a rank waits for the other one between two tests.
PATIENCE_S = 120

STRATEGIES: dict[str, Callable[[], Any]] = {
    # Without views, as is Lightning's default, the numbers are the same.
    "ddp": lambda: DDPStrategy(timeout=TIMEOUT),
    "layered_sgd": lambda: LayeredSGDStrategy(group_size=1, timeout=TIMEOUT),
    "layered_sgd_load": lambda: LayeredSGDStrategy(group_size=1, overlap="load", timeout=TIMEOUT),
    "krizhevsky_hybrid": lambda: KrizhevskyHybridStrategy(head="layer", timeout=TIMEOUT),
}
make_strategy = STRATEGIES[os.environ["FORCED_STRATEGY"]]

_digests: list[dict[str, Any]] = []
# Some tests have module-level models, which are built when a file is collected.
torch.manual_seed(0)


def _force(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def forced(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = str(kwargs.get("strategy", "auto"))
        if "spawn" in strategy or "fork" in strategy:
            # Its processes would take themselves for the two ranks that are there, and wait for one another.
            pytest.skip(f"strategy={strategy} starts processes of its own")
        on_one_cpu = (
            kwargs.get("accelerator", "auto") in ("auto", "cpu")
            and kwargs.get("devices", "auto") in ("auto", 1, "1")
            and kwargs.get("strategy", "auto") == "auto"
            and kwargs.get("num_nodes", 1) == 1
            and not kwargs.get("barebones")
        )
        if on_one_cpu and not args:
            kwargs |= {"accelerator": "cpu", "devices": 2, "strategy": make_strategy()}
        init(self, *args, **kwargs)

    return forced


def _note(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = fit(self, *args, **kwargs)
        _digests.append(_digest(self))
        return result

    return noting


def _digest(trainer: Any) -> dict[str, Any]:
    """What training has made: a hash of its bits, and the size of each tensor, for strategies that round otherwise."""
    module = trainer.lightning_module
    values = dict(module.state_dict()) if module is not None else {}
    # Lightning itself has a stand-in without a state for `configure_optimizers` that returns None.
    optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    for index, optimizer in enumerate(optimizers):
        for number, state in enumerate(optimizer.state_dict()["state"].values()):
            values |= {f"{index}.{number}.{name}": value for name, value in state.items()}
    progress = f"{trainer.global_step} {trainer.current_epoch}"
    hasher = hashlib.sha256(progress.encode())
    sizes = {}
    for name, value in sorted(values.items()):
        hasher.update(name.encode())
        if isinstance(value, torch.Tensor):
            hasher.update(value.detach().cpu().contiguous().numpy().tobytes())
            sizes[name] = [value.detach().double().sum().item(), value.detach().double().square().sum().item()]
        else:
            hasher.update(repr(value).encode())
    return {"bits": hasher.hexdigest()[:16], "progress": progress, "sizes": sizes}


pl.Trainer.__init__ = _force(pl.Trainer.__init__)  # type: ignore[method-assign]
pl.Trainer.fit = _note(pl.Trainer.fit)  # type: ignore[method-assign]

_number = 0


def pytest_configure(config: Any) -> None:
    """Know the markers of plugins that Lightning's tests use and that need not be installed."""
    config.addinivalue_line("markers", "flaky: may be repeated")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Bring the ranks together; give each test a rendezvous of its own, and random numbers that its name decides."""
    global _number
    _number += 1
    os.environ["MASTER_PORT"] = _meet(_number)
    seed = int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _digests.clear()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Write down how a test went."""
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        line = {"test": item.nodeid, "when": report.when, "outcome": report.outcome, "digests": list(_digests)}
        if report.outcome == "failed":
            line["error"] = call.excinfo.exconly()
        with open(RESULTS / f"{RANK}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def _meet(number: int) -> str:
    """Wait for the other rank, so that a test that failed on one of them alone costs that test and no other.

    Return a port for the store at which they make this test's process group.
    """
    port = ""
    if RANK == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
    partial = RESULTS / f"{number}.{RANK}.partial"
    partial.write_text(port)
    partial.rename(RESULTS / f"{number}.{RANK}")
    others = RESULTS / f"{number}.{1 - RANK}"
    deadline = time.monotonic() + PATIENCE_S
    while not others.exists():
        if time.monotonic() > deadline:
            pytest.exit(f"the other rank did not come to test {number}", returncode=3)
        time.sleep(0.01)
    return port or others.read_text()


@pytest.fixture
def tmp_path(request: Any) -> Path:
    """The same folder on both ranks."""
    path = RESULTS / "tmp" / hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    path.mkdir(parents=True, exist_ok=True)
    return path
