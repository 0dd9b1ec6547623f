"""Files that workers only read, and DALI, which decodes them. Where DALI is not installed its tests are skipped."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dp.data import ImageNet
from lightning_dp.data.image_files import EncodedFiles, EncodedImages, ImageFiles, plain_file, resize
from lightning_dp.data.jpeg import BrokenImageError, RandomCrops, open_image
from lightning_dp.data.loading import BatchSlice, TrainingSampler
from tests.data.jpegs import encoded, installed, picture, write_imagenet
from tests.data.test_imagenet import OPTIONS, SIZE, Sums, break_files, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")
needs_dali = pytest.mark.skipif(not installed("dali"), reason="DALI is not installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("imagenet"))


def dataset(root, kind: type, training: bool = True):
    module = ImageNet(root, **OPTIONS)
    images, labels = module.read_train()[0 if training else 1]
    return kind(module._source(images), labels, SIZE, crop="resized" if training else None)


def decoded_by_pillow(images: EncodedImages) -> torch.Tensor:
    """What any decoder should make of these, up to rounding."""
    made = []
    for file, region in zip(images.files(), images.regions, strict=True):
        image = resize(region.box.crop(open_image(file.tobytes(), "pillow").decode()), images.size)
        made.append(image.flip(1) if region.flip else image)
    return torch.stack(made).permute(0, 3, 1, 2)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean error in levels of the worst image."""
    assert a.shape == b.shape
    return (a.int() - b.int()).abs().flatten(1).float().mean(1).max().item()


@pytest.mark.parametrize("training", [True, False])
def test_regions_are_those_that_the_other_decoders_use(root, training):
    part = BatchSlice([7, 0, 3, 2], 2, 6, seed=5, image_size=80)  # too large for decoding at a reduced scale
    images, labels = dataset(root, EncodedFiles, training)[part]
    expected, expected_labels = dataset(root, ImageFiles, training)[part]
    assert torch.equal(labels, expected_labels)
    # Training images are decoded faster and less exactly there; other regions differ by 35 levels or more.
    assert difference(decoded_by_pillow(images), expected) < (6 if training else 1)
    crops = RandomCrops(6, torch.Generator().manual_seed(5))
    assert [region.flip for region in images.regions] == [training and crops.flip(place) for place in (2, 3, 4, 5)]


def test_a_batch_stays_in_host_memory_and_passes_through_workers(root):
    files = dataset(root, EncodedFiles)
    sampler = TrainingSampler(files, 6)
    direct = [files[part] for part in sampler]
    loaded = list(
        DataLoader(files, batch_size=None, sampler=sampler, num_workers=1, multiprocessing_context="forkserver")
    )
    assert len(loaded) == len(direct) == 4
    for (images, labels), (expected, expected_labels) in zip(loaded, direct, strict=True):
        assert torch.equal(labels, expected_labels)
        assert images.to("meta") is images
        assert (len(images), images.regions, images.indices) == (6, expected.regions, expected.indices)
        for file, expected_file in zip(images.files(), expected.files(), strict=True):
            assert file.tobytes() == expected_file.tobytes()


@pytest.mark.parametrize(("form", "mode"), [("JPEG", "CMYK"), ("PNG", "RGBA"), ("BMP", "RGB"), ("PNG", "P")])
def test_files_that_not_all_decoders_know_become_png(form, mode):
    data = encoded(picture(20, 30), form, mode)
    file, height, width = plain_file(data)
    assert (height, width) == (20, 30)
    image = PIL.Image.open(io.BytesIO(file))
    assert (image.format, image.mode) == ("PNG", "RGB")
    assert np.array_equal(np.asarray(image), np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB")))


def test_files_that_all_decoders_know_stay_as_they_are():
    for data in (encoded(picture(20, 30)), encoded(picture(20, 30), mode="L"), encoded(picture(20, 30), "PNG")):
        assert plain_file(data) == (data, 20, 30)


def test_what_cannot_work_is_refused_before_training(root):
    with pytest.raises(ValueError, match="on_broken='skip' needs decoder='auto'"):
        ImageNet(root, **OPTIONS, decoder="dali", on_broken="skip")
    if not installed("dali"):
        with pytest.raises(ModuleNotFoundError, match=r"dali is not installed: pip install nvidia-dali-cuda120"):
            ImageNet(root, **OPTIONS, decoder="dali").check(1)


def test_a_file_that_is_no_image_is_named_and_others_are_not_looked_up(root, tmp_path, monkeypatch):
    break_files(write_imagenet(tmp_path, 3, 1), 1)
    broken = dataset(tmp_path, EncodedFiles)
    broken.source.path(0).write_bytes(b"no image")
    with pytest.raises(BrokenImageError, match=r"n01440764_0.JPEG cannot be decoded: .*; replace it, or use decoder="):
        broken[BatchSlice([1, 0], 0, 2, seed=0)]
    intact = dataset(root, EncodedFiles)
    monkeypatch.setattr(type(intact.source), "name", None)  # in tar shards, finding a name reads all headers
    assert len(intact[BatchSlice([1, 0], 0, 2, seed=0)][1]) == 2


def test_the_file_that_dali_cannot_decode_is_found_by_pillow(tmp_path):
    break_files(write_imagenet(tmp_path, 3, 1), 1)
    files = dataset(tmp_path, EncodedFiles)
    files.name_the_broken(files[BatchSlice([1, 2], 0, 2, seed=0)][0])
    broken, _ = files[BatchSlice([1, 0], 0, 2, seed=0)]
    with pytest.raises(BrokenImageError, match=r"n01440764_0.JPEG cannot be decoded: .*; replace it, or use decoder="):
        files.name_the_broken(broken)


def test_dali_decodes_no_single_images(root):
    with pytest.raises(ValueError, match="decoder='dali' decodes whole batches: use ImageNet"):
        open_image(encoded(picture(20, 30)), "dali")


@pytest.mark.skipif(installed("dali"), reason="DALI is installed")
def test_without_dali_a_trainer_says_what_to_install(root):
    module = ImageNet(root, **OPTIONS, decoder="dali")
    with pytest.raises(ModuleNotFoundError, match="dali is not installed"):
        trainer(max_epochs=1).fit(Sums(), datamodule=module)


@needs_dali
def test_a_used_data_module_can_be_copied_and_forked(root):
    module = ImageNet(root, **OPTIONS, decoder="dali")
    trainer(max_epochs=1, limit_train_batches=1).fit(Sums(), datamodule=module)
    assert len(pickle.dumps(module)) == len(pickle.dumps(copy.deepcopy(module)))
    images, labels = module._datasets["train"][BatchSlice([1, 0], 0, 2, seed=0)]
    expected, _ = module.on_after_batch_transfer((images, labels), 0)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def decode() -> None:
        sender.send(torch.equal(module.on_after_batch_transfer((images, labels), 0)[0], expected))

    child = multiprocessing.get_context("fork").Process(target=decode)
    child.start()
    try:
        assert receiver.poll(100), "the child waits for the parent's threads"
        assert receiver.recv()
    finally:
        child.kill()
        child.join()


@needs_dali
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("training", [True, False])
def test_dali_makes_the_images_that_pillow_makes(root, training, device):
    from lightning_dp.data.dali import DaliDecoder

    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    decode = DaliDecoder(torch.device(device), num_threads=1)
    files = dataset(root, EncodedFiles, training)
    for count, size in ((2, 24), (7, 48), (3, 16)):  # the second batch is larger than what was built for the first
        images, _ = files[BatchSlice(list(range(count)), 0, count, seed=1, image_size=size)]
        pixels = decode(images)
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert difference(pixels.cpu(), decoded_by_pillow(images)) < (3 if training else 1)


@needs_dali
def test_training_validation_and_test_under_dali(root):
    seen = []
    for decoder in ("auto", "dali"):
        module = ImageNet(root, **OPTIONS, start_image_size=16, resize_between=(0.0, 1.0), decoder=decoder)
        module.check(1)
        model = Sums()
        runner = trainer(max_epochs=2)
        runner.fit(model, datamodule=module)
        runner.test(model, datamodule=module, verbose=False)
        assert model.counts["test"] == 9
        seen.append(model.seen)
    assert module.loader_images_per_s() is None
    assert module.broken_files() == []
    for (mean, size), (expected_mean, expected_size) in zip(*seen, strict=True):
        assert size == expected_size
        assert mean == pytest.approx(expected_mean, abs=0.02)


@needs_dali
def test_dali_s_error_names_the_file(tmp_path):
    break_files(write_imagenet(tmp_path, 3, 1), 1)
    module = ImageNet(tmp_path, **OPTIONS, decoder="dali")
    with pytest.raises(BrokenImageError, match="n01440764_0.JPEG cannot be decoded"):
        trainer(max_epochs=1).fit(Sums(), datamodule=module)
