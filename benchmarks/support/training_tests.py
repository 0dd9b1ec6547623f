"""Parts of gpu_check that run other programs: pytest, and the recipe for CIFAR-10."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from support.command_line import ROOT

MARK = "mark.gpu"


def files_with_gpu_tests() -> list[Path]:
    """Return the test files with a test that is marked gpu. Others may import packages that are not installed."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text())


def run_tests(
    workers: int, small: bool, environment: Mapping[str, str] | None = None, only: str = ""
) -> dict[str, float]:
    """Run the tests that are marked gpu; return how many have passed, failed and been skipped.

    Args:
        workers: tests that run side by side.
        small: run those of one file only.
        environment: variables to set beside the present ones.
        only: run those with this in their name.
    """
    files = files_with_gpu_tests()[:1] if small else files_with_gpu_tests()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if workers > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(workers)]
        # Warnings of other versions of Lightning and torch than those that the project is developed with are no errors.
        command += ["-W", "default"]
        if only:
            command += ["-k", only]
        variables = {**os.environ, **(environment or {})}
        subprocess.run([*command, *map(str, files)], cwd=ROOT, check=False, env=variables)
        return counts_of(report.read_text())


def counts_of(junit: str) -> dict[str, float]:
    """Return the numbers in a report of pytest."""
    suite = ElementTree.fromstring(junit).find("testsuite")
    assert suite is not None, "a report of pytest has a testsuite"
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return {"passed": passed, "failed": failed, "skipped": counts["skipped"]}


def run_cifar10(root: Path | None, folder: Path, small: bool) -> dict[str, float]:
    """Train ResNet-20 on CIFAR-10 as He et al. 2015 do, with the recipe; return accuracy and seconds.

    Args:
        root: the folder of the images. None: synthetic images, which is of use in a small run only.
        folder: the run's folder is made in it.
        small: train a few steps on the CPU.

    Raises:
        ValueError: ``root`` is missing.
    """
    if root is None and not small:
        raise ValueError("cifar10 needs the images; give --root DIR, which contains cifar-10-batches-py")
    options = [f"data.root={root}"] if root is not None else ["data=synthetic", "data.batch_size=16"]
    options += ["trainer=cpu", "trainer.max_steps=2"] if small else ["trainer=gpu", "data.num_workers=4"]
    recipe = [sys.executable, str(ROOT / "recipes" / "train.py"), "experiment=cifar10_resnet20", *options]
    start_s = time.monotonic()
    run = [f"hydra.run.dir={folder / 'cifar10_run'}", "trainer.enable_progress_bar=false"]
    done = subprocess.run([*recipe, *run], cwd=folder, check=True, capture_output=True, text=True)
    return {"accuracy": accuracy_of(done.stdout), "took_s": time.monotonic() - start_s}


def accuracy_of(printed: str) -> float:
    """Return the accuracy in the last line that a recipe prints: ``test/acc=0.9125  run_dir=...``."""
    return float(printed.splitlines()[-1].split()[0].removeprefix("test/acc="))
