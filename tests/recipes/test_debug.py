"""The options of ``debug`` run; for ``debug=smoke`` see test_smoke.py."""

from __future__ import annotations

import pytest

from lightning_dp.runs.validation import validate
from tests.recipes.in_process import composed, tiny, train
from tests.recipes.test_compose import names


def test_fast_dev_run_leaves_nothing(tmp_path):
    assert "test/acc" in train(tiny(tmp_path, "debug=fast_dev_run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_the_profiler_writes_its_table(tmp_path):
    train(tiny(tmp_path, "debug=profiler"))
    assert "run_training_batch" in (tmp_path / "fit-profile.txt").read_text()


@pytest.mark.parametrize("option", sorted(set(names("debug")) - {"smoke"}))
def test_every_option_of_debug_goes_with_the_demo(option, tmp_path):
    validate(composed(tmp_path, "experiment=digits_resnet20", f"debug={option}", "trainer.devices=1"))
