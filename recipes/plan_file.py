"""Apply a plan of recipes/plan.py: ``plan=FILE`` on the command line stands for the overrides in the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PREFIX = "plan="


def with_plan(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the command line with the overrides of a plan in its place, and a line that says so, if there is one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no plan, two are given, or the command line also sets what the plan sets.
    """
    files = [argument.removeprefix(PREFIX) for argument in arguments if argument.startswith(PREFIX)]
    if not files:
        return list(arguments), None
    if len(files) > 1:
        raise ValueError(f"plan={files[0]} and plan={files[1]}: give one plan")
    path = Path(files[0])
    if not path.is_file():
        raise FileNotFoundError(f"plan={path}: there is no such file; recipes/plan.py writes one, plan.yaml")
    from lightning_dp.planner.report import read_overrides

    overrides = read_overrides(path)
    others = [argument for argument in arguments if not argument.startswith(PREFIX)]
    given = {_key(argument) for argument in others if "=" in argument}
    if twice := [override for override in overrides if _key(override) in given]:
        raise ValueError(f"plan={path} sets {twice[0]}, and so does the command line; leave out one of the two")
    return [*others, *overrides], f"plan={path}: {' '.join(overrides)}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
