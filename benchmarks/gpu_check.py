"""What one GPU shows of this package: its `gpu` tests, batch norm, the strategies, overlap; later a whole training.

    python benchmarks/gpu_check.py                               # all but cifar10, in at most 10 minutes
    python benchmarks/gpu_check.py --parts batch_norm resnet20   # some parts
    python benchmarks/gpu_check.py --parts cifar10 --root DIR    # ResNet-20 on CIFAR-10 in full

Parts, each in processes of its own, which are stopped when the time is up:

- tests: the tests that are marked gpu, with the installed pytest. From torch 2.15 on the backend nccl is another
  engine, and those that use NCCL run again with the engine of before (nccl-legacy).
- batch_norm: forward and backward of global batch norm, SyncBatchNorm and torch's BatchNorm2d (the bound, which sends
  nothing), at five shapes of ResNet-50, in float32 and bfloat16, channels last: over NCCL with one rank, where the
  functions of several ranks are called, and over gloo with two ranks that share the GPU.
- resnet50: images a second of each strategy, over NCCL with one rank (each of its engines) and over gloo with two ranks
  that share the GPU, beside DDP (the reference; with one rank it sends nothing and is the bound).
- overlap: layered SGD between two such ranks: the share of the copies and messages that lies under kernels.
- resnet20: images a second of one rank, in float32 as TensorFloat-32 and in bfloat16.

NCCL refuses two ranks on one GPU, so no part measures it between GPUs. The sides of batch_norm and resnet50 take turns,
round after round; shown are the median and the quartiles. Without a GPU nothing is measured; --smoke runs the parts on
the CPU, as far as they go there. Writes results.json, table.md and gpu_check.png after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import gpu_parts, gpu_report
from support.command_line import ROOT, benchmark_parser, output_folder, parse
from support.report import write_report
from support.training_tests import run_cifar10, run_tests

from lightning_dp.launch import launch

NO_GPU = "skipped: gpu_check needs a GPU that torch can use, and there is none; --smoke runs it on the CPU in small"
FIRST_STAGE = ["tests", "batch_norm", "resnet50", "overlap", "resnet20"]
PARTS = [*FIRST_STAGE, "cifar10"]
LONGEST_S = {"tests": 270.0, "cifar10": 3600.0}  # of a part, if so much is left; others may take what is left
SMOKE = {
    "batch": 2, "image_size": 32, "steps": 4, "fits": 1, "rounds": 1, "layer_steps": 1,
    "budget_s": 1200.0, "workers": 1,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=FIRST_STAGE)
    options.add_argument("--budget-s", type=float, default=540.0, help="seconds for all parts but cifar10")
    options.add_argument("--batch", type=int, default=64, help="images a rank, of ResNet-50 and of a layer")
    options.add_argument("--image-size", type=int, default=224, help="of ResNet-50")
    options.add_argument("--steps", type=int, default=40, help="of each training; the second half is timed")
    options.add_argument("--fits", type=int, default=3, help="trainings of ResNet-50 with each strategy, in turns")
    options.add_argument("--layer-steps", type=int, default=10, help="of a layer in a round")
    options.add_argument("--rounds", type=int, default=8, help="of each shape of a layer")
    options.add_argument("--root", type=Path, help="folder that contains cifar-10-batches-py, for cifar10")
    options.add_argument("--workers", type=int, default=4, help="tests that run side by side, if pytest-xdist is there")
    options.add_argument("--part", help=argparse.SUPPRESS)  # of the process that measures it
    return options


def measure(part: str, arguments: argparse.Namespace) -> Any:
    """Measure a part, in a process of its own."""
    small = arguments.smoke
    if part == "tests":
        return {
            name: run_tests(arguments.workers, small, environment, only="NCCL" if environment else "")
            for name, environment in gpu_parts.nccl_engines(torch.__version__).items()
        }
    if part == "cifar10":
        return run_cifar10(arguments.root, arguments.output, small)
    if part == "batch_norm":
        return measure_batch_norm(arguments)
    if part == "overlap":
        names = [name for name in strategies_of(small) if name.startswith("layered")]
        size = (arguments.batch, arguments.image_size)
        return {name: launch(gpu_parts.overlap, name, "gloo", *size, num_processes=2) for name in names}
    if part == "resnet50":
        return measure_strategies(arguments)
    batch, steps = (8, arguments.steps) if small else (128, 10 * arguments.steps)
    precisions = {"TensorFloat-32": "32-true"} if small else {"TensorFloat-32": "32-true", "bfloat16": "bf16-mixed"}
    rates = {}
    for name, precision in precisions.items():
        job = ("ResNet-20", ["DDP"], gpu_backend(), precision, (batch, 32), steps, 1)
        (rates[name],) = launch(gpu_parts.images_per_s, *job, num_processes=1)["DDP"]
    return rates


def strategies_of(small: bool) -> list[str]:
    """Return the names of the strategies. Two of them show that a small run works; each takes seconds to start."""
    return ["DDP", "layered SGD, step"] if small else list(gpu_parts.STRATEGIES)


def backends_of(small: bool) -> list[tuple[str, int]]:
    """Return the backends, and the number of ranks on the GPU. A small run has those with messages only."""
    return [("gloo", 2)] if small else [(gpu_backend(), 1), ("gloo", 2)]


def gpu_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def measure_batch_norm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each side, for each backend and dtype, and each shape."""
    results = {}
    batch = arguments.batch if arguments.smoke else arguments.batch // 2
    for backend, ranks in backends_of(arguments.smoke):
        for dtype in (torch.float32,) if arguments.smoke else (torch.float32, torch.bfloat16):
            job = (backend, dtype, batch, arguments.layer_steps, arguments.rounds)
            name = f"{backend}, {ranks} rank{'s' * (ranks > 1)}, {str(dtype).removeprefix('torch.')}"
            results[name] = launch(gpu_parts.batch_norm, *job, num_processes=ranks)
    return results


def measure_strategies(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the images a second of ResNet-50 with each strategy, for each backend, one value a round."""
    precision = "32-true" if arguments.smoke else "bf16-mixed"
    shape = (arguments.batch, arguments.image_size)
    results: dict[str, Any] = {}
    for backend, ranks in backends_of(arguments.smoke):
        engines = gpu_parts.nccl_engines(torch.__version__) if backend == "nccl" else {backend: {}}
        job = ("ResNet-50", strategies_of(arguments.smoke), backend, precision, shape, arguments.steps, arguments.fits)
        for engine, environment in engines.items():
            with patch.dict(os.environ, environment):
                rates = launch(gpu_parts.images_per_s, *job, num_processes=ranks)
            results[f"{engine}, {ranks} rank{'s' * (ranks > 1)}"] = rates
    return results


def run_part(part: str, limit_s: float, folder: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Run this script with ``--part``; return the figures, or the reason why there are none."""
    result = folder / f"{part}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, *argv, "--part", part, "--output", str(folder)]
    start_s = time.monotonic()
    # A session of its own, so that the ranks, too, are stopped when the time is up.
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "PYTHONPATH": python_path()})
    try:
        status: int | str = process.wait(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        status = f"stopped after {limit_s:.0f} s"
    figures = json.loads(result.read_text()) if result.exists() else None
    problem = None if figures is not None else f"{status}" if isinstance(status, str) else f"exit status {status}"
    return {"figures": figures, "problem": problem, "took_s": time.monotonic() - start_s}


def python_path() -> str:
    """Return a path with this checkout first: it need not be installed."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    if not torch.cuda.is_available() and not arguments.smoke:
        print(NO_GPU)
        return
    if arguments.part is not None:
        figures = measure(arguments.part, arguments)
        (arguments.output / f"{arguments.part}.json").write_text(json.dumps(figures))
        return
    folder = output_folder(arguments)
    end_s = time.monotonic() + arguments.budget_s
    results: dict[str, Any] = {}
    for part in arguments.parts:
        left_s = LONGEST_S["cifar10"] if part == "cifar10" else end_s - time.monotonic()
        limit_s = min(left_s, LONGEST_S.get(part, left_s))
        if limit_s < 1:
            results[part] = {"figures": None, "problem": "not started: no time was left", "took_s": 0.0}
        else:
            print(f"== {part}, at most {limit_s:.0f} s", flush=True)
            results[part] = run_part(part, limit_s, folder, sys.argv[1:] if argv is None else argv)
        write_report(folder, arguments, "One GPU", gpu_report.table(results), results)
        gpu_report.draw(results, folder / "gpu_check.png")
    if any(result["problem"] for result in results.values()) or gpu_report.failed_tests(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
