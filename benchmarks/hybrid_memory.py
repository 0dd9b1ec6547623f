"""Memory of hybrid parallelism with a large head: all processes together, phase by phase.

    python benchmarks/hybrid_memory.py           # a small head: does it work?
    python benchmarks/hybrid_memory.py --full    # 1,000,000 x 512 on 4 processes: needs 21 GB of memory, 5 GB of disk

Each rank holds its rows of the weights, gradients and momentum. Phases: the module is built (whole on each rank, or,
with --meta, on none), `fit` sets up, trains, saves a checkpoint and ends, and a second run resumes from it.
Memory is the proportional set size (PSS) of all processes, the launcher's included: shared pages count once. It is
sampled every 0.1 s. The table shows the peak of each phase, beside what DDP needs on all ranks for weights, gradients
and momentum alone. Writes table.md and results.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from support.report import describe_machine, output_folder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.launch import launch

PHASES = ["start", "build", "set up", "train", "save", "end of fit", "resume"]
LOCAL_BATCH_SIZE = 8


class LargeHead(pl.LightningModule):
    """A small trunk, and one linear layer to many classes."""

    def __init__(self, num_classes: int, num_features: int, on_meta: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, num_features), nn.ReLU())
        with torch.device("meta" if on_meta else "cpu"):
            self.head = nn.Linear(num_features, num_classes, bias=False)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(features), target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class SaysPhase(pl.Callback):
    """Leaves the name of the phase, on rank 0, for the process that samples."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def enter(self, phase: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            self.file.write_text(phase)

    def on_train_start(self, *_: Any) -> None:
        self.enter("train")

    def on_train_batch_end(self, *_: Any) -> None:
        self.enter("save")

    def on_train_batch_start(self, *_: Any) -> None:
        self.enter("train")

    def on_train_end(self, *_: Any) -> None:
        self.enter("end of fit")


def run(arguments: argparse.Namespace, folder: str) -> None:
    """One rank: trains, saves, and resumes."""
    (Path(folder) / f"pid-{os.getpid()}").touch()
    says = SaysPhase(Path(folder, "phase"))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    count = arguments.steps * LOCAL_BATCH_SIZE
    x = torch.randn(count, 32, generator=generator)
    y = torch.randint(arguments.classes, (count,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), LOCAL_BATCH_SIZE)
    for epochs in (1, 2):
        says.enter("build" if epochs == 1 else "resume")
        module = LargeHead(arguments.classes, arguments.features, arguments.meta)
        says.enter("set up" if epochs == 1 else "resume")
        # Only the last step of the first run saves.
        saver = ModelCheckpoint(Path(folder, "checkpoint"), filename="last", every_n_train_steps=arguments.steps)
        trainer = pl.Trainer(
            strategy=KrizhevskyHybridStrategy(
                evaluation=arguments.evaluation, state_dict_type=arguments.state_dict_type
            ),
            accelerator="cpu", devices=arguments.processes, max_epochs=epochs, logger=False,
            callbacks=[says, saver] if epochs == 1 else [], enable_checkpointing=epochs == 1,
            use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=None if epochs == 1 else str(Path(folder, "checkpoint", "last.ckpt")))
        del module, trainer, saver
        gc.collect()


class Sampler(threading.Thread):
    """The sum of the processes' PSS, and its peak in each phase, in bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.peaks = dict.fromkeys(PHASES, 0)
        self.least_available = _available()
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.wait(0.1):
            pids = [int(path.name.rpartition("-")[2]) for path in self.folder.glob("pid-*")]
            phase = self.folder / "phase"
            name = (phase.read_text() or "start") if phase.exists() else "start"
            total = sum(_pss(pid) for pid in (os.getpid(), *pids))
            self.peaks[name] = max(self.peaks[name], total)
            self.least_available = min(self.least_available, _available())


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1,000,000 classes and 512 features")
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--meta", action="store_true", help="build the head on the meta device")
    parser.add_argument("--evaluation", choices=("gathered", "sharded"), default="gathered")
    parser.add_argument("--state-dict-type", choices=("full", "sharded"), default="full")
    parser.add_argument("--folder", type=Path, help="for the checkpoint; a temporary one by default")
    arguments = parser.parse_args()
    if arguments.full:
        arguments.classes, arguments.features = 1_000_000, 512
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    sampler = Sampler(folder)
    sampler.start()
    begin_s = time.perf_counter()
    try:
        launch(run, arguments, str(folder), num_processes=arguments.processes)
    finally:
        sampler.is_done.set()
        sampler.join()
        saved = sum(path.stat().st_size for path in (folder / "checkpoint").rglob("*") if path.is_file())
        shutil.rmtree(folder)
    report(arguments, sampler, saved, time.perf_counter() - begin_s)


def report(arguments: argparse.Namespace, sampler: Sampler, saved: int, seconds: float) -> None:
    """Print the table, and write it."""
    head = arguments.classes * arguments.features * 4
    ddp = 3 * arguments.processes * head
    rows = ["| phase | peak of all processes, GB |", "|---|---|"]
    rows += [f"| {phase} | {peak / 1e9:.2f} |" for phase, peak in sampler.peaks.items() if peak]
    text = "\n".join(
        [
            f"{describe_machine()}, {seconds:.0f} s",
            f"head {arguments.classes} x {arguments.features}, momentum, {arguments.processes} processes, "
            f"evaluation={arguments.evaluation}, state_dict_type={arguments.state_dict_type}, "
            f"built {'on the meta device' if arguments.meta else 'whole'}; checkpoint {saved / 1e9:.2f} GB",
            *rows,
            f"peak {max(sampler.peaks.values()) / 1e9:.2f} GB; DDP needs {ddp / 1e9:.2f} GB for weights, gradients and "
            f"momentum alone; least memory available on the machine {sampler.least_available / 1e9:.2f} GB",
        ]
    )
    print(text)
    folder = output_folder("hybrid_memory")
    (folder / "table.md").write_text(text + "\n")
    results = {"peaks": sampler.peaks, "ddp": ddp, "checkpoint": saved, "classes": arguments.classes}
    (folder / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
