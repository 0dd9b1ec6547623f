"""CIFAR-10's files: read as they are, refused when they are anything else."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dp.data import CIFAR10
from lightning_dp.data.cifar10 import read_batch_file
from tests.data.images import FOLDER, numpy_pickle, pixels_and_labels, python2_pickle, write_folder

UNPACK = Path(__file__).parents[3] / "shared" / "data" / "unpack.py"


def as_numpy(spelling: bytes) -> bytes:
    content = numpy_pickle(*pixels_and_labels(7))
    for other in (b"numpy._core.multiarray", b"numpy.core.multiarray"):
        content = content.replace(b"c" + other + b"\n", b"c" + spelling + b"\n")
    assert spelling in content
    return content


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(lambda: python2_pickle(*pixels_and_labels(7)), id="as published"),
        pytest.param(lambda: as_numpy(b"numpy.core.multiarray"), id="numpy 1"),
        pytest.param(lambda: as_numpy(b"numpy._core.multiarray"), id="numpy 2"),
    ],
)
def test_a_file_is_read(tmp_path, content):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content())
    pixels, numbers = pixels_and_labels(7)
    images, labels = read_batch_file(path)
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), pixels.reshape(7, 3, 32, 32))
    assert labels.tolist() == numbers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer numpys on older spellings
        ordinary = pickle.loads(content(), encoding="bytes")  # noqa: S301 - the test's own: the file is sound
    assert np.array_equal(ordinary[b"data"], pixels)


def test_an_array_in_fortran_order_is_read(tmp_path):
    pixels, labels = pixels_and_labels(7)
    (tmp_path / "batch").write_bytes(numpy_pickle(np.asfortranarray(pixels), labels))
    assert np.array_equal(read_batch_file(tmp_path / "batch")[0].numpy().reshape(7, 3072), pixels)


class Runs:
    def __init__(self, function: object, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> object:
        return self.call


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.mkdir, ("pwned",), f"{os.mkdir.__module__}.mkdir"),
        (eval, ("__import__('os').mkdir('pwned')",), "__builtin__.eval"),
        (np.load, ("pwned", None, True), "numpy.load"),
        (getattr, ({}, "keys"), "__builtin__.getattr"),
    ],
)
def test_a_file_that_would_run_something_is_refused_and_runs_nothing(tmp_path, function, args, name):
    pixels, labels = pixels_and_labels(3)
    content = pickle.dumps({b"data": pixels, b"labels": labels, b"more": Runs(function, *args)}, protocol=2)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=rf"data_batch_1 is not a file .* asks for {name}.*nothing was run.*unpack"):
        read_batch_file(tmp_path / "data_batch_1")
    assert not (tmp_path / "pwned").exists()


def test_an_ordinary_reader_runs_the_malicious_file(tmp_path):
    pickle.loads(pickle.dumps({b"more": Runs(os.mkdir, "pwned")}, protocol=2))  # noqa: S301 - the twin of the test above
    assert (tmp_path / "pwned").exists()


def test_splits_have_the_requested_sizes_and_do_not_overlap(tmp_path):
    write_folder(tmp_path, num_train=60, num_test=20)
    module = CIFAR10(tmp_path, val_size=11)
    train, val = module.read_train()
    assert [len(train[1]), len(val[1]), len(module.read_test()[1])] == [49, 11, 20]
    written = pixels_and_labels(60)[0].reshape(60, -1)
    read = torch.cat([train[0], val[0]]).flatten(1).numpy()
    assert {row.tobytes() for row in read} == {row.tobytes() for row in written}
    limited = CIFAR10(tmp_path, val_size=11, train_limit=20, test_limit=5)
    some, same = limited.read_train()
    assert torch.equal(same[0], val[0])
    assert {row.tobytes() for row in some[0].numpy()} < {row.tobytes() for row in train[0].numpy()}
    assert [len(some[1]), len(limited.read_test()[1])] == [20, 5]
    assert len(CIFAR10(tmp_path, val_size=0, train_limit=1000).read_train()[0][1]) == 60


def test_training_images_are_augmented_and_others_not(tmp_path):
    write_folder(tmp_path)
    batches = {}
    for augment in (True, False):
        module = CIFAR10(tmp_path, val_size=10, batch_size=50, augment=augment)
        module.setup()
        loaders = (module.train_dataloader(), module.val_dataloader(), module.test_dataloader())
        batches[augment] = [next(iter(loader)) for loader in loaders]
    for split, ((images, labels), (plain, same)) in enumerate(zip(*batches.values(), strict=True)):
        assert torch.equal(labels, same)
        assert torch.equal(images, plain) == (split > 0)


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path):
    module = CIFAR10(tmp_path / "here", download=False)
    module.prepare_data()
    for act in (lambda: module.check(1), lambda: module.setup("fit"), lambda: module.setup("test")):
        with pytest.raises(FileNotFoundError) as caught:
            act()
        for part in (
            str(tmp_path / "here" / FOLDER),
            "download=true",
            "cifar-10-python.tar.gz",
            "data_batch_1",
            "test_batch",
        ):
            assert part in str(caught.value)
    assert not (tmp_path / "here").exists()


def test_an_incomplete_folder_is_refused_with_the_remedy(tmp_path):
    (write_folder(tmp_path) / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="lacks data_batch_3; delete that folder"):
        CIFAR10(tmp_path, download=True).check(1)


def test_check_counts_the_official_images_before_a_download(tmp_path):
    CIFAR10(tmp_path / "new", download=True, batch_size=45_000).check(1)
    with pytest.raises(ValueError, match="larger than the training set \\(45000 images\\)"):
        CIFAR10(tmp_path / "new", download=True, batch_size=45_001).check(1)
    with pytest.raises(ValueError, match="larger than the training set \\(100 images\\)"):
        CIFAR10(tmp_path / "new", download=True, train_limit=100).check(1)
    assert not (tmp_path / "new").exists()


@pytest.mark.ci
@pytest.mark.skipif(not UNPACK.exists(), reason=f"the real images are not at {UNPACK.parent}")
def test_real_images_are_read(tmp_path):
    pytest.importorskip("PIL", reason="unpacking the real images needs Pillow")
    subprocess.run([sys.executable, UNPACK, "cifar10", tmp_path, "--train", "300", "--test", "100"], check=True)
    module = CIFAR10(tmp_path, val_size=50, batch_size=250)
    module.check(2)
    (images, labels), (_, val_labels) = module.read_train()
    assert [len(labels), len(val_labels), len(module.read_test()[1])] == [250, 50, 100]
    assert labels.bincount(minlength=10).min() > 10
    # Real pictures: of their known mean color, and neighboring pixels alike.
    pixels = images.double() / 255
    assert (pixels.mean((0, 2, 3)) - torch.tensor(CIFAR10.mean)).abs().max() < 0.03
    assert (pixels[..., 1:] - pixels[..., :-1]).abs().mean() < 0.1
