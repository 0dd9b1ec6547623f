"""Checkpoints in which each rank writes its own rows of the head, so that no rank ever holds all of it.

A checkpoint is a folder with ``checkpoint.ckpt``, which holds everything but the head and is written by rank 0, and a
file of rows from each rank. It can be loaded on any number of ranks. `consolidate` converts it to an ordinary file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp.collectives.ring_schedule import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import State, convert_head, write_to_disk
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead

MAIN_FILE = "checkpoint.ckpt"


def save(
    checkpoint: State,
    folder: Path,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    head: ShardedHead,
    barrier: Callable[[], None],
) -> None:
    """Write a checkpoint to which each rank contributes its rows of the head.

    All ranks must call it, and all must see the same file system.

    Args:
        checkpoint: this rank's checkpoint, as Lightning makes it.
        folder: path of the checkpoint. What is there is replaced once all ranks have written.
        module: the module that the head belongs to.
        optimizers: in the order of the checkpoint's ``optimizer_states``.
        head: in its sharded state.
        barrier: returns when all ranks have called it.
    """
    rank, world_size = head.channel.rank, head.channel.world_size
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()
    rest, rows = _split(checkpoint, module, optimizers, head)
    write_to_disk(rows, unfinished / f"rows-{rank:05}-of-{world_size:05}.pt")
    if rank == 0:
        write_to_disk(rest, unfinished / MAIN_FILE)
    barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)


def is_sharded(path: Any) -> bool:
    """Return whether there is a checkpoint of this kind at ``path``."""
    return "://" not in str(path) and Path(path, MAIN_FILE).is_file()


def load(folder: Path, rank: int = 0, world_size: int = 1, weights_only: bool | None = None) -> State:
    """Return the checkpoint with those rows of the head that ``rank`` of ``world_size`` ranks holds; by default, all.

    The number of ranks may differ from when it was saved. Files are mapped, not read, so that memory is needed for
    these rows only.

    Raises:
        ValueError: the files of some ranks are missing.
    """
    checkpoint: State = torch.load(folder / MAIN_FILE, map_location="cpu", weights_only=weights_only)
    files = sorted(folder.glob("rows-*-of-*.pt"))
    count = int(files[0].stem.rpartition("-")[2]) if files else 1
    if len(files) != count:
        raise ValueError(f"{folder} holds the rows of {len(files)} ranks of {count}; copy the files of all ranks there")
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]

    def join(blocks: list[Tensor]) -> Tensor:
        begin, end = chunk_bounds(sum(len(block) for block in blocks), world_size)[rank]
        return _rows(blocks, begin, end)

    for name in parts[0]["parameters"]:
        checkpoint["state_dict"][name] = join([part["parameters"][name] for part in parts])
    for number, of_parameters in enumerate(parts[0]["optimizer_states"]):
        state = checkpoint["optimizer_states"][number]["state"]
        for index, values in of_parameters.items():
            of_index = [part["optimizer_states"][number][index] for part in parts]
            state.setdefault(index, {}).update({key: join([part[key] for part in of_index]) for key in values})
    return checkpoint


def consolidate(folder: str | Path, file: str | Path, weights_only: bool = True) -> None:
    """Convert a sharded checkpoint to one ordinary file with whole tensors, which any Trainer can load.

    Args:
        folder: the sharded checkpoint, with the files of all ranks.
        file: path of the file to write. It must not exist.
        weights_only: see `torch.load`. False also reads objects of other classes, as hyperparameters may be. That runs
            code which the file chooses, so use it only if you trust the file.

    Raises:
        ValueError: there is no sharded checkpoint at ``folder``, it holds such objects, or ``file`` exists.
    """
    if not is_sharded(folder):
        raise ValueError(f"{folder} is not a sharded checkpoint: it has no {MAIN_FILE}; give the folder that has one")
    if Path(file).exists():
        raise ValueError(f"{file} exists; remove it, or give another name")
    try:
        checkpoint = load(Path(folder), weights_only=weights_only)
    except UnpicklingError as error:
        raise ValueError(
            f"{folder} holds more than weights, numbers and text, and reading it would run code that the file chooses; "
            "if you trust it, use weights_only=False"
        ) from error
    write_to_disk(checkpoint, file)


def _split(
    checkpoint: State, module: LightningModule, optimizers: Sequence[Optimizer], head: ShardedHead
) -> tuple[State, State]:
    """Return the checkpoint without the head's rows, and the rows."""
    names = head.names_in(module)
    state_dict = checkpoint["state_dict"]
    rows: State = {"parameters": {name: state_dict[name] for name in names if name in state_dict}}
    rest = checkpoint | {"state_dict": {name: value for name, value in state_dict.items() if name not in names}}
    rows["optimizer_states"] = []
    rest_of_optimizers = []
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        own: dict[int, State] = {}
        converted = convert_head(optimizer, state, head, lambda value, p: None if _is_rows(value, p) else value)
        for index, values in converted.get("state", {}).items():
            kept = {key: value for key, value in values.items() if value is not None}
            taken = {key: value for key, value in state["state"][index].items() if key not in kept}
            converted["state"][index] = kept
            if taken:
                own[index] = taken
        rows["optimizer_states"].append(own)
        rest_of_optimizers.append(converted)
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = rest_of_optimizers
    return rest, rows


def _is_rows(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _rows(blocks: Sequence[Tensor], begin: int, end: int) -> Tensor:
    """Return rows ``begin`` to ``end`` of the concatenated blocks, without concatenating the others."""
    found = []
    first = 0
    for block in blocks:
        found.append(block[max(0, begin - first) : max(0, end - first)])
        first += len(block)
    return torch.cat(found)
