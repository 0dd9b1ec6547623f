"""Test a checkpoint on one device, with the configuration in its run folder.

That configuration is a program: it names the classes and functions that are called. For a run folder of somebody whom
you do not trust, give the configuration yourself, with --own. Then only the weights are read, and nothing is executed.

lightning-dp-evaluate runs/digits_resnet20/DATE/checkpoints/last.ckpt
lightning-dp-evaluate CHECKPOINT data.root=/elsewhere trainer.accelerator=gpu
lightning-dp-evaluate CHECKPOINT --own experiment=digits_resnet20
lightning-dp-evaluate CHECKPOINT --own --config-dir FOLDER experiment=NAME
"""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning import seed_everything
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_dp.data.module import ImageDataModule
from lightning_dp.runs.checkpoints import (
    OF_A_RUN,
    OTHERS,
    naming_another_model,
    read_checkpoint,
    require_intact,
    require_version,
    run_folder,
)
from lightning_dp.runs.command_line import (
    GROUPS,
    argument_parser,
    conf_folder,
    hydra_of,
    key_of,
    message_of,
    require_new_names,
    with_plan,
)
from lightning_dp.runs.hydra_versions import VERSION_BASE
from lightning_dp.runs.train import build
from lightning_dp.runs.validation import (
    Config,
    check_arguments,
    check_top_level,
    check_top_level_types,
    resolved_part,
    targets,
)

log = logging.getLogger(__name__)

READ = ("data", "model", "trainer")  # what is built of a configuration
# Nothing is trained, on one device, without callbacks. So nothing reads these keys of a run.
HERE = {"devices": 1, "num_nodes": 1, "strategy": "auto", "enable_checkpointing": False}
OF_TRAINING = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "check_val_every_n_epoch")
UNREAD = {
    *("callbacks", "logger", "strategy", "optim", "name", "run_dir", "ckpt_path", "train", "test", "print_config"),
    *("optimized_metric", "optimized_mode", *(f"trainer.{key}" for key in (*HERE, *OF_TRAINING))),
}


def evaluate(
    checkpoint: Path, overrides: list[str], own: bool = False, config_dir: Path | None = None
) -> dict[str, float]:
    """Return the test metrics of a checkpoint.

    Args:
        checkpoint: its path. No code in it is executed.
        overrides: changes to the configuration. With ``own``, a warning names those that have no effect on a test.
        own: take this installation's configuration, with ``overrides``, and not that of the run folder.
        config_dir: with ``own``, a folder with more configuration files.

    Raises:
        FileNotFoundError: the checkpoint does not exist, or is not in a run folder.
        ValueError: the file is not a checkpoint, or its model is not that of the configuration.
    """
    check_weights(checkpoint)
    if config_dir is not None and not own:
        raise ValueError(f"--config-dir {config_dir} has no effect on the configuration in a run folder; add --own")
    if own and (unread := [text for text in overrides if is_unread(key_of(text))]):
        log.warning(f"without effect, because a test is on one device and without callbacks: {', '.join(unread)}")
    with nullcontext() if own else hydra_of(run_folder(checkpoint)):
        config = on_one_device(own_config(overrides, config_dir) if own else config_of_run(checkpoint, overrides))
    check_top_level_types(config)
    for path, node in targets({key: config[key] for key in READ}):
        check_arguments(path, node)
    if config["trainer"].get("limit_test_batches") == 0:
        raise ValueError("trainer.limit_test_batches=0 leaves nothing to test; leave it out")
    seed_everything(config["seed"], workers=True, verbose=False)
    trainer, model, data = build(config)
    # The strategies of runs do so before the data module's setup, which may divide the images at random. Otherwise some
    # of those that are tested were trained on. Only this strategy does not.
    if not str((config.get("strategy") or {}).get("_target_")).endswith(".SingleDeviceStrategy"):
        seed_everything(config["seed"], workers=True, verbose=False)
    if isinstance(data, ImageDataModule):
        data.check(world_size=1)
    # Of the callbacks that were there in training, which are not needed.
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
    with naming_another_model(checkpoint):
        # Lightning loads the weights when the module has the layers of its configure_model, and its precision.
        tested = trainer.test(model, datamodule=data, ckpt_path=str(checkpoint), verbose=False, weights_only=True)
    if not tested:
        raise ValueError("the configuration has no test images; give data that has some, with data.KEY=VALUE")
    return {name: value for of_loader in tested for name, value in of_loader.items()}


def check_weights(path: Path) -> None:
    """Raise an error unless a file is a whole checkpoint with weights. No code in it is executed."""
    if path.is_dir():
        for last in (path / OF_A_RUN["last"], path / OF_A_RUN["last"].name):
            if last.exists():
                raise ValueError(f"{path} is a folder with checkpoints; give one of them, such as {last}")
        raise ValueError(
            f"{path} is a folder, as of a sharded checkpoint; make a plain file of it with "
            "lightning_dp.strategies.consolidate_checkpoint, put that in its place, and leave it in the run folder"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}; {OTHERS}")
    read_checkpoint(path)
    require_intact(path)
    require_version(path)


def config_of_run(checkpoint: Path, overrides: list[str]) -> DictConfig:
    """Return the configuration in the run folder of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or nothing would read one of the overrides.
    """
    check_overrides(overrides)
    run_dir = run_folder(checkpoint)
    path = run_dir / ".hydra" / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; leave the checkpoint in its run folder, or use --own")
    try:
        config = OmegaConf.load(path)
    except Exception as error:  # of YAML or OmegaConf
        raise ValueError(f"{path} is damaged ({error}); give a configuration with --own") from error
    if not (isinstance(config, DictConfig) and all(OmegaConf.is_dict(config.get(key)) for key in READ)):
        raise ValueError(f"{path} has no {', '.join(READ)}, as that of a run has; give a configuration with --own")
    OmegaConf.set_struct(config, True)
    config.run_dir = str(run_dir)
    config.merge_with_dotlist([text for text in overrides if not text.startswith("+")])
    OmegaConf.set_struct(config, False)
    config.merge_with_dotlist([text.lstrip("+") for text in overrides if text.startswith("+")])
    return config


def check_overrides(overrides: list[str]) -> None:
    """Raise ValueError for a change to the configuration in a run folder that is none, or that nothing would read."""
    for text in overrides:
        key, sign, _ = text.lstrip("+").partition("=")  # ``++`` adds or changes
        if not sign:
            raise ValueError(f"{text} is no override; write KEY=VALUE")
        if key in (*READ, "optim", *GROUPS):
            group = key if key in READ else "GROUP"
            raise ValueError(
                f"{text} chooses a file, but the run folder has values: write {group}.OPTION=..., or use --own"
            )
        if is_unread(key) or (text.startswith("+") and not key.startswith(tuple(f"{name}." for name in READ))):
            raise ValueError(f"{text} has no effect: a test is on one device, and trains nothing; leave it out")


def is_unread(key: str) -> bool:
    """Return whether nothing reads a key of a training's configuration here."""
    return not UNREAD.isdisjoint((key, key.partition(".")[0]))


def own_config(overrides: list[str], config_dir: Path | None = None) -> DictConfig:
    """Return the configuration that a training with these overrides would have."""
    more = []
    if config_dir is not None:
        if not config_dir.is_dir():
            raise FileNotFoundError(f"--config-dir {config_dir}: there is no such folder")
        require_new_names(config_dir)
        more = [f"hydra.searchpath=['file://{config_dir.resolve()}']"]
    overrides, _ = with_plan(overrides)
    with initialize_config_dir(str(conf_folder()), **VERSION_BASE):
        cfg = compose("train", [*overrides, *more, "run_dir=."])
    check_top_level(cfg)
    return cfg


def on_one_device(cfg: DictConfig) -> Config:
    """Return what is read of a configuration, in plain dicts and lists, that uses one device and writes nothing."""
    cfg.trainer.update(HERE)
    found = resolved_part(cfg, (*READ, "strategy", "seed", "matmul_precision", "run_dir"))
    # Nothing is trained, so no checkpoint is kept.
    return found | {"callbacks": {}, "logger": {}, "test": "last"}


def main() -> None:
    """Print the test metrics."""
    parser = argument_parser("lightning-dp-evaluate", __doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--own", action="store_true", help="ignore the configuration in the run folder")
    parser.add_argument("--config-dir", type=Path, metavar="FOLDER", help="with --own: of experiments of your own")
    arguments = parser.parse_intermixed_args()
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)
    try:
        metrics = evaluate(arguments.checkpoint, arguments.overrides, arguments.own, arguments.config_dir)
        print("  ".join(f"{name}={value:.4f}" for name, value in sorted(metrics.items())), flush=True)
    except SIGTERMException:  # else the status would be that of a test that has ended well
        sys.exit("error: ended by SIGTERM")
    except Exception as error:
        sys.exit(f"error: {' '.join(message_of(error).split())}")
