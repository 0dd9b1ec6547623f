from __future__ import annotations

import json
import pickle
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_dp.models import Classifier
from lightning_dp.planner.report import PLAN_VERSION
from lightning_dp.runs.command_line import hydra_of, message_of
from lightning_dp.runs.evaluate import check_overrides, check_weights, config_of_run, evaluate, main, own_config
from tests.recipes.conftest import TINY, metrics
from tests.recipes.in_process import tiny, train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The folder of a run, with its configuration, as the command line keeps it."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny(folder, "trainer.max_epochs=1")
    train(config)
    (folder / ".hydra").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    return folder


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
        check_weights(tmp_path / "last.ckpt")
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))  # noqa: S301  our own
    assert Trap.sprung, "the trap works"


def test_the_folder_of_a_run_is_not_taken_for_a_sharded_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    for folder in (tmp_path, checkpoint.parent):
        with pytest.raises(ValueError, match=f"{folder} is a folder with checkpoints; .* such as {checkpoint}$"):
            check_weights(folder)


@pytest.mark.ci
def test_another_model_is_one_line(run_dir, monkeypatch):
    checkpoint = str(run_dir / "checkpoints" / "last.ckpt")
    monkeypatch.setattr("sys.argv", ["evaluate.py", checkpoint, "model.model.num_classes=9"])
    with pytest.raises(SystemExit, match=r"error: \S+ holds another model than .*: size mismatch .*\(and 1 more such"):
        main()


@pytest.mark.ci
def test_an_argument_that_the_run_did_not_give_is_added(run_dir):
    """As the error for an unknown key says."""
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    with pytest.raises(Exception, match="eval_batch_size") as found:
        evaluate(checkpoint, ["data.eval_batch_size=3"])
    assert "write +data.eval_batch_size=..." in message_of(found.value)
    assert config_of_run(checkpoint, ["+data.eval_batch_size=3", "data.batch_size=8"]).data.eval_batch_size == 3
    assert config_of_run(checkpoint, ["++data.eval_batch_size=3", "++data.batch_size=8"]).data.batch_size == 8
    assert evaluate(checkpoint, ["+data.eval_batch_size=3"]).keys() == {"test/acc", "test/acc5", "test/loss"}
    with pytest.raises(ValueError, match="data.bach_size is not an argument"):
        evaluate(checkpoint, ["+data.bach_size=3"])
    for nothing in ("+other=1", "+callbacks.other=1", "+data=1"):
        with pytest.raises(ValueError, match="has no effect|chooses a file"):
            evaluate(checkpoint, [nothing])


def test_what_is_not_read_may_name_what_only_a_run_knows(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "copy")
    config = OmegaConf.load(tmp_path / "copy" / ".hydra" / "config.yaml")
    config.logger = {"own": {"_target_": "own.Logger", "save_dir": "${hydra:runtime.output_dir}"}}
    config.name = "${oc.env:NOT_SET_HERE}"
    OmegaConf.save(config, tmp_path / "copy" / ".hydra" / "config.yaml")
    checkpoint = tmp_path / "copy" / "checkpoints" / "last.ckpt"
    assert evaluate(checkpoint, []).keys() == {"test/acc", "test/acc5", "test/loss"}


@pytest.mark.parametrize(
    "text", ["experiment=digits_resnet20", "debug=limit", "plan=plan.yaml", "optim=lars", "+data=1"]
)
def test_what_chooses_a_file_is_refused_for_the_values_of_a_run(text):
    with pytest.raises(
        ValueError, match=r"chooses a file, but the run folder has values: write \w+\.OPTION=\.\.\., or use"
    ):
        check_overrides([text])


def test_with_own_a_key_that_nothing_reads_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing reads the key other"):
        own_config(["+other=1"])
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("data:\n  batch_size: 8\n")
    with pytest.raises(ValueError, match="the file of experiment=NAME lacks its first line"):
        own_config(["experiment=mine"], tmp_path)
    own_config(["+classes=3", "num_classes=${classes}"])


def test_with_own_the_plan_of_a_training_may_stay(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(json.dumps({"version": PLAN_VERSION, "overrides": ["strategy=layered_sgd"]}))
    assert own_config([f"plan={plan}"]).strategy._target_ == "lightning_dp.LayeredSGDStrategy"


@pytest.mark.filterwarnings("ignore:Total length of")
def test_an_evaluation_without_images_is_an_error(run_dir):
    """It would print nothing, and end with status 0."""
    with pytest.raises(ValueError, match="the configuration has no test images"):
        evaluate(run_dir / "checkpoints" / "last.ckpt", ["data.num_test=0"])


@pytest.mark.ci
def test_data_may_be_where_the_run_was_started(run_dir, tmp_path):
    """``${hydra:runtime.cwd}/data``, as people write it. Only Hydra knows it, and it is not on in an evaluation."""
    folder = tmp_path / "copy"
    shutil.copytree(run_dir, folder)
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    config.data.num_test = "${hydra:runtime.answer}"
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    OmegaConf.save({"hydra": {"runtime": {"answer": 21}}}, folder / ".hydra" / "hydra.yaml")
    checkpoint = Path("checkpoints", "last.ckpt")
    assert evaluate(folder / checkpoint, []) == evaluate(run_dir / checkpoint, [])


@pytest.mark.parametrize("is_hydra_on", [True, False])
def test_what_hydra_answers_is_as_before_when_a_run_has_been_read(tmp_path, is_hydra_on, monkeypatch):
    """A program that Hydra has started reads ``${hydra:...}`` later, too, and so may the next run."""
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save({"hydra": {"job": {"name": "of the run"}}}, tmp_path / ".hydra" / "hydra.yaml")
    config = OmegaConf.create({"name": "${hydra:job.name}"})
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"job": {"name": "of Hydra"}}))
    OmegaConf.clear_resolver("hydra")
    if is_hydra_on:
        setup_globals()
    with suppress(KeyError), hydra_of(tmp_path):
        assert config.name == "of the run"
        raise KeyError
    with hydra_of(tmp_path / "without"):
        assert OmegaConf.has_resolver("hydra") == is_hydra_on
        assert not is_hydra_on or config.name == "of Hydra"
    setup_globals()
    (tmp_path / ".hydra" / "hydra.yaml").write_text("hydra: [")
    with pytest.raises(ValueError, match=r"hydra\.yaml is damaged (.|\n)*; remove it if"), hydra_of(tmp_path):
        pass


def test_a_checkpoint_without_a_run_folder_is_named():
    with pytest.raises(FileNotFoundError, match=r"there is no /\.hydra/config\.yaml; .* use --own"):
        config_of_run(Path("/last.ckpt"), [])


def test_a_run_folder_of_somebody_else_need_not_be_trusted(run_dir, tmp_path, monkeypatch, capsys):
    """With --own, its configuration is not read; and only weights are read of the checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint = shutil.copy(run_dir / "checkpoints" / "last.ckpt", folder / "checkpoints")
    config = OmegaConf.load(run_dir / ".hydra" / "config.yaml")
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
    (tested,) = [row for row in metrics(run_dir) if row["test/acc"]]
    assert f"test/acc={float(tested['test/acc']):.4f}" in capsys.readouterr().out
    assert not (tmp_path / "sprung").exists()
    monkeypatch.setattr("sys.argv", ["evaluate.py", str(checkpoint)])
    with pytest.raises(SystemExit):
        main()
    assert (tmp_path / "sprung").exists(), "the trap works"


@pytest.mark.ci
def test_with_own_the_options_without_effect_are_named(run_dir, caplog):
    """Those of a training may be given as they are."""
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    of_training = ["trainer.devices=4", "strategy=layered_sgd", "+callbacks.other=null"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [evaluate(checkpoint, [*TINY[1:6], *more], own=True) for more in ([], of_training)]
    assert found[0] == found[1]
    (said,) = [each.message for each in caplog.records if "without effect" in each.message]
    assert said.endswith("callbacks: trainer.devices=4, strategy=layered_sgd, +callbacks.other=null")


@pytest.mark.ci
def test_with_own_the_model_may_be_the_users(tmp_path):
    """Its experiment is in a folder of the user's, and the run folder is not looked at."""
    train(tiny(tmp_path / "run", "trainer.max_epochs=1", "model.model._target_=lightning_dp.models.resnet20"))
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    config = "# @package _global_\ndefaults:\n  - override /data: synthetic\n  - override /trainer: cpu\n"
    (tmp_path / "mine" / "experiment" / "my.yaml").write_text(config)
    checkpoint = shutil.copy(tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "only.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = evaluate(Path(checkpoint), ["experiment=my", *TINY[2:6]], own=True, config_dir=tmp_path / "mine")
    (tested,) = [row for row in metrics(tmp_path / "run") if row["test/acc"]]
    assert found["test/acc"] == pytest.approx(float(tested["test/acc"]))


class Writes(Classifier):
    """Writes to its logger in a test, as others write a confusion matrix."""

    def on_test_epoch_end(self):
        self.logger.log_metrics({"test/own": 1.0}, step=self.global_step)
        for folder in (self.trainer.log_dir, self.logger.save_dir, self.logger.log_dir):
            Path(folder, "images.txt").touch()


@pytest.mark.ci
def test_a_module_may_write_to_its_logger(run_dir):
    """A run always has one, and its folder is that of the run."""
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    assert evaluate(checkpoint, [f"model._target_={__name__}.Writes"]) == evaluate(checkpoint, [])
    (run_dir / "images.txt").unlink()


class Divided(LightningDataModule):
    """Its split is drawn in ``setup``, once for all stages."""

    tested: ClassVar[list[list[int]]] = []

    def setup(self, stage):
        if not hasattr(self, "train"):
            images = TensorDataset(torch.zeros(64, 3, 8, 8), torch.zeros(64, dtype=torch.int64))
            self.train, self.test = random_split(images, [48, 16])

    def train_dataloader(self):
        return DataLoader(self.train, 16)

    def test_dataloader(self):
        self.tested.append(list(self.test.indices))
        return DataLoader(self.test, 16)


SINGLE_DEVICE = {"_target_": "pytorch_lightning.strategies.SingleDeviceStrategy", "device": "cpu"}


@pytest.mark.ci
@pytest.mark.parametrize("strategy", [{}, SINGLE_DEVICE], ids=["ddp", "single device"])
def test_images_that_are_divided_at_random_are_divided_as_in_the_run(tmp_path, strategy):
    """Else the run would be tested on images that it has trained on. Only DDP seeds before ``setup``."""
    config = tiny(tmp_path, "trainer.max_epochs=1", "seed=4") | {"data": {"_target_": f"{__name__}.Divided"}}
    config["strategy"] = config["trainer"]["strategy"] = strategy or config["strategy"]
    train(config)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    evaluate(tmp_path / "checkpoints" / "last.ckpt", [])
    of_run, again = Divided.tested[-2:]
    assert again == of_run


class Late(Classifier):
    """Makes its layers where Lightning asks for large ones."""

    def __init__(self, model, **options):
        super().__init__(torch.nn.Identity(), **options)
        self.make = model

    def configure_model(self):
        if isinstance(self.model, torch.nn.Identity):  # Lightning calls it for each stage
            self.model = self.make()


@pytest.mark.ci
def test_layers_of_configure_model_are_there_when_weights_are_loaded(tmp_path):
    config = tiny(tmp_path, "trainer.max_epochs=1")
    config["model"] |= {"_target_": f"{__name__}.Late"}
    config["model"]["model"]["_partial_"] = True
    found = train(config)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    again = evaluate(tmp_path / "checkpoints" / "last.ckpt", [])
    assert again == {name: value for name, value in found.items() if name.startswith("test/")}


def test_a_result_that_nobody_reads_is_an_error_in_one_line(monkeypatch):
    """As in a pipe that is closed."""

    def closed(*texts, **options):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.argv", ["evaluate.py", "last.ckpt"])
    monkeypatch.setattr("lightning_dp.runs.evaluate.evaluate", lambda *arguments: {"test/acc": 0.5})
    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(SystemExit, match=r"^error: .*Broken pipe$"):
        main()


def test_the_help_says_that_a_configuration_is_a_program(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/lightning-dp-evaluate", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "That configuration is a program" in capsys.readouterr().out
