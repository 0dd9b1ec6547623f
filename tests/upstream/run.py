"""Run Lightning's own tests with this package's strategies in DDP's place, and compare with what DDP does there.

    python -m tests.upstream.run CHECKOUT [--strategies layered_sgd ...] [--only trainer/optimization] [-k EXPRESSION]

CHECKOUT is a checkout of Lightning with ``tests/tests_pytorch``, of about the installed version. Every Trainer on one
CPU process becomes one on two ranks (`forced_strategy`). That alone makes many of Lightning's assertions fail, so what
counts is the difference, on each rank by itself, for many assertions hold on rank 0 alone: a test that passes under DDP
and fails under another strategy, or that ends with other bits in the parameters. The hybrid sums gradients in another
order, so there the numbers may differ by rounding. It shards ``layer``, as the linear layer of Lightning's
`BoringModel` is called, and raises an error for modules without one.
`known_differences.txt` lists those that have a reason, each with it. Status 1 if there are others.

The two ranks share their files. A test that rewrites its checkpoint may read what the other rank is writing, under any
strategy. Tests that differ are therefore run once more, and count if they differ again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUND_OTHERWISE = ("krizhevsky_hybrid",)
ON_RANK = " on rank "
KNOWN = Path(__file__).with_name("known_differences.txt")
# Exit statuses of pytest: all passed, some failed, none selected.
PYTEST_HAS_RUN = (0, 1, 5)
# Not about training on several ranks, or with a strategy of their own, or in need of what a test machine lacks.
IGNORED = (
    *("accelerators", "demos", "deprecated_api", "graveyard", "profilers", "serve", "strategies"),
    *("test_cli.py", "utilities/test_cli.py", "models/test_onnx.py"),
    "callbacks/test_throughput_monitor.py",  # allows six calls of `time.perf_counter`
    # They start processes of their own: those of both ranks meet, and wait for ever.
    *("core/test_results.py", "core/test_metric_result_integration.py", "utilities/test_all_gather_grad.py"),
)


def run(checkout: Path, strategy: str, only: list[str], expression: str) -> dict[str, dict[str, Any]]:
    """Run the tests on two ranks; return outcome and digests by "TEST on rank R"."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["--tb=no"]  # most failures are those of DDP, too
        command += ["-p", "tests.upstream.forced_strategy"]
        command += [f"tests_pytorch/{path}" for path in only] or ["tests_pytorch"]  # a path may go on with ::TEST
        command += [f"--ignore=tests_pytorch/{path}" for path in IGNORED] + (["-k", expression] if expression else [])
        repository = Path(__file__).parents[2]
        processes = []
        for rank in range(2):
            environment = {
                **os.environ,
                "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
                "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "upstream",
                "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                "FORCED_STRATEGY": strategy, "FORCED_RESULTS": folder,
                "PYTHONPATH": f"{repository}{os.pathsep}{checkout / 'tests'}",
            }  # fmt: skip
            output = None if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, cwd=checkout / "tests", env=environment, stdout=output))
        statuses = wait_for_both(processes)
        files = [Path(folder, f"{rank}.jsonl") for rank in range(2)]
        if set(statuses) - set(PYTEST_HAS_RUN):
            last = [json.loads(file.read_text().splitlines()[-1])["test"] if file.exists() else None for file in files]
            sys.exit(f"{strategy}: a rank left the run; exit statuses {statuses}, after these tests: {last}")
        return _merge(files)


def wait_for_both(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit statuses. A rank that ends out of turn ends the other one, which would wait for it for ever."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, *PYTEST_HAS_RUN) for process in processes):
            for process in processes:
                process.kill()
        time.sleep(1)
    return [process.wait() for process in processes]


def _merge(files: list[Path]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for rank, file in enumerate(files):
        for line in file.read_text().splitlines() if file.exists() else ():
            report = json.loads(line)
            name = f"{report['test']}{ON_RANK}{rank}"
            test = merged.setdefault(name, {"outcome": "passed", "digests": [], "error": ""})
            test["digests"].append(report["digests"])
            if report["outcome"] != "passed" and test["outcome"] != "failed":
                test |= {"outcome": report["outcome"], "error": report.get("error", "")}
    return merged


def differences(ddp: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]], is_exact: bool) -> dict[str, str]:
    """What passes under DDP and does not under the other strategy, or ends elsewhere."""
    found = {}
    for test, expected in ddp.items():
        got = ours.get(test, {"outcome": "not run", "digests": [], "error": ""})
        if expected["outcome"] == "passed" and got["outcome"] not in ("passed", "skipped"):
            if _has_passed(ours, _on_other_rank(test)) and not _has_passed(ddp, _on_other_rank(test)):
                continue  # of two ranks that make one folder, the slower one fails
            found[test] = f"{got['outcome']}: {got['error']}"
        elif expected["outcome"] == got["outcome"] == "passed" and not (
            expected["digests"] == got["digests"] or (not is_exact and _are_close(expected["digests"], got["digests"]))
        ):
            found[test] = "other parameters, optimizer states or steps"
    return found


def _on_other_rank(name: str) -> str:
    test, _, rank = name.partition(ON_RANK)
    return f"{test}{ON_RANK}{1 - int(rank or 0)}"


def _has_passed(results: dict[str, dict[str, Any]], name: str) -> bool:
    return name in results and results[name]["outcome"] == "passed"


def _are_close(expected: Any, got: Any) -> bool:
    """Compare digests, but for the bits and for rounding."""
    if isinstance(expected, dict):
        keys = expected.keys() - {"bits"}
        return keys == got.keys() - {"bits"} and all(_are_close(expected[key], got[key]) for key in keys)
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(_are_close, expected, got))
    if isinstance(expected, float):
        return math.isclose(expected, got, rel_tol=1e-4, abs_tol=1e-5) or math.isnan(expected) == math.isnan(got) == 1
    return bool(expected == got)


def unexplained(found: dict[str, str], strategy: str) -> dict[str, str]:
    """Leave out what `known_differences.txt` gives a reason for: lines "STRATEGY | TEST, or ERROR: TEXT | REASON"."""
    lines = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    fields = [[field.strip() for field in line.split("|", 2)] for line in lines]
    known = [what for of, what, _ in fields if of == strategy]
    errors = tuple(what.removeprefix("error: ") for what in known if what.startswith("error: "))
    return {
        test: what
        for test, what in found.items()
        if _test_of(test) not in known and not any(each in what for each in errors)
    }


def _test_of(name: str) -> str:
    return name.partition(ON_RANK)[0]


def main() -> None:
    """Print what differs; see the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--strategies", nargs="+", default=["layered_sgd", "layered_sgd_load", "krizhevsky_hybrid"])
    parser.add_argument("--only", nargs="*", default=[], help="files or folders below tests_pytorch")
    parser.add_argument("-k", default="", dest="expression", help="as pytest's")
    arguments = parser.parse_args()
    if not (arguments.checkout / "tests" / "tests_pytorch").is_dir():
        sys.exit(f"{arguments.checkout} has no tests/tests_pytorch; give a checkout of Lightning")
    selection = arguments.only, arguments.expression
    checkout = arguments.checkout.resolve()
    ddp = run(checkout, "ddp", *selection)
    print(f"Each test counts once for each rank.\nddp: {_count(ddp)}")
    status = 0
    for strategy in arguments.strategies:
        ours = run(checkout, strategy, *selection)
        is_exact = strategy not in ROUND_OTHERWISE
        found = differences(ddp, ours, is_exact)
        unknown = unexplained(found, strategy)
        num_known = len(found) - len(unknown)
        if unknown:
            again = sorted({_test_of(test).removeprefix("tests/tests_pytorch/") for test in unknown}), ""
            repeated = differences(run(checkout, "ddp", *again), run(checkout, strategy, *again), is_exact)
            unknown = {test: what for test, what in unexplained(repeated, strategy).items() if test in unknown}
        print(
            f"{strategy}: {_count(ours)}; {len(found)} differ, {num_known} of them for a known reason, "
            f"{len(unknown)} again when repeated"
        )
        for test, what in unknown.items():
            print(f"  {test}\n      {what[:500]}")
        status |= bool(unknown)
    sys.exit(status)


def _count(results: dict[str, dict[str, Any]]) -> str:
    outcomes = [test["outcome"] for test in results.values()]
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    main()
