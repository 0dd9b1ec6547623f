from __future__ import annotations

import os

import pytest
import torch

from lightning_dp.runs.command_line import arguments_of_rank
from lightning_dp.runs.resume import find_checkpoint, with_last_checkpoint
from tests.ranks import RankError, run_processes
from tests.recipes.conftest import metrics
from tests.recipes.in_process import tiny, train, train_rank

SETTINGS = ("trainer.devices=2", "seed=2", "strategy=layered_sgd_single", "callbacks=agbn")


def last(run_dir):
    return run_dir / "checkpoints" / "last.ckpt"


def weights(run_dir):
    return torch.load(last(run_dir), weights_only=True)["state_dict"]


def test_a_run_that_was_killed_continues_bitwise_as_if_nothing_had_happened(tmp_path):
    """Two ranks, killed by SIGKILL in the second of two epochs of three steps, and continued in the same folder."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected, _ = run_processes(2, train_rank, tiny(whole, *SETTINGS))
    kill = ("+callbacks.kill._target_=tests.recipes.pieces.Kill", "+callbacks.kill.after_steps=5")
    with pytest.raises(RankError, match="died with exit code -9"):
        run_processes(2, train_rank, tiny(cut, *SETTINGS, *kill), grace=5)
    assert torch.load(last(cut), weights_only=True)["global_step"] == 3
    resumed, _ = run_processes(2, train_rank, tiny(cut, *SETTINGS, f"ckpt_path={last(cut)}"))
    assert metrics(cut) == metrics(whole)
    ours, reference = weights(cut), weights(whole)
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
    timeless = {name: value for name, value in expected.items() if not name.startswith("time/")}
    assert {name: resumed[name] for name in timeless} == timeless


def test_dropout_draws_the_same_after_a_checkpoint_and_continues_in_another_folder(tmp_path):
    first, second, whole = tmp_path / "first", tmp_path / "second", tmp_path / "whole"
    alexnet = ("model=cifar_alexnet", "model.channels_last=false")
    train(tiny(whole, *alexnet))
    train(tiny(first, *alexnet, "trainer.max_epochs=1", "+optim.scheduler.total_steps=6", "test=false"))
    train(tiny(second, *alexnet, f"ckpt_path={last(first)}"))
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(second).items())
    assert [row["train/loss"] for row in metrics(second)] == [row["train/loss"] for row in metrics(whole)]


def find(requested, run_dir, in_sweep=False):
    return find_checkpoint(requested, run_dir, "tiny", in_sweep)


def save(run_dir, num_steps=1, age_s=0):
    last(run_dir).parent.mkdir(parents=True)
    torch.save({"global_step": num_steps}, last(run_dir))
    os.utime(last(run_dir), (1e9 - age_s, 1e9 - age_s))
    return last(run_dir)


def test_last_is_that_of_the_run_folder_or_else_of_the_newest_run(tmp_path):
    new = tmp_path / "runs" / "tiny" / "new"
    with pytest.raises(FileNotFoundError, match="nor has another run named tiny beside it"):
        find("last", new)
    save(tmp_path / "runs" / "tiny" / "older", age_s=10)
    newest = save(tmp_path / "runs" / "tiny" / "old")
    assert find("last", new) == newest
    own = save(new, age_s=20)
    assert find("last", new) == own
    assert find(str(newest), new) == newest
    assert find(None, new) is None


def test_another_folder_is_not_taken_for_a_run_of_that_name(tmp_path):
    save(tmp_path / "somewhere" / "old")
    with pytest.raises(FileNotFoundError, match=r"hydra\.run\.dir=FOLDER"):
        find("last", tmp_path / "somewhere" / "new")


def test_a_job_of_an_interrupted_sweep_continues_itself_or_starts(tmp_path):
    sweep = tmp_path / "sweep"
    with pytest.raises(FileNotFoundError, match=r"no job of .*sweep has a checkpoint; .*hydra\.sweep\.dir=FOLDER"):
        find("last", sweep / "0", in_sweep=True)
    own = save(sweep / "0")
    assert find("last", sweep / "0", in_sweep=True) == own
    assert find("last", sweep / "1", in_sweep=True) is None, "not the weights of another job"


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
        find(str(tmp_path / "none.ckpt"), tmp_path)
    (tmp_path / "text.ckpt").write_text("epoch,step\n")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        find(str(tmp_path / "text.ckpt"), tmp_path)


def test_under_a_launcher_last_needs_a_folder_and_starts_if_that_is_empty(tmp_path, capsys):
    assert with_last_checkpoint(["seed=1"]) == ["seed=1"]
    for folder in ([], ["hydra.run.dir=runs/${name}"]):
        with pytest.raises(ValueError, match=r"hydra\.run\.dir=FOLDER"):
            with_last_checkpoint(["ckpt_path=last", *folder])
    arguments = ["ckpt_path=last", f"hydra.run.dir={tmp_path / 'run'}"]
    assert with_last_checkpoint(arguments)[0] == "ckpt_path=null"
    assert "starting from the beginning" in capsys.readouterr().out
    own = save(tmp_path / "run")
    assert with_last_checkpoint(arguments)[0] == f"ckpt_path={own}"
    assert f"{own}: continuing" in capsys.readouterr().out


def test_the_command_line_of_a_restarted_rank_names_the_checkpoint_of_rank_0(tmp_path):
    own = save(tmp_path / "run")
    arguments = arguments_of_rank(["ckpt_path=last", f"hydra.run.dir={tmp_path / 'run'}"], 1, "/elsewhere")
    assert arguments[0] == f"ckpt_path={own}"
    assert "hydra.run.dir=/elsewhere" in arguments
