"""Train and test one configuration, or with --multirun several, one after the other.

python recipes/train.py experiment=digits_resnet20
python recipes/train.py experiment=digits_resnet20 strategy=ddp trainer.devices=4 data.batch_size=128
python recipes/train.py experiment=digits_resnet20 ckpt_path=last
python recipes/train.py experiment=digits_resnet20 --multirun strategy=ddp,layered_sgd seed=1,2,3
torchrun --nproc-per-node=4 recipes/train.py experiment=digits_resnet20 trainer.devices=4

Each run has a folder: metrics.csv, curves.png, checkpoints/, .hydra/ with the configuration, train.log, hparams.yaml.
Of the checkpoints, last.ckpt has the weights at the end; ckpt_path=PATH or ckpt_path=last continues a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import hydra
from command_line import config_error, job_error, job_logging, run
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from options import check_top_level
from resume import find_checkpoint
from training import optimized, result_line, train
from validation import validate

from lightning_dp.launch import external_rank, launch


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parents[1] / "conf"), config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run one job: check its configuration, then train and test in its processes, and print the result."""
    try:
        check_top_level(cfg)
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        num_processes = validate(config)
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        checkpoint = find_checkpoint(config["ckpt_path"], Path(config["run_dir"]), config["name"], in_sweep)
        config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
    except (ValueError, OSError, ImportError) as error:
        raise config_error(cfg.run_dir, error) from error
    is_first = external_rank() in (None, 0)
    if cfg.print_config and is_first:
        print(OmegaConf.to_yaml(cfg, resolve=True), flush=True)
    try:
        metrics = launch(train, config, job_logging(), num_processes=num_processes, num_nodes=cfg.trainer.num_nodes)
        if is_first:
            print(result_line(metrics, cfg.run_dir), flush=True)
        has_trained = cfg.train and 0 not in (cfg.trainer.max_epochs, cfg.trainer.get("max_steps"))
        return optimized(metrics, cfg.optimized_metric if has_trained else None)
    except Exception as error:
        raise job_error(cfg.run_dir, error) from error


if __name__ == "__main__":
    run(main)
