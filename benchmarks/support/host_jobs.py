"""A benchmark on emulated hosts: one process makes the hosts and reports, the others are the ranks on them.

The benchmark starts itself again on the hosts, with ``--worker FILE``: the file tells a rank what to do, and what a
rank returns is written beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.emulated_hosts import Hosts, network_name, why_no_hosts

SKIPPED = "skipped: this machine cannot make hosts"


@dataclass(frozen=True)
class Job:
    """What the ranks are to measure, and on which hosts. The last three fields are those of `Hosts`."""

    options: argparse.Namespace
    num_hosts: int
    per_host: int
    rate: str
    slow_host: str | None = None
    delay_ms: float = 0.0

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.num_hosts * self.per_host

    @property
    def network(self) -> str:
        """Name of the hosts' links, for people to read."""
        return network_name(self.rate, self.slow_host, self.delay_ms)

    def write(self, path: Path) -> None:
        """Write it for the ranks."""
        fields = {**asdict(self), "options": vars(self.options)}
        path.write_text(json.dumps(fields, default=str))

    @staticmethod
    def read(path: Path) -> Job:
        """Read it on a rank."""
        fields = json.loads(path.read_text())
        return Job(argparse.Namespace(**fields.pop("options")), **fields)


def add_worker_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that `run_benchmark` and `measure_on_hosts` use between themselves."""
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run_benchmark(
    arguments: argparse.Namespace, worker: Callable[[Job], Any], report: Callable[[argparse.Namespace], None]
) -> None:
    """A benchmark's main function: ``worker`` in a rank on a host, ``report`` in the process that the user started.

    Where no hosts can be made, the reason is printed, and nothing is measured.
    """
    if arguments.worker is not None:
        job_file: Path = arguments.worker
        result = worker(Job.read(job_file))
        (job_file.parent / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    elif lacking := why_no_hosts():
        print(f"{SKIPPED}: {lacking}")
    else:
        report(arguments)


def measure_on_hosts(script: str, job: Job, folder: Path, timeout_s: float = 7200.0) -> list[Any]:
    """Run ``script --worker`` as the ranks of ``job``; return what each rank's worker returned, in rank order.

    Args:
        script: the benchmark's ``__file__``.
        job: passed to the workers.
        folder: for the logs of the hosts and the ranks' results.
        timeout_s: all ranks are stopped after so long.

    Raises:
        RuntimeError: a rank failed, or the time is up.
    """
    results = [folder / f"rank-{rank}.json" for rank in range(job.world_size)]
    for path in results:
        path.unlink(missing_ok=True)  # of an earlier run: it must not pass for this one's
    job_file = folder / "job.json"
    job.write(job_file)
    with Hosts(job.num_hosts, job.rate, job.slow_host, job.delay_ms) as hosts:
        hosts.torchrun(job.per_host, [script, "--worker", str(job_file)], timeout_s=timeout_s, logs=folder)
    return [json.loads(path.read_text()) for path in results]
