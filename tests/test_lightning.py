"""Both names of the framework work, and mixing them raises an error that says so."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter, because the choice of framework depends on the order of imports."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,  # a safety net
    )


# Most other tests follow `pytorch_lightning`.
@pytest.mark.ci
@pytest.mark.parametrize("framework", [pytest.param("pytorch_lightning", marks=pytest.mark.slow), "lightning.pytorch"])
def test_follows_what_the_user_has_loaded(framework):
    code = f"""
        import {framework} as L
        import lightning_dp
        from lightning_dp import LayeredSGDStrategy, AdaptiveGlobalBatchNorm
        assert issubclass(LayeredSGDStrategy, L.strategies.DDPStrategy)
        assert issubclass(AdaptiveGlobalBatchNorm, L.Callback)
        trainer = L.Trainer(strategy="layered_sgd", accelerator="cpu", devices=2, logger=False)
        assert type(trainer.strategy) is LayeredSGDStrategy
        # twice: the names are registered once
        import importlib
        names = L.strategies.StrategyRegistry.available_strategies()
        importlib.reload(lightning_dp)
        assert L.strategies.StrategyRegistry.available_strategies() == names
        print("fine")
    """
    done = run(code)
    assert done.stdout.strip().endswith("fine"), done.stderr


@pytest.mark.slow
def test_the_environment_variable_decides():
    done = run("import lightning_dp._lightning as f; print(f.FRAMEWORK)", LIGHTNING_DP_FRAMEWORK="lightning.pytorch")
    assert done.stdout.strip() == "lightning.pytorch", done.stderr
    done = run("import lightning_dp", LIGHTNING_DP_FRAMEWORK="keras")
    assert done.returncode != 0
    assert "LIGHTNING_DP_FRAMEWORK='keras' names no framework; use one of pytorch_lightning" in done.stderr


MIXED = """
    import pytorch_lightning
    import lightning_dp
    import lightning.pytorch as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1)
    for use in (
        lambda: L.Trainer(strategy=lightning_dp.LayeredSGDStrategy(), **options),
        lambda: L.Trainer(strategy="layered_sgd", **options),
        lambda: L.Trainer(callbacks=[lightning_dp.AdaptiveGlobalBatchNorm()], **options).fit(BoringModel()),
    ):
        try:
            use()
        except (TypeError, ValueError) as error:
            print(f"refused: {error}")
"""


@pytest.mark.slow
def test_the_other_framework_refuses_what_is_not_its_own():
    done = run(MIXED)
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refusals) == 3, done.stderr
    for refusal in refusals[:2]:
        assert "an instance of `lightning.pytorch.strategies.Strategy`" in refusal
    name = "AdaptiveGlobalBatchNorm"
    assert f"{name} was built on `pytorch_lightning`, but this Trainer comes from `lightning.pytorch`" in refusals[2]
    assert "import `lightning.pytorch` before `lightning_dp`" in refusals[2]
