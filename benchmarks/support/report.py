"""What every benchmark says about where it ran, and where it writes."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


def describe_machine() -> str:
    """Processor, cores, GPU, versions and date, in one line."""
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = {
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        }
        processor = ", ".join(sorted(names)) or processor
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({processor}), {gpu}, {versions}, {datetime.date.today().isoformat()}"


def output_folder(*parts: str) -> Path:
    """``runs/benchmarks/PARTS`` of the repository, made if needed."""
    folder = Path(__file__).resolve().parents[1].joinpath("runs", "benchmarks", *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
