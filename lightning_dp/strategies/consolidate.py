"""One file with whole tensors from a sharded checkpoint, which is a folder, so that any Trainer can continue from it.

A folder is that of a sharded head, or PyTorch's (``torch.distributed.checkpoint``), as `LayeredFSDPStrategy` and
Lightning's `ModelParallelStrategy` write it. Its optimizer states go by the names of parameters, and those of a file
by their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_dp.strategies.complete_files import existing, hidden_beside, remove, write_file
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import consolidate

REST = "meta.pt"
"""The file of Lightning in PyTorch's folder, with everything but weights and optimizer states."""
OUTLINE = "outline"
"""The key in that file of what `LayeredFSDPStrategy` has there of module and optimizers, with rank 0's values."""


def consolidate_checkpoint(folder: str | Path, file: str | Path, weights_only: bool = True) -> None:
    """Convert a sharded checkpoint to one ordinary file with whole tensors, which any Trainer can load.

    All of it must fit into memory. Training continues from the file as from the folder, under any strategy.

    Args:
        folder: the sharded checkpoint, with the files of all ranks.
        file: path of the file to write. It must not exist.
        weights_only: see `torch.load`. False also reads objects of other classes, as hyperparameters may be. That runs
            code which the file chooses, so use it only if you trust the file. A folder of FSDP2 needs False: PyTorch
            reads its list of parts by pickle.

    Raises:
        ValueError: there is no sharded checkpoint at ``folder``, it holds such objects, or ``file`` exists.
    """
    folder, file = Path(existing(folder)), Path(file).expanduser()
    if not (folder / REST).is_file():
        consolidate(folder, file, weights_only)
        return
    if file.exists():
        raise ValueError(f"{file} exists; remove it, or give another name")
    if weights_only:
        raise ValueError(
            f"{folder} is a folder of FSDP2, and PyTorch reads its list of parts by pickle, which runs code that the "
            "folder chooses; if you trust it, use weights_only=False"
        )
    unfinished = hidden_beside(file)
    try:
        dcp_to_torch_save(folder, unfinished)
        parts: dict[str, Any] = torch.load(unfinished, map_location="cpu", mmap=True, weights_only=False)
        rest = torch.load(folder / REST, map_location="cpu", weights_only=False)
        keys = [key for key in (f"optimizer_{index}" for index in range(len(parts))) if key in parts]
        outline = rest.pop(
            OUTLINE, {"state_dict": parts["state_dict"], "optimizer_states": [parts[key] for key in keys]}
        )
        state = _filled(outline["state_dict"], parts["state_dict"])
        states = [
            _filled(each, parts[key]) for key, each in zip(keys, outline.get("optimizer_states", []), strict=True)
        ]
        whole = rest | {"state_dict": state, "optimizer_states": list(map(by_number, states))}
    finally:
        remove(unfinished)  # what is mapped stays until it is written
    write_file(whole, file)


def _filled(outline: Any, part: Any) -> Any:
    """Return ``outline`` with the whole tensors of ``part`` in the places of those that were sharded."""
    if isinstance(outline, Tensor) and outline.is_meta:
        if not isinstance(part, Tensor):
            raise ValueError("the folder has no values of a tensor that its outline names; is it complete?")
        return part
    if isinstance(outline, dict):
        return {key: _filled(each, _at(part, key)) for key, each in outline.items()}
    if isinstance(outline, list):
        return [_filled(each, _at(part, index)) for index, each in enumerate(outline)]
    return outline


def _at(part: Any, key: Any) -> Any:
    try:
        return part[str(key) if isinstance(part, dict) else key]
    except (LookupError, TypeError):
        return None  # PyTorch has not written this value


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by the numbers of parameters, as ``load_state_dict`` takes it, from one by names."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        numbers |= {name: len(numbers) + place for place, name in enumerate(group["params"])}
        groups.append(group | {"params": [numbers[name] for name in group["params"]]})
    return {"state": {numbers[name]: values for name, values in state.get("state", {}).items()}, "param_groups": groups}
