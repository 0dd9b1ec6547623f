"""Memory of hybrid parallelism with a large head: all processes together, phase by phase.

    python benchmarks/hybrid_memory.py                       # a head of 0.2 GB, which any machine can hold
    python benchmarks/hybrid_memory.py --full                # 1,000,000 x 512: needs 21 GB of memory and 5 GB of disk
    python benchmarks/hybrid_memory.py --full --meta --evaluation sharded --state-dict-type sharded
    python benchmarks/hybrid_memory.py --classes 5500000 --features 512 --bf16 --momentum 0 --meta \
        --evaluation sharded --state-dict-type sharded       # 14 GB of memory and 6 GB of disk

Each rank holds its rows of the weights, gradients and momentum. The phases: the module is built (whole on every rank,
with --meta on none), `fit` sets up, trains, saves a checkpoint and ends, and a second run resumes from the checkpoint.
Memory is the proportional set size (PSS) of all processes, the launcher's included: shared pages count once. It is
sampled every 0.1 s. The table shows the peak of each phase. The bound is what the rows alone take: weights, gradients
and momentum. DDP holds them on every rank, K times as much. There is one run, so there is no spread. Writes
results.json, table.md and memory.png.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.report import markdown_table, write_report
from support.spread import min_max
from support.training import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.launch import launch
from lightning_dp.losses import sharded_cross_entropy

FULL = (1_000_000, 512)  # classes and features
START = "start of the processes"
BUILD = "build"
SET_UP = "set-up"
TRAIN = "training"
SAVE = "checkpoint"
END = "end of fit"
RESUME = "second run, resumed"
PHASES = [START, BUILD, SET_UP, TRAIN, SAVE, END, RESUME]
LOCAL_BATCH_SIZE = 8
PROCESS_BYTES = 450e6  # of a process with torch and Lightning, without any tensor
SMOKE = {"classes": 20_000, "features": 128, "processes": 2}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.add_argument("--full", action="store_true", help=f"a head of {FULL[0]:,} x {FULL[1]}")
    options.add_argument("--classes", type=int, default=200_000)
    options.add_argument("--features", type=int, default=256)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--momentum", type=float, default=0.9, help="of SGD; 0 takes a third less memory")
    options.add_argument("--bf16", action="store_true", help="weights, gradients and momentum of 16 bits")
    options.add_argument("--meta", action="store_true", help="build the head on the meta device")
    options.add_argument("--evaluation", choices=("gathered", "sharded"), default="gathered")
    options.add_argument("--state-dict-type", choices=("full", "sharded"), default="full")
    options.add_argument("--folder", type=Path, help="for the checkpoint; a temporary one by default")
    return options


class LargeHead(pl.LightningModule):
    """A small trunk, and one linear layer to many classes."""

    def __init__(self, num_classes: int, num_features: int, on_meta: bool, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.trunk = nn.Sequential(nn.Linear(32, num_features), nn.ReLU())
        with torch.device("meta" if on_meta else "cpu"):
            self.head = nn.Linear(num_features, num_classes, bias=False)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return sharded_cross_entropy(self.head, features, target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.head_step(self.trunk(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=self.momentum)


def build(arguments: argparse.Namespace) -> LargeHead:
    module = LargeHead(arguments.classes, arguments.features, arguments.meta, arguments.momentum)
    return module.to(dtype_of(arguments))


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if arguments.bf16 else torch.float32


class PhaseFile(pl.Callback):
    """Keeps the name of the present phase in a file, for the process that samples. Rank 0 writes it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def enter(self, phase: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            self.file.write_text(phase)

    def on_train_start(self, *_: Any) -> None:
        self.enter(TRAIN)

    def on_train_batch_start(self, *_: Any) -> None:
        self.enter(TRAIN)

    def on_train_batch_end(self, *_: Any) -> None:
        self.enter(SAVE)  # ModelCheckpoint comes after this callback

    def on_train_end(self, *_: Any) -> None:
        self.enter(END)


def run(arguments: argparse.Namespace, folder: str) -> None:
    """One rank: trains, saves, and resumes."""
    quiet()
    Path(folder, f"pid-{os.getpid()}").touch()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    count = arguments.steps * LOCAL_BATCH_SIZE
    x = torch.randn(count, 32, generator=generator).to(dtype_of(arguments))
    y = torch.randint(arguments.classes, (count,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), LOCAL_BATCH_SIZE)
    # Only the last step of the first run saves.
    saver = ModelCheckpoint(Path(folder, "checkpoint"), filename="last", every_n_train_steps=arguments.steps)
    phases = PhaseFile(Path(folder, "phase"))
    phases.enter(BUILD)
    module = build(arguments)
    phases.enter(SET_UP)
    fit(arguments, module, loader, max_epochs=1, callbacks=[phases, saver])
    # Free the first run before the second one begins, with its callbacks, on which Lightning leaves the module's log.
    del module, saver, phases
    gc.collect()
    dist.barrier()  # a rank that is late must not count in the next phase
    PhaseFile(Path(folder, "phase")).enter(RESUME)
    module = build(arguments)
    fit(arguments, module, loader, max_epochs=2, ckpt_path=Path(folder, "checkpoint", "last.ckpt"))


def fit(
    arguments: argparse.Namespace,
    module: pl.LightningModule,
    loader: DataLoader[Any],
    max_epochs: int,
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: Path | None = None,
) -> None:
    strategy = KrizhevskyHybridStrategy(evaluation=arguments.evaluation, state_dict_type=arguments.state_dict_type)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=arguments.processes,
        max_epochs=max_epochs,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)


class Sampler(threading.Thread):
    """Samples the sum of the processes' PSS, and keeps the peak of each phase, in bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.peaks = dict.fromkeys(PHASES, 0)
        self.least_available = memory_available()
        self.is_done = threading.Event()

    def run(self) -> None:
        name = START
        while not self.is_done.wait(0.1):
            pids = [int(path.name.rpartition("-")[2]) for path in self.folder.glob("pid-*")]
            phase = self.folder / "phase"
            if phase.exists():
                name = phase.read_text() or name  # empty while rank 0 writes it
            total = sum(_proportional_set_size(pid) for pid in (os.getpid(), *pids))
            self.peaks[name] = max(self.peaks[name], total)
            self.least_available = min(self.least_available, memory_available())


def memory_available() -> int:
    """Return what the machine can still give to processes, in bytes. It counts what only caches files."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _proportional_set_size(pid: int) -> int:
    try:
        return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") * 1024
    except OSError:  # the process has ended
        return 0


def _kilobytes(file: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(key)), 0)


def require_memory(arguments: argparse.Namespace) -> None:
    """Exit if the machine has too little memory: the kernel would end other processes, too."""
    head = arguments.classes * arguments.features * dtype_of(arguments).itemsize
    # At the end of fit each rank has the whole weights and momentum beside its rows of the weights. With both options
    # "sharded", that is not so; what then counts are rows, the files of a checkpoint, and the module as it is built.
    is_sharded = arguments.evaluation == arguments.state_dict_type == "sharded"
    copies = 2 * arguments.processes + 1
    if is_sharded:
        copies = 5 if arguments.meta else arguments.processes + 3
        copies -= 2 if arguments.momentum == 0 else 0  # neither it nor its rows in a checkpoint
    needed = copies * head + (arguments.processes + 1) * PROCESS_BYTES
    if needed > memory_available():
        raise SystemExit(
            f"this head needs about {needed / 1e9:.0f} GB of memory, and {memory_available() / 1e9:.0f} GB are "
            "available; give a smaller one with --classes and --features"
        )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    if arguments.full:
        arguments.classes, arguments.features = FULL
    require_memory(arguments)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    output = output_folder(arguments)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    sampler = Sampler(folder)
    sampler.start()
    try:
        launch(run, arguments, str(folder), num_processes=arguments.processes)
        saved = sum(path.stat().st_size for path in (folder / "checkpoint").rglob("*") if path.is_file())
    finally:
        sampler.is_done.set()
        sampler.join()
        shutil.rmtree(folder)
    report(output, arguments, sampler, saved)


def report(folder: Path, arguments: argparse.Namespace, sampler: Sampler, checkpoint_bytes: int) -> None:
    """Print and write the table and the plot."""
    copies = 3 if arguments.momentum else 2  # weights, gradients and momentum
    rows_bytes = copies * arguments.classes * arguments.features * dtype_of(arguments).itemsize
    ddp_bytes = arguments.processes * rows_bytes
    peak = max(sampler.peaks.values())
    title = (
        f"Head of {arguments.classes:,} x {arguments.features}, {dtype_of(arguments)}, momentum {arguments.momentum}, "
        f"{arguments.processes} processes, built "
        f"{'on the meta device' if arguments.meta else 'whole'}, evaluation={arguments.evaluation!r}, "
        f"state_dict_type={arguments.state_dict_type!r}"
    )
    rows = [[phase, f"{sampler.peaks[phase] / 1e9:.2f}"] for phase in PHASES]
    rows += [
        ["peak of all phases", f"{peak / 1e9:.2f}"],
        ["bound: weights, gradients and momentum, once", f"{rows_bytes / 1e9:.2f}"],
        ["DDP: the same on every rank, without the processes themselves", f"{ddp_bytes / 1e9:.2f}"],
        ["the checkpoint on disk", f"{checkpoint_bytes / 1e9:.2f}"],
        ["least memory available on the machine", f"{sampler.least_available / 1e9:.2f}"],
    ]
    results = {
        "peak_bytes": sampler.peaks,
        "rows_bytes": rows_bytes,
        "ddp_bytes": ddp_bytes,
        "checkpoint_bytes": checkpoint_bytes,
        "least_available_bytes": sampler.least_available,
    }
    write_report(folder, arguments, title, markdown_table(["", "memory of all processes, GB"], rows), results)
    bars = [Bar(phase, min_max([sampler.peaks[phase] / 1e9]), bound=rows_bytes / 1e9) for phase in PHASES]
    bars.append(Bar("DDP, tensors alone", min_max([ddp_bytes / 1e9]), hatched=True))
    draw_bars(
        {f"{arguments.classes:,} x {arguments.features}": bars},
        folder / "memory.png",
        title=f"Hybrid parallelism, {arguments.processes} processes",
        axis="peak memory of all processes",
        unit="GB",
        digits=2,
        bound_label="weights, gradients, momentum, once",
        hatched_label="computed, not measured",
    )


if __name__ == "__main__":
    main()
