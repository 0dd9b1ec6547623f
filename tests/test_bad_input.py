"""Bad input of every kind: one error of one line, with the value, the rule and the remedy; and nothing is lost."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import logging
import os
import pickle
import shlex
import struct
import sys
import tarfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_dp import AdaptiveGlobalBatchNorm, KrizhevskyHybridStrategy, LayeredSGDStrategy, Memonger, Plateau
from lightning_dp import RanksAgree as RanksAgreeCallback
from lightning_dp.data import CIFAR10, ImageNet, ImageNetShards, Synthetic
from lightning_dp.data.cifar10 import extract, read_batch_file
from lightning_dp.data.imagenet import read_labels
from lightning_dp.data.jpeg import BrokenImageError, open_image
from lightning_dp.data.shards import find_shards, require_distinct, scan_shard
from lightning_dp.runs import compare, evaluate, metrics, plan, train
from lightning_dp.runs.checkpoints import VERSION, naming_another_model
from lightning_dp.runs.resume import find_checkpoint
from tests.data.images import FOLDER, numpy_pickle, pack, pixels_and_labels, write_folder
from tests.data.jpegs import CLASSES, encoded, picture, write_imagenet
from tests.data.shards import sample, write_shards, write_tar

REFUSED = (ValueError, OSError, ImportError, BrokenImageError)


class Bad(NamedTuple):
    """A bad input.

    Attributes:
        name: what is bad.
        says: parts of the message, in their order, with " ... " in between.
        do: gets it, in a folder.
        given: writes files into the folder before.
    """

    name: str
    says: str
    do: Callable[[Path], object]
    given: Callable[[Path], object] = lambda folder: None


# --- recipes: what does not depend on files is a line of arguments ---


def command(main: Callable[[], object], arguments: str) -> None:
    """Call the function of a command, and raise what it says at its end."""
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        with patch.object(sys, "argv", ["train.py", *shlex.split(arguments)]):
            main()
    except SystemExit as end:
        raise ValueError(str(end.code).removeprefix("error: ")) from end
    finally:
        for handler in set(logging.root.handlers) - set(handlers):
            handler.close()
        logging.root.handlers[:], logging.root.level = handlers, level


def recipe(arguments: str, says: str, given: Callable[[Path], object] = lambda folder: None) -> Bad:
    return Bad(arguments, says, lambda folder: command(train.main, f"name=bad {arguments}"), given)


AGBN = "callbacks=agbn callbacks.adaptive_global_batch_norm"
PLATEAU = (
    "optim=sgd_multistep ~optim.scheduler.milestones ~optim.scheduler.gamma"
    " optim.scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"
)
RECIPES = [
    # Hydra's own errors.
    ("strategy=nope", "Could not find 'strategy/nope' ... ddp, krizhevsky_hybrid, layered_fsdp, layered_sgd"),
    ("--multirun strategy=ddp,nope", "Could not find 'strategy/nope' ... layered_sgd"),
    ("--multirun hydra/launcher=nope seed=1,2", "hydra/launcher/nope"),
    ("strategy=ddp,layered_sgd", "strategy=ddp,layered_sgd ... --multirun"),
    ("name=häß", """name=häß cannot be read; for a text write 'name="häß"'"""),
    ("ckpt_path=a/epoch=3.ckpt", """cannot be read; for a text write 'ckpt_path="a/epoch=3.ckpt"'"""),
    ("data.batch_size", "data.batch_size is no override; write KEY=VALUE"),
    ("trainer", "trainer is no override; write KEY=VALUE"),
    ("data.seed='${sed}'", "data.seed: Interpolation key 'sed' not found"),
    ("logger=[csv,nope]", "Could not load 'logger/nope' ... --help names what there is"),
    ("""'hydra.run.dir="runs/${seeed}"'""", "hydra.run.dir: Interpolation key 'seeed' not found"),
    ("hydra.run.dir=null", "hydra.run.dir ... is not Optional"),
    ("hydra.run.dir=", "hydra.run.dir= names no folder; write hydra.run.dir=FOLDER"),
    ("hydra.sweep.dir=old trainer=cpu", "hydra.sweep.dir=old has no effect on a single run; add --multirun"),
    ("hydra.sweeper.max_batch_size=2 trainer=cpu", "max_batch_size=2 has no effect on a single run; add --multirun"),
    (
        "--multirun hydra.run.dir=old trainer=cpu",
        "hydra.run.dir=old has no effect in a sweep ... hydra.sweep.dir=FOLDER",
    ),
    ("hydra.run.dir=/proc/self", "the run folder cannot be made: ... /proc/self/train.log"),
    ("hydra.run.dir=/dev/null/run", "the run folder cannot be made ... name another one with hydra.run.dir"),
    # Keys.
    ("strateggy=ddp", "strateggy is unknown; did you mean strategy? ... callbacks, ckpt_path, data"),
    ("experiments=digits_resnet20", "experiments is unknown; did you mean experiment?"),
    ("data.bach_size=3", "data.bach_size is unknown; did you mean batch_size? ... num_workers, seed"),
    (
        "callbacks=none callbacks.checkpoint.monitor=a",
        "callbacks.checkpoint is unknown. In callbacks there is nothing.",
    ),
    ("trainer.profiler=simple", "trainer.profiler is unknown ... write +trainer.profiler=..."),
    ("optim.weight_decay=0", "optim.weight_decay is unknown ... write ++optim.optimizer.weight_decay=..."),
    ("+optim.momentum=0.5", "nothing reads optim.momentum; ... write ++optim.optimizer.momentum=..."),
    ("+ckpt_pth=a.ckpt", "nothing reads the key ckpt_pth; did you mean ckpt_path?"),
    ("+data.augment=true", "data.augment is not an argument of lightning_dp.data.Digits; there are batch_size"),
    ("run_dir=elsewhere", "run_dir=elsewhere ... name the run folder with hydra.run.dir=FOLDER"),
    ("+trainer.logger=true", "trainer.logger cannot be given; choose loggers with logger=csv"),
    ("+trainer.callbacks=[]", "trainer.callbacks cannot be given; add one with +callbacks.NAME._target_=CLASS"),
    ("trainer.strategy=ddp", "trainer.strategy=ddp cannot be given; choose it with strategy=NAME"),
    ("~test", "test was taken away, and every run needs it; leave out ~test"),
    ("name=null", "name=None must be a text"),
    ("name=", "name= must be a text: the run folder is runs/NAME/DATE"),
    ("model=null", "model=null: every run needs one; choose it with model=NAME"),
    ("optim=null", "optim.optimizer"),
    ("optim.optimizer=null", "optim.optimizer=None must be an object, with a _target_; choose a file"),
    ("optim.scheduler=cosine", "optim.scheduler=cosine must be an object, with a _target_"),
    ("optim.interval=week", "optim.interval='week' must be 'step' or 'epoch'"),
    ("model.model=null", "model.model=None must be an object"),
    ("model.label_smoothing=7", "model.label_smoothing=7 must be 0 to 1"),
    ("model=alexnet model.loss=hinge", "model.loss='hinge' must be"),
    # Objects.
    ("~data._target_", "data has no _target_; choose a file that has it with data=NAME"),
    ("data._target_=5", "data._target_=5 cannot be imported"),
    ("data._target_=lightning_dp.models.resnet20", "data.batch_size is not an argument of"),
    ("data._target_=os.getcwd ~data.batch_size ~data.seed ~data.num_workers", "os.getcwd must make a LightningData"),
    ("model.model._target_=lightning_dp.models.vgg", "model.model._target_= ... cannot be imported"),
    ("trainer=cpu +callbacks.other._target_=torch.nn.ReLU", "other._target_=torch.nn.ReLU must make a Callback"),
    ("trainer=cpu +logger.other._target_=torch.nn.ReLU", "logger.other._target_=torch.nn.ReLU must make a Logger"),
    ("+callbacks.other.patience=2", "callbacks.other={'patience': 2} has no _target_ ... callbacks.other=null"),
    ("+callbacks.other=2", "callbacks.other=2 has no _target_"),
    ("logger=csv +logger.wandb.project=a", "logger.wandb={'project': 'a'} has no _target_ ... logger=NAME"),
    ("trainer=cpu callbacks.progress_bar._target_=lightning_dp.runs.progress.RichBar", "rich"),
    # Types.
    ("trainer=cpu data.batch_size=abc", "data.batch_size=abc must be a whole number"),
    ("trainer=cpu data.batch_size=null", "data.batch_size=None must be a whole number"),
    ("trainer=cpu data.batch_size=[1,2]", "data.batch_size=[1, 2] must be a whole number"),
    ("trainer=cpu data.batch_size=1.5", "data.batch_size=1.5 must be a whole number"),
    ("data=cifar10 data.download=maybe", "data.download=maybe must be true or false"),
    ("model.model.num_classes=ten", "model.model.num_classes=ten must be a whole number"),
    ("optim.lr=fast", "=fast must be a number"),
    ("optim.optimizer.momentum=true", "optim.optimizer.momentum=True must be a number"),
    ("trainer.max_epochs=many", "trainer.max_epochs=many must be a whole number or null"),
    ("seed=null", "seed=None must be a whole number"),
    ("train=maybe", "train=maybe must be true or false"),
    ("test=3", "test=3 must be"),
    ("optimized_metric=3", "optimized_metric=3 must be a text or null"),
    ("ckpt_path=7", "ckpt_path=7 must be a text or null"),
    ("trainer=cpu data=synthetic data.shape=[3,32]", "data: not enough values"),
    (f"{AGBN}.convergence.patience=long", "patience=long must be"),
    # Values.
    ("seed=-1", "seed=-1 must be 0 to 4294967295"),
    ("test=first", "test=first must be last, best or false"),
    ("optimized_mode=most", "optimized_mode=most must be max or min"),
    ("matmul_precision=tf32", "matmul_precision=tf32 must be highest, high or medium"),
    ("trainer=cpu trainer.devices=100000", "trainer.devices=100000 ... CPU cores; use at most"),
    ("trainer=cpu trainer.devices=0", "trainer.devices=0 must be 1 or more"),
    ("trainer=cpu trainer.devices=few", "trainer.devices=few must be 1 or more"),
    ("trainer=cpu trainer.devices=2.5", "trainer.devices=2.5 must be 1 or more"),
    ("trainer=cpu trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 must be 1 or more"),
    ("trainer=cpu trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 ... null for no clipping"),
    ("trainer=cpu trainer.deterministic=foo", "trainer.deterministic=foo must be true, false or warn"),
    ("trainer=cpu +trainer.max_time=3", "trainer.max_time=3 must be days, hours, minutes and seconds ... 00:12:00:00"),
    ("trainer.num_nodes=2", "num_nodes=2 ... torchrun --nnodes=2"),
    ("trainer.accelerator=abacus", "trainer.accelerator='abacus'"),
    (
        "strategy=layered_fsdp trainer.precision=64-true",
        "trainer.precision=64-true is none that FSDP2 takes; use 32-true",
    ),
    ("trainer=cpu trainer.precision=8", "trainer: Precision 8 is invalid. Allowed precision values"),
    ("trainer=cpu trainer.max_epochs=-2", "trainer.max_epochs ... must be a non-negative integer or -1 ... -2"),
    ("trainer=cpu trainer.limit_train_batches=2.5", "2.5 for trainer.limit_train_batches ... has to be in"),
    ("trainer=cpu trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 must be 1 or more"),
    ("trainer=cpu trainer.devices=2 data.batch_size=1", "batch_size=1 ... number of ranks (2)"),
    ("trainer=cpu num_classes=0", "num_classes=0"),
    ("trainer=cpu num_classes=5", "model.num_classes=5 is less than the 10 classes of the data; use num_classes=10"),
    ("model.num_classes=4", "model.num_classes=4 is less than the 10 classes of the data; use model.num_classes=10"),
    ("trainer=cpu optim.lr=-1", "optim.optimizer ... -1"),
    ("trainer=cpu optim.lr=nan", "optim.optimizer.lr=nan must be a finite number"),
    ("trainer=cpu optim.optimizer.weight_decay=nan", "optim.optimizer.weight_decay=nan must be a finite number"),
    ("trainer=cpu data=synthetic data.num_test=0", "data.num_test=0 leaves nothing to test; use test=false"),
    ("trainer=cpu data=synthetic data.num_val=-1", "data.num_val=-1 must be 0 or more"),
    ("trainer=cpu optim=goyal optim.weight_decay=-1", "optim.parameter_groups.weight_decay=-1 must not be negative"),
    ("trainer=cpu optim=krizhevsky model=cifar_alexnet optim.rule=cubic", "optim.parameter_groups.rule='cubic'"),
    (
        "trainer=cpu strategy=krizhevsky_hybrid strategy.head=top",
        "strategy.head='top' names no submodule",
    ),
    ("trainer=cpu trainer.num_nodes=0", "trainer.num_nodes=0 must be 1 or more"),
    ("trainer=cpu optim.scheduler.pct_start=7", "optim.scheduler ... pct_start"),
    (f"trainer=cpu {AGBN}.convergence.mode=up", "convergence.mode='up' is not known; use 'min' or 'max'"),
    (f"trainer=cpu {AGBN}.group_size=0", "callbacks.adaptive_global_batch_norm.group_size=0 must be at least 1"),
    (
        "strategy=ddp +strategy.start_method=spawn",
        "strategy.start_method=spawn: the recipes start the ranks; leave it out",
    ),
    ("strategy=layered_fsdp strategy.wrap=foo", "strategy.wrap='foo' must be classes of modules in a list"),
    ("strategy=layered_fsdp strategy.wrap=[Bottleneck]", "strategy.wrap=['Bottleneck'] must be classes"),
    ("strategy=layered_sgd strategy.overlap=all", "strategy.overlap='all' is not known; use one of"),
    (
        "trainer=cpu trainer.devices=2 strategy=layered_sgd strategy.group_size=3",
        "world_size=2 is not a multiple of strategy.group_size=3; use 1 or 2",
    ),
    ("data=imagenet data.crop=round", "data.crop='round' must be one of"),
    # What does not go together.
    ("train=false", "train=false needs weights to test; give ckpt_path=PATH"),
    ("train=false test=false", "train=false and test=false leave nothing to do; use test=last"),
    ("train=false test=best ckpt_path=last", "test=best has no effect; use test=last, or ckpt_path=best"),
    ("trainer=cpu trainer.max_epochs=-1", "trainer.max_epochs=-1 ... OneCycleLR ... trainer.max_steps"),
    ("trainer=cpu trainer.limit_train_batches=0", "trainer.limit_train_batches=0 ... use train=false"),
    ("trainer=cpu trainer.max_steps=0", "trainer.max_steps=0 ... use train=false"),
    ("trainer=cpu trainer.max_epochs=0", "trainer.max_epochs=0 ... use train=false"),
    ("trainer=cpu trainer.limit_test_batches=0", "trainer.limit_test_batches=0 ... use test=false"),
    ("strategy=krizhevsky_hybrid strategy.state_dict_type=sharded", "test=last needs whole weights ... use test=false"),
    ("test=best trainer.limit_val_batches=0.0", "test=best ... trainer.limit_val_batches=0"),
    ("test=best trainer.check_val_every_n_epoch=20", "trainer.check_val_every_n_epoch=20 ... max_epochs=10"),
    ("test=best optimized_metric=null", "test=best needs a metric that is measured during training"),
    ("test=best optimized_metric=val/loss", "optimized_metric=val/loss ... write optimized_mode=min"),
    ("test=best optimized_metric=test/acc", "not optimized_metric=test/acc; use val/acc"),
    ("test=best data=synthetic data.num_val=0", "no images are held out for validation"),
    (f"{PLATEAU} data=synthetic data.num_val=0", "ReduceLROnPlateau needs val/loss ... no images are held out"),
    (f"{PLATEAU} trainer.limit_val_batches=0", "ReduceLROnPlateau needs val/loss ... trainer.limit_val_batches=0"),
    ("test=best callbacks=none", "test=best needs checkpoints"),
    ("test=best debug=fast_dev_run", "test=best needs checkpoints"),
    ("test=false optimized_metric=test/acc", "optimized_metric=test/acc is not measured with test=false"),
    ("data=imagenet data.on_broken=skip data.decoder=dali", "data.on_broken='skip' needs data.decoder='auto'"),
    # Files.
    ("data=cifar10 data.root=no/where", "no/where/cifar-10-batches-py ... download=true"),
    ("data=imagenet_shards data.root=none", "set data.root to the folder ... set data.train_shards"),
    ("plan=none.yaml", "plan=none.yaml: there is no such file; lightning-dp-plan writes one"),
    ("ckpt_path=", "ckpt_path=: there is no such checkpoint"),
    ("ckpt_path=none", "ckpt_path=none: there is no such checkpoint ... checkpoints/last.ckpt"),
    ("ckpt_path=last", "has no checkpoints/last.ckpt, nor has another run named bad ... hydra.run.dir=FOLDER"),
    ("ckpt_path=best", "has no checkpoints/best.ckpt ... test=best keeps the best weights"),
    (
        "--multirun ckpt_path=last seed=1,2",
        "has no checkpoints/last.ckpt; continue a sweep with hydra.sweep.dir=",
    ),
]


def old_run(folder: Path) -> None:
    (folder / "old" / ".hydra").mkdir(parents=True)
    for name in ("metrics.csv", "train.log", ".hydra/config.yaml"):
        (folder / "old" / name).write_text("as it was")


WITH_FILES = [
    recipe("plan=p.yaml", "p.yaml is no plan ... make it again", lambda folder: (folder / "p.yaml").write_text("a: 1")),
    recipe(
        "plan=p.yaml plan=p.yaml",
        "plan=p.yaml and plan=p.yaml: give one plan",
        lambda folder: (folder / "p.yaml").write_text(json.dumps({"version": 1, "overrides": []})),
    ),
    recipe(
        "trainer=cpu hydra.run.dir=old",
        "hydra.run.dir: ... old holds the results of a run, which this one would replace ... ckpt_path=last",
        old_run,
    ),
    Bad(
        "plan: the folder of a training",
        "hydra.run.dir: ... old holds the results of a run, which this one would replace",
        lambda _: command(plan.main, "trainer=cpu hydra.run.dir=old"),
        old_run,
    ),
    Bad(
        "plan: the hybrid",
        "Diagnose cannot measure the layers of a head that KrizhevskyHybridStrategy shards ... strategy=ddp",
        lambda _: command(
            plan.main, "trainer=cpu trainer.devices=2 model=cifar_alexnet optim=krizhevsky strategy=krizhevsky_hybrid"
        ),
    ),
    Bad(
        "plan: a larger batch of data of the user's",
        "plan.method=ddp_memonger_larger_batch sets data.batch_size ... that of one in tests.recipes.pieces.OwnData",
        lambda _: command(
            plan.main,
            "trainer=cpu trainer.devices=2 plan.method=ddp_memonger_larger_batch ~data "
            "+data={_target_:tests.recipes.pieces.OwnData,batch_size:8} +num_classes=10",
        ),
    ),
    # The folder in which the command is called is the run folder.
    recipe("trainer=cpu hydra.run.dir=. data.batch_size=0", "data.batch_size=0 is smaller than the number of ranks"),
]


# --- what other commands are given ---


ROWS = "epoch,step,val/acc\n0,2,0.5\n"


def sweep(config: str = "seed: 1", overrides: str = "- seed=1", rows: str = ROWS) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        hydra = folder / "sweep" / "0" / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "config.yaml").write_text(config)
        (hydra / "overrides.yaml").write_text(overrides)
        (folder / "sweep" / "0" / "metrics.csv").write_text(rows)

    return write


def evaluated(arguments: str, says: str, config: str | None = None) -> Bad:
    """Evaluate a checkpoint in a run folder with this configuration, or with that of the defaults."""

    def write(folder: Path) -> None:
        for name in ("checkpoints", ".hydra"):
            (folder / "run" / name).mkdir(parents=True)
        torch.save({"state_dict": {}, "global_step": 1, VERSION: "2.6.6"}, folder / "run" / "checkpoints" / "last.ckpt")
        path = folder / "run" / ".hydra" / "config.yaml"
        if config is None:
            OmegaConf.save(evaluate.own_config(["trainer=cpu"]), path)
        else:
            path.write_text(config)

    name = f"evaluate: {arguments or repr(config)}"
    return Bad(name, says, lambda _: command(evaluate.main, f"run/checkpoints/last.ckpt {arguments}"), write)


OTHER_COMMANDS = [
    Bad("compare: no sweep", "none has no jobs with a metrics.csv; give", lambda _: command(compare.main, "none")),
    Bad(
        "compare: a metric that is not there",
        "--metric acc was logged by no job of sweep; use one of val/acc",
        lambda _: command(compare.main, "sweep --metric acc"),
        sweep(),
    ),
    Bad(
        "compare: a damaged configuration",
        "config.yaml is damaged ... move its job out of the sweep's folder",
        lambda _: command(compare.main, "sweep"),
        sweep(config="{"),
    ),
    Bad(
        "compare: damaged overrides",
        "overrides.yaml is damaged",
        lambda _: command(compare.main, "sweep"),
        sweep(overrides="{"),
    ),
    Bad(
        "compare: an empty configuration",
        "config.yaml is damaged ... move its job out of the sweep's folder",
        lambda _: command(compare.main, "sweep"),
        sweep(config=""),
    ),
    Bad(
        "compare: damaged metrics",
        "metrics.csv is damaged (could not convert ... 'half') ... move its job out of the sweep's folder",
        lambda _: command(compare.main, "sweep"),
        sweep(rows="epoch,step,val/acc\n0,2,half\n"),
    ),
    Bad("curves: no run", "none has no metrics.csv; give the folder of a run", lambda _: command(metrics.main, "none")),
    Bad("evaluate: no file", "there is no checkpoint none; runs keep", lambda _: command(evaluate.main, "none")),
    Bad(
        "evaluate: a sharded checkpoint",
        "a is a folder, as of a sharded checkpoint ... consolidate_checkpoint",
        lambda _: command(evaluate.main, "a"),
        lambda folder: (folder / "a").mkdir(),
    ),
    Bad(
        "evaluate: outside of a run folder",
        "there is no ... .hydra/config.yaml; leave the checkpoint in its run folder, or use --own",
        lambda _: command(evaluate.main, "a.ckpt"),
        lambda folder: torch.save({"state_dict": {}, "global_step": 1, VERSION: "2.6.6"}, folder / "a.ckpt"),
    ),
    Bad(
        "evaluate: --config-dir without --own",
        "--config-dir mine has no effect on the configuration in a run folder; add --own",
        lambda _: command(evaluate.main, "a.ckpt --config-dir mine"),
        lambda folder: torch.save({"state_dict": {}, "global_step": 1, VERSION: "2.6.6"}, folder / "a.ckpt"),
    ),
    evaluated("trainer.devices=4", "trainer.devices=4 has no effect: a test is on one device"),
    evaluated("strategy.bucket_cap_mb=1", "strategy.bucket_cap_mb=1 has no effect"),
    evaluated("optim.lr=0.2", "optim.lr=0.2 has no effect: a test is on one device, and trains nothing; leave it out"),
    evaluated("trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches=2 has no effect"),
    evaluated("data=cifar10", "data=cifar10 chooses a file ... data.OPTION=..., or use --own"),
    evaluated("data.root", "data.root is no override; write KEY=VALUE"),
    evaluated("seed=abc", "seed=abc must be a whole number"),
    evaluated("seed=-1", "seed=-1 must be 0 to"),
    evaluated("matmul_precision=tf32", "matmul_precision=tf32 must be highest, high or medium"),
    evaluated("data.batch_size=abc", "data.batch_size=abc must be a whole number"),
    evaluated("trainer.limit_test_batches=0", "trainer.limit_test_batches=0 leaves nothing to test"),
    evaluated("", "config.yaml has no data, model, trainer ... --own", config=""),
    evaluated("", "config.yaml has no data, model, trainer ... --own", config="- 1"),
    evaluated("", "config.yaml is damaged ... --own", config="a: [1,"),
]


# --- checkpoints ---


class Trap:
    """An object that leaves a file behind if it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def checkpoint(name: str, says: str, **changes: Any) -> Bad:
    """A checkpoint that is whole but for ``changes``; None takes a key away."""
    whole = {"state_dict": {"w": torch.ones(1000)}, "global_step": 3, "callbacks": {}, VERSION: "2.6.6"}
    whole |= {"loops": {}, "optimizer_states": [], "lr_schedulers": []}
    kept = {key: value for key, value in (whole | changes).items() if value is not None}
    return damaged(name, says, lambda path: torch.save(kept, path))


def damaged(name: str, says: str, write: Callable[[Path], object]) -> Bad:
    def find(folder: Path) -> None:
        config = {"ckpt_path": str(folder / "a.ckpt"), "run_dir": str(folder / "run"), "name": "bad", "test": "last"}
        find_checkpoint(config | {"train": True, "trainer": {}, "callbacks": {}})

    return Bad(f"checkpoint: {name}", says, find, lambda folder: write(folder / "a.ckpt"))


def change(path: Path, where: Callable[[bytes], int]) -> None:
    """Write a whole checkpoint with one byte changed."""
    torch.save({"state_dict": {"w": torch.full((1000,), 1.5)}, "global_step": 3}, path)
    data = bytearray(path.read_bytes())
    data[where(data)] ^= 0xFF
    path.write_bytes(data)


def load_other_model(folder: Path) -> None:
    with naming_another_model(folder / "a.ckpt"):
        nn.Linear(2, 3).load_state_dict(nn.Conv2d(1, 2, 3).state_dict())


NO_CHECKPOINT = "a.ckpt is no checkpoint of a run"
CHECKPOINTS = [
    damaged("empty", f"{NO_CHECKPOINT}, or is damaged ... runs keep theirs in", lambda path: path.write_bytes(b"")),
    damaged("a text", f"{NO_CHECKPOINT}, or is damaged", lambda path: path.write_text("epoch,step\n")),
    damaged("cut", f"{NO_CHECKPOINT}, or is damaged", lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100))),
    damaged("an empty folder", f"{NO_CHECKPOINT}, or is damaged", lambda path: path.mkdir()),
    damaged(
        "a changed byte of a weight",
        "a.ckpt is damaged: ... does not have the checksum it had; runs keep theirs in",
        lambda path: change(path, lambda data: data.index(struct.pack("<f", 1.5) * 9)),
    ),
    damaged("a tensor", f"{NO_CHECKPOINT}: it has no state_dict", lambda path: torch.save(torch.ones(3), path)),
    checkpoint("no weights", f"{NO_CHECKPOINT}: it has no state_dict and global_step", state_dict=None),
    checkpoint("a list of weights", f"{NO_CHECKPOINT}: state_dict and callbacks must be dicts", state_dict=[1]),
    checkpoint("callbacks of another kind", f"{NO_CHECKPOINT}: state_dict and callbacks must be", callbacks=[1]),
    checkpoint("steps in words", f"{NO_CHECKPOINT}: global_step='many' is no number of steps", global_step="many"),
    checkpoint("steps below 0", f"{NO_CHECKPOINT}: global_step=-4 is no number of steps", global_step=-4),
    checkpoint(
        "an object", "a.ckpt holds an object of ... to read it would run code ... keep objects out", more=Trap()
    ),
    checkpoint(
        "weights only",
        "a.ckpt has no optimizer_states, so no training can continue from it; test its weights with train=false",
        optimizer_states=None,
    ),
    checkpoint("of no version of Lightning", f"a.ckpt has no {VERSION}, so Lightning cannot", **{VERSION: None}),
    Bad(
        "checkpoint: another model",
        "a.ckpt holds another model than the configuration: size mismatch ... more such lines); give the options of",
        load_other_model,
    ),
]


# --- data ---


def image(name: str, says: str, data: bytes, decoder: str = "auto") -> Bad:
    return Bad(f"image: {name}", says, lambda _: open_image(data, decoder).decode())


def png(width: int, height: int, chunk: tuple[bytes, bytes] = (b"tEXt", b"a\0b")) -> bytes:
    """A PNG file whose header claims a size, without pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), chunk, (b"IDAT", zlib.compress(b""))]
    parts = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
             for kind, data in chunks)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def claiming(width: int, height: int) -> bytes:
    """A JPEG file whose header claims another size."""
    data = encoded(picture(64, 64))
    start = data.index(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


IMAGES = [
    image("empty", "cannot identify image file", b""),
    image("a text", "cannot identify image file", b"not an image" * 20),
    image("cut in its header", "Truncated File Read", encoded(picture(64, 64))[:100]),
    *(image(f"cut in its pixels, {name}", "image file is truncated", encoded(picture(64, 64))[:900], name)
      for name in ("simplejpeg", "pillow")),
    *(image(f"a JPEG bomb, {name}", "65500 ... pixels" if name == "simplejpeg" else "exceeds limit",
            claiming(65500, 65500), name) for name in ("simplejpeg", "pillow")),
    image("a PNG bomb", "exceeds limit of 178956970 pixels", png(60000, 60000)),
    image("a PNG with a text bomb", "data too large", png(9, 9, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24))))),
]  # fmt: skip


def shard(name: str, says: str, *members: tuple[str, bytes]) -> Bad:
    return damaged_shard(name, says, lambda path: write_tar(path, members))


def damaged_shard(name: str, says: str, write: Callable[[Path], object]) -> Bad:
    return Bad(f"shard: {name}", says, lambda folder: scan_shard(folder / "x.tar"), lambda f: write(f / "x.tar"))


def rewrite(path: Path, new: Callable[[bytes], bytes]) -> None:
    path.write_bytes(new(write_tar(path, [*sample("a", 1), *sample("b", 2)]).read_bytes()))


def claiming_name(length: int) -> bytes:
    """The header of a member with a name of so many bytes."""
    info = tarfile.TarInfo("name")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, length
    return info.tobuf(tarfile.GNU_FORMAT)


def link(kind: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with tarfile.open(write_tar(path, sample("a", 1)), "a") as tar:
            info = tarfile.TarInfo("b.JPEG")
            info.type, info.linkname = kind, "a.JPEG"
            tar.addfile(info)

    return write


NO_NUMBER = "which is not the number of a class; write numbers from 0"
SHARDS = [
    shard("two images of a name", "x.tar has two images a; give each", ("a.jpg", b""), ("a.png", b""), ("a.cls", b"0")),
    shard("two labels", "has two labels a; give each", ("a.jpg", b"1"), ("a.cls", b"0"), ("a.cls", b"1")),
    shard("no label", "has no KEY.cls for 2 keys, of which b is", *sample("a", 1), ("b.jpg", b""), ("c.jpg", b"")),
    shard("no image", "has no KEY.jpeg, KEY.jpg, KEY.png for 1 keys, of which b", *sample("a", 1), ("b.cls", b"1")),
    shard("a class by name", f"contains b'n0', {NO_NUMBER}", ("a.jpg", b"1"), ("a.cls", b"n0")),
    shard("a class below 0", f"contains b'-1', {NO_NUMBER}", ("a.jpg", b"1"), ("a.cls", b"-1")),
    shard("an empty class", f"contains b'', {NO_NUMBER}", ("a.jpg", b"1"), ("a.cls", b"")),
    shard("a class of 30 digits", f"contains b'9999 ... {NO_NUMBER}", ("a.jpg", b"1"), ("a.cls", b"9" * 30)),
    shard("other files", "has no images ... but .tar, .txt ... use data=imagenet", ("n.tar", b"1"), ("r.txt", b"1")),
    shard("nothing", "x.tar has no images"),
    shard("line breaks in a name", r"of which a\nb is the first", ("a\nb.jpg", b"1")),
    damaged_shard("a hard link", "b.JPEG in ... is a link ... tar --dereference", link(tarfile.LNKTYPE)),
    damaged_shard("a symbolic link", "b.JPEG in ... is a link ... tar --dereference", link(tarfile.SYMTYPE)),
    damaged_shard("gzip", "x.tar is compressed (gzip) ... decompress it", lambda path: rewrite(path, gzip.compress)),
    damaged_shard("zstd", "is compressed (zstd)", lambda path: rewrite(path, lambda data: b"\x28\xb5\x2f\xfd" + data)),
    damaged_shard("empty", "x.tar is not a whole tar file: ... download it or write", lambda path: path.touch()),
    damaged_shard("cut", "is not a whole tar file", lambda path: rewrite(path, lambda data: data[:1536])),
    damaged_shard("two archives", "something other than members", lambda path: rewrite(path, lambda data: 2 * data)),
    damaged_shard(
        "a damaged header",
        "is not a whole tar file: there is something other than members after byte",
        lambda path: rewrite(path, lambda data: data.replace(b"b.JPEG", b"?.JPEG", 1)),
    ),
    damaged_shard(
        "a name of 2^60 bytes",
        "x.tar is not a whole tar file: ... download it or write it again",
        lambda path: rewrite(path, lambda data: claiming_name(1 << 60) + data),
    ),
]


def shards_of(patterns: Any, says: str) -> Bad:
    def write(folder: Path) -> None:
        for name in ("a-0.tar", "a-1.tar"):
            (folder / name).touch()
        (folder / "link.tar").symlink_to("a-1.tar")

    def find(folder: Path) -> None:
        require_distinct(folder, find_shards(folder, "train", patterns))

    return Bad(f"shards: {patterns}", says, find, write)


SHARD_NAMES = [
    shards_of("a-{0..4}.tar", "3 of the 5 shards of train_shards=a-{0..4}.tar are missing, of which ... /a-2.tar is"),
    shards_of("a-{2..0}.tar", "ends before it begins; use {0..2}"),
    shards_of("a-{0..9999999999}.tar", "stands for over 1000000 shards; give a shorter range"),
    shards_of("b-*.tar", "train_shards=b-*.tar matches no file in"),
    shards_of(["a-*.tar", "a-1.tar"], "a-1.tar is used twice; set train_shards"),
    shards_of(["link.tar", "a-1.tar"], "a-1.tar is used twice, also as link.tar"),
    shards_of("https://host/a-0.tar", "https://host/a-0.tar is not a local file ... copy the shards to a local disk"),
    shards_of("pipe:cat a-0.tar", "is not a local file"),
    shards_of(None, "there are no shards for train in ... set data.root"),
    shards_of([], "train_shards=[] names no shard; name some"),
]


def label_file(name: str, says: str, content: bytes, meta: bytes | None = None) -> Bad:
    def write(folder: Path) -> None:
        (folder / "labels.txt").write_bytes(content)
        if meta is not None:
            (folder / "meta.mat").write_bytes(meta)

    names = ["a.JPEG", "b.JPEG"]
    return Bad(f"labels: {name}", says, lambda folder: read_labels(folder / "labels.txt", names, CLASSES), write)


LABEL_FILES = [
    label_file("too few", "labels.txt has 1 lines for 2 images", b"n01440764\n"),
    label_file("an unknown class", "has a class n9, which is not one of the 3 classes", b"n01440764\nn9\n"),
    label_file("a number too large", "has a class 3, which is not", b"a.JPEG 0\nb.JPEG 3\n"),
    label_file("one is missing", "has no label for 1 images, of which b.JPEG is", b"a.JPEG 0\nc.JPEG 1\n"),
    label_file("two for an image", "has two labels for a.JPEG, 0 and another one", b"a.JPEG 0\nb.JPEG 1\na.JPEG 1\n"),
    label_file("no text", "labels.txt is not a text file with labels ... set val_labels", b"\xff\xfe\x00"),
    label_file("no table of numbers", "there is no ... meta.mat; take it from the devkit", b"1\n2\n"),
    label_file("a damaged table", "meta.mat is damaged ... take it from the devkit again", b"1\n2\n", b"no table"),
]


def cifar_file(name: str, says: str, content: bytes) -> Bad:
    says = f"a is not a file of CIFAR-10's python version: ... {says} ... delete it and unpack"
    return Bad(f"CIFAR-10: {name}", says, lambda f: read_batch_file(f / "a"), lambda f: (f / "a").write_bytes(content))


def cifar_batch(data: Any, labels: list[int] | None) -> bytes:
    return pickle.dumps({b"data": data} | ({} if labels is None else {b"labels": labels}), protocol=2)


PIXELS = np.zeros((3, 3072), np.uint8)
CIFAR = [
    cifar_file("empty", "pickle exhausted", b""),
    cifar_file("no pickle", "", b"\x1f\x8b not a pickle"),
    cifar_file("cut", "", numpy_pickle(*pixels_and_labels(3))[:-40]),
    cifar_file("a list", "not a dict with the keys", pickle.dumps([1, 2], protocol=2)),
    cifar_file("no labels", "not a dict with the keys", cifar_batch(PIXELS, None)),
    cifar_file("smaller images", "data is (3, 1024), not an array", cifar_batch(PIXELS[:, :1024], [1, 2, 3])),
    cifar_file("images in a list", "data is list", cifar_batch([[0] * 3072], [1])),
    cifar_file("floating-point images", "array of type", cifar_batch(PIXELS * 1.0, [1, 2, 3])),
    cifar_file("objects", "array of type", cifar_batch(np.array([[None] * 3072]), [1])),
    cifar_file("too few labels", "2 labels for 3 images", cifar_batch(PIXELS, [1, 2])),
    cifar_file("an 11th class", "labels is not a list of integers from 0 to 9", cifar_batch(PIXELS, [1, 2, 10])),
    cifar_file("no images", "0 labels for 3 images", cifar_batch(PIXELS, [])),
    cifar_file("code", "asks for", pickle.dumps({b"data": PIXELS, b"labels": [1, 2, 3], b"more": Trap()}, protocol=2)),
    cifar_file("a memo bomb", "it stores an object at place 268435455", b"\x80\x02Nr\xff\xff\xff\x0f."),
    cifar_file("a bytes bomb", "", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"N."),
]


def archive(name: str, says: str, write: Callable[[Path], object]) -> Bad:
    def do(folder: Path) -> None:
        extract(folder / "a", FOLDER, folder)

    return Bad(f"archive: {name}", says, do, lambda folder: write(folder / "a"))


def tar_gz(path: Path, *names: str, target: str | None = None) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        if target is not None:
            info = tarfile.TarInfo(f"{FOLDER}/evil")
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)


def cut_archive(path: Path) -> None:
    path.write_bytes(pack(write_folder(path.parent / "source"))[:-1000])


NOT_UNPACKED = "a cannot be unpacked: ... delete it and download it again"
ARCHIVES = [
    archive("no archive", NOT_UNPACKED, lambda path: path.write_text("no archive")),
    archive("cut", NOT_UNPACKED, cut_archive),
    archive("a path outside", NOT_UNPACKED, lambda path: tar_gz(path, f"{FOLDER}/a", "../evil")),
    archive("a longer path outside", NOT_UNPACKED, lambda path: tar_gz(path, f"{FOLDER}/../../evil")),
    archive("a link outside", NOT_UNPACKED, lambda path: tar_gz(path, target="../../../../etc/passwd")),
    archive("another folder", f"a contains no folder {FOLDER}; delete it", lambda path: tar_gz(path, "other/a")),
]


# --- options ---


def option(says: str, make: Callable[[Path], Any], given: Callable[[Path], object] = lambda folder: None) -> Bad:
    return Bad(f"option: {says.partition(' ')[0]} {says[-30:]}", says, make, given)


def synthetic(says: str, world_size: int, **options: int) -> Bad:
    return option(says, lambda _: Synthetic(**{"num_train": 300, **options}).check(world_size))


def cifar(says: str, **options: int) -> Bad:
    made = {"batch_size": 10, **options}
    return option(says, lambda folder: CIFAR10(folder, **made).check(1), write_folder)


SMALL = {"image_size": 32, "num_classes": 3, "batch_size": 6, "eval_batch_size": 4, "num_workers": 0}


def imagenet(says: str, **options: Any) -> Bad:
    made = SMALL | options
    return option(says, lambda _: ImageNet(**({"root": "."} | made)).check(1), lambda f: write_imagenet(f, 2, 1))


def imagenet_shards(says: str, **options: Any) -> Bad:
    made = SMALL | options

    def write(folder: Path) -> None:
        write_shards(folder, write_imagenet(folder / "folders", 3, 2))

    return option(says, lambda _: ImageNetShards(**({"root": ".", "index_dir": "/dev/null"} | made)).check(1), write)


OPTIONS = [
    synthetic("batch_size=2 is smaller than the number of ranks (4) ... batch_size=4 or more", 4, batch_size=2),
    synthetic("batch_size=0 is smaller than the number of ranks", 1, batch_size=0),
    synthetic("batch_size=128 is not a multiple of 3 ranks; use 126 or 129", 3, batch_size=128),
    synthetic("batch_size=512 is larger than the training set (300 images); use at most 300", 1, batch_size=512),
    synthetic("batch_size=400 ... use at most 296", 8, batch_size=400),
    synthetic("num_workers=-1 must be 0", 1, num_workers=-1),
    synthetic("eval_batch_size=2 is smaller than the number of ranks", 4, eval_batch_size=2),
    synthetic("3 test images are too few for 4 ranks", 4, num_test=3),
    synthetic("3 val images are too few for 4 ranks", 4, num_val=3),
    synthetic("the last batch would hold 2 of 449 ... drop_last", 3, batch_size=447, num_train=449, drop_last=False),
    cifar("val_size=60 cannot be held out of the 60 training images ... use 0 ... to 59", val_size=60),
    cifar("val_size=-1 cannot be held out", val_size=-1),
    cifar("val_size=0.1 cannot be held out", val_size=0.1),  # a share, as in scikit-learn
    cifar("a limit of 0 images leaves no image", val_size=0, train_limit=0),
    cifar("a limit of -3 images leaves no image", val_size=0, test_limit=-3),
    imagenet("crop='random' must be one of 'resized', 'square', or null", crop="random"),
    imagenet("on_broken='ignore' must be 'raise' or 'skip'", on_broken="ignore"),
    imagenet("resize_between=(0.8, 0.7) must be two fractions", resize_between=(0.8, 0.7)),
    imagenet("image_size=0 must be 1 or more pixels", image_size=0),
    imagenet("decoder='opencv' must be one of", decoder="opencv"),
    imagenet("has 3 class folders, but num_classes=2; use num_classes=3 or more", num_classes=2),
    imagenet("ImageNet is not in ... nowhere", root="nowhere"),
    imagenet_shards("has the label 2, but num_classes=2; ... use num_classes=3 or more", num_classes=2),
    imagenet_shards("val_labels=labels.txt has no effect on shards", val_labels="labels.txt"),
    imagenet_shards("imagenet-val-000000.tar is used twice", train_shards="imagenet-*.tar"),
    option("communicator='chief' is not known; use one of", lambda _: LayeredSGDStrategy(communicator="chief")),
    option("overlap='all' is not known; use one of 'load', 'step'", lambda _: LayeredSGDStrategy(overlap="all")),
    option("all_reduce='tree' is not known; use one of", lambda _: LayeredSGDStrategy(all_reduce="tree")),
    option("compression='int9' is not known; use None, 'bf16'", lambda _: LayeredSGDStrategy(compression="int9")),
    option("gradient_as_bucket_view=False cannot work", lambda _: LayeredSGDStrategy(gradient_as_bucket_view=False)),
    option("ddp_comm_hook cannot be given ... use DDPStrategy", lambda _: LayeredSGDStrategy(ddp_comm_hook=print)),
    option("model_averaging_period cannot be given", lambda _: LayeredSGDStrategy(model_averaging_period=3)),
    option("scheme='d' is not known; use one of 'a', 'b', 'c'", lambda _: KrizhevskyHybridStrategy(scheme="d")),
    option("num_passes=1 must be an integer of at least 2", lambda _: KrizhevskyHybridStrategy(num_passes=1)),
    option(
        "num_passes=2 is for schemes b and c, and scheme='a' has one pass",
        lambda _: KrizhevskyHybridStrategy(scheme="a", num_passes=2),
    ),
    option(
        "variable_batch=True needs several passes, and scheme='a' has one; use scheme 'b' or 'c'",
        lambda _: KrizhevskyHybridStrategy(scheme="a", variable_batch=True),
    ),
    option("model_averaging_period cannot be used", lambda _: KrizhevskyHybridStrategy(model_averaging_period=3)),
    option("evaluation='none' is not known; use 'gathered' or", lambda _: KrizhevskyHybridStrategy(evaluation="none")),
    option(
        "state_dict_type='half' is not known; use 'full'", lambda _: KrizhevskyHybridStrategy(state_dict_type="half")
    ),
    option(
        "start_method='fork' returns the weights of rank 0 ... run a script with start_method='popen'",
        lambda _: KrizhevskyHybridStrategy(state_dict_type="sharded", start_method="fork"),
    ),
    option("patience=0 must be at least 1 epoch", lambda _: Plateau(patience=0)),
    option("min_delta=-1.0 must not be negative", lambda _: Plateau(min_delta=-1.0)),
    option("patience=nan must be at least 1 epoch", lambda _: Plateau(patience=float("nan"))),  # type: ignore[arg-type]
    option("min_delta=nan must not be negative or NaN", lambda _: Plateau(min_delta=float("nan"))),
    option("mode='lower' is not known; use 'min' or 'max'", lambda _: Plateau(mode="lower")),
    option("max_batch_size=0 must be at least 1, or None", lambda _: AdaptiveGlobalBatchNorm(max_batch_size=0)),
    option("group_size=-2 must be at least 1, or None", lambda _: AdaptiveGlobalBatchNorm(group_size=-2)),
    option(
        "max_batch_size=nan must be at least 1",
        lambda _: AdaptiveGlobalBatchNorm(max_batch_size=float("nan")),  # type: ignore[arg-type]
    ),
    option(
        "max_batch_size='128' must be at least 1",
        lambda _: AdaptiveGlobalBatchNorm(max_batch_size="128"),  # type: ignore[arg-type]
    ),
    option(
        "group_size=1.5 must be at least 1, or None; a whole number",
        lambda _: AdaptiveGlobalBatchNorm(group_size=1.5),  # type: ignore[arg-type]
    ),
    option("global_phase='some' is not known; use", lambda _: AdaptiveGlobalBatchNorm(global_phase="some")),
    option(
        "global_phase='always' does not use a criterion; leave convergence out",
        lambda _: AdaptiveGlobalBatchNorm(global_phase="always", convergence=Plateau()),
    ),
    option(
        "global_phase='after_converged' never begins without a criterion; pass convergence=",
        lambda _: AdaptiveGlobalBatchNorm(global_phase="after_converged"),
    ),
    option("convergence=3 is neither a function nor has it update", lambda _: AdaptiveGlobalBatchNorm(convergence=3)),
    option(
        "convergence=Plateau is a class; make an object of it: Plateau()",
        lambda _: AdaptiveGlobalBatchNorm(convergence=Plateau),  # type: ignore[arg-type]
    ),
    option("policy='costly' must be one of", lambda _: Memonger("costly")),
    option("policy='budget' with budget_bytes=None must be given a number of bytes", lambda _: Memonger("budget")),
    option("budget_bytes=5 has no effect on policy='cheap'; use policy='budget'", lambda _: Memonger(budget_bytes=5)),
    option("every_n_steps=0 must be at least 1", lambda _: RanksAgreeCallback(every_n_steps=0)),
    option(
        "every_n_steps=nan must be at least 1",
        lambda _: RanksAgreeCallback(every_n_steps=float("nan")),  # type: ignore[arg-type]
    ),
]

BAD = [
    *(recipe(arguments, says) for arguments, says in RECIPES), *WITH_FILES, *OTHER_COMMANDS, *CHECKPOINTS,
    *IMAGES, *SHARDS, *SHARD_NAMES, *LABEL_FILES, *CIFAR, *ARCHIVES, *OPTIONS,
]  # fmt: skip
if not torch.cuda.is_available():
    BAD.append(recipe("trainer=gpu", "there is no GPU that torch can use; use trainer=cpu"))
if importlib.util.find_spec("optuna") is None:
    BAD.append(recipe("--multirun hparams_search=optuna", "optuna ... pip install hydra-optuna-sweeper"))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_bad_input_is_refused_in_one_line_and_nothing_is_lost(bad, tmp_path, monkeypatch, capsys):
    """It is seen before any process starts, runs no code that it brings, and leaves every file as it was."""

    def launched(*args: object, **options: object) -> None:
        pytest.fail("processes were started")

    monkeypatch.setattr(train, "launch", launched)
    bad.given(tmp_path)
    before = contents(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as Pillow's of large images
        with pytest.raises(REFUSED) as caught:
            bad.do(tmp_path)
    message, place = str(caught.value), 0
    assert "\n" not in message
    assert " at 0x" not in message, "an address in memory tells nobody anything"
    for part in bad.says.split(" ... "):
        place = message.find(part, place)
        assert place >= 0, f"{part!r} is not in {message!r}"
    assert contents(tmp_path) == before
    assert "Traceback" not in capsys.readouterr().err
