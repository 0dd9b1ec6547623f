"""Measure some training steps, and say where they go and what would make them faster.

lightning-dp-plan experiment=digits_resnet20 trainer.devices=2
lightning-dp-plan experiment=cifar10_alexnet plan.gbit_per_s=1 plan.world_size=4
lightning-dp-plan plan.gbit_per_s=0.2 plan.world_size=4 plan.method=layered_sgd_step_int8
lightning-dp-plan experiment=digits_resnet20 trainer.devices=2 verify=true

The run folder then holds plan.md, what is printed; plan.yaml, what to change (or plan.method); and plan.png, step time
against number of ranks. With verify=true some steps of the plan and of the present configuration are run as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pytorch_lightning import Callback, seed_everything

from lightning_dp.launch import external_rank, launch
from lightning_dp.planner import METHODS, Diagnose, Link, Network
from lightning_dp.planner.diagnose import remove_plan, require_whole_model
from lightning_dp.planner.formulas import require_not_negative, require_positive
from lightning_dp.planner.report import read_plan
from lightning_dp.planner.simulation import LARGER_BATCH
from lightning_dp.runs.command_line import (
    composed_again,
    config_error,
    given_keys,
    job_error,
    job_logging,
    key_of,
    resolved_command,
    run,
    write_configuration,
)
from lightning_dp.runs.hydra_versions import instantiate
from lightning_dp.runs.resume import require_unused
from lightning_dp.runs.train import build, configure_logging, leaving_nothing
from lightning_dp.runs.validation import Config, check_arguments, naming_keys, resolved, validate


def main() -> None:
    """Run the command."""
    run(job, "plan")


def job(cfg: DictConfig) -> None:
    """Check the configuration, measure steps in its processes, and print the diagnosis."""
    try:
        config = resolved_command(cfg, "plan", "verify")
        check_plan(config, given_keys())
        num_processes = validate(config)
        require_whole_model(instantiate(config["strategy"]))
        check_verify(config, num_processes * config["trainer"]["num_nodes"])
        check_ranks(config, num_processes)
        require_unused(Path(cfg.run_dir), None, "hydra.run.dir")  # else the configuration there would be replaced
    except Exception as error:
        raise config_error(error) from error
    is_first = external_rank() in (None, 0)
    if is_first:
        write_configuration(cfg)
        remove_plan(Path(cfg.run_dir))  # else it would be verified where this run makes none
    try:
        num_nodes = config["trainer"]["num_nodes"]
        text = launch(measure, config, job_logging(), num_processes=num_processes, num_nodes=num_nodes)
        if is_first:
            print(text, flush=True)
        if config["verify"] and Path(cfg.run_dir, PLAN_FILE).exists():
            verified = verify(config, num_processes)
            print(f"\n{verified}", flush=True)
            Path(cfg.run_dir, "plan.md").write_text(f"{text}\n\n{verified}\n")
    except Exception as error:
        raise job_error(cfg.run_dir, error, config) from error


def make_callback(
    run_dir: str,
    num_steps: int,
    max_s: float,
    method: str | None,
    memonger: bool,
    world_size: int | None,
    ranks_per_node: int,
    gbit_per_s: float | None,
    latency_s: float,
    intra_gbit_per_s: float,
    intra_latency_s: float,
) -> Diagnose:
    """Make the callback that measures. The arguments but the first are the keys under ``plan``.

    Raises:
        ValueError: a value makes no sense.
    """
    # A link would name its own arguments, and there is none where the network is measured.
    require_not_negative("latency_s", latency_s)
    require_not_negative("intra_latency_s", intra_latency_s)
    require_positive("intra_gbit_per_s", intra_gbit_per_s)
    network = None
    if gbit_per_s is not None:
        require_positive("gbit_per_s", gbit_per_s)
        inter = Link(latency_s, 1e9 / 8 * gbit_per_s)
        intra = Link(intra_latency_s, 1e9 / 8 * intra_gbit_per_s)
        network = Network(inter, intra, ranks_per_node)
    return Diagnose(num_steps, max_s, network, world_size, run_dir, stop=True, method=method, memonger=memonger)


OF_THE_NETWORK = [f"plan.{key}" for key in ("ranks_per_node", "latency_s", "intra_gbit_per_s", "intra_latency_s")]


def check_plan(config: Config, given: Sequence[str]) -> None:
    """Raise ValueError for a value under ``plan`` that makes no sense, or that nothing would read.

    Args:
        config: the whole configuration.
        given: the keys of the command line.
    """
    check_arguments("plan", config["plan"])
    with naming_keys("plan", config):
        instantiate(config["plan"], config["run_dir"])
    unread = [key for key in OF_THE_NETWORK if key in given]
    if unread and config["plan"]["gbit_per_s"] is None:
        raise ValueError(f"{unread[0]} has no effect on a network that is measured; give plan.gbit_per_s as well")


def check_ranks(config: Config, num_processes: int) -> None:
    """Raise ValueError for a number of ranks that cannot be predicted for, before anything is measured.

    Also for a plan that would set a batch size of which nothing tells whether it counts the images of all ranks.

    Args:
        config: the whole configuration.
        num_processes: that measure, on each node.
    """
    plan, num_measured = config["plan"], num_processes * config["trainer"]["num_nodes"]
    given = plan["gbit_per_s"]
    size = num_measured if plan["world_size"] is None else plan["world_size"]
    if given is None and num_measured == 1 < size:
        raise ValueError(
            f"plan.world_size={size} has no effect on one rank, which has no network to measure; give plan.gbit_per_s "
            "as well, or measure on more ranks (trainer.devices=2)"
        )
    if given is not None and size == 1:
        raise ValueError(f"plan.gbit_per_s={given} has no effect on one rank; give plan.world_size as well")
    own, name = config["data"]["_target_"], plan["method"]
    changes_batch = name is not None and METHODS[name].recompute == LARGER_BATCH
    if changes_batch and size > 1 and not own.startswith("lightning_dp."):
        raise ValueError(
            f"plan.method={name} sets data.batch_size, which counts the images of all ranks in data of this "
            f"package, and may be that of one in {own}; leave plan.method out, or use a larger batch with Memonger "
            "yourself (callbacks=memonger)"
        )
    per_node = num_processes if given is None else plan["ranks_per_node"]
    if size > per_node and size % per_node:
        raise ValueError(f"{size} ranks do not fill the last node of {per_node}; give plan.world_size a multiple of it")


def measure(config: Config, logging_config: Config | None) -> str:
    """Train on this rank for as long as the callback measures, and return the diagnosis."""
    configure_logging(logging_config)
    callback: Diagnose = instantiate(config["plan"], config["run_dir"])
    with leaving_nothing():
        run_steps(config, callback)
    return str(callback.diagnosis or f"there is no plan: {callback.why_none}")


def run_steps(config: Config, callback: Callback) -> None:
    """Train on this rank until ``callback`` stops it, without what is not part of a step."""
    logging.getLogger("lightning_dp.planner.diagnose").setLevel(logging.WARNING)  # `main` prints the diagnosis
    # No checkpoints and no metrics: they are not what is measured. Callbacks that change training stay.
    callbacks = {name: node for name, node in config["callbacks"].items() if node is not None and is_measured(node)}
    config = {**config, "callbacks": callbacks, "test": "last", "ckpt_path": None}
    # One batch, because a schedule, a callback or the module may read a metric of validation when an epoch ends.
    num_val_batches = 0 if config["trainer"].get("limit_val_batches") == 0 else 1
    config["trainer"] = {**config["trainer"], "enable_checkpointing": False, "limit_val_batches": num_val_batches}
    seed_everything(config["seed"], workers=True, verbose=False)
    trainer, model, data = build(config)
    trainer.callbacks.append(callback)
    trainer.fit(model, datamodule=data)


CHANGE_STEPS = ("GradientAccumulationScheduler", "BackboneFinetuning", "ModelPruning", "WeightAveraging")
"""Ends of the names of Lightning's callbacks that change what a step does."""


def is_measured(callback: Config) -> bool:
    """Return whether a callback of the configuration is part of a step, and does not only watch training."""
    module, _, name = callback["_target_"].rpartition(".")
    return not module.startswith(("pytorch_lightning", "lightning_dp.runs.progress")) or name.endswith(CHANGE_STEPS)


# With verify=true: steps of the present and of the planned configuration, in turn.

PLAN_FILE = "plan.yaml"
PRESENT, PLANNED = "present", "plan"
ROUNDS = 3
NUM_STEPS = 8  # of a round, after the first ones
WARM_UP = 4  # Memonger makes its plan in the third


def check_verify(config: Config, world_size: int) -> None:
    """Raise ValueError if the plan will be for a job that cannot run here, or ``verify`` is no switch."""
    if not isinstance(config["verify"], bool):
        raise ValueError(f"verify={config['verify']!r} must be true or false")
    if not config["verify"]:
        return
    plan = config["plan"]
    if plan["gbit_per_s"] is not None or plan["world_size"] not in (None, world_size):
        raise ValueError(
            f"verify=true runs the plan on these {world_size} ranks and their own network: leave out plan.gbit_per_s "
            "and plan.world_size"
        )
    if external_rank() is not None:
        raise ValueError("verify=true starts the processes of both configurations itself; use python, not torchrun")


def verify(config: Config, num_processes: int) -> str:
    """Run steps of the present configuration and of the planned one, and return a table of their times."""
    plan = read_plan(Path(config["run_dir"], PLAN_FILE))
    overrides = [*without(HydraConfig.get().overrides.task, plan["overrides"]), *plan["overrides"]]
    planned = resolved(composed_again(overrides), *config)  # the keys of the command, which were checked
    validate(planned)
    sides = {PRESENT: config, PLANNED: planned}
    times = launch(time_steps, sides, job_logging(), num_processes=num_processes)
    return verified_text(times, sides, plan)


def without(overrides: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the overrides of the command line but those of keys that the plan sets, and of options below them.

    With a group, such as ``strategy``, the plan chooses another file, which may not have the options of the present
    one. Options that the command line adds (``+``) are in neither file, and stay.
    """
    keys = {key_of(override) for override in others}

    def is_replaced(override: str) -> bool:
        key = key_of(override)
        is_below = any(key.startswith(f"{other}.") for other in keys)
        return key in keys or (is_below and not override.startswith("+"))

    return [override for override in overrides if not is_replaced(override)]


class StepClock(Callback):
    """Times steps from one update to the next, without validation; stops training after `NUM_STEPS` of them."""

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._validation_s = 0.0  # in all so far

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        self._validation_s -= time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        """Go on."""
        self._validation_s += time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Note the end of a step. Batches whose gradients are added up end none."""
        if trainer.global_step > len(self._ends_s):
            self._ends_s.append(time.perf_counter() - self._validation_s)
        trainer.should_stop = len(self._ends_s) > WARM_UP + NUM_STEPS

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        ends = self._ends_s[WARM_UP:]
        if len(ends) < 2:
            raise ValueError(f"verify=true needs more than {WARM_UP + 1} steps, and the data has {len(self._ends_s)}")
        return median(end - begin for begin, end in pairwise(ends))


def time_steps(configs: Mapping[str, Config], logging_config: Config | None) -> dict[str, list[float]]:
    """Train each configuration in turn on this rank, `ROUNDS` times; return the seconds of a step in each round."""
    configure_logging(logging_config)
    times: dict[str, list[float]] = {name: [] for name in configs}
    with leaving_nothing():
        for name, config in ROUNDS * list(configs.items()):
            clock = StepClock()
            run_steps(config, clock)
            times[name].append(clock.step_s)
    return times


def verified_text(times: Mapping[str, Sequence[float]], configs: Mapping[str, Config], plan: Config) -> str:
    """Return a table of the measured times beside the predicted ones.

    Args:
        times: seconds of a step in each round.
        configs: what was run.
        plan: the values of ``plan.yaml``.
    """
    # That of the present configuration is what the diagnosis has measured.
    # The plan has the time for as many images as the present step has.
    planned_ms = plan["step_ms"] * METHODS[plan["method"]].accumulate
    predicted_ms = {PRESENT: sum(plan["measured_ms"].values()), PLANNED: planned_ms}
    medians = {name: median(values) for name, values in times.items()}
    lines = [
        f"Verified: {ROUNDS} rounds of {NUM_STEPS} steps, in turn; the median, and the least and the largest.",
        "",
        "| configuration | diagnosed or predicted, ms per step | measured | off by |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        spread = f"{1e3 * medians[name]:.1f} ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})"
        off = predicted_ms[name] / (1e3 * medians[name]) - 1
        lines.append(f"| {name} | {predicted_ms[name]:.1f} | {spread} | {off:+.0%} |")
    images = {name: _images(config) for name, config in configs.items()}
    factor = {
        "predicted": images[PLANNED] / predicted_ms[PLANNED] * predicted_ms[PRESENT] / images[PRESENT],
        "measured": images[PLANNED] / medians[PLANNED] * medians[PRESENT] / images[PRESENT],
    }
    said = f"Images/s of the plan over those at present: {factor['measured']:.2f}, predicted {factor['predicted']:.2f}."
    if abs(predicted_ms[PRESENT] / (1e3 * medians[PRESENT]) - 1) > plan["error"]:
        said += (
            " The present configuration took another time when it was diagnosed, so that other work has disturbed one "
            "of the two: run it again."
        )
    return "\n".join([*lines, "", said])


def _images(config: Config) -> float:
    """Return the images of a step of all ranks; its batches, for data without ``batch_size``, which no plan changes."""
    return float(config["data"].get("batch_size", 1) * (config["trainer"].get("accumulate_grad_batches") or 1))
