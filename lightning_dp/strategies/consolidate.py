"""One file with whole tensors from a sharded checkpoint, which is a folder, so that any Trainer can continue from it.

A folder is that of a sharded head, or PyTorch's (``torch.distributed.checkpoint``), as `LayeredFSDPStrategy` and
Lightning's `ModelParallelStrategy` write it. Its optimizer states go by the names of parameters, and those of a file
by their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_dp.strategies.complete_files import existing, hidden_beside, remove, write_file
from lightning_dp.strategies.krizhevsky_hybrid.checkpoint import consolidate

REST = "meta.pt"
"""The file of Lightning in PyTorch's folder, with everything but weights and optimizer states."""
BESIDE_TENSORS = "values_beside_tensors"
"""The key of `LayeredFSDPStrategy` in that file for rank 0's values of the module that are no parameters or buffers."""


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
        optimizers = [parts[key] for key in (f"optimizer_{index}" for index in range(len(parts))) if key in parts]
        values = parts["state_dict"] | rest.pop(BESIDE_TENSORS, {})
        whole = rest | {"state_dict": values, "optimizer_states": list(map(_by_number, optimizers))}
    finally:
        remove(unfinished)  # what is mapped stays until it is written
    write_file(whole, file)


def _by_number(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by the numbers of parameters, as ``load_state_dict`` takes it, from one by names."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        numbers |= {name: len(numbers) + place for place, name in enumerate(group["params"])}
        groups.append(group | {"params": [numbers[name] for name in group["params"]]})
    return {"state": {numbers[name]: values for name, values in state.get("state", {}).items()}, "param_groups": groups}
