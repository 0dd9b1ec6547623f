from __future__ import annotations

import pickle

import pytest
import torch

from lightning_dp.runs.evaluate import read_checkpoint, read_config


def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        read_checkpoint(tmp_path / "last.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()
    with pytest.raises(ValueError, match="a sharded checkpoint.*consolidate_checkpoint"):
        read_checkpoint(tmp_path / "sharded.ckpt")
    (tmp_path / "last.ckpt").write_text("epoch,step\n")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "last.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(FileNotFoundError, match="leave the checkpoint in its run folder"):
        read_config(tmp_path / "last.ckpt", [])


class Trap:
    sprung = False

    def __reduce__(self):
        return Trap._spring, ()

    @staticmethod
    def _spring() -> None:
        Trap.sprung = True


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    torch.save({"state_dict": Trap()}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "last.ckpt")
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))  # noqa: S301  our own
    assert Trap.sprung, "the trap works"
