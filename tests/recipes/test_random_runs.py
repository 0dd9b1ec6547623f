"""Random runs, killed at random moments and continued: bitwise the unbroken run."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_dp.runs.checkpoints import CONFIGURATION
from lightning_dp.runs.metrics import rows_of
from lightning_dp.runs.resume import find_checkpoint
from lightning_dp.runs.validation import validate
from lightning_dp.strategies import consolidate_checkpoint
from tests.ranks import ends_of_processes
from tests.recipes.in_process import tiny, train

Case = tuple[list[str], dict[str, Any] | None]  # options, and what replaces the data

CALLBACKS = "pytorch_lightning.callbacks"
OWN = f"+callbacks.own._target_={CALLBACKS}.ModelCheckpoint +callbacks.own.dirpath=${{run_dir}}/own"
# A run has one of each, where the first one is what most users have. Several options have spaces between them.
OPTIONS = (
    ("trainer.max_epochs=2", "trainer.max_epochs=3", "trainer.max_epochs=4"),
    ("optim=sgd_onecycle", "optim=sgd_multistep", "optim=goyal", "optim=lars", "optim=linear_warmup"),
    ("model=resnet20", "model=cifar_alexnet"),
    ("", "model._target_=tests.recipes.pieces.Watching"),
    ("", "trainer.precision=64-true", "trainer.precision=bf16-true", "trainer.precision=bf16-mixed"),
    (
        *("", "", "trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches=3"),
        f"+callbacks.more._target_={CALLBACKS}.GradientAccumulationScheduler +callbacks.more.scheduling={{0:1,1:2}}",
    ),
    (
        *("", "", "trainer.check_val_every_n_epoch=2", "+trainer.val_check_interval=0.5"),
        *("+trainer.val_check_interval=1", "+trainer.val_check_interval=4 trainer.check_val_every_n_epoch=null"),
    ),
    ("", "", "trainer.limit_train_batches=2", "trainer.limit_train_batches=0.7"),
    ("", "", "trainer.max_steps=4", "trainer.max_steps=5"),
    ("", "", "trainer.gradient_clip_val=0.1"),
    ("test=last", "test=best", "test=best optimized_metric=train/loss optimized_mode=min", "test=false"),
    ("", "data.batch_size=13", "+data.drop_last=false data.batch_size=10", "data.num_workers=1"),
    ("", "", "+trainer.reload_dataloaders_every_n_epochs=1", "+trainer.reload_dataloaders_every_n_epochs=2"),
    ("", "trainer.log_every_n_steps=1", "trainer.log_every_n_steps=2"),
    ("", "trainer.num_sanity_val_steps=1"),
    ("", "", "callbacks=agbn", "callbacks=[agbn,memonger]"),
    ("", "", f"+callbacks.mean._target_={CALLBACKS}.EMAWeightAveraging"),
    ("", "", f"+callbacks.stop._target_={CALLBACKS}.EarlyStopping +callbacks.stop.monitor=val/loss "
             "+callbacks.stop.patience=1"),
    ("", "callbacks.learning_rate.logging_interval=step", "callbacks.learning_rate=null"),
    ("", "", "+trainer.limit_val_batches=1"),
    (
        *("", "", f"{OWN} +callbacks.own.save_top_k=-1"),
        f"{OWN} +callbacks.own.monitor=val/acc +callbacks.own.mode=max +callbacks.own.save_last=true",
    ),
    # It is called before or after the callbacks that write checkpoints.
    tuple(f"+callbacks.kill._target_=tests.recipes.pieces.{name}" for name in ("KillAt", "KillAtLast")),
)  # fmt: skip
# In place of the small data: what draws random numbers itself.
DATA = (
    None,
    *({"has_own": has_own, "num_workers": num_workers} for has_own in (False, True) for num_workers in (0, 1)),
)
OF_TWO_RANKS = (
    *("ddp", "layered_sgd", "layered_sgd_single", "krizhevsky_hybrid", "layered_fsdp"),
    # Their checkpoints are folders.
    "krizhevsky_hybrid strategy.state_dict_type=sharded test=false",
    "layered_fsdp strategy.save_distributed_checkpoint=true",
)
HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_save_checkpoint", "on_train_epoch_end", "on_train_end", "on_test_start", "on_test_batch_end"),
)


def run(case: Case, run_dir: Path, ckpt_path: str = "null", kill: dict[int, str] | None = None) -> Any:
    """Return the results of a run in processes of its own, the text of an error, or None where ranks may be killed.

    Args:
        case: options and data.
        run_dir: the folder of the run.
        ckpt_path: what it continues from.
        kill: of each rank that is killed, a hook, the number of its call, and the signal.
    """
    options, data = case
    try:
        config = tiny(run_dir, *options, f"ckpt_path={ckpt_path}")
        if data is not None:
            config["data"] = {"_target_": "tests.recipes.pieces.DrawnData", **data}
        num_ranks = validate(config)
        checkpoint = find_checkpoint(config)
    except ValueError as error:
        return str(error)
    config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
    (run_dir / CONFIGURATION).parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, run_dir / CONFIGURATION)
    ends = ends_of_processes(num_ranks, _train, config, kill or {}, timeout=60, grace=15)
    errors = [error for error, _ in ends if error is not None]
    if kill is None:
        assert not errors, (case, ckpt_path, errors)
        return ends[0][1]
    is_killed = any("exit code -9" in error or "SIGTERM" in error for error in errors)
    assert is_killed or not errors, (case, ckpt_path, kill, errors)
    return None


def _train(rank: int, config: dict[str, Any], kill: dict[int, str]) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # else it may start no workers
    multiprocessing.set_start_method("fork", force=True)  # of the workers; another takes seconds
    if rank in kill:
        os.environ["KILL_AT"] = kill[rank]
    try:
        found = train(config)
    except (ValueError, MisconfigurationException, InstantiationException) as error:
        return str(error)
    # Not those of a step: not each is in metrics.csv, from which a run that has nothing left to train takes them.
    of_epochs = [name for name in found if not name.endswith(("_step", "/drawn", "/sum"))]
    return {name: found[name] for name in of_epochs if name.startswith(("train/", "val/", "test/"))}


def state_of(run_dir: Path) -> tuple[Any, ...]:
    """What must be the same at the end: weights, optimizer and schedules, the rows, and the best weights."""
    path = run_dir / "checkpoints" / "last.ckpt"
    if path.is_dir():
        consolidate_checkpoint(path, run_dir / "whole.ckpt", weights_only=False)
        path = run_dir / "whole.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    parts = tuple(checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers"))
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows_of(run_dir)]
    best = run_dir / "checkpoints" / "best.ckpt"
    return *parts, rows, torch.load(best, weights_only=True)["state_dict"] if best.is_file() else None


def is_same(ours: Any, others: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(torch.nan_to_num(ours), torch.nan_to_num(others))
    if isinstance(ours, dict):
        return ours.keys() == others.keys() and all(is_same(ours[key], others[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(others) and all(map(is_same, ours, others))
    return bool(ours == others) or str(ours) == str(others) == "nan"


def check(seed: int, num_ranks: int, folder: Path) -> bool:
    """Return whether a run with random options is one; it is compared then with one that is killed up to three times.

    It continues in its folder, by ``last`` or the file, or in a new one.
    """
    draw = random.Random(seed)
    case = [option for choices in OPTIONS for option in draw.choice(choices).split()], draw.choice(DATA)
    if num_ranks > 1:
        case = (
            [*case[0], f"trainer.devices={num_ranks}", *f"strategy={draw.choice(OF_TWO_RANKS)}".split()],
            draw.choice(DATA[:3]),
        )
    whole, run_dir, ckpt_path = folder / "tiny" / "whole", folder / "0" / "tiny" / "cut", "null"
    expected = run(case, whole)
    if isinstance(expected, str):
        return False
    story: list[Any] = [seed, case]
    for number in range(draw.choice([1, 1, 2, 3])):
        call = f"{draw.choice(HOOKS)} {draw.choice([1, 1, 2, 3, 4, 6])}"
        ranks = draw.sample(range(num_ranks), draw.randint(1, num_ranks))
        # Lightning waits for the ranks that SIGTERM does not reach.
        call += f" {draw.choice(['SIGKILL', 'SIGTERM'] if len(ranks) == num_ranks else ['SIGKILL'])}"
        story += [ckpt_path, ranks, call]
        run(case, run_dir, ckpt_path, dict.fromkeys(ranks, call))
        last = run_dir / "checkpoints" / "last.ckpt"
        ckpt_path = draw.choice(["last", str(last)]) if last.exists() else "last"
        # Of a run that was killed between the two files, best.ckpt may be of a later epoch: an error in a new folder.
        is_whole = last.exists() and not (call.startswith("on_save") and "test=best" in case[0])
        if is_whole and draw.random() < 0.3:
            run_dir, ckpt_path = folder / str(number + 1) / "tiny" / "cut", str(last)
    found = run(case, run_dir, ckpt_path)
    assert is_same(found, expected), (story, ckpt_path, found, expected)
    assert is_same(state_of(run_dir), state_of(whole)), (story, ckpt_path)
    return True


@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    [
        pytest.param(1, range(4), marks=pytest.mark.ci),
        pytest.param(2, range(4, 7), marks=pytest.mark.ci),
        *(pytest.param(1, range(start, start + 25), marks=pytest.mark.slow) for start in range(100, 300, 25)),
        *(pytest.param(2, range(start, start + 15), marks=pytest.mark.slow) for start in range(100, 220, 15)),
    ],
    ids=lambda value: f"{value.start}" if isinstance(value, range) else f"ranks{value}",
)
def test_a_random_run_that_is_killed_and_continued_is_the_unbroken_one(num_ranks, seeds, tmp_path):
    num_runs = sum(check(seed, num_ranks, tmp_path / str(seed)) for seed in seeds)
    assert num_runs > len(seeds) / 3, "the others are combinations that Lightning or the recipes refuse"
