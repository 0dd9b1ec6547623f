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
MUTANTS = runpy.run_path(str(ROOT / ".ci" / "mutants.py"))
FLOORS = runpy.run_path(str(ROOT / ".ci" / "floors.py"))["floors"]


def test_the_version_is_stated_once_and_repeated_right():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_dp.__version__"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == lightning_dp.__version__
    assert f"lightning_dp-{lightning_dp.__version__}-py3-none-any.whl" in (ROOT / "README.md").read_text()


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


def test_mutants_have_a_fault_in_what_the_code_computes(tmp_path):
    lines = [
        "def f(a: int = 1) -> Literal[2]:",
        '    """3 < 4."""',
        "    if not (a < 5 and g(a, b=6)):",
        '        log.warning("%d", 7)',
        "    self.a = 8 + a",
        "    return h(a)",
    ]
    folder = tmp_path / "lightning_dp"
    folder.mkdir()
    (folder / "m.py").write_text("\n".join(lines))
    found = list(MUTANTS["mutants_of"](tmp_path, tmp_path))
    assert {(mutant.line, mutant.after) for mutant in found} == {
        (1, "def f(a: int = 2) -> Literal[2]:"),
        (3, "if (a < 5 and g(a, b=6)):"),
        (3, "if not (a < 5 or g(a, b=6)):"),
        (3, "if not (a <= 5 and g(a, b=6)):"),
        (3, "if not (a < 6 and g(a, b=6)):"),
        (3, "if not (a < 5 and g(a, b=7)):"),
        (3, "if not (a < 5 and g(a)):"),
        (5, "pass"),
        (5, "self.a = 9 + a"),
        (5, "self.a = 8 - a"),
        (6, "return None"),
    }
    drawn = MUTANTS["draw"](found, 9, seed=0)
    assert sorted(mutant.line for mutant in drawn) == [1, 3, 5, 6], "at most one of a line"
    path, before, after = MUTANTS["put"](drawn[0], tmp_path)
    assert before == path.read_text()
    changed = [line.strip() for line, old in zip(after.splitlines(), lines, strict=True) if line != old]
    assert changed == [drawn[0].after]


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


# Addresses that exist, or how they begin. lightning_dp itself has none yet: no repository, no page on a package index.
ADDRESSES = (
    "http://www.apache.org/licenses/",
    "https://arxiv.org/abs/",
    "https://github.com/Lightning-AI/pytorch-lightning/issues/",
    "https://keepachangelog.com/",
    "https://semver.org/",
    "https://www.cs.toronto.edu/~kriz/",
)
# Installs the project from an index, where the name is free. Its taker could run code on our users' machines.
FROM_AN_INDEX = re.compile(r"(?:pip|uv|conda|mamba) [^\n]*?(?<![\w./-])lightning[-_]dp(?![\w.]|-\w)")


def unknown_addresses(text: str) -> list[str]:
    """The addresses in ``text`` that nobody has looked up."""
    found = re.findall(r"(?:https?://[\w~]|git@)[^\s)\"'`>,]*", text)
    return [address for address in found if not address.startswith(ADDRESSES)]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_file_names_an_address_or_a_package_that_does_not_exist():
    found = {}
    for name in tracked():
        if not name.startswith("tests/") and not name.endswith((".png", ".svg")) and (ROOT / name).is_file():
            text = (ROOT / name).read_text()
            if wrong := unknown_addresses(text) + FROM_AN_INDEX.findall(text):
                found[name] = wrong
    assert found == {}, "add an address that you have opened to ADDRESSES; install lightning_dp from a clone or a wheel"


def test_an_address_and_an_index_are_seen():
    text = "https://github.com/lightning-dp/lightning_dp, git@github.com:a/b, https://arxiv.org/abs/1."
    assert unknown_addresses(text) == ["https://github.com/lightning-dp/lightning_dp", "git@github.com:a/b"]
    for line in ("pip install lightning-dp", "pip install 'lightning_dp[recipes]'", "uv add lightning-dp"):
        assert FROM_AN_INDEX.search(line), line
    for line in ("pip install -e .", "pip install dist/lightning_dp-0.1.0-py3-none-any.whl", "lightning-dp-train"):
        assert not FROM_AN_INDEX.search(line), line


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
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (archive,) = (copy / "dist").glob(f"lightning_dp-{lightning_dp.__version__}.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    assert set(files) - packed == set()
