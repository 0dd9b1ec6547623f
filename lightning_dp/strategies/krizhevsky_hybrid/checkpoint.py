"""Checkpoints of a sharded head: how they get to disk and back. `complete_files` has the renames.

``state_dict_type="full"``: one file with whole tensors, which rank 0 writes. Any strategy can load it.

``state_dict_type="sharded"``: a folder, so that no rank ever holds the whole head. ``checkpoint.ckpt`` has everything
but the head and is written by rank 0; each rank writes a file with its local shard. Any number of ranks can load it,
and `consolidate` converts it to an ordinary file. It is not the format of ``torch.distributed.checkpoint``, whose
index can only be read by ``pickle.load``, which runs code that the file chooses.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import tree_leaves, tree_map_only
from lightning_dp.collectives.ring import chunk_bounds
from lightning_dp.strategies.complete_files import existing, hidden_beside, remove, replace, save, write_file
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead
from lightning_dp.strategies.krizhevsky_hybrid.state import State, is_like, memory_of, states_of_head

MAIN_FILE = "checkpoint.ckpt"
SAVE_ID = "save_id"
"""Key of what the files of one save have in common. A copy that is made while a run saves may have files of two."""

# --- One file ---


def map_file(path: str | os.PathLike[str], weights_only: bool | None = None) -> State:
    """Load a checkpoint from a local file, and map parameters and optimizer states into memory instead of reading them.

    Only the rows that are used are then read, and the ranks of a host share them. They must be copied before they are
    changed or kept, because the file may be replaced.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        checkpoint: State = torch.load(str(path), map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError:  # files of old versions of torch cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    mapped = ("state_dict", "optimizer_states")
    return {
        key: value if key in mapped else tree_map_only(Tensor, Tensor.clone, value) for key, value in checkpoint.items()
    }


# --- A folder with a file of each rank ---


def write_folder(
    checkpoint: State,
    folder: Path,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    head: ShardedHead,
    broadcast: Callable[[Any], Any],
) -> None:
    """Write a checkpoint to which each rank contributes its local shard of the head.

    All ranks must call it, and all must see the same file system. If one of them cannot write, all raise, and what was
    at ``folder`` stays.

    Args:
        checkpoint: this rank's checkpoint, as Lightning makes it.
        folder: path of the checkpoint. What is there is replaced once all ranks have written.
        module: the module that the head belongs to.
        optimizers: in the order of the checkpoint's ``optimizer_states``.
        head: in its sharded state.
        broadcast: returns rank 0's value of its argument.
    """
    rank, world_size = head.channel.rank, head.channel.world_size
    # `ModelCheckpoint` may put a metric into the name that differs between ranks. All write to rank 0's folder.
    folder, unfinished, save_id = broadcast((folder, hidden_beside(folder), uuid4().hex) if rank == 0 else None)
    try:
        with _all_succeed(head, "create a folder for the checkpoint"):
            if rank == 0:
                unfinished.mkdir(parents=True)
        with _all_succeed(head, "write the checkpoint"):
            rest, local = _split(checkpoint, module, optimizers, head)
            save(local | {SAVE_ID: save_id}, unfinished / f"rows-{rank:05}-of-{world_size:05}.pt")
            if rank == 0:
                save(rest | {SAVE_ID: save_id}, unfinished / MAIN_FILE)
        with _all_succeed(head, "put the checkpoint into its place"):
            if rank == 0:
                replace(folder, unfinished)
    finally:
        if rank == 0:
            remove(unfinished)


@contextmanager
def _all_succeed(head: ShardedHead, what: str) -> Iterator[None]:
    """Do the same on all ranks within the context. If one of them raises OSError or RuntimeError, all raise."""
    error: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError) as raised:  # torch raises the second where a disk is full
        error = raised
    # Without this exchange, the others would wait for a rank whose disk is full.
    flag = torch.tensor([float(error is not None)], device=head.parameters[0].device)
    failed = head.control.all_gather("success", flag).flatten().nonzero().flatten().tolist()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"rank {failed[0]} could not {what}: see its error. The checkpoint of before is kept")


def is_sharded(path: Any) -> bool:
    """Return whether there is a sharded checkpoint at ``path``."""
    return "://" not in str(path) and Path(path, MAIN_FILE).is_file()


def load_folder(folder: Path, rank: int = 0, world_size: int = 1, weights_only: bool | None = None) -> State:
    """Return the checkpoint with the local shard of ``rank`` of ``world_size`` ranks; by default, with the whole head.

    The number of ranks may differ from when it was saved. Files are mapped, not read, so that memory is needed for
    this shard only.

    Raises:
        ValueError: the files of some ranks are missing, or they are of different saves.
    """
    checkpoint: State = torch.load(folder / MAIN_FILE, map_location="cpu", weights_only=weights_only)
    files = sorted(folder.glob("rows-*-of-*.pt"))
    count = int(files[0].stem.rpartition("-")[2]) if files else 1
    if len(files) != count:
        raise ValueError(f"{folder} has the shards of {len(files)} ranks of {count}; copy the files of all ranks there")
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]
    if len({part.pop(SAVE_ID, None) for part in (checkpoint, *parts)}) > 1:
        raise ValueError(
            f"{folder} has files of different saves, as a copy has that was made while a run was saving; copy it again"
        )

    def join(blocks: list[Tensor]) -> Tensor:
        """Return this rank's rows of the concatenated blocks, without concatenating the others."""
        *firsts, num_rows = accumulate(map(len, blocks), initial=0)
        begin, end = chunk_bounds(num_rows, world_size)[rank]
        placed = zip(blocks, firsts, strict=True)
        return torch.cat([block[max(0, begin - first) : max(0, end - first)] for block, first in placed])

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
    folder = existing(folder)
    if not is_sharded(folder):
        raise ValueError(f"{folder} is not a sharded checkpoint: it has no {MAIN_FILE}; give the folder that has one")
    if Path(file).expanduser().exists():
        raise ValueError(f"{file} exists; remove it, or give another name")
    try:
        checkpoint = load_folder(Path(folder), weights_only=weights_only)
    except UnpicklingError as error:
        raise ValueError(
            f"{folder} holds more than weights, numbers and text, and reading it would run code that the file chooses; "
            "if you trust it, use weights_only=False"
        ) from error
    write_file(checkpoint, file)


def _split(
    checkpoint: State, module: LightningModule, optimizers: Sequence[Optimizer], head: ShardedHead
) -> tuple[State, State]:
    """Return the checkpoint without the head's local shard, and that shard."""
    own_names = head.names_in(module)
    # A copy, not a new dictionary, which would lose the versions of the layers.
    state_dict = copy.copy(checkpoint["state_dict"])
    # Also by memory, because the module may save the head under other names. Those of rank 0 count.
    places = set(map(memory_of, head.parameters))
    names = [
        name
        for name, value in state_dict.items()
        if name in own_names or (isinstance(value, Tensor) and memory_of(value) in places)
    ]
    _require_known(module, own_names, state_dict, names)
    local: State = {"parameters": {name: state_dict.pop(name) for name in names}, "optimizer_states": []}
    rest = checkpoint | {"state_dict": state_dict}
    rest_of_optimizers = []
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        own: dict[int, State] = {}
        kept = dict(state.get("state", {}))
        for index, p, values in states_of_head(optimizer, state, head):
            own[index] = {key: value for key, value in values.items() if is_like(value, p.shape)}
            kept[index] = {key: value for key, value in values.items() if key not in own[index]}
            _require_none_like(p, kept[index], optimizer)
        local["optimizer_states"].append(own)
        rest_of_optimizers.append(state | {"state": kept} if own else state)
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = rest_of_optimizers
    return rest, local


def _require_none_like(parameter: Tensor, kept: State, optimizer: Optimizer) -> None:
    """Raise RuntimeError if ``kept``, which rank 0 alone writes, has tensors like ``parameter`` in lists or dicts."""
    for key, value in kept.items():
        if any(is_like(each, parameter.shape) for each in tree_leaves(value)):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {key!r} of the head's parameters in lists or dicts, of which a "
                "sharded checkpoint would have rank 0's local shard alone; use state_dict_type='full'"
            )


def _require_known(
    module: LightningModule, own_names: Mapping[str, Tensor], state_dict: State, names: Sequence[str]
) -> None:
    """Raise RuntimeError if the head may be among what ``state_dict`` holds beside ``names``, in another form.

    Copies and nested dictionaries, for example: the file of rank 0 would hold its local shard, which is no checkpoint.
    """
    saved = {memory_of(state_dict[name]) for name in names}
    missing = [name for name, p in own_names.items() if name not in names and memory_of(p) not in saved]
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    others = state_dict.keys() - names - {name for name, _ in own}
    if missing and others:
        raise RuntimeError(
            f"the state_dict of {type(module).__name__} lacks {missing[0]} and has other keys ({min(others)!r}), which "
            "may hold rank 0's local shard. With state_dict_type='sharded' it may give the head's tensors other "
            "names, but must not copy, nest or join them; or use state_dict_type='full'"
        )
