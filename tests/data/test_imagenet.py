"""The ImageNet data module: the same batches for any number of ranks and workers, and broken files."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_dp._lightning import Callback, LightningModule, Trainer
from lightning_dp.data import ImageNet, SyntheticImageNet, smoke_data
from lightning_dp.data.image_files import FilesInFolder, ImageFiles
from lightning_dp.data.imagenet import image_size_at
from lightning_dp.data.jpeg import BrokenImageError
from lightning_dp.data.loading import BatchSlice, EvaluationSampler, TrainingSampler
from tests.data.jpegs import DECODERS, write_imagenet

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")
SIZE = 32
OPTIONS = {"image_size": SIZE, "num_classes": 3, "batch_size": 6, "eval_batch_size": 4, "num_workers": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_imagenet(tmp_path_factory.mktemp("imagenet"))


def files(root: Path, training: bool = True, **options) -> ImageFiles:
    module = ImageNet(root, **OPTIONS)
    names, labels = module.read_train()[0 if training else 1]
    source = FilesInFolder(root, names)
    return ImageFiles(source, labels, SIZE, crop="resized" if training else None, training=training, **options)


def batches(dataset: ImageFiles, world_size: int = 1) -> list[list[torch.Tensor]]:
    """Images and labels of an epoch, the slices of all ranks put together."""
    kind = TrainingSampler if dataset.crop else EvaluationSampler
    ranks = [[dataset[part] for part in kind(dataset, 6, rank, world_size)] for rank in range(world_size)]
    return [[torch.cat(tensors) for tensors in zip(*slices, strict=True)] for slices in zip(*ranks, strict=True)]


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("training", [True, False])
def test_batches_do_not_depend_on_the_number_of_ranks(root, training):
    expected = batches(files(root, training))
    assert sum(len(labels) for _, labels in expected) == (24 if training else 9)
    for world_size in (2, 3):
        assert same(batches(files(root, training), world_size), expected)


def test_the_test_above_detects_crops_that_each_rank_draws_for_itself(root, monkeypatch):
    expected = batches(files(root))
    read = ImageFiles._read
    monkeypatch.setattr(
        ImageFiles, "_read", lambda self, index, size, crops, place: read(self, index, size, crops, place % 3)
    )
    assert not same(batches(files(root), 2), expected)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_worker_processes_give_the_same_images_and_their_speed_is_known(root):
    loaded = {}
    for num_workers in (0, 2):
        module = ImageNet(root, **{**OPTIONS, "num_workers": num_workers})
        module.setup("fit")
        assert module.loader_images_per_s() is None
        loaded[num_workers] = [list(batch) for batch in module.train_dataloader()]
        assert module.loader_images_per_s() > 0
    assert same(loaded[0], loaded[2])
    images, labels = loaded[0][0]
    assert images.shape == (6, 3, SIZE, SIZE)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("decoder", DECODERS)
def test_evaluation_images_are_the_central_square_decoded_exactly(root, decoder):
    dataset = files(root, training=False, decoder=decoder)
    images, labels = dataset[BatchSlice([0, 4], 0, 2, seed=0)]
    assert labels.tolist() == [0, 1]
    for image, index in zip(images, (0, 4), strict=True):
        source = PIL.Image.open(dataset.source.path(index)).convert("RGB")
        side = round(min(source.size) * 224 / 256)
        left, top = (source.width - side) // 2, (source.height - side) // 2
        square = source.crop((left, top, left + side, top + side))
        expected = np.asarray(square.resize((SIZE, SIZE), PIL.Image.Resampling.BILINEAR), int)
        assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 2


class Sums(LightningModule):
    """Counts what it gets, and remembers the mean and the size of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.seen: list[tuple[float, int]] = []
        self.counts = {"val": 0, "test": 0}

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        assert images.dtype == torch.float32
        self.seen.append((images.mean().item(), images.shape[2]))
        return F.cross_entropy(self.layer(images.mean((2, 3))), labels)

    def validation_step(self, batch, batch_idx: int) -> None:
        self.counts["val"] += len(batch[1])

    def test_step(self, batch, batch_idx: int) -> None:
        self.counts["test"] += len(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", num_sanity_val_steps=0, **quiet, **options)


def test_a_trainer_normalizes_and_evaluates_every_image_once(root):
    model = Sums()
    module = ImageNet(root, **OPTIONS)
    runner = trainer(max_epochs=1)
    runner.fit(model, datamodule=module)
    runner.test(model, datamodule=module, verbose=False)
    assert model.counts == {"val": 9, "test": 9}
    first_epoch = ImageNet(root, **OPTIONS)
    first_epoch.setup("fit")
    images, _ = next(iter(first_epoch.train_dataloader()))
    mean = torch.tensor(ImageNet.mean).view(3, 1, 1)
    std = torch.tensor(ImageNet.std).view(3, 1, 1)
    expected = ((images.double() / 255 - mean) / std).mean().item()
    assert model.seen[0][0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("new", "is_said"), [("a_first_one", True), ("z_last_one", False)])
def test_classes_that_have_other_labels_than_for_the_checkpoint_are_named(tmp_path, caplog, new, is_said):
    """Labels count the class folders, so a new one in between changes those of others."""
    root = write_imagenet(tmp_path, num_train=2, num_val=1)
    runner = trainer(max_epochs=1)
    runner.fit(Sums(), datamodule=ImageNet(root, **OPTIONS))
    runner.save_checkpoint(tmp_path / "x.ckpt")
    (root / "train" / new).mkdir()
    (root / "train" / "n01440764" / "n01440764_0.JPEG").rename(root / "train" / new / "0.JPEG")
    module = ImageNet(root, **{**OPTIONS, "num_classes": 4})
    trainer().test(Sums(), datamodule=module, ckpt_path=tmp_path / "x.ckpt", verbose=False)
    said = f"label 0 is 'a_first_one' in {root / 'train'}, and was 'n01440764' where the checkpoint was made"
    assert (said in caplog.text) == is_said


def test_images_that_a_loader_has_normalized_are_not_normalized_again(root):
    """A subclass may have other test images, in a loader with torchvision's usual transforms."""

    class OtherTest(ImageNet):
        def test_dataloader(self) -> DataLoader:
            return DataLoader([(torch.full((3, 8, 8), 1.5), 0)] * 2, batch_size=2)

    class Remembers(Sums):
        def test_step(self, batch, batch_idx: int) -> None:
            self.tested = batch[0]

    model = Remembers()
    trainer().test(model, datamodule=OtherTest(root, **OPTIONS), verbose=False)
    assert model.tested.unique().tolist() == [1.5]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_training_images_grow(root, num_workers):
    model = Sums()
    options = {**OPTIONS, "image_size": 96, "start_image_size": 32, "resize_between": (0.25, 0.75)}
    module = ImageNet(root, **{**options, "num_workers": num_workers})
    trainer(max_epochs=4, limit_val_batches=0).fit(model, datamodule=module)
    assert [size for _, size in model.seen] == [32] * 8 + [64] * 4 + [96] * 4


class Enlarges(Callback):
    """Progressive resizing by hand: other options of the data module, and its loaders made again."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        trainer.datamodule.image_size = 48


def test_loaders_have_what_the_module_has_when_they_are_made(root):
    model, module = Sums(), ImageNet(root, **OPTIONS)
    runner = trainer(max_epochs=3, limit_val_batches=0, reload_dataloaders_every_n_epochs=1, callbacks=[Enlarges()])
    runner.fit(model, datamodule=module)
    assert [size for _, size in model.seen] == [32] * 4 + [48] * 8
    module.crop = None
    sizes = {}
    for size in (None, 64, 96):
        module.eval_image_size = size
        sizes[size] = module.val_dataloader()
    assert {size: next(iter(loader))[0].shape[2] for size, loader in sizes.items()} == {None: 48, 64: 64, 96: 96}
    first, last = (vars(sizes[size].dataset) for size in (None, 96))
    assert all(first[name] is last[name] for name in ("source", "labels", "broken", "_speed")), "not a list was copied"
    cropped = next(iter(module.train_dataloader()))[0]
    assert torch.equal(cropped, next(iter(module.train_dataloader()))[0])
    plain = ImageNet(root, **{**OPTIONS, "image_size": 48}, crop=None)
    plain.setup("fit")
    plain.trainer = runner
    assert torch.equal(cropped, next(iter(plain.train_dataloader()))[0])


def test_images_that_a_trainer_has_tested_can_be_read_by_hand(root):
    """The Trainer makes its loader in inference mode, in which torch makes tensors that cannot change outside of it."""
    module = ImageNet(root, **OPTIONS)
    trainer(max_epochs=1).test(Sums(), module, verbose=False)
    assert sum(len(labels) for _, labels in module.test_dataloader()) == 9


class Folds(ImageNet):
    """Other training images are held out in each fold, as for cross-validation."""

    fold = 0

    def read_train(self):
        (names, labels), _ = super().read_train()
        held = torch.arange(len(labels)) % 3 == self.fold
        return (names[~held.numpy()], labels[~held]), (names[held.numpy()], labels[held])


def test_images_of_a_later_setup_take_the_place_of_those_before(root):
    module = Folds(root, **OPTIONS, crop=None)
    (names, labels), _ = ImageNet(root, **OPTIONS).read_train()
    for fold in range(3):
        module.fold = fold
        module.setup("fit")
        held = np.arange(len(labels)) % 3 == fold
        whole = ImageFiles(FilesInFolder(root, names[held]), labels[torch.from_numpy(held)], SIZE)
        found = [torch.cat(parts) for parts in zip(*module.val_dataloader(), strict=True)]
        assert same([found], [list(whole[BatchSlice(list(range(len(whole))), 0, len(whole), seed=0)])])
        assert sum(len(part) for _, part in module.train_dataloader()) == len(labels) - len(whole) - 4


def test_sizes_in_between_are_multiples_of_32():
    assert [image_size_at(epoch, 11, 13, 160, 192) for epoch in range(16)] == [160] * 12 + [192] * 4
    assert [image_size_at(epoch, 2, 6, 128, 256) for epoch in range(8)] == [128, 128, 128, 160, 192, 224, 256, 256]


def test_growing_images_need_a_number_of_epochs(root):
    module = ImageNet(root, **OPTIONS, start_image_size=16)
    with pytest.raises(ValueError, match="start_image_size=16 needs to know the number of epochs.*max_epochs=-1"):
        trainer(max_epochs=-1, max_steps=2).fit(Sums(), datamodule=module)


def break_files(root: Path, count: int) -> list[Path]:
    broken = sorted((root / "train").rglob("*.JPEG"))[:count] + sorted((root / "val").rglob("*.JPEG"))[:count]
    for path in broken:
        path.write_bytes(path.read_bytes()[:700])
    return broken


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_file_is_named(tmp_path, num_workers, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # the loader waits for its worker
    broken = break_files(write_imagenet(tmp_path, 2, 1), 1)
    module = ImageNet(tmp_path, **{**OPTIONS, "num_workers": num_workers})
    module.setup("fit")
    with pytest.raises(BrokenImageError, match=rf"{broken[0]} cannot be decoded: .*on_broken=skip") as caught:
        list(module.train_dataloader())
    # The traceback keeps the loader, and so its workers, alive.
    del caught
    gc.collect()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_broken_files_are_skipped_and_counted(tmp_path, num_workers, caplog):
    broken = break_files(write_imagenet(tmp_path, 4, 2), 2)
    module = ImageNet(tmp_path, **{**OPTIONS, "num_workers": num_workers}, on_broken="skip")
    module.setup("fit")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            train = list(module.train_dataloader())
            val = list(module.val_dataloader())
    assert [len(labels) for _, labels in train] == [6, 6]
    assert sum(len(labels) for _, labels in val) == 4
    assert module.broken_files() == sorted(map(str, broken))
    if num_workers == 0:
        assert len(caplog.records) == 4, "one warning for each file"


def test_batches_with_skipped_images_do_not_depend_on_the_number_of_ranks(tmp_path):
    broken = break_files(write_imagenet(tmp_path, 4, 2), 3)
    expected = batches(files(tmp_path, skip_broken=True))
    for world_size in (2, 3, 6):
        dataset = files(tmp_path, skip_broken=True)
        assert same(batches(dataset, world_size), expected)
        assert set(map(str, broken)) & set(dataset.broken_files()), "not vacuous"


def test_the_next_image_takes_the_place_of_a_skipped_one(tmp_path):
    broken = break_files(write_imagenet(tmp_path, 2, 1), 1)
    dataset = files(tmp_path, skip_broken=True)
    images, labels = dataset[BatchSlice([5, 0, 3], 0, 3, seed=1)]
    whole, _ = dataset[BatchSlice([5, 1, 3], 0, 3, seed=1)]
    assert labels.tolist() == [2, 0, 1]
    assert torch.equal(images, whole), "with the crop of that place"
    assert dataset.broken_files() == [str(broken[0])]


def test_a_training_set_without_an_intact_image_is_an_error(tmp_path):
    break_files(write_imagenet(tmp_path, 1, 1), 3)
    with pytest.raises(BrokenImageError, match=r"nor any of the 2 images after it; .*data.root"):
        files(tmp_path, skip_broken=True)[BatchSlice([0, 1], 0, 2, seed=1)]


def test_a_missing_file_is_not_a_broken_one(tmp_path):
    write_imagenet(tmp_path, 2, 1)
    dataset = files(tmp_path, skip_broken=True)
    dataset.source.path(0).unlink()
    with pytest.raises(FileNotFoundError):
        dataset[BatchSlice([0, 1], 0, 2, seed=1)]


def test_options_that_work_are_accepted(root):
    module = ImageNet(root, **OPTIONS)
    module.check(2)
    assert module.sizes() == {"train": 24, "val": 9, "test": 9}
    assert ImageNet(root, num_workers=None).num_workers >= 1


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(6, 1, 6), (6, 4, 1), (2, 4, 1), (64, 4, 16), (64, 1, 16)])
def test_a_rank_has_a_worker_for_each_of_its_cores_up_to_16(root, monkeypatch, cores, ranks, workers):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert ImageNet(root, **{**OPTIONS, "num_workers": None}).num_workers == workers


def test_the_cores_are_divided_among_ranks_that_lightning_starts(root, monkeypatch):
    """Its launcher does not set torchrun's variable."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for given, workers in ((None, 4), (3, 3)):
        module = ImageNet(root, **{**OPTIONS, "num_workers": given})
        module.trainer = Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
        module.setup("fit")
        assert module.train_dataloader().num_workers == workers


def test_synthetic_images_stand_in_for_imagenet():
    module = SyntheticImageNet(num_train=60, num_val=9, **OPTIONS)
    module.check(2)
    model = Sums()
    runner = trainer(max_epochs=1)
    runner.fit(model, datamodule=module)
    runner.test(model, datamodule=module, verbose=False)
    assert len(model.seen) == 10
    assert model.counts == {"val": 9, "test": 9}
    assert module.loader_images_per_s() is None
    images, _ = next(iter(module.train_dataloader()))
    assert (images.shape, images.dtype) == ((6, 3, SIZE, SIZE), torch.uint8)


class Typed(Sums):
    """A layer of the precision that the Trainer gives it."""

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        assert images.dtype == self.layer.weight.dtype
        return F.cross_entropy(self.layer(images.mean((2, 3))), labels)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_images_that_are_normalized_on_the_device_have_the_precision_of_the_model(precision):
    module = SyntheticImageNet(num_train=12, num_val=9, **OPTIONS)
    trainer(max_epochs=1, precision=precision).fit(Typed(), datamodule=module)


def test_smoke_data_ignores_the_options_of_other_data():
    module = smoke_data(num_classes=3, image_size=16, batch_size=4, root="nowhere", val_size=0, crop="square")
    module.check(2)
    assert module.sizes() == {"train": 8, "val": 4, "test": 4}
    assert module.image_shape == (3, 16, 16)
