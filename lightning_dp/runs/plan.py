"""Measure some training steps, and say where they go and what would make them faster.

lightning-dp-plan experiment=digits_resnet20 trainer.devices=2
lightning-dp-plan experiment=cifar10_alexnet plan.gbit_per_s=1 plan.world_size=4
lightning-dp-plan plan.gbit_per_s=0.2 plan.world_size=4 plan.method=layered_sgd_step_int8

The run folder then holds plan.md, what is printed; plan.yaml, the fastest strategy that computes what DDP computes (or
plan.method); and plan.png, step time against number of ranks.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig
from pytorch_lightning import seed_everything

from lightning_dp.launch import external_rank, launch
from lightning_dp.planner import Diagnose, Link, Network
from lightning_dp.runs.command_line import config_error, job_error, job_logging, run, write_configuration
from lightning_dp.runs.train import build, configure_logging
from lightning_dp.runs.validation import Config, resolved, validate


def main() -> None:
    """Run the command."""
    run(job, "plan")


def job(cfg: DictConfig) -> None:
    """Check the configuration, measure steps in its processes, and print the diagnosis."""
    try:
        config = resolved(cfg, "plan")
        make_callback(config)  # raises for values that make no sense, before a process starts
        num_processes = validate(config)
    except Exception as error:
        raise config_error(error) from error
    if external_rank() in (None, 0):
        write_configuration(cfg)
    try:
        text = launch(measure, config, job_logging(), num_processes=num_processes, num_nodes=cfg.trainer.num_nodes)
    except Exception as error:
        raise job_error(cfg.run_dir, error) from error
    if external_rank() in (None, 0):
        print(text, flush=True)


def make_callback(config: Config) -> Any:
    """Make the callback that measures, from the values under ``plan``."""
    plan = config["plan"]
    network = None
    if plan["gbit_per_s"] is not None:
        inter = Link(plan["latency_s"], 1e9 / 8 * plan["gbit_per_s"])
        intra = Link(plan["intra_latency_s"], 1e9 / 8 * plan["intra_gbit_per_s"])
        network = Network(inter, intra, plan["ranks_per_node"])
    return Diagnose(
        plan["num_steps"],
        plan["max_s"],
        network,
        plan["world_size"],
        config["run_dir"],
        stop=True,
        method=plan["method"],
        memonger=plan["memonger"],
    )


def measure(config: Config, logging_config: Config | None) -> str:
    """Train on this rank for as long as the callback measures, and return the diagnosis."""
    if logging_config is not None:
        configure_logging(logging_config, int(os.environ.get("RANK", 0)))
    seed_everything(config["seed"], workers=True, verbose=False)
    callback = make_callback(config)
    logging.getLogger("lightning_dp.planner.diagnose").setLevel(logging.WARNING)  # `main` prints the diagnosis
    # No checkpoints and no metrics: they are not what is measured. Callbacks that change training stay.
    callbacks = {
        name: node
        for name, node in config["callbacks"].items()
        if node is not None and not node["_target_"].startswith(("pytorch_lightning.", "lightning_dp.runs.progress."))
    }
    config = {**config, "callbacks": callbacks, "test": "last"}
    config["trainer"] = {**config["trainer"], "enable_checkpointing": False, "logger": False, "limit_val_batches": 0}
    trainer, model, data = build(config)
    trainer.callbacks.append(callback)
    try:
        trainer.fit(model, datamodule=data)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return str(callback.diagnosis or f"there is no plan: {callback.why_none}")
