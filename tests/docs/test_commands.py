"""Command lines in the README and in docs/: each is run, or as much of it as this machine and a test's time allow.

Every command goes through a quick check: recipes are composed by Hydra, benchmarks parse their arguments, targets of
make and extras of pip exist. With ``-m slow`` those that need nothing but CPU cores are run, made shorter. The table
`NOT_RUN` names the others, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_dp.runs.hydra_versions import VERSION_BASE
from lightning_dp.runs.validation import check_arguments, targets
from tests.commands import run_command
from tests.docs.pages import DOCS, ROOT, blocks, spans

COMMAND = "lightning-dp-"  # the console commands: a script of recipes/ each
PROGRAMS = (
    "make",
    "pip",
    "pytest",
    "python",
    "torchrun",
    *(f"{COMMAND}{name}" for name in ("train", "evaluate", "compare", "plan")),
)
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

# Command, or how it begins -> why it is not run. The longest match counts.
NOT_RUN = {
    "make test": "it would run this test",
    "make lint": "CI runs it",
    "make docs": "it installs packages; test_site.py builds the site",
    "make bench": "hours",
    "make gpu-check": "needs a GPU; tests/benchmarks/test_gpu_check.py runs a part of it on the CPU",
    "pip": "it installs packages or builds one; targets of make and tests/test_wheel.py do it",
    "pytest -m slow tests/collective_order": "a slow test by itself",
    "torchrun --nnodes=2": "needs two machines; composed only",
    "torchrun --nproc-per-node=4 docs/minimal/": "test_minimal.py runs the minimal versions",
    "torchrun --nproc-per-node=4 docs/examples/": "test_examples.py runs the examples",
    "lightning-dp-": "tests/test_wheel.py runs the console commands",
    "python docs/examples/": "test_examples.py runs the examples",
    "python recipes/compare.py SWEEP_DIR": "needs a sweep; tests/test_wheel.py compares one",
    "python recipes/train.py experiment=digits_resnet20 ckpt_path=last": "needs a run; see test_resume.py",
    "python recipes/train.py experiment=digits_resnet20 --multirun hparams_search=optuna": "20 runs; composed only",
    "python recipes/train.py experiment=digits_resnet20 --multirun seed=1,2,3 hydra/launcher=joblib": (
        "tests/recipes/test_sweeps.py runs a sweep with it"
    ),
    "python recipes/train.py experiment=digits_resnet20 --multirun seed=1,2,3 trainer=gpu": "needs SLURM",
    "python recipes/train.py experiment=cifar10_resnet20 data.root=DIR": "needs CIFAR-10 and a GPU; composed only",
    "python recipes/train.py experiment=cifar10_resnet20_budget": "needs CIFAR-10 and an hour; composed only",
    "python recipes/train.py experiment=digits_resnet20 trainer=gpu": "needs a GPU; composed only",
    "python recipes/train.py experiment=imagenet_resnet50 data": "needs ImageNet or days; composed only",
    "python benchmarks/all_reduce.py": "needs root and network namespaces; arguments parsed only",
    "python benchmarks/compression_accuracy.py": "needs CIFAR-10 and hours; arguments parsed only",
    "python benchmarks/data_loading.py --imagenet DIR": "needs ImageNet; arguments parsed only",
    "python benchmarks/faults.py": "a quarter of an hour on a quiet machine; arguments parsed only",
    "python benchmarks/gpu_check.py": "needs a GPU; arguments parsed only",
    "python benchmarks/global_batch_norm_accuracy.py": "needs CIFAR-10 and hours; arguments parsed only",
    "python benchmarks/global_batch_norm_throughput.py": "minutes on a quiet machine; arguments parsed only",
    "python benchmarks/hybrid_accuracy.py": "needs CIFAR-10 and hours; arguments parsed only",
    "python benchmarks/hybrid_classes.py": "minutes on a quiet machine; arguments parsed only",
    "python benchmarks/hybrid_memory.py": "needs 21 GB of memory; arguments parsed only",
    "python benchmarks/hybrid_overlap.py": "needs root and network namespaces; arguments parsed only",
    "python benchmarks/hybrid_throughput.py": "needs root and network namespaces; arguments parsed only",
    "python benchmarks/hybrid_traffic.py": "minutes; arguments parsed only",
    "python benchmarks/layered_sgd_host_time.py": "minutes on a quiet machine; arguments parsed only",
    "python benchmarks/layered_sgd_overlap.py": "needs root and network namespaces; arguments parsed only",
    "python benchmarks/layered_sgd_throughput.py": "needs root and network namespaces; arguments parsed only",
    "python benchmarks/planner_choices.py": "needs root and network namespaces; arguments parsed only",
    "python benchmarks/planner_peaks.py": "minutes; arguments parsed only",
    "python benchmarks/recompute.py": "minutes on a quiet machine; arguments parsed only",
}


def bare(command: str) -> str:
    """Return the command without the environment variables and the priority that it sets."""
    return re.sub(r"^(\w+=\S+ )+|^chrt -r 1 ", "", command)


def commands_of(text: str) -> list[str]:
    """The command lines of a page: the lines of its bash blocks, and inline code that begins with a program."""
    bash = [block.text for block in blocks(text) if block.language == "bash"]
    lines = [line for script in bash for line in re.sub(r"\\\n\s*", "", script).splitlines()]
    inline = [span for span in spans(text) if span.split()[0] in PROGRAMS and " " in span]
    return [line for line in lines if line.strip() and not line.startswith("#")] + inline


COMMANDS = sorted({command for page in PAGES for command in commands_of(page.read_text())})
RUN = [command for command in COMMANDS if not any(bare(command).startswith(begin) for begin in NOT_RUN)]


# Option -> the Hydra plugin that it needs, one of the extras `sweeps` and `search`.
PLUGINS = {
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "submitit": "hydra_plugins.hydra_submitit_launcher",
    "optuna": "hydra_plugins.hydra_optuna_sweeper",
}


class Parsed(Exception):
    """A benchmark has parsed its arguments, and would begin."""


def parse_benchmark(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a benchmark up to the end of its ``parse_args``; a wrong option ends with SystemExit."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def swept(value: str) -> list[str]:
    """Return the values that a sweep takes in turn: those between commas that are not within a list."""
    return re.split(r",(?![^\[]*\])", value)


def compose_recipe(overrides: list[str], name: str = "train") -> None:
    """Compose a recipe's configuration; of a sweep, that of each job. An unknown key is an error of Hydra's."""
    values = [swept(override.partition("=")[2]) for override in overrides]
    keys = [override.partition("=")[0] for override in overrides]
    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        for job in itertools.product(*values):
            chosen = [f"{key}={value}" for key, value in zip(keys, job, strict=True)]
            config = OmegaConf.to_container(compose(name, [*chosen, "run_dir=somewhere"]), resolve=True)
            for path, node in targets(config):
                check_arguments(path, node)


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command without running what it starts."""
    program, *arguments = shlex.split(command)
    if program == "make":
        done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        extras = re.findall(r"(?:\.|\.whl)\[(\w+)\]", command)
        assert extras or arguments[:1] == ["wheel"] or "jsonargparse" in command
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    elif program.startswith(COMMAND):
        script = program.removeprefix(COMMAND)
        assert f'{program} = "lightning_dp.runs:{script}_command"' in (ROOT / "pyproject.toml").read_text()
        if script == "train" and "--config-dir" not in arguments:
            compose_recipe([argument for argument in arguments if argument != "--multirun"])
    elif program == "pytest":
        assert "gpu: needs a CUDA device" in (ROOT / "pyproject.toml").read_text()
    else:
        script = next(argument for argument in arguments if argument.endswith(".py"))
        arguments = arguments[arguments.index(script) + 1 :]
        assert (ROOT / script).exists(), f"there is no {script}"
        if script.startswith("benchmarks/"):
            parse_benchmark(script, arguments, monkeypatch)
        elif script.startswith(("docs/examples/", "docs/minimal/")) or script == "recipes/compare.py":
            assert any(command.startswith(begin) for begin in NOT_RUN)
        elif script in ("recipes/train.py", "recipes/plan.py"):
            for plugin in re.findall(r"hydra/launcher=([a-z]+)|hparams_search=([a-z]+)", command):
                pytest.importorskip(PLUGINS["".join(plugin)], reason="in the extras sweeps and search")
            compose_recipe([argument for argument in arguments if argument != "--multirun"], Path(script).stem)
        else:
            assert command in RUN, f"say in tests/docs/test_commands.py how to check {script}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_works(command, monkeypatch):
    check(command, monkeypatch)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("make nothing", AssertionError),
        ('pip install -e ".[nothing]"', AssertionError),
        ("python benchmarks/nothing.py", AssertionError),
        ("python benchmarks/all_reduce.py --nothing 1", SystemExit),
        ("python recipes/train.py experiment=digits_resnet20 trainer.nothing=1", Exception),
        ("python recipes/train.py strategy=ddp,nothing --multirun", Exception),
        ("python recipes/plan.py plan.nothing=1", Exception),
    ],
)
def test_a_command_that_does_not_work_is_seen(command, error, monkeypatch):
    with pytest.raises(error):
        check(command, monkeypatch)


def test_the_table_names_no_command_that_is_gone():
    assert [begin for begin in NOT_RUN if not any(bare(command).startswith(begin) for command in COMMANDS)] == []


def test_commands_are_found_in_blocks_and_in_text():
    text = "`make\ndemo` or `make`\n```bash\n# a comment\npython \\\n    a.py\n\n```\n```python\nmake(1)\n```\n"
    assert commands_of(text) == ["python a.py", "make demo"]


def run(folder: Path, script: str, *arguments: str) -> str:
    """Run a script of the repository in ``folder``, and return what it prints."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = run_command(command, folder, {"PYTHONPATH": str(ROOT)}, limit_s=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(printed: str) -> list[float]:
    """The accuracy of each job."""
    return [float(found) for found in re.findall(r"^test/acc=([\d.]+)", printed, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_runs(command, tmp_path):
    program, *arguments = shlex.split(command)
    if command == "make demo":
        dry_run = ["make", "--dry-run", "--old-file=.venv/.ready", "demo"]
        printed = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        _, *arguments = shlex.split(printed.splitlines()[-1])
        (accuracy,) = accuracies(run(tmp_path, *arguments))
        assert accuracy > 0.97, "conf/experiment/digits_resnet20.yaml expects 0.989 to 0.997"
        return
    assert program == "python", f"say in tests/docs/test_commands.py how to run {command}"
    script, *overrides = arguments
    if script == "recipes/evaluate.py":
        run(tmp_path, "recipes/train.py", "experiment=digits_resnet20", "debug=default")
        (checkpoint,) = tmp_path.glob("runs/*/*/checkpoints/last.ckpt")
        assert "test/acc=" in run(tmp_path, script, str(checkpoint))
    elif script == "recipes/plan.py":
        assert "Overhead ratio (Lemma 3.1)" in run(tmp_path, script, *overrides)
        assert list(tmp_path.glob("runs/plan/*/plan.md"))
    elif script.startswith("benchmarks/"):
        assert "written to" in run(tmp_path, script, *overrides)
    else:
        shorter = [] if any(override.startswith("debug=") for override in overrides) else ["debug=default"]
        printed = run(tmp_path, script, *overrides, *shorter)
        sweeps = [swept(override.partition("=")[2]) for override in overrides if "--multirun" in overrides]
        assert len(accuracies(printed)) == math.prod(map(len, sweeps))
