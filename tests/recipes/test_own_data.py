"""A data module of the user's own, which has nothing but what Lightning asks for."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from lightning_dp.runs.checkpoints import completed_steps
from lightning_dp.runs.evaluate import evaluate
from lightning_dp.runs.validation import validate
from tests.recipes.in_process import tiny, train


def own(run_dir, name="OwnData", **values):
    config = tiny(run_dir, "trainer.max_epochs=1", "test=last")
    config["data"] = {"_target_": f"tests.recipes.pieces.{name}", **values}
    config["model"]["_target_"] = "tests.recipes.pieces.OwnModel"
    return config


@pytest.mark.ci
def test_it_is_trained_and_tested_with(tmp_path):
    config = own(tmp_path, batch_size=8)
    assert validate(config) == 1
    found = train(config)
    assert {"val/acc", "test/acc/dataloader_idx_0", "test/acc/dataloader_idx_1"} <= found.keys()
    assert found["time/images_per_s"] > 0, "the batch begins with texts"
    assert OmegaConf.load(tmp_path / "hparams.yaml").sizes == [1, 2]
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    again = evaluate(tmp_path / "checkpoints" / "last.ckpt", [])
    assert again == {name: value for name, value in found.items() if name.startswith("test/")}


@pytest.mark.ci
def test_an_object_among_its_hyperparameters_is_warned_of(tmp_path, caplog):
    """Lightning saves it, and a checkpoint with it cannot be read without running its code."""
    config = own(tmp_path, batch_size=8, transform={"_target_": "fractions.Fraction"})
    train(config | {"test": False})
    (record,) = [record for record in caplog.records if "no run can continue" in record.message]
    assert "fractions.Fraction" in record.message
    assert "save_hyperparameters(ignore=...)" in record.message
    assert OmegaConf.load(tmp_path / "hparams.yaml").transform == "0"
    with pytest.raises(ValueError, match="holds an object of fractions.Fraction"):
        completed_steps(tmp_path / "checkpoints" / "last.ckpt")


@pytest.mark.ci
def test_an_object_among_its_hyperparameters_ends_a_run_that_tests_its_best_checkpoint(tmp_path):
    config = own(tmp_path, batch_size=8, transform={"_target_": "fractions.Fraction"}) | {"test": "best"}
    with pytest.raises(ValueError, match="test=best reads the best checkpoint again: .* object of fractions.Fraction"):
        train(config)


@pytest.mark.ci
def test_a_list_among_its_hyperparameters_can_be_read_if_hydra_converts_it(tmp_path, caplog):
    """Else it is an object of OmegaConf, and the warning says how to convert it."""
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    config = own(tmp_path, batch_size=8, transform=[1, 2]) | {"test": False}
    train(config)
    (record,) = [record for record in caplog.records if "no run can continue" in record.message]
    assert "omegaconf.listconfig.ListConfig" in record.message
    assert "with _convert_: all beside the _target_" in record.message
    config["data"]["_convert_"] = "all"
    train(config)
    assert completed_steps(checkpoint) == 6


def test_what_it_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match="NoTest has no test_dataloader; use test=false"):
        validate(own(tmp_path, "NoTest"))
    assert validate(own(tmp_path, "NoTest") | {"test": False}) == 1
    config = own(tmp_path, batch_size=8) | {"model": {"_target_": "tests.recipes.pieces.NoTestStep"}}
    with pytest.raises(ValueError, match="NoTestStep has no test_step; use test=false"):
        validate(config)
    assert validate(config | {"test": False}) == 1
    with pytest.raises(ValueError, match="must make a LightningDataModule"):
        validate(own(tmp_path, "Kill", after_steps=1))


def test_it_may_ask_its_trainer_when_it_prepares_itself(tmp_path):
    """That is done before any process of the run, and so before there is the Trainer of one."""
    validate(own(tmp_path, "Prepared", batch_size=8))
    assert (tmp_path / "prepared").exists()


@pytest.mark.ci
def test_the_loaders_may_be_made_from_datasets(tmp_path):
    """Then they are those of the object, and its class has none."""
    make = "pytorch_lightning.LightningDataModule.from_datasets"
    images = {"_target_": "tests.recipes.pieces.Named", "length": 20}
    config = own(tmp_path) | {"data": {"_target_": make, "train_dataset": images, "val_dataset": images}}
    with pytest.raises(ValueError, match="LightningDataModule has no test_dataloader; use test=false"):
        validate(config)
    config["data"]["test_dataset"] = images
    assert validate(config) == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data", "LightningDataModule"),
        ("callbacks.other", "Callback"),
        ("model", "LightningModule"),
        ("strategy", "strategies.DDPStrategy"),
        ("trainer", "Trainer"),
    ],
)
def test_an_object_of_lightnings_other_package_is_named(tmp_path, path, name):
    """Its class has the same name, and the Trainer refuses it, or refuses all others."""
    pytest.importorskip("lightning")
    config = OmegaConf.create(own(tmp_path, batch_size=8))
    OmegaConf.update(config, path, {"_target_": f"lightning.pytorch.{name}"}, merge=path == "trainer")
    config.trainer.strategy = config.strategy  # as in conf/train.yaml
    kind = {"strategies.DDPStrategy": "Strategy"}.get(name, name)
    with pytest.raises(ValueError, match=f"{path}.* a {kind} of pytorch_lightning, .* not of lightning.pytorch"):
        validate(OmegaConf.to_container(config) | {"test": False})
