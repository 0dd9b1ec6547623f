"""What every benchmark has in common: options, a smoke run, and a file of its own that nobody imports."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ROOT, benchmark_parser, output_folder, parse
from support.host_jobs import SKIPPED

from tests.commands import run_command

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
NAMES = [script.stem for script in SCRIPTS]


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_docstring_and_the_smoke_option(name, capsys):
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as exit_:
        module.main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert module.__doc__.splitlines()[0] in printed
    assert "--smoke" in printed
    assert f"python benchmarks/{name}.py" in printed


@pytest.mark.parametrize("name", NAMES)
def test_smoke_options_are_options_of_the_benchmark(name):
    module = importlib.import_module(name)
    known = set(vars(module.parser().parse_args([])))
    assert set(module.SMOKE) <= known


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_benchmarks_do_not_import_each_other(script):
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not imported & set(NAMES), "what two benchmarks share belongs in benchmarks/support"


def test_the_readme_has_a_row_for_every_benchmark():
    rows = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    for name in NAMES:
        assert sum(row.startswith(f"| `{name}`") for row in rows) == 1, f"{name} needs one row in benchmarks/README.md"


def test_smoke_replaces_defaults_and_keeps_what_was_given():
    parser = benchmark_parser("", "some/folder/example.py")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    smoke = {"rounds": 1, "steps": 2}
    assert parse(parser, smoke, []).rounds == 30
    arguments = parse(parser, smoke, ["--smoke", "--steps", "5"])
    assert (arguments.rounds, arguments.steps) == (1, 5)


def test_smoke_runs_write_to_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("support.command_line.ROOT", tmp_path)
    folders = []
    for argv in ([], ["--smoke"], ["--output", str(tmp_path / "elsewhere")]):
        parser = benchmark_parser("", "some/folder/example.py")
        folders.append(output_folder(parse(parser, {}, argv), "part"))
    assert folders == [
        tmp_path / "runs" / "benchmarks" / "example" / "part",
        tmp_path / "runs" / "benchmarks" / "smoke" / "example" / "part",
        tmp_path / "elsewhere" / "part",
    ]
    assert all(folder.is_dir() for folder in folders)


def smoke_run(script: Path) -> Any:
    """Return the case of a benchmark. The longest take minutes."""
    marks = pytest.mark.slow if script.stem in ("gpu_check", "planner_choices") else pytest.mark.ci
    return pytest.param(script, id=script.stem, marks=marks)


@pytest.mark.parametrize("script", [smoke_run(script) for script in SCRIPTS])
def test_smoke_run_writes_results_table_and_plot(script, tmp_path):
    command = [sys.executable, script, "--smoke", "--output", tmp_path]
    done = run_command(command, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        if line.startswith(SKIPPED):
            pytest.skip(f"{script.stem}: {line}")
    folders = [path.parent for path in tmp_path.rglob("results.json")]
    assert folders
    for folder in folders:
        report = json.loads((folder / "results.json").read_text())
        assert "cores" in report["machine"]
        assert report["results"]
        assert (folder / "table.md").read_text().count("|") > 10
        plots = list(folder.glob("*.png"))
        assert plots
        assert all(_is_png(plot) for plot in plots)


def _is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")
