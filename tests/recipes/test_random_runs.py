"""Random runs, killed at random moments and continued: bitwise the unbroken run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_dp.runs.checkpoints import CONFIGURATION
from lightning_dp.runs.metrics import rows_of
from lightning_dp.runs.resume import find_checkpoint
from lightning_dp.runs.validation import validate
from tests.recipes.in_process import tiny, train

Case = tuple[list[str], dict[str, Any] | None]  # options, and what replaces the data

CALLBACKS = "pytorch_lightning.callbacks"
# A run has one of each, where the first one is what most users have. Several options have spaces between them.
OPTIONS = (
    ("trainer.max_epochs=2", "trainer.max_epochs=3", "trainer.max_epochs=4"),
    ("optim=sgd_onecycle", "optim=sgd_multistep", "optim=goyal", "optim=lars", "optim=linear_warmup"),
    ("model=resnet20", "model=cifar_alexnet"),
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
    # It is called before or after the callbacks that write checkpoints.
    tuple(f"+callbacks.kill._target_=tests.recipes.pieces.{name}" for name in ("KillAt", "KillAtLast")),
)  # fmt: skip
# In place of the small data: what draws random numbers itself.
DATA = (
    None,
    *({"has_own": has_own, "num_workers": num_workers} for has_own in (False, True) for num_workers in (0, 1)),
)
HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_save_checkpoint", "on_train_epoch_end", "on_train_end", "on_test_start", "on_test_batch_end"),
)


def run(case: Case, run_dir: Path, ckpt_path: str = "null", kill: str | None = None) -> Any:
    """Return the results of a run in a process of its own, the text of an error, or None if it was killed."""
    context = multiprocessing.get_context("fork")  # all is imported, so that a run takes a second
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, case, run_dir, ckpt_path, kill))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        assert process.exitcode == -signal.SIGKILL, (case, ckpt_path, kill)
        return None
    finally:
        process.join()
        receiver.close()


def _run(sender: Connection, case: Case, run_dir: Path, ckpt_path: str, kill: str | None) -> None:
    if kill is not None:
        os.environ["KILL_AT"] = kill
    options, data = case
    try:
        config = tiny(run_dir, *options, f"ckpt_path={ckpt_path}")
        if data is not None:
            config["data"] = {"_target_": "tests.recipes.pieces.DrawnData", **data}
        validate(config)
        checkpoint = find_checkpoint(config)
        config["ckpt_path"] = None if checkpoint is None else str(checkpoint)
        (run_dir / CONFIGURATION).parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, run_dir / CONFIGURATION)
        found = train(config)
        sender.send({name: value for name, value in found.items() if name.startswith(("train/", "val/", "test/"))})
    except (ValueError, MisconfigurationException) as error:
        sender.send(str(error))
    sender.close()


def state_of(run_dir: Path) -> tuple[Any, ...]:
    """What must be the same at the end: weights, optimizer and schedules, and the rows."""
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    parts = tuple(checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers"))
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows_of(run_dir)]
    return *parts, rows


def is_same(ours: Any, others: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(torch.nan_to_num(ours), torch.nan_to_num(others))
    if isinstance(ours, dict):
        return ours.keys() == others.keys() and all(is_same(ours[key], others[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(others) and all(map(is_same, ours, others))
    return bool(ours == others) or str(ours) == str(others) == "nan"


def check(seed: int, folder: Path) -> bool:
    """Return whether a run with random options is one; it is compared then with one that is killed up to three times.

    It continues in its folder, by ``last`` or the file, or in a new one.
    """
    draw = random.Random(seed)
    case = [option for choices in OPTIONS for option in draw.choice(choices).split()], draw.choice(DATA)
    whole, run_dir, ckpt_path = folder / "tiny" / "whole", folder / "0" / "tiny" / "cut", "null"
    expected = run(case, whole)
    if isinstance(expected, str):
        return False
    story: list[Any] = [seed, case]
    for number in range(draw.choice([1, 1, 2, 3])):
        kill = f"{draw.choice(HOOKS)} {draw.choice([1, 1, 2, 3, 4, 6])}"
        story += [ckpt_path, kill, run(case, run_dir, ckpt_path, kill)]
        last = run_dir / "checkpoints" / "last.ckpt"
        ckpt_path = draw.choice(["last", str(last)]) if last.exists() else "last"
        if last.exists() and draw.random() < 0.3:
            run_dir, ckpt_path = folder / str(number + 1) / "tiny" / "cut", str(last)
    found = run(case, run_dir, ckpt_path)
    assert is_same(found, expected), (story, ckpt_path, found, expected)
    assert is_same(state_of(run_dir), state_of(whole)), (story, ckpt_path)
    return True


def _check_all(seeds: range, folder: Path) -> int:
    torch.set_num_threads(1)  # a fork has no others
    return sum(check(seed, folder / str(seed)) for seed in seeds)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(4), marks=pytest.mark.ci),
        *(pytest.param(range(start, start + 25), marks=pytest.mark.slow) for start in range(100, 300, 25)),
    ],
    ids=lambda seeds: f"{seeds.start}",
)
def test_a_random_run_that_is_killed_and_continued_is_the_unbroken_one(seeds, tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:  # to fork, it has no threads
        num_runs = process.submit(_check_all, seeds, tmp_path).result()
    assert num_runs > len(seeds) / 3, "the others are combinations that Lightning or the recipes refuse"
