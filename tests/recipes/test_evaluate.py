from __future__ import annotations

import pickle
import shutil
import warnings

import pytest
import torch
from omegaconf import OmegaConf

from lightning_dp.runs.evaluate import config_of_run, evaluate, main, read_weights
from tests.recipes.conftest import TINY, metrics


def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        read_weights(tmp_path / "last.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()
    with pytest.raises(ValueError, match="a sharded checkpoint.*consolidate_checkpoint"):
        read_weights(tmp_path / "sharded.ckpt")
    (tmp_path / "last.ckpt").write_text("epoch,step\n")
    with pytest.raises(ValueError, match="is no checkpoint"):
        read_weights(tmp_path / "last.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(FileNotFoundError, match="leave the checkpoint in its run folder"):
        config_of_run(tmp_path / "last.ckpt", [])


class Trap:
    sprung = False

    def __reduce__(self):
        return Trap._spring, ()

    @staticmethod
    def _spring() -> None:
        Trap.sprung = True


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    torch.save({"state_dict": Trap()}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="holds an object of getattr"):
        read_weights(tmp_path / "last.ckpt")
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))  # noqa: S301  our own
    assert Trap.sprung, "the trap works"


def test_a_checkpoint_of_another_model_is_refused(single):
    checkpoint = single.run_dir() / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="holds another model"):
        evaluate(checkpoint, ["model.model.num_classes=9"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no checkpoint of a run, or is damaged"),
        (b"# Recipes", "is no checkpoint of a run, or is damaged"),
        (b"PK\x03\x04" + bytes(100), "is no checkpoint of a run, or is damaged"),
        (torch.ones(3), "is no checkpoint of a run: it has no state_dict"),
        ({"a": 1}, "is no checkpoint of a run: it has no state_dict"),
        ({"state_dict": {}, "global_step": Trap()}, "holds an object of getattr"),
    ],
    ids=["empty", "text", "cut", "tensor", "other", "object"],
)
def test_the_error_for_a_file_that_is_no_checkpoint_is_one_line(tmp_path, monkeypatch, content, message):
    path = tmp_path / "last.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    monkeypatch.setattr("sys.argv", ["evaluate.py", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    (line,) = str(caught.value.code).splitlines()
    assert line.startswith(f"error: {path} {message}")


def test_another_model_is_one_line(single, monkeypatch):
    checkpoint = str(single.run_dir() / "checkpoints" / "last.ckpt")
    monkeypatch.setattr("sys.argv", ["evaluate.py", checkpoint, "model.model.num_classes=9"])
    with pytest.raises(SystemExit, match=r"error: \S+ holds another model than .*: size mismatch .*\(and 1 more such"):
        main()


def test_a_run_folder_of_somebody_else_need_not_be_trusted(single, tmp_path, monkeypatch, capsys):
    """With --own, its configuration is not read; and only weights are read of the checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint = shutil.copy(single.run_dir() / "checkpoints" / "last.ckpt", folder / "checkpoints")
    config = OmegaConf.load(single.run_dir() / ".hydra" / "config.yaml")
    config.data = {
        "_target_": "pathlib.Path.touch",
        "_args_": [{"_target_": "pathlib.Path", "_args_": [str(tmp_path / "sprung")]}],
    }
    (folder / ".hydra").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    monkeypatch.setattr("sys.argv", ["evaluate.py", str(checkpoint), "--own", *TINY])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
    (tested,) = [row for row in metrics(single.run_dir()) if row["test/acc"]]
    assert f"test/acc={float(tested['test/acc']):.4f}" in capsys.readouterr().out
    assert not (tmp_path / "sprung").exists()
    monkeypatch.setattr("sys.argv", ["evaluate.py", str(checkpoint)])
    with pytest.raises(SystemExit):
        main()
    assert (tmp_path / "sprung").exists(), "the trap works"


def test_the_help_says_that_a_configuration_is_a_program(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/lightning-dp-evaluate", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "That configuration is a program" in capsys.readouterr().out
