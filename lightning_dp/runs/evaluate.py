"""Test a checkpoint on one device, with the configuration in its run folder.

lightning-dp-evaluate runs/digits_resnet20/DATE/checkpoints/last.ckpt
lightning-dp-evaluate CHECKPOINT data.root=/elsewhere trainer.accelerator=gpu
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_dp.runs.command_line import argument_parser, explain
from lightning_dp.runs.train import build


def evaluate(checkpoint: Path, overrides: list[str]) -> dict[str, float]:
    """Return the test metrics of a checkpoint.

    Raises:
        FileNotFoundError: the checkpoint does not exist, or is not in a run folder.
        ValueError: the file is not a checkpoint, or its model is not that of the configuration.
    """
    state = read_checkpoint(checkpoint)
    trainer, model, data = build(read_config(checkpoint, overrides))
    data.check(world_size=1)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} holds another model than the configuration of its run: {error}") from error
    metrics = trainer.test(model, datamodule=data, verbose=False)[0]
    return {name: float(value) for name, value in metrics.items()}


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint. No code in the file is executed."""
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder, as of a sharded checkpoint; make a plain file of it with "
            "lightning_dp.strategies.consolidate_checkpoint, put that in its place, and leave it in the run folder"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; runs keep theirs in RUN_DIR/checkpoints/last.ckpt")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # an unpickler can raise any error for bytes that are not a pickle
        raise ValueError(f"{path} is not a checkpoint of a run: {error}") from error


def read_config(checkpoint: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the configuration in the run folder of a checkpoint, changed to use one device and to write nothing."""
    run_dir = checkpoint.resolve().parents[1]
    path = run_dir / ".hydra" / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; leave the checkpoint in its run folder")
    config = OmegaConf.load(path)
    OmegaConf.set_struct(config, True)
    config.run_dir = str(run_dir)
    config.callbacks = {}
    here = {"devices": 1, "num_nodes": 1, "strategy": "auto", "enable_checkpointing": False}
    for name, value in here.items():
        config.trainer[name] = value
    config.merge_with_dotlist(overrides)
    resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    # Nothing is trained, so no checkpoint is kept.
    return resolved | {"test": "last"}


def main() -> None:
    """Print the test metrics."""
    parser = argument_parser("lightning-dp-evaluate", __doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    try:
        metrics = evaluate(arguments.checkpoint, arguments.overrides)
    except (ValueError, OSError, ImportError, OmegaConfBaseException) as error:
        sys.exit(f"error: {explain(error)}")
    print("  ".join(f"{name}={value:.4f}" for name, value in sorted(metrics.items())))
