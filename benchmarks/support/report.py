"""What every benchmark writes: the machine, the options, the figures as JSON, and a table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> str:
    """Return processor, cores, GPU, versions and date in one line."""
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = {
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        }
        processor = ", ".join(sorted(models)) or processor
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({processor}), {gpu}, {versions}, {datetime.date.today().isoformat()}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Every row has a cell for each column."""
    assert all(len(row) == len(header) for row in rows), "a row of the table has too few or too many cells"
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(folder: Path, arguments: argparse.Namespace, title: str, table: str, results: Any) -> None:
    """Print ``title``, the machine and ``table``; write ``results.json`` and ``table.md`` to ``folder``.

    Args:
        folder: an existing folder.
        arguments: the benchmark's options, kept beside the figures.
        title: what was measured, in one line.
        table: Markdown.
        results: the figures, for JSON.
    """
    machine = describe_machine()
    if arguments.smoke:
        title = f"{title} (smoke run: the figures mean nothing)"
    report = {
        "title": title,
        "machine": machine,
        "command": " ".join(sys.argv),
        "arguments": vars(arguments),
        "results": results,
    }
    # Paths among the options become text.
    (folder / "results.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    (folder / "table.md").write_text(f"{title}; {machine}\n\n{table}\n")
    print(f"\n{title}; {machine}\n\n{table}\n\nwritten to {folder}", flush=True)
