"""The options that every benchmark has, and where it writes its results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # the repository's


def benchmark_parser(description: str | None, script: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has.

    Args:
        description: the benchmark's docstring, shown by ``--help`` as it stands.
        script: the benchmark's ``__file__``; its name is the name of the folder for the results.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(benchmark=Path(script).stem)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run for a few seconds, to see that everything works; the figures mean nothing",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"folder for the results (default: runs/benchmarks/{Path(script).stem}; "
        "with --smoke in runs/benchmarks/smoke)",
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, smoke: Mapping[str, Any], argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse ``argv`` (None: the command line). With ``--smoke``, ``smoke`` replaces the options' defaults.

    An option that is given keeps its value, so that a smoke run can be made larger by hand.
    """
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        parser.set_defaults(**smoke)
        arguments = parser.parse_args(argv)
    # Other work on the machine spoils a measurement. Afterwards the load average shows the benchmark itself.
    arguments.load_average_at_start = os.getloadavg()[0]
    return arguments


def output_folder(arguments: argparse.Namespace, *parts: str) -> Path:
    """Return the folder for the results, or the folder ``parts`` inside it, made if needed.

    Smoke runs have a folder of their own: they must not replace figures that took an hour.
    """
    base: Path | None = arguments.output
    if base is None:
        base = ROOT.joinpath("runs", "benchmarks", *(["smoke"] if arguments.smoke else []), arguments.benchmark)
    folder = base.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
