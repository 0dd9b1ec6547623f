"""The options of ``debug`` run; for ``debug=smoke`` see test_smoke.py."""

from __future__ import annotations

import pytest

from lightning_dp.runs.validation import validate
from tests.ranks import run_processes
from tests.recipes.conftest import TINY
from tests.recipes.in_process import QUIET, composed, run_script, tiny, train
from tests.recipes.test_compose import names


def test_fast_dev_run_leaves_nothing(tmp_path):
    assert "test/acc" in train(tiny(tmp_path, "debug=fast_dev_run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_fast_dev_run_from_a_checkpoint_leaves_its_run_as_it_is(tmp_path):
    """With its configuration, the checkpoint would be evaluated on one batch."""
    command = (*TINY, *QUIET, "trainer.max_epochs=1", "optim=sgd_multistep")

    def run(folder, *options):
        arguments = (*command, f"hydra.run.dir={tmp_path / folder}", *options)
        ((status, output),) = run_processes(1, run_script, "train.py", tmp_path, *arguments, grace=5)
        assert status is None, (status, output)
        files = [each for each in (tmp_path / folder).rglob("*") if each.suffix in (".ckpt", ".csv", ".yaml")]
        return {each.name: each.read_bytes() for each in files}

    before = run("run")
    try_it = ("debug=fast_dev_run", f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt")
    assert run("run", *try_it) == before
    assert "last.ckpt" not in run("new", *try_it)


@pytest.mark.ci
def test_the_profiler_writes_its_table(tmp_path):
    train(tiny(tmp_path, "debug=profiler"))
    assert "run_training_batch" in (tmp_path / "fit-profile.txt").read_text()


@pytest.mark.parametrize("option", sorted(set(names("debug")) - {"smoke"}))
def test_every_option_of_debug_goes_with_the_demo(option, tmp_path):
    validate(composed(tmp_path, "experiment=digits_resnet20", f"debug={option}", "trainer.devices=1"))
