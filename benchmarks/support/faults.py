"""Faults that a rank can have in training: what happens, at which moment, under which strategy.

`rank_main` is one rank of a `Case`: it trains a small network with batch norm, and at one moment of the second epoch
the fault happens to the victim. It returns how its own training ended. ``tests/faults`` runs cases and says what must
hold; ``benchmarks/faults.py`` times them.
"""

from __future__ import annotations

import ctypes
import io
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dp import AdaptiveGlobalBatchNorm, KrizhevskyHybridStrategy, LayeredFSDPStrategy, LayeredSGDStrategy
from lightning_dp._private.torch_names import local_part
from lightning_dp.strategies import PowerSGD
from support.emulated_hosts import NIC, Hosts

SMALL_BUCKETS_MB = 200 / 2**20  # 200 bytes: DDP gives each layer a bucket of its own


def _layered(**options: Any) -> Callable[[timedelta], Any]:
    return lambda timeout: LayeredSGDStrategy(1, bucket_cap_mb=SMALL_BUCKETS_MB, timeout=timeout, **options)


def _hybrid(**options: Any) -> Callable[[timedelta], Any]:
    return lambda timeout: KrizhevskyHybridStrategy(timeout=timeout, **options)


def _fsdp(group_size: int, **options: Any) -> Callable[[timedelta], Any]:
    wrap = [nn.Linear, nn.BatchNorm1d]
    return lambda timeout: LayeredFSDPStrategy(group_size, wrap=wrap, timeout=timeout, **options)


DDP = "ddp"
STRATEGIES: dict[str, Callable[[timedelta], Any]] = {
    DDP: lambda timeout: DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB, timeout=timeout),
    "layered step": _layered(),
    "layered load": _layered(overlap="load"),
    "layered int8": _layered(compression="int8"),
    "layered PowerSGD": _layered(compression=PowerSGD(rank=1)),
    "FSDP step": _fsdp(1),  # the sums between groups
    "FSDP load": _fsdp(1, overlap="load"),
    "FSDP shards": _fsdp(2),  # the collectives of FSDP2 inside a group
    "hybrid a": _hybrid(scheme="a"),
    "hybrid c": _hybrid(scheme="c"),
    "hybrid sharded": _hybrid(scheme="a", state_dict_type="sharded"),
}
WORLD_SIZE = 2
LONG_S = 600.0
NUM_BATCHES, LOCAL_BATCH_SIZE = 4, 3
BATCH = 1  # of the fault, from 0: training would go on afterwards
# In the folder of a case.
CHECKPOINTS, CHECKPOINT, TEMPORARY = "checkpoints", "last.ckpt", "temporary"
# In the folder for temporary files: a path too long for a Unix socket. Ranks on two hosts have none between them, and
# those of `Hosts`, which share their files, would talk through one when the network is cut.
WITHOUT_SOCKETS = "without_sockets".ljust(96, "_")


@dataclass(frozen=True)
class Case:
    """One row: ``fault`` happens to rank ``victim`` at ``moment``.

    Attributes:
        fault: a name in `FAULTS`.
        moment: "forward", "backward", "pending" (between two steps), "validation", "save" (half of a checkpoint is
            written), "rename" (it is written, and not yet in its place), or "start".
        strategy: a name in `STRATEGIES`.
        victim: rank.
        global_batch_norm: with `AdaptiveGlobalBatchNorm`.
        timeout_s: of the strategy's process groups.
        epoch: in which the fault happens, from 0. With 1, there is a checkpoint of the epoch before.
        num_epochs: of the whole training.
    """

    fault: str
    moment: str
    strategy: str
    victim: int = 1
    global_batch_norm: bool = False
    timeout_s: float = LONG_S
    epoch: int = 1
    num_epochs: int = 2

    def __str__(self) -> str:
        norm = ", global batch norm" if self.global_batch_norm else ""
        return f"{self.fault}, {self.moment} of rank {self.victim}, {self.strategy}{norm}"


@dataclass(frozen=True)
class End:
    """How a rank's `fit` has ended.

    Attributes:
        error: type, text and notes of what it raised. None: it went through.
        trace: of the error.
        weights: at the end, by name; only of a rank that went through.
    """

    error: str | None
    trace: str
    weights: dict[str, Tensor]


class Net(pl.LightningModule):
    """A trunk with batch norm, and a head; it tells the fault which moment it has reached."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        self.optional = nn.Linear(6, 6)
        self.head = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        self.double()
        self.fault = fault

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        is_here = self.current_epoch == self.fault.case.epoch and batch_idx == BATCH
        features = self.trunk(x)
        if not (is_here and self.fault.leaves_a_layer_out):
            features = features + self.optional(features)
        if is_here:
            features.register_hook(lambda gradient: self.fault.reach("backward"))
            self.fault.reach("forward")
        return self.head_step(features, target)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == self.fault.case.epoch and batch_idx == BATCH:
            self.fault.reach("pending")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, target = batch
        features = self.trunk(x)
        loss = F.cross_entropy(self.head(features + self.optional(features)), target)
        self.log("val_loss", loss, sync_dist=True)
        if self.current_epoch == self.fault.case.epoch and batch_idx == 1:
            self.fault.reach("validation")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Data(pl.LightningDataModule):
    """Random batches, others on each rank."""

    def __init__(self, fault: Fault, rank: int) -> None:
        super().__init__()
        self._fault = fault
        self._rank = rank

    def _loader(self, num_batches: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self._rank)
        x = torch.randn(NUM_BATCHES * LOCAL_BATCH_SIZE, 6, dtype=torch.float64, generator=generator)
        dataset = TensorDataset(x, torch.randint(3, (len(x),), generator=generator))
        has_workers = self._fault.case.fault == "loader worker killed"
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if has_workers else {}
        return DataLoader(Subset(dataset, range(num_batches * LOCAL_BATCH_SIZE)), LOCAL_BATCH_SIZE, **workers)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return self._loader(self._fault.num_batches(self.trainer.current_epoch))

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(2)


def make_trainer(case: Case, folder: Path) -> pl.Trainer:
    """Return the Trainer of a case, which writes a checkpoint after each epoch."""
    callbacks: list[pl.Callback] = [
        ModelCheckpoint(folder / CHECKPOINTS, Path(CHECKPOINT).stem, enable_version_counter=False)
    ]
    if case.global_batch_norm:
        callbacks.append(AdaptiveGlobalBatchNorm())
    return pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=STRATEGIES[case.strategy](timedelta(seconds=case.timeout_s)),
        callbacks=callbacks,
        max_epochs=case.num_epochs,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class Fault:
    """The fault of a case, on one rank. `reach` is called at each moment, and does something once, on the victim.

    Args:
        case: whose fault it is.
        rank: of this process.
        folder: shared by the ranks.
    """

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case = case
        self.is_victim = rank == case.victim
        self.folder = folder
        self._is_over = False

    @property
    def leaves_a_layer_out(self) -> bool:
        return self.is_victim and self.case.fault == "other graph"

    def num_batches(self, epoch: int) -> int:
        """Return the batches of this rank in an epoch."""
        is_shorter = self.is_victim and self.case.fault == "fewer batches" and epoch == self.case.epoch
        return BATCH + 1 if is_shorter else NUM_BATCHES

    def reach(self, moment: str) -> None:
        if self.is_victim and moment == self.case.moment and not self._is_over:
            self._is_over = True
            write_whole(self.folder / "fault", f"{time.monotonic()}")
            FAULTS[self.case.fault](self.folder)

    @contextmanager
    def watching(self, trainer: pl.Trainer) -> Iterator[None]:
        """Reach the moments "save" and "rename" of checkpoints that are written within the context."""
        save = torch.save
        is_due = lambda: trainer.current_epoch == self.case.epoch  # noqa: E731

        def save_in_two_halves(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            whole = io.BytesIO()
            save(content, whole, *args, **kwargs)
            half = len(whole.getvalue()) // 2
            with nullcontext(file) if hasattr(file, "write") else open(file, "wb") as opened:
                opened.write(whole.getvalue()[:half])
                opened.flush()
                if is_due():
                    self.reach("save")
                opened.write(whole.getvalue()[half:])

        def see_rename(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "os.rename" and str(arguments[1]).endswith(CHECKPOINT) and is_due():
                self.reach("rename")

        setattr(torch, "save", save_in_two_halves)  # noqa: B010  its type is that of torch's own
        sys.addaudithook(see_rename)
        try:
            yield
        finally:
            torch.save = save


def _signal(number: signal.Signals) -> Callable[[Path], None]:
    return lambda folder: os.kill(os.getpid(), number)


def _signal_all(folder: Path) -> None:
    """As a cluster's scheduler does it; this rank comes last."""
    pids = {int(path.read_text()) for path in folder.glob("pid-*")}
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGTERM)


PAUSE_S = 1.0
# It waits until the process is stopped, or the signal that continues it could come first.
_CONTINUE = f"until grep -q 'T (stopped)' /proc/$0/status; do :; done; sleep {PAUSE_S}; kill -CONT $0"


def _pause(folder: Path) -> None:
    with subprocess.Popen(["sh", "-c", _CONTINUE, str(os.getpid())]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _raise(folder: Path) -> None:
    raise ValueError("the fault")


def _kill_workers(folder: Path) -> None:
    """The handler of torch's loader raises here, or it would do so at any later moment."""
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def _fill_disk(folder: Path) -> None:
    """Fill the file system of the checkpoints if it is a small one, else forbid this process larger files."""
    checkpoints = folder / CHECKPOINTS
    if not checkpoints.is_mount():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        return
    with suppress(OSError), open(checkpoints / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _cut_network(folder: Path) -> None:
    subprocess.run(["ip", "link", "set", NIC, "down"], check=True)


def _nothing(folder: Path) -> None:
    """The fault is in the rank's data or its model."""


FAULTS: dict[str, Callable[[Path], None]] = {
    "kill -9": _signal(signal.SIGKILL),
    "stopped for 1 s": _pause,
    "stopped for good": _signal(signal.SIGSTOP),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGTERM to all": _signal_all,
    "exception": _raise,
    "loader worker killed": _kill_workers,
    "fewer batches": _nothing,
    "other graph": _nothing,
    "disk full": _fill_disk,
    "network cut": _cut_network,
    "none": _nothing,
}


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen in part."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def rank_main(rank: int, case: Case, folder: Path, namespaces: Sequence[str] = (), resume: bool = False) -> End:
    """Train as `train` does, and return how that has ended."""
    try:
        weights = train(rank, case, folder, namespaces, resume)
    except BaseException as error:
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        return End("\n".join(said), traceback.format_exc(), {})
    return End(None, "", weights)


def train(
    rank: int, case: Case, folder: Path, namespaces: Sequence[str] = (), resume: bool = False
) -> dict[str, Tensor]:
    """Be one rank of a case, in a process of its own, which has the environment that torchrun would give it.

    Args:
        rank: of this process.
        case: what happens.
        folder: shared by the ranks; made by `make_folder`.
        namespaces: of the network, one for each rank; none: all ranks use the host's.
        resume: continue from the last checkpoint.

    Returns:
        The weights at the end, by name; of a shard, this rank's part.
    """
    os.setpgid(0, 0)  # what this rank leaves behind is found by its process group
    multiprocessing.current_process().daemon = False  # or it could not have loader workers
    tempfile.tempdir = str(folder / TEMPORARY)
    write_whole(folder / f"pid-{rank}", str(os.getpid()))
    if namespaces:
        _enter(namespaces[rank])
        tempfile.tempdir = str(folder / TEMPORARY / WITHOUT_SOCKETS)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # advice
    fault = Fault(case, rank, folder)
    net = Net(fault)
    trainer = make_trainer(case, folder)
    checkpoint = folder / CHECKPOINTS / CHECKPOINT
    try:
        with fault.watching(trainer):
            trainer.fit(net, datamodule=Data(fault, rank), ckpt_path=checkpoint if resume else None)
    finally:
        if case.fault == "stopped for good" and not fault.is_victim:
            os.kill(int((folder / f"pid-{case.victim}").read_text()), signal.SIGCONT)
    return {name: local_part(value).clone() for name, value in net.state_dict().items()}


def make_folder(folder: Path) -> Path:
    """Make a folder for the ranks of a case, and return it."""
    for name in (CHECKPOINTS, Path(TEMPORARY, WITHOUT_SOCKETS)):
        (folder / name).mkdir(parents=True)
    return folder


def _enter(namespace: str) -> None:
    """Let this process use the network of a host that `Hosts` has made. Rank 0 keeps the store there."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.environ.update(
        MASTER_ADDR=Hosts.address(0), MASTER_PORT="29500", TORCHELASTIC_USE_AGENT_STORE="False", GLOO_SOCKET_IFNAME=NIC
    )


# --- The table ---

# Fault, moment, victim. None: the rank that writes checkpoints, or a rank that contributes its part to one.
ROWS: tuple[tuple[str, str, int | None], ...] = (
    ("kill -9", "forward", 1),
    ("kill -9", "forward", 0),
    ("kill -9", "backward", 1),
    ("kill -9", "pending", 1),
    ("kill -9", "validation", 1),
    ("kill -9", "save", None),
    ("kill -9", "rename", 0),
    ("stopped for 1 s", "forward", 1),
    ("stopped for 1 s", "backward", 1),
    ("stopped for 1 s", "pending", 1),
    ("stopped for good", "forward", 1),
    ("stopped for good", "backward", 1),
    ("stopped for good", "pending", 1),
    ("stopped for good", "validation", 1),
    ("SIGTERM", "forward", 1),
    ("SIGTERM to all", "backward", 1),
    ("exception", "forward", 1),
    ("exception", "backward", 1),
    ("exception", "pending", 1),
    ("exception", "validation", 1),
    ("loader worker killed", "forward", 1),
    ("fewer batches", "pending", 0),
    ("fewer batches", "pending", 1),
    ("other graph", "forward", 1),
    ("disk full", "save", 0),  # the rest of a shard may fit into its last page
    ("network cut", "backward", 1),
)
# Those that a rank can only notice by waiting for the timeout.
SILENT = ("stopped for good", "network cut", "SIGTERM", "SIGTERM to all", "fewer batches", "other graph")


def cases(
    rows: Sequence[tuple[str, str, int | None]], strategies: Sequence[str], norms: Sequence[bool], timeout_s: float
) -> list[Case]:
    """Return rows x strategies x with and without global batch norm.

    Args:
        rows: of `ROWS`.
        strategies: of `STRATEGIES`.
        norms: whether with global batch norm.
        timeout_s: of the process groups where nothing but the timeout ends a wait. Elsewhere it is so long that a rank
            that waits for it is seen.
    """
    return [
        Case(fault, moment, strategy, _victim(victim, strategy), norm, timeout_s if fault in SILENT else LONG_S)
        for fault, moment, victim in rows
        for norm in norms
        for strategy in strategies
    ]


def _victim(victim: int | None, strategy: str) -> int:
    return victim if victim is not None else int(strategy == "hybrid sharded")
