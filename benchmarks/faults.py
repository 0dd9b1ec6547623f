"""Seconds from a fault of one rank until the other ranks have ended, beside DDP in the same run.

    python benchmarks/faults.py
    python benchmarks/faults.py --faults "kill -9" "exception" --rounds 3

Two ranks train a small network. In the second epoch something happens to one of them: it is killed, stopped, cut off,
raises an exception, has fewer batches. Shown is the time from there until the other rank's process has ended, error,
teardown and exit of the interpreter included; for "stopped for 1 s", "SIGTERM to all" and "disk full", until all have
ended. All strategies run in turn. Where nothing but silence tells of the fault, the bound is the timeout of the process
groups (--timeout); elsewhere 0.

A strategy must need at most one timeout, and at most 2 s more than DDP. "hang" is a rank that was still there after
--limit, and has been killed. The network is cut between two emulated hosts, which need Linux, root, and iproute2; where
they cannot be made, that row is left out. Writes results.json, table.md and faults.png.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.emulated_hosts import UNLIMITED, Hosts, why_no_hosts
from support.faults import DDP, FAULTS, ROWS, SILENT, STRATEGIES, WORLD_SIZE, Case, cases, make_folder, train
from support.report import markdown_table, write_report
from support.spread import min_max, turn_order

SMOKE = {"rounds": 1, "faults": ["exception"], "strategies": [DDP, "layered step"], "norms": [0]}
MAX_LATER_S = 2.0  # than DDP


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--faults", nargs="+", default=list(FAULTS), help="names, as the table has them")
    options.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="names, as the table has them")
    options.add_argument("--norms", nargs="+", type=int, default=[0, 1], help="1: with global batch norm; 0: without")
    options.add_argument("--timeout", type=float, default=5.0, help="of the process groups (s)")
    options.add_argument("--limit", type=float, default=40.0, help="until a rank counts as hanging (s)")
    options.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    return options


# --- The ranks: forks of a process that has imported everything, and ends like a script of a user ---


def nursery() -> dict[str, Any] | None:
    """Fork the ranks of each job that comes in, and print when each has ended. Return the job in a rank.

    A rank returns to the top of the script, so that its interpreter ends as a user's does.
    """
    for line in sys.stdin:
        job = json.loads(line)
        pids = {}
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                return {**job, "rank": rank}
            pids[pid] = rank
        ends = {}
        for _ in pids:
            pid, status = os.wait()
            ends[pids[pid]] = (os.waitstatus_to_exitcode(status), time.monotonic())
        print(json.dumps(ends), flush=True)
    return None


def be_rank(job: dict[str, Any]) -> None:
    """Train as one rank of a job. Output goes to a file in its folder."""
    rank, folder = job["rank"], Path(job["folder"])
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE), GROUP_RANK="0", TORCHELASTIC_RUN_ID="faults",
        TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    train(rank, Case(**job["case"]), folder, job["namespaces"])


class Nursery:
    """The process that forks the ranks."""

    def __enter__(self) -> Nursery:
        command = [sys.executable, __file__, "--nursery"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends with its standard input

    def run(self, case: Case, limit_s: float) -> float | None:
        """Return the seconds from the fault of a case until the ranks that it leaves have ended. None: one hangs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = make_folder(Path(temporary, "case"))
            hosts = stack.enter_context(Hosts(WORLD_SIZE, UNLIMITED)) if case.fault == "network cut" else None
            namespaces = [] if hosts is None else [hosts.namespace(rank) for rank in range(WORLD_SIZE)]
            job = {"case": asdict(case), "folder": str(folder), "port": store.port, "namespaces": namespaces}
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            hangs = not select.select([self._process.stdout], [], [], limit_s)[0]
            if hangs:
                for path in folder.glob("pid-*"):
                    with suppress(ProcessLookupError):
                        os.kill(int(path.read_text()), 9)
            ends = {int(rank): time_s for rank, (_, time_s) in json.loads(self._process.stdout.readline()).items()}
            if hangs:
                return None
            fault_s = float((folder / "fault").read_text())
        return max(time_s for rank, time_s in ends.items() if rank != case.victim or case.fault in FOR_ALL) - fault_s


FOR_ALL = ("stopped for 1 s", "SIGTERM to all", "disk full")


# --- The report ---

Row = tuple[str, str, int, bool]  # fault, moment, victim (-1: the writer), with global batch norm


def row_of(case: Case) -> Row:
    """Return the row of the table; the writer of a checkpoint is another rank under another strategy."""
    victim = -1 if case.moment in ("save", "rename") else case.victim
    return (case.fault, case.moment, victim, case.global_batch_norm)


def name_of(row: Row) -> str:
    fault, moment, victim, norm = row
    who = "the writer" if victim < 0 else f"rank {victim}"
    return f"{fault}, {moment}, {who}{', global batch norm' if norm else ''}"


Times = dict[Row, dict[str, list[float | None]]]


def measure(arguments: argparse.Namespace) -> Times:
    """Return the seconds of each row and strategy, one value a round; None is a hang."""
    rows = [row for row in ROWS if row[0] in arguments.faults]
    if "network cut" in arguments.faults and (lacking := why_no_hosts()):
        print(f"without the cut network: {lacking}")
        rows = [row for row in rows if row[0] != "network cut"]
    norms = [bool(norm) for norm in arguments.norms]
    times: Times = defaultdict(lambda: defaultdict(list))
    with Nursery() as ranks:
        for turn in range(arguments.rounds):
            for case in cases(rows, turn_order(arguments.strategies, turn), norms, arguments.timeout):
                taken = ranks.run(case, arguments.limit)
                times[row_of(case)][case.strategy].append(taken)
                print(f"{case}: {'hang' if taken is None else f'{taken:.2f} s'}", flush=True)
    return times


def table_of(times: Times, arguments: argparse.Namespace) -> str:
    """Return a row a fault; what is later than DDP and the timeout allow is in bold."""
    header = ["fault, moment, who", "bound", *arguments.strategies]
    lines = []
    for row, of_strategies in times.items():
        bound_s = arguments.timeout if row[0] in SILENT else 0.0
        cells = []
        for strategy in arguments.strategies:
            values = of_strategies[strategy]
            late = any(
                is_late(value, of_ddp, bound_s) for value, of_ddp in zip(values, of_strategies[DDP], strict=False)
            )
            text = "hang" if None in values else min_max(filter(None, values)).text(1)
            cells.append(f"**{text}**" if late else text)
        lines.append([name_of(row), f"{bound_s:g}", *cells])
    return markdown_table(header, lines)


def is_late(value_s: float | None, of_ddp_s: float | None, bound_s: float) -> bool:
    """Whether a time breaks the promise."""
    if value_s is None:
        return True
    return of_ddp_s is not None and value_s > max(of_ddp_s, bound_s) + MAX_LATER_S


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    if arguments.nursery:
        if (job := nursery()) is not None:
            be_rank(job)
        return
    times = measure(arguments)
    folder = output_folder(arguments)
    title = f"Seconds from a fault until the other rank has ended, {arguments.rounds} rounds (minimum-maximum)"
    results = {name_of(row): dict(of_strategies) for row, of_strategies in times.items()}
    write_report(folder, arguments, title, table_of(times, arguments), results)
    draw_bars(
        {
            name_of(row): [
                Bar(strategy, min_max(arguments.limit if value is None else value for value in values))
                for strategy, values in of_strategies.items()
            ]
            for row, of_strategies in times.items()
        },
        folder / "faults.png",
        title=title,
        axis="seconds",
        digits=1,
    )


if __name__ == "__main__":
    main()
