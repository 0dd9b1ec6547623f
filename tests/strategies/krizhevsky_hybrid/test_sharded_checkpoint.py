"""Checkpoints with a file of rows for each rank: they go on anywhere, and no rank ever holds the whole."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.strategies import consolidate_checkpoint
from tests.ranks import logged, run_processes
from tests.strategies.krizhevsky_hybrid.modules import Result, ScheduledNet, StepNet, all_batches
from tests.strategies.modules import CLASSES, assert_same, snapshot, trainer

STEPS = 4


def saving(folder: str) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    return {"enable_checkpointing": True, "callbacks": [saver]}


def single(folder: Path, epochs: int, ckpt_path: str | None = None) -> Result:
    module = ScheduledNet()
    runner = trainer("auto", 1, max_epochs=epochs, **saving(str(folder)))
    runner.fit(module, all_batches(4, steps=STEPS), ckpt_path=ckpt_path)
    return snapshot(module, runner)


def _fit(rank: int, world_size: int, folder: str, ckpt_path: str | None, epochs: int, state_dict_type: str) -> Any:
    warnings.filterwarnings("ignore", "The dirpath has changed")
    module = ScheduledNet()
    strategy = KrizhevskyHybridStrategy(scheme="c", evaluation="sharded", state_dict_type=state_dict_type)
    runner = trainer(strategy, world_size, use_distributed_sampler=False, max_epochs=epochs, **saving(folder))
    dataset = all_batches(4, steps=STEPS).dataset
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), world_size)), batch_size=12 // world_size)
    with logged() as said:
        runner.fit(module, loader, ckpt_path=ckpt_path)
    if state_dict_type == "full":
        return snapshot(module, runner)
    # Each rank is left with its rows, and that is said; nothing takes them for the whole.
    assert any("holds only its local shard of 'head'" in text and "consolidate_checkpoint" in text for text in said)
    again = trainer(KrizhevskyHybridStrategy(), world_size)
    for use in (again.predict, again.fit):
        with pytest.raises(ValueError, match="leaves one rank's local shard there"):
            use(module, loader)
    with pytest.raises(ValueError, match="leaves one rank's local shard there"):
        runner.predict(module, loader, ckpt_path="best", weights_only=True)
    with pytest.raises(ValueError, match="leaves one rank's local shard there"):
        runner.save_checkpoint(Path(folder, "after.ckpt"))
    # Under another strategy no shape would tell, where the ranks share a single layer's rows evenly.
    with pytest.raises(RuntimeError, match="'head' holds only one rank's local shard"):
        module.head(torch.zeros(2, 6, dtype=torch.float64))
    return sum(p.numel() for p in module.head.parameters())


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_it_goes_on_on_any_number_of_ranks_and_in_a_plain_trainer(tmp_path):
    expected = single(tmp_path / "one", 2)
    held = run_processes(4, _fit, 4, str(tmp_path / "four"), None, 1, "sharded")
    assert sum(held) == sum(p.numel() for p in StepNet().head.parameters())
    folder = tmp_path / "four" / "step=4.ckpt"
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["checkpoint.ckpt", *(f"rows-0000{rank}-of-00004.pt" for rank in range(4))]
    main = torch.load(folder / "checkpoint.ckpt", weights_only=True)
    assert not any(name.startswith("head.") for name in main["state_dict"])
    assert not list((tmp_path / "four").glob(".*"))

    # On the ranks that wrote it, on fewer, as one file or as many, and in one process.
    whole = tmp_path / "whole.ckpt"
    consolidate_checkpoint(folder, whole)
    plain = torch.load(tmp_path / "one" / "step=4.ckpt", weights_only=True)
    consolidated = torch.load(whole, weights_only=True)
    assert_same(consolidated["state_dict"], plain["state_dict"], 1e-9)
    for index, state in plain["optimizer_states"][0]["state"].items():
        assert_same(consolidated["optimizer_states"][0]["state"][index], state, 1e-9)
    assert_same(single(tmp_path / "plain", 2, str(whole)), expected, 1e-9)
    for path in (folder, whole):
        for result in run_processes(2, _fit, 2, str(tmp_path / f"two from {path.name}"), str(path), 2, "full"):
            assert_same(result, expected, 1e-9)
    run_processes(4, _fit, 4, str(tmp_path / "again"), str(whole), 2, "sharded")
    consolidate_checkpoint(tmp_path / "again" / "step=8.ckpt", tmp_path / "again.ckpt")
    resumed = torch.load(tmp_path / "again.ckpt", weights_only=True)["state_dict"]
    assert_same(resumed, {name: expected[name] for name in resumed}, 1e-9)


class Trap:
    sprung = False

    def __reduce__(self):
        return Trap._spring, ()

    @staticmethod
    def _spring():
        Trap.sprung = True


def test_nothing_in_a_checkpoint_is_executed_unless_it_is_trusted(tmp_path):
    folder = tmp_path / "sharded.ckpt"
    folder.mkdir()
    torch.save({"state_dict": {}, "optimizer_states": [], "hyper_parameters": Trap()}, folder / "checkpoint.ckpt")
    torch.save({"parameters": {}, "optimizer_states": []}, folder / "rows-00000-of-00001.pt")
    with pytest.raises(ValueError, match=r"would run code that the file chooses; if you trust it, use weights_only=F"):
        consolidate_checkpoint(folder, tmp_path / "whole.ckpt")
    assert not Trap.sprung
    assert not (tmp_path / "whole.ckpt").exists()
    consolidate_checkpoint(folder, tmp_path / "whole.ckpt", weights_only=False)
    assert Trap.sprung, "the trap works"


class OwnMetric(ScheduledNet):
    """Its metric differs between ranks, as one that is logged without sync_dist does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("own", float(self.global_rank), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def _named_by_metric(rank: int, folder: str) -> None:
    saver = ModelCheckpoint(folder, filename="{own:.0f}", save_on_train_epoch_end=True)
    runner = trainer(
        KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, enable_checkpointing=True, callbacks=[saver]
    )
    runner.fit(OwnMetric(), all_batches(1, steps=2))


@pytest.mark.filterwarnings("ignore")
def test_all_ranks_write_to_one_folder_even_if_they_would_name_it_differently(tmp_path):
    run_processes(2, _named_by_metric, str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "own=0.ckpt"
    assert len(list(folder.iterdir())) == 3


class Unset(torch.optim.SGD):
    """Has a state without a value."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["note"] = None
        return loss


class UnsetNet(StepNet):
    def configure_optimizers(self) -> Any:
        return Unset(self.parameters(), lr=0.1, momentum=0.9)


def _unset(rank: int, folder: str) -> None:
    runner = trainer(KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, **saving(folder))
    runner.fit(UnsetNet(), all_batches(1, steps=4))


@pytest.mark.filterwarnings("ignore")
def test_a_state_without_a_value_is_kept(tmp_path):
    run_processes(2, _unset, str(tmp_path))
    consolidate_checkpoint(tmp_path / "step=2.ckpt", tmp_path / "whole.ckpt")
    states = torch.load(tmp_path / "whole.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    for index, parameter in enumerate(StepNet().parameters()):
        assert states[index]["note"] is None
        assert states[index]["momentum_buffer"].shape == parameter.shape


class KeepsItsOwn(ScheduledNet):
    """Keeps its own values of what has another shape in the checkpoint, as modules do whose classes have changed."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name: state[name] if state[name].shape == own.shape else own for name, own in self.state_dict().items()
        }


def _keeping(rank: int, folder: str) -> None:
    warnings.filterwarnings("ignore", "The dirpath has changed")
    dataset = all_batches(4, steps=STEPS).dataset
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), 2)), batch_size=6)
    for epochs, path in ((1, None), (2, Path(folder, "step=4.ckpt"))):
        strategy = KrizhevskyHybridStrategy(state_dict_type="sharded")
        runner = trainer(strategy, 2, use_distributed_sampler=False, max_epochs=epochs, **saving(folder))
        runner.fit(KeepsItsOwn(), loader, ckpt_path=path)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_shapes_of_a_sharded_checkpoint_are_those_of_the_module_that_loads_it(tmp_path):
    expected = single(tmp_path / "one", 2)
    run_processes(2, _keeping, str(tmp_path / "two"))
    consolidate_checkpoint(tmp_path / "two" / "step=8.ckpt", tmp_path / "whole.ckpt")
    found = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    assert_same(found, {name: expected[name] for name in found}, 1e-9)


class OneLayer(ScheduledNet):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(6, num_classes).double()


def _fewer_classes(rank: int, folder: str) -> None:
    runner = trainer(KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, **saving(folder))
    runner.fit(OneLayer(2 * CLASSES), all_batches(1, steps=4))
    runner = trainer(KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, max_epochs=2)
    with pytest.raises(RuntimeError, match="size mismatch for head.weight"):
        runner.fit(OneLayer(CLASSES), all_batches(1, steps=4), ckpt_path=Path(folder, "step=2.ckpt"))


@pytest.mark.filterwarnings("ignore")
def test_a_local_shard_of_twice_as_many_classes_is_not_taken_for_the_whole_head(tmp_path):
    run_processes(2, _fewer_classes, str(tmp_path))


def _two_epochs(rank: int, folder: str) -> None:
    runner = trainer(KrizhevskyHybridStrategy(state_dict_type="sharded"), 2, max_epochs=2, **saving(folder))
    runner.fit(ScheduledNet(), all_batches(1, steps=4))


@pytest.mark.filterwarnings("ignore")
def test_files_of_two_saves_are_no_checkpoint(tmp_path):
    """A copy has them that was made while a run replaced the folder."""
    run_processes(2, _two_epochs, str(tmp_path))
    name = "rows-00001-of-00002.pt"
    shutil.copy(tmp_path / "step=2.ckpt" / name, tmp_path / "step=4.ckpt" / name)
    consolidate_checkpoint(tmp_path / "step=2.ckpt", tmp_path / "whole.ckpt")
    assert "save_id" not in torch.load(tmp_path / "whole.ckpt", weights_only=True)
    with pytest.raises(ValueError, match="step=4.ckpt has files of different saves"):
        consolidate_checkpoint(tmp_path / "step=4.ckpt", tmp_path / "mixed.ckpt")


def test_what_cannot_be_consolidated(tmp_path):
    with pytest.raises(ValueError, match="is not a sharded checkpoint: it has no checkpoint.ckpt"):
        consolidate_checkpoint(tmp_path, tmp_path / "whole.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "checkpoint.ckpt")
    torch.save({"parameters": {}, "optimizer_states": []}, tmp_path / "rows-00000-of-00002.pt")
    with pytest.raises(ValueError, match="has the shards of 1 ranks of 2; copy the files of all ranks there"):
        consolidate_checkpoint(tmp_path, tmp_path / "whole.ckpt")
    (tmp_path / "whole.ckpt").touch()
    with pytest.raises(ValueError, match="exists; remove it"):
        consolidate_checkpoint(tmp_path, tmp_path / "whole.ckpt")
