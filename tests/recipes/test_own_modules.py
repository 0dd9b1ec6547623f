"""A user's own modules, whatever their names, are those that his configuration means; and they are not ours."""

from __future__ import annotations

import sys

import pytest

from tests.commands import run_command
from tests.recipes.conftest import ROOT, TINY, TRAIN

# Names of our scripts and modules. Each defines a callback that prints its file, or fails if it is imported.
OWN = """
from pytorch_lightning import Callback

class Own(Callback):
    def on_fit_start(self, trainer, module):
        if trainer.is_global_zero:
            print("own", __name__, flush=True)
"""
UNUSED = 'raise AssertionError("a module of the user in place of ours")\n'
OURS = sorted({path.stem for folder in ("recipes", "lightning_dp/runs") for path in (ROOT / folder).glob("[a-z]*.py")})
SHORT = ("trainer.max_epochs=1", "test=false", "trainer.enable_model_summary=false")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["train", "validation"])
def test_a_module_in_the_path_is_the_users(tmp_path, name, devices):
    for other in {*OURS, "options", "training"}:
        (tmp_path / f"{other}.py").write_text(OWN if other == name else UNUSED)
    options = (f"+callbacks.own._target_={name}.Own", f"trainer.devices={devices}")
    command = [sys.executable, TRAIN, *TINY, *SHORT, *options]
    done = run_command(command, tmp_path, {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 0, done.stderr
    assert f"own {name}" in done.stdout
