"""Train and test one configuration, or with --multirun several, one after the other.

python recipes/train.py experiment=digits_resnet20
python recipes/train.py experiment=digits_resnet20 strategy=ddp trainer.devices=4 data.batch_size=128
python recipes/train.py experiment=digits_resnet20 --multirun strategy=ddp,layered_sgd seed=1,2,3
torchrun --nproc-per-node=4 recipes/train.py experiment=digits_resnet20 trainer.devices=4

Each run has a folder: metrics.csv, curves.png, checkpoints/, .hydra/ with the configuration, train.log, hparams.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import hydra
from command_line import config_error, job_error, job_logging, run
from omegaconf import DictConfig, OmegaConf
from training import optimized, result_line, train
from validation import validate

from lightning_dp.launch import external_rank, launch


@hydra.main(version_base="1.3", config_path=str(Path(__file__).resolve().parents[1] / "conf"), config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run one job: check its configuration, then train and test in its processes, and print the result."""
    try:
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        num_processes = validate(config)
    except (ValueError, OSError, ImportError) as error:
        raise config_error(cfg.run_dir, error) from error
    try:
        metrics = launch(train, config, job_logging(), num_processes=num_processes, num_nodes=cfg.trainer.num_nodes)
        if external_rank() in (None, 0):
            print(result_line(metrics, cfg.run_dir), flush=True)
        return optimized(metrics, cfg.optimized_metric)
    except Exception as error:
        raise job_error(cfg.run_dir, error) from error


if __name__ == "__main__":
    run(main)
