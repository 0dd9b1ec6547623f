"""The project's own files agree with each other: version, lower bounds, source distribution, commands."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import lightning_dp

pytestmark = pytest.mark.repository
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FLOORS = runpy.run_path(str(ROOT / ".ci" / "floors.py"))["floors"]


def test_the_version_is_stated_once_and_repeated_right():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_dp.__version__"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == lightning_dp.__version__


def test_the_lower_bounds_are_those_that_contributing_names():
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    floors = dict(line.split("==") for line in FLOORS(ROOT / "pyproject.toml"))
    for name in ("torch", "pytorch-lightning", "torchmetrics", "numpy", "hydra-core", "omegaconf"):
        assert f"{name} {floors[name]}" in text
    assert floors["lightning"] == floors["pytorch-lightning"], "the same code under two names"
    assert f"Python {PROJECT['project']['requires-python'].removeprefix('>=')}" in text


def test_a_requirement_without_a_lower_bound_is_refused(tmp_path):
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub(r'"torch>=[0-9.]+"', '"torch"', text))
    with pytest.raises(ValueError, match="'torch' in .* has no lower bound; write it as name>=version"):
        FLOORS(tmp_path / "pyproject.toml")


def test_what_is_installed_for_development_is_not_older_than_the_lower_bounds():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {name.replace("_", "-").lower(): version for name, version in pinned.items()}
    for line in FLOORS(ROOT / "pyproject.toml"):
        name, floor = line.split("==")
        assert numbers(pinned[name]) >= numbers(floor), name


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", ".ci/run", ".github/pull_request_template.md", "Makefile"])
def test_commands_that_are_named_exist(name):
    named = set(re.findall(r"(?:`|^ *)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE))
    assert named <= targets() | {"docs"}
    assert named or name == "Makefile"


def test_the_hosted_workflow_runs_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert {name for run in steps for name in re.findall(r"^make ([a-z-]+)$", run)} <= targets() | {"docs"}
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert {f"test-{versions}" for versions in ("oldest", *matrix["versions"])} - {"test-pinned"} <= targets()
    stated = {c.rpartition(":: ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert set(matrix["python"]) == stated


def tracked() -> list[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    return listed.stdout.splitlines() if listed.returncode == 0 else []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_source_distribution_holds_every_tracked_file(tmp_path):
    pytest.importorskip("setuptools")
    copy = tmp_path / "copy"
    files = [name for name in tracked() if (ROOT / name).is_file()]
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    code = "import sys; sys.path.insert(0, '.ci'); import build_backend; build_backend.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (archive,) = (copy / "dist").glob(f"lightning_dp-{lightning_dp.__version__}.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert set(files) - packed == set()
