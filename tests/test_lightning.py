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
        lambda: L.Trainer(callbacks=[lightning_dp.AdaptiveGlobalBatchNorm()], **options).fit(BoringModel()),
    ):
        try:
            use()
        except TypeError as error:
            print(f"refused: {error}")
"""


@pytest.mark.slow
def test_an_object_of_the_other_framework_is_refused_by_name():
    done = run(MIXED)
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refusals) == 2, done.stderr
    for name, refusal in zip(("LayeredSGDStrategy", "AdaptiveGlobalBatchNorm"), refusals, strict=True):
        assert f"{name} was built on `pytorch_lightning`, but this Trainer comes from `lightning.pytorch`" in refusal
        assert "import `lightning.pytorch` before `lightning_dp`" in refusal


@pytest.mark.slow
def test_a_strategy_name_of_the_other_framework_is_refused_by_name():
    done = run(
        """
        import pytorch_lightning, lightning.pytorch
        import lightning_dp
        pytorch_lightning.Trainer(strategy="layered_sgd", accelerator="cpu")
        """
    )
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "LayeredSGDStrategy was built on `lightning.pytorch`, but this Trainer comes from `pytorch_lightning`" in last
    )
