"""The data modules under a Trainer: in rank processes, resumed, and with options that cannot work."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp._lightning import FRAMEWORK, LightningModule, ModelParallelStrategy, Trainer
from lightning_dp.data import CIFAR10, Digits, ImageNet, ImageNetShards, Synthetic
from lightning_dp.models import Classifier
from tests.ranks import RankError, run_processes

# Lightning 2.6 asks torch 2.13 in a way that torch calls old.
OLD_WAYS = ".*treespec, LeafSpec"
pytestmark = pytest.mark.filterwarnings(f"ignore:{OLD_WAYS}")
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


class Probe(LightningModule):
    """A fixed random classifier (learning rate 0) that counts what it sees, and remembers its training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, 10, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(10, 3072, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("constant", torch.zeros(1))  # broadcast by DistributedDataParallel in every forward
        self.metrics = torch.nn.ModuleDict()
        for stage in ("val", "test"):
            self.metrics[stage + "/acc"] = MulticlassAccuracy(10, average="micro")
            self.metrics[stage + "/count"] = SumMetric()
            self.metrics[stage + "/loss"] = MeanMetric()
        self.seen: list[tuple[int, list[float]]] = []  # epoch, sum of each image

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images.flatten(1)) + self.constant

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch[0].flatten(1).double().sum(1).tolist()))
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def evaluate(self, stage: str, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.metrics[stage + "/acc"](logits, labels)
        self.metrics[stage + "/count"](len(labels))
        self.metrics[stage + "/loss"](torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
        self.log_dict({name: self.metrics[name] for name in self.metrics if name.startswith(stage)})

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.evaluate("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class PaddedByTorch(Synthetic):
    """What one gets without the evaluation sampler: Lightning adds torch's, which repeats images."""

    def test_dataloader(self) -> DataLoader:
        images, labels = self._splits["test"]
        return DataLoader(list(zip(images.float() / 64 - 2, labels, strict=True)), batch_size=20)


def data(kind: type[Synthetic] = Synthetic, **options) -> Synthetic:
    return kind(num_train=60, num_val=41, num_test=101, batch_size=12, eval_batch_size=20, **options)


def fit_and_test(rank: int, world_size: int, kind: type[Synthetic]) -> tuple[dict[str, float], list]:
    warnings.filterwarnings("ignore", message=OLD_WAYS)
    probe = Probe()
    trainer = Trainer(
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=2,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(probe, datamodule=data(kind))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    if kind is PaddedByTorch:
        warnings.filterwarnings("ignore", message=".*it is recommended to use `Trainer", category=UserWarning)
    trainer.test(probe, datamodule=data(kind), verbose=False)
    metrics |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    return metrics, probe.seen


@pytest.mark.ci
def test_three_ranks_train_and_evaluate_on_the_same_images_as_one():
    one, seen = fit_and_test(0, 1, Synthetic)
    ranks = run_processes(3, fit_and_test, 3, Synthetic)
    for metrics, _ in ranks:
        assert metrics["val/count"] == 41
        assert metrics["test/count"] == 101
        assert metrics["test/acc"] == one["test/acc"]
        assert metrics["val/acc"] == one["val/acc"]
        assert metrics["test/loss"] == pytest.approx(one["test/loss"], rel=1e-6)
    assert [epoch for epoch, _ in seen] == [0] * 5 + [1] * 5
    assert seen[0][1] != seen[5][1]
    for step, (epoch, sums) in enumerate(seen):
        assert {rank_seen[step][0] for _, rank_seen in ranks} == {epoch}
        assert [value for _, rank_seen in ranks for value in rank_seen[step][1]] == sums


@pytest.mark.ci
def test_the_test_above_detects_padding():
    ranks = run_processes(3, fit_and_test, 3, PaddedByTorch)
    assert [metrics["test/count"] for metrics, _ in ranks] == [102] * 3


class TensorParallel(Probe):
    """A classifier whose layer is divided among the ranks, so that all of them need the same images."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.layer, mesh["tensor_parallel"], ColwiseParallel(output_layouts=Replicate()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_in_tensor_parallel(rank: int, num_parts: int) -> tuple[list, torch.Tensor]:
    warnings.filterwarnings("ignore", message=OLD_WAYS)
    strategy = ModelParallelStrategy(1, num_parts) if num_parts > 1 else "auto"
    model = TensorParallel()
    trainer = Trainer(devices=num_parts, strategy=strategy, max_epochs=2, enable_checkpointing=False, **QUIET)
    trainer.fit(model, datamodule=data())
    weight = model.layer.weight
    return model.seen, (weight.full_tensor() if num_parts > 1 else weight).detach().clone()


def test_ranks_that_share_a_layer_have_the_same_images():
    """They would compute parts of one batch's logits from different images, without an error."""
    seen, weight = fit_in_tensor_parallel(0, 1)
    for seen_by_rank, weight_of_rank in run_processes(2, fit_in_tensor_parallel, 2):
        assert seen_by_rank == seen
        torch.testing.assert_close(weight_of_rank, weight)


def fit_with_loaders(rank: int) -> None:
    warnings.filterwarnings("ignore", message=OLD_WAYS)
    module = data()
    module.setup("fit")
    trainer = Trainer(devices=2, strategy="ddp", max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Probe(), module.train_dataloader(), module.val_dataloader())


def test_loaders_that_were_made_before_the_ranks_were_known_are_refused():
    """Each rank would train on the images of all."""
    with pytest.raises(RankError, match="made for one process, so each of the 2 ranks would get all images; pass the"):
        run_processes(2, fit_with_loaders)


def make_loaders(rank: int, batch_size: int, num_val: int) -> None:
    module = Synthetic((1, 2, 2), num_train=32, num_val=num_val, num_test=9, batch_size=batch_size)
    module.setup()
    torch.distributed.init_process_group("gloo")
    try:
        module.train_dataloader()
        module.val_dataloader()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("batch_size", "num_val", "message"),
    [(16, 9, "batch_size=16 is not a multiple of 3 ranks"), (15, 2, "2 val images are too few for 3 ranks")],
)
def test_loaders_are_checked_against_ranks_that_setup_did_not_know(batch_size, num_val, message):
    """Slices would differ in size, and averages over the ranks give images unequal weights; or none would be left."""
    with pytest.raises(RankError, match=message):
        run_processes(3, make_loaders, batch_size, num_val)


def test_a_batch_size_that_was_set_since_setup_is_checked():
    """With it there is no whole batch, and Lightning would train nothing."""
    module = Synthetic((1, 2, 2), num_train=32, batch_size=8)
    module.setup()
    module.batch_size = 64
    with pytest.raises(ValueError, match=r"batch_size=64 is larger than the training set \(32 images\)"):
        module.train_dataloader()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_goes_on_with_the_next_epoch(tmp_path, num_workers):
    whole = Probe()
    Trainer(max_epochs=3, enable_checkpointing=False, **QUIET).fit(whole, datamodule=data())
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Probe(), datamodule=data(num_workers=num_workers))
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    rest = Probe()
    trainer = Trainer(max_epochs=3, enable_checkpointing=False, **QUIET)
    trainer.fit(rest, datamodule=data(num_workers=num_workers), ckpt_path=tmp_path / "last.ckpt")
    assert rest.seen == whole.seen[5:]


class Scheduled(Probe):
    """A probe whose schedule asks for the number of steps: Lightning makes the loader before it restores the epoch."""

    def configure_optimizers(self):
        self.trainer.estimated_stepping_batches  # noqa: B018
        return super().configure_optimizers()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(("probe", "options"), [(Probe, {}), (Scheduled, {}), (Probe, {"every_n_train_steps": 5})])
def test_workers_of_a_run_that_continues_from_a_callbacks_checkpoint_load_the_next_epoch(tmp_path, probe, options):
    whole = Probe()
    Trainer(max_epochs=3, enable_checkpointing=False, **QUIET).fit(whole, datamodule=data())
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, **options)
    Trainer(max_epochs=1, callbacks=[checkpoint], **QUIET).fit(Probe(), datamodule=data())
    rest = probe()
    trainer = Trainer(max_epochs=3, callbacks=[ModelCheckpoint(tmp_path, save_last=True, **options)], **QUIET)
    trainer.fit(rest, datamodule=data(num_workers=2), ckpt_path=tmp_path / "last.ckpt")
    assert rest.seen == whole.seen[5:]


def test_without_validation_images_there_is_no_validation():
    probe = Probe()
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(probe, datamodule=Synthetic(num_train=24, num_val=0, batch_size=12))
    assert "val/count" not in trainer.callback_metrics


@pytest.mark.parametrize("stage", [None, "fit", "test"])
def test_loaders_read_what_no_stage_has_needed(stage):
    """After a fit, loaders of the test images are asked for, and after a test those of the others."""
    module = data()
    if stage is not None:
        module.setup(stage)
    loaders = module.train_dataloader(), module.val_dataloader(), module.test_dataloader()
    assert [sum(len(labels) for _, labels in loader) for loader in loaders] == [60, 41, 101]


def predict(rank: int, world_size: int) -> list[torch.Tensor]:
    warnings.filterwarnings("ignore", message=OLD_WAYS)
    model = Classifier(torch.nn.Sequential(torch.nn.Flatten(), Probe().layer), 10, torch.optim.SGD)
    strategy = "ddp" if world_size > 1 else "auto"
    return Trainer(devices=world_size, strategy=strategy, **QUIET).predict(model, datamodule=data())


def test_predictions_are_the_logits_of_the_test_images_in_order():
    one = torch.cat(predict(0, 1))
    images, _ = next(iter(data().test_dataloader()))
    assert len(one) == 101
    weight = Probe().layer.weight
    torch.testing.assert_close(one[: len(images)], (images.flatten(1) @ weight.T).detach())
    ranks = run_processes(2, predict, 2)
    # Products of fewer images at once may be rounded in another way.
    all_ranks = torch.cat([part for parts in zip(*ranks, strict=True) for part in parts])
    torch.testing.assert_close(all_ranks, one, atol=1e-3, rtol=0)


def test_lightnings_advice_on_workers_is_suppressed(monkeypatch):
    connector = importlib.import_module(FRAMEWORK + ".trainer.connectors.data_connector")
    monkeypatch.setattr(connector, "suggested_max_num_workers", lambda _: 15)
    Trainer(max_epochs=1, enable_checkpointing=False, **QUIET).fit(Probe(), datamodule=data())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_pinned_where_the_model_is_on_a_gpu(device):
    module = data()
    module.setup()
    strategy = SimpleNamespace(root_device=torch.device(device))
    module.trainer = SimpleNamespace(global_rank=0, world_size=1, current_epoch=0, strategy=strategy)
    assert module.train_dataloader().pin_memory == module.test_dataloader().pin_memory == (device == "cuda")


def test_a_trainer_raises_the_same_errors():
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    with pytest.raises(ValueError, match="batch_size=512 is larger than the training set"):
        trainer.fit(Probe(), datamodule=Synthetic(num_train=300, batch_size=512))


def test_options_that_work_are_accepted():
    for world_size in (1, 2, 3, 4):
        Synthetic(num_train=300, batch_size=12).check(world_size)
    Synthetic(num_train=12, num_val=0, batch_size=12).check(12)
    Digits().check(2)


def test_a_folder_may_be_below_the_home_folder(tmp_path, monkeypatch):
    """As with torchvision. Else a download would go to a folder with the name ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CIFAR10("~/data").root == tmp_path / "data"
    assert ImageNet("~/data", val_labels="~/labels.txt").val_labels == tmp_path / "labels.txt"
    shards = ImageNetShards("~/data", index_dir="~/index")
    assert (shards.root, shards.index_dir) == (tmp_path / "data", tmp_path / "index")
