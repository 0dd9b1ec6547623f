from __future__ import annotations

import re

import pytest
import torch

from tests.ranks import run_processes
from tests.recipes.conftest import EXPECTED, metrics
from tests.recipes.in_process import run_script


def weights(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same(one, other) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def sweep(start):
    return start("--multirun", "strategy=ddp,layered_sgd", "trainer.devices=2", "seed=2", "callbacks=agbn")


@pytest.fixture(scope="module")
def failing_sweep(start):
    """Job 0 fails in its processes, job 1 succeeds, jobs 2 and 3 cannot start."""
    return start("--multirun", "trainer.devices=2", "seed=3", "trainer.max_epochs=1", *JOBS)


JOBS = ("+optim.scheduler.total_steps=1,null", "data.batch_size=16,50")


@pytest.mark.ci
def test_a_run_leaves_one_folder_with_the_documented_files_and_prints_its_result(single):
    assert single.status == 0, single.err
    assert single.files() == {str(single.run_dir().relative_to(single.folder)): EXPECTED}
    last = single.out.splitlines()[-1]
    accuracy = float(next(row["test/acc"] for row in metrics(single.run_dir()) if row["test/acc"]))
    assert last == f"test/acc={accuracy:.4f}  run_dir={single.run_dir().relative_to(single.folder)}"
    assert [row["agbn/is_global"] for row in metrics(single.run_dir()) if row["agbn/is_global"]] == ["1.0", "1.0"]


@pytest.mark.slow
def test_a_sweep_runs_each_job_once_in_a_folder_of_its_own(sweep):
    assert sweep.status == 0, sweep.err
    folders = sweep.files()
    (top,) = {re.match(r"runs/tiny/sweep_[^/]+", name)[0] for name in folders}
    assert folders == {f"{top}/0": EXPECTED, f"{top}/1": EXPECTED, top: {"multirun.yaml"}}
    assert len(re.findall(r"^test/acc=", sweep.out, re.MULTILINE)) == 2


@pytest.mark.slow
def test_a_job_of_a_sweep_is_bitwise_identical_to_a_single_run(sweep, single):
    (job,) = sweep.folder.glob("runs/tiny/sweep_*/1")
    assert metrics(job) == metrics(single.run_dir())
    assert same(weights(job), weights(single.run_dir()))


@pytest.mark.slow
def test_layered_sgd_trains_as_ddp_does(sweep):
    (ddp,), (layered,) = sweep.folder.glob("runs/tiny/sweep_*/0"), sweep.folder.glob("runs/tiny/sweep_*/1")
    torch.testing.assert_close(weights(ddp), weights(layered), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_torchrun_gives_one_folder_and_the_same_result(start, single):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = start("trainer.devices=2", "seed=2", "strategy=layered_sgd", "callbacks=agbn", launcher=torchrun)
    assert run.status == 0, run.err
    assert run.files() == {str(run.run_dir().relative_to(run.folder)): EXPECTED}
    assert metrics(run.run_dir()) == metrics(single.run_dir())
    assert len(re.findall(r"^test/acc=", run.out, re.MULTILINE)) == 1


@pytest.mark.ci
def test_evaluate_finds_what_the_run_found(single):
    checkpoint = str(single.run_dir() / "checkpoints" / "last.ckpt")
    before = single.files()
    ((status, output),) = run_processes(1, run_script, "evaluate.py", single.folder, checkpoint)
    assert status is None
    (tested,) = [row for row in metrics(single.run_dir()) if row["test/acc"]]
    expected = [f"{name}={float(tested[name]):.4f}" for name in ("test/acc", "test/acc5", "test/loss")]
    assert output[-1] == "  ".join(expected)
    assert single.files() == before


@pytest.mark.slow
def test_failed_jobs_fail_the_sweep_and_do_not_affect_the_others(failing_sweep, single):
    assert failing_sweep.status == 1
    assert "Tried to step 2 times" in failing_sweep.err
    assert "Traceback" not in failing_sweep.err
    assert "job 3 failed: data.batch_size=50 is larger" in failing_sweep.out
    (top,) = failing_sweep.folder.glob("runs/tiny/sweep_*")
    assert sorted(path.name for path in top.iterdir()) == ["0", "1", "multirun.yaml"]
    assert "torch/optim/lr_scheduler.py" in (top / "0" / "train.log").read_text()
    files = failing_sweep.files()
    assert files[str((top / "1").relative_to(failing_sweep.folder))] == EXPECTED
    assert not same(weights(top / "1"), weights(single.run_dir())), "another seed: weights cannot be the same"


ALEXNET = ("model=cifar_alexnet", "optim=krizhevsky", "model.model.dropout=0", "callbacks=default", "seed=2")


@pytest.mark.slow
def test_a_sharded_head_trains_the_same_network_as_ddp(start):
    """And its checkpoint has the whole head."""
    run = start(*ALEXNET, "--multirun", "strategy=krizhevsky_hybrid,ddp", "trainer.devices=2")
    assert run.status == 0, run.err
    (hybrid,), (ddp,) = run.folder.glob("runs/tiny/sweep_*/0"), run.folder.glob("runs/tiny/sweep_*/1")
    assert weights(hybrid).keys() == weights(ddp).keys()
    for name, ours in weights(hybrid).items():
        torch.testing.assert_close(ours, weights(ddp)[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_head_can_be_updated_after_each_pass(start):
    variable = ("strategy.variable_batch=true", "optim.trunk_batch_scale=2")
    run = start(*ALEXNET, "strategy=krizhevsky_hybrid", "trainer.devices=2", *variable)
    assert run.status == 0, run.err
