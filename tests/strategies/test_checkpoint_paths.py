"""Checkpoints are where Lightning puts those of plain DDP."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from pytorch_lightning.strategies import DDPStrategy

from lightning_dp import KrizhevskyHybridStrategy, LayeredSGDStrategy
from lightning_dp.strategies.complete_files import CompleteFiles, copy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, batches
from tests.strategies.modules import trainer

STRATEGIES = {
    "ddp": DDPStrategy,
    "layered_sgd": lambda: LayeredSGDStrategy(group_size=1),
    "hybrid": KrizhevskyHybridStrategy,
    "sharded": lambda: KrizhevskyHybridStrategy(state_dict_type="sharded"),
}


class SavesAtHome(HybridNet):
    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def _at_home(rank: int, home: str) -> None:
    warnings.simplefilter("ignore")  # Lightning advises on loaders
    os.environ["HOME"] = home
    for name, make in STRATEGIES.items():
        for epochs, path in ((1, None), (2, f"~/{name}.ckpt")):
            module = SavesAtHome()
            module.path = f"~/{name}.ckpt"
            runner = trainer(make(), 2, max_epochs=epochs, use_distributed_sampler=False)
            runner.fit(module, batches(rank, 2, steps=2), ckpt_path=path)
            assert runner.global_step == 2 * epochs
            assert Path(home, f"{name}.ckpt").exists()


@pytest.mark.ci
def test_a_path_may_begin_with_the_home_folder(tmp_path):
    run_processes(2, _at_home, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} >= {f"{name}.ckpt" for name in STRATEGIES}
    assert not Path("~").exists()


def _from_a_folder(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    for name in ("layered_sgd", "hybrid", "sharded"):
        runner = trainer(STRATEGIES[name](), 2, max_epochs=1, use_distributed_sampler=False)
        with pytest.raises(
            ValueError, match=r"folder, as of a sharded .* make a file of it with .*\.consolidate_chec"
        ) as error:
            runner.fit(HybridNet(), batches(rank, 2, steps=2), ckpt_path=folder)
        assert "is it complete" not in "".join(getattr(error.value, "__notes__", ()))


def test_a_folder_that_the_strategy_does_not_read_is_an_error_with_a_remedy(tmp_path):
    """Python's is that it is a directory. It may be one of FSDP2, or of any other sharded strategy."""
    (tmp_path / "meta.pt").touch()
    run_processes(2, _from_a_folder, str(tmp_path))
    with pytest.raises(ValueError, match="make a file of it"):
        CompleteFiles().load_checkpoint(tmp_path)


def test_a_copy_replaces_a_checkpoint_that_is_a_folder_too(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").touch()
    copy(tmp_path / "new", tmp_path / "old")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")} == {"new/of_new", "old/of_new"}
    assert {path.name for path in tmp_path.iterdir()} == {"new", "old"}, "nothing hidden is left"
