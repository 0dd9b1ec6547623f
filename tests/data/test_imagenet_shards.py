"""ImageNet from tar shards: the same batches as from class folders, bitwise, and broken images."""

from __future__ import annotations

import gc
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from lightning_dp.data import ImageNet, ImageNetShards
from lightning_dp.data.jpeg import BrokenImageError
from lightning_dp.data.loading import EvaluationSampler, TrainingSampler
from lightning_dp.data.shards import INDEX_FILE
from tests.data.jpegs import write_imagenet
from tests.data.shards import JPEG, sample, write_shards, write_tar
from tests.data.test_imagenet import OPTIONS, batches, same

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    return write_imagenet(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def root(folders, tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), folders)


def dataset(module: ImageNet, split: str):
    module.setup(None)
    return module._dataset(split, augment=True)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_batches_are_those_of_class_folders_on_any_number_of_ranks(folders, root, split):
    expected = batches(dataset(ImageNet(folders, **OPTIONS), split))
    for world_size in (1, 2, 3):
        assert same(batches(dataset(ImageNetShards(root, **OPTIONS), split), world_size), expected)
    assert sum(len(labels) for _, labels in expected) == (24 if split == "train" else 9)


def test_worker_processes_give_the_same_images(root):
    loaded = []
    for num_workers in (0, 2):
        module = ImageNetShards(root, **{**OPTIONS, "num_workers": num_workers})
        module.setup("fit")
        # Opened shards are inherited by the workers, which read them at the same time.
        module._dataset("train", augment=True).source.read(0)
        loaded.append([list(batch) for batch in module.train_dataloader()])
    assert same(*loaded)


def test_every_image_is_evaluated_once_on_any_number_of_ranks(root):
    for world_size in (1, 2, 3):
        data = dataset(ImageNetShards(root, **OPTIONS), "val")
        parts = [list(EvaluationSampler(data, 4, rank, world_size)) for rank in range(world_size)]
        assert sorted(index for rank in parts for part in rank for index in part.indices) == list(range(9))
        assert len({len(rank) for rank in parts}) == 1


def test_a_dataset_with_open_shards_can_be_sent_to_a_process_and_closed(root):
    data = dataset(ImageNetShards(root, **OPTIONS), "train")
    first = data.source.read(0)
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301
    data.source.close()
    assert copy.source.read(0) == data.source.read(0) == first


def test_no_more_files_are_open_than_the_process_may_have(root, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2, 2))
    data = dataset(ImageNetShards(root, **OPTIONS), "train")
    before = len(os.listdir("/proc/self/fd"))
    assert [len(data.source.read(index)) for index in (0, 8, 16, 0)] == [
        len(data.source.read(index)) for index in (0, 8, 16, 0)
    ]
    assert len(os.listdir("/proc/self/fd")) == before + 1


def broken_shards(root: Path, train: int = 6) -> Path:
    """Training images of which number 1 is damaged in the middle of its shard, and one such validation image."""
    intact = [part for number in range(2, train) for part in sample(f"n{number}", number % 3)]
    write_tar(root / "train-0.tar", [*sample("n0", 0), *sample("n1", 1, JPEG[:300]), *intact])
    write_tar(root / "val-0.tar", [*sample("v0", 0), *sample("v1", 1, b"")])
    return root


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_image_is_named_with_its_shard(tmp_path, num_workers, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # the loader waits for its worker
    module = ImageNetShards(broken_shards(tmp_path), **{**OPTIONS, "num_workers": num_workers})
    module.setup("fit")
    with pytest.raises(
        BrokenImageError, match=rf"n1.JPEG in {tmp_path}/train-0.tar cannot be decoded: .*=skip"
    ) as caught:
        list(module.train_dataloader())
    # The traceback keeps the loader, and so its workers, alive.
    del caught
    gc.collect()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_broken_images_are_skipped_and_counted(tmp_path, num_workers):
    module = ImageNetShards(broken_shards(tmp_path), **{**OPTIONS, "num_workers": num_workers}, on_broken="skip")
    module.setup("fit")
    train = list(module.train_dataloader())
    val = list(module.val_dataloader())
    assert [len(labels) for _, labels in train] == [6]
    assert [len(labels) for _, labels in val] == [1]
    assert module.broken_files() == [f"n1.JPEG in {tmp_path}/train-0.tar", f"v1.JPEG in {tmp_path}/val-0.tar"]


def test_a_shard_that_changes_or_disappears_during_a_run_is_an_error(tmp_path):
    data = dataset(ImageNetShards(broken_shards(tmp_path), **OPTIONS), "train")
    write_tar(tmp_path / "train-0.tar", [*sample("other", 2), *sample("images", 2)])
    with pytest.raises(RuntimeError, match=r"train-0.tar has changed since the start of this run"):
        data.source.read(0)
    (tmp_path / "train-0.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-0.tar"):
        data.source.read(0)
    assert data.source.name(1).startswith("the member at byte "), "messages need no shard"


def test_a_shard_that_is_cut_while_it_is_open_is_an_error(tmp_path):
    data = dataset(ImageNetShards(broken_shards(tmp_path), **OPTIONS), "train")
    data.source.read(0)
    os.truncate(tmp_path / "train-0.tar", 600)
    with pytest.raises(RuntimeError, match=r"train-0.tar has changed"):
        data.source.read(0)


def test_a_shard_that_is_written_over_while_it_is_open_is_an_error(tmp_path):
    """Its images would get the labels of those that were there."""
    data = dataset(ImageNetShards(broken_shards(tmp_path), **OPTIONS), "train")
    data.source.read(0)
    path = tmp_path / "train-0.tar"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))  # sooner than the clock of some file systems ticks
    with pytest.raises(RuntimeError, match=r"train-0.tar has changed"):
        data.source.read(0)


def test_a_subset_of_the_shards_is_read_and_the_index_may_be_elsewhere(root, tmp_path):
    module = ImageNetShards(root, "imagenet-train-{000000..000001}.tar", index_dir=tmp_path / "index", **OPTIONS)
    module.check(2)
    assert module.sizes() == {"train": 16, "val": 9, "test": 9}
    assert (tmp_path / "index" / INDEX_FILE).exists()


def test_the_first_rank_of_a_node_makes_the_index_for_the_others(root, tmp_path, monkeypatch):
    options = {**OPTIONS, "index_dir": tmp_path}
    ImageNetShards(root, **options).prepare_data()
    monkeypatch.delattr("lightning_dp.data.shards.scan_shard")
    other = ImageNetShards(root, **options)
    other.setup("fit")
    images, _ = next(iter(other.train_dataloader()))
    assert images.dtype == torch.uint8
    assert len(list(TrainingSampler(other._dataset("train", True), 6))) == 4
