"""torchrun restarts a job whose rank has died, and the job continues from its last checkpoint."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ranks import run_processes
from tests.recipes.conftest import EXPECTED, TINY, TRAIN, Run, metrics
from tests.recipes.in_process import tiny, train_rank

SETTINGS = ("trainer.devices=2", "trainer.max_epochs=3", "strategy=layered_sgd_single", "seed=2")


@pytest.mark.slow
def test_a_restarted_job_finds_bitwise_what_an_uninterrupted_one_finds(start, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Without it, the ranks of the second attempt find the addresses of the first one's in torchrun's store.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run_processes(2, train_rank, tiny(tmp_path, *SETTINGS))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    kill = ("+callbacks.kill._target_=tests.recipes.pieces.Kill", "+callbacks.kill.after_steps=5")
    arguments = (*SETTINGS, *kill, "ckpt_path=last", "hydra.run.dir=runs/tiny/fixed")
    run = start(*arguments, launcher=torchrun)
    assert run.status == 0, run.err
    assert "this job starts from the beginning" in run.out
    assert re.search("continuing from .*last.ckpt", run.out)
    assert run.files() == {"runs/tiny/fixed": EXPECTED}
    folder = run.folder / "runs" / "tiny" / "fixed"
    assert metrics(folder) == metrics(tmp_path)
    ours, reference = (
        torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for run_dir in (folder, tmp_path)
    )
    assert all(torch.equal(ours[name], reference[name]) for name in reference)
    again = Run(run.folder, (*torchrun, str(TRAIN)), (*TINY, *arguments))
    assert again.status == 0, again.err
    assert again.out.splitlines()[-1] == run.out.splitlines()[-1], "a finished job prints its result"
    assert metrics(folder) == metrics(tmp_path)
