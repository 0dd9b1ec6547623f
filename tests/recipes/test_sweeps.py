"""A sweep of jobs with two processes each finds what single runs find, under each launcher."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_processes
from tests.recipes.conftest import EXPECTED, metrics
from tests.recipes.in_process import tiny, train_rank

SETTINGS = ("trainer.devices=2", "trainer.max_epochs=1", "callbacks=agbn")
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def single_runs(tmp_path_factory):
    """The folder of a run for each seed."""
    folders = [tmp_path_factory.mktemp(f"seed{seed}") for seed in SEEDS]
    for seed, folder in zip(SEEDS, folders, strict=True):
        run_processes(2, train_rank, tiny(folder, *SETTINGS, f"seed={seed}"))
    return folders


def launched(launcher: str) -> tuple[str, ...]:
    """The overrides for a launcher of Hydra."""
    return {
        "basic": (),
        "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        "submitit_local": ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=10"),
    }[launcher]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_a_sweep_is_bitwise_identical_to_single_runs(launcher, start, single_runs, monkeypatch):
    if launcher != "basic":
        plugin = f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher"
        pytest.importorskip(plugin, reason="pip install hydra-joblib-launcher hydra-submitit-launcher")
    # joblib would give each job half of the cores, and another number of threads sums in another order.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = start("--multirun", "seed=1,2,3", *SETTINGS, *launched(launcher))
    assert run.status == 0, run.err
    (top,) = run.folder.glob("runs/tiny/sweep_*")
    jobs = [top / str(number) for number in range(3)]
    folders = run.files()
    for job, single in zip(jobs, single_runs, strict=True):
        assert folders[str(job.relative_to(run.folder))] == EXPECTED
        assert metrics(job) == metrics(single)
        ours, reference = (
            torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
            for folder in (job, single)
        )
        assert all(torch.equal(ours[name], reference[name]) for name in reference)
