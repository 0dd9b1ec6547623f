"""What an installation has: the package with conf, console commands, a README for the package page."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from lightning_dp import runs
from lightning_dp.runs.command_line import conf_folder
from tests.commands import run_command

pytestmark = pytest.mark.repository
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
# What the build backend reads.
BUILT_FROM = ("lightning_dp", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def test_every_package_is_listed():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "lightning_dp").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders}
    assert set(SETUPTOOLS["packages"]) - found == set(SETUPTOOLS["package-dir"])
    assert found - set(SETUPTOOLS["packages"]) == set(), "add it to [tool.setuptools] packages in pyproject.toml"


def test_every_command_is_a_function_that_a_script_calls():
    assert conf_folder() == ROOT / "conf"
    for command, target in PROJECT["project"]["scripts"].items():
        module, _, name = target.partition(":")
        assert module == runs.__name__
        assert getattr(runs, name).__doc__.startswith(f"``{command}``")
        script = ROOT / "recipes" / f"{command.removeprefix('lightning-dp-')}.py"
        assert f"    {name}()" in script.read_text()


def test_a_command_names_the_packages_that_it_lacks(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "hydra" else object())
    with pytest.raises(SystemExit, match="the recipes need more packages: pip install hydra-core$"):
        runs.train_command()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the repository."""
    copy = tmp_path_factory.mktemp("build") / "copy"
    copy.mkdir()
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True, timeout=300)
    (path,) = (copy / "dist").glob("*.whl")
    return path


@pytest.mark.slow
def test_a_wheel_has_the_commands_and_every_file_of_conf(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        page = archive.read(metadata).decode()
    expected = {f"lightning_dp/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_dp").rglob("*.py")}
    expected |= {"hydra_plugins/lightning_dp_search_path.py", "lightning_dp/py.typed"}
    assert expected - names == set()
    assert not any(name.startswith(("tests/", "benchmarks/", "recipes/", "conf/")) for name in names)
    assert "\n# lightning_dp\n" in page, "the README"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh virtual environment with the wheel, which borrows the requirements from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)], check=True, timeout=300
    )
    # A .pth file adds the folder only: editable installations in it, such as this repository's, are not seen.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def run(program: Path, *arguments: str, cwd: Path) -> str:
    # Without PYTHONPATH, so that only what is installed is found.
    done = run_command([program, *arguments], cwd, {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_installed_commands_work_in_an_empty_folder(installed, tmp_path):
    where = run(installed / "python", "-c", "import lightning_dp; print(lightning_dp.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where
    sweep = ("--multirun", "experiment=digits_resnet20", "debug=default", "seed=1,2", "name=installed")
    assert run(installed / "lightning-dp-train", *sweep, cwd=tmp_path).count("test/acc=") == 2
    (folder,) = (tmp_path / "runs" / "installed").iterdir()
    assert "| all jobs | 2 |" in run(installed / "lightning-dp-compare", str(folder), cwd=tmp_path)
    checkpoint = folder / "0" / "checkpoints" / "last.ckpt"
    assert "test/acc=" in run(installed / "lightning-dp-evaluate", str(checkpoint), cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


@pytest.mark.slow
def test_users_add_experiments_of_their_own(installed, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /model: resnet20\nname: mine\n"
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(text)
    train = installed / "lightning-dp-train"
    printed = run(train, "--config-dir", "mine", "experiment=mine", "--cfg", "job", cwd=tmp_path)
    assert "name: mine" in printed
    (tmp_path / "app.yaml").write_text(
        "defaults: [strategy: layered_sgd]\nhydra: {searchpath: ['pkg://lightning_dp.conf']}\n"
    )
    program = (
        "import hydra\n\n\n@hydra.main(version_base='1.3', config_path='.', config_name='app')\n"
        "def main(cfg):\n    print(cfg)\n\n\nmain()\n"
    )
    (tmp_path / "app.py").write_text(program)
    assert "lightning_dp.LayeredSGDStrategy" in run(installed / "python", "app.py", cwd=tmp_path)


@pytest.mark.slow
def test_another_hydra_project_finds_our_options(installed, tmp_path):
    project = shutil.copytree(ROOT / "docs" / "examples" / "hydra_project", tmp_path / "project")
    options = ("callbacks=agbn", "+strategy@trainer.strategy=layered_sgd_single")
    printed = run(installed / "python", str(project / "train.py"), *options, cwd=tmp_path)
    assert printed.splitlines()[-1] == "LayeredSGDStrategy: ModelSummary, AdaptiveGlobalBatchNorm"
