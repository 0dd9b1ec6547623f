"""The images that need no download."""

from __future__ import annotations

import hashlib
import sys

import pytest
import torch

from lightning_dp.data import Digits, Synthetic


def nearest_mean_accuracy(train: tuple[torch.Tensor, torch.Tensor], test: tuple[torch.Tensor, torch.Tensor]) -> float:
    (images, labels), (test_images, test_labels) = train, test
    means = torch.stack([images[labels == c].flatten(1).float().mean(0) for c in range(int(labels.max()) + 1)])
    nearest = torch.cdist(test_images.flatten(1).float(), means).argmin(1)
    return (nearest == test_labels).float().mean().item()


def test_the_split_of_the_digits_is_fixed():
    train, val = Digits(seed=0).read_train()
    other, _ = Digits(seed=1).read_train()
    test = Digits().read_test()
    assert torch.equal(train[0], other[0])
    assert [len(labels) for _, labels in (train, val, test)] == [1257, 180, 360]
    for images, labels in (train, val, test):
        assert images.dtype == torch.uint8
        assert images.shape[1:] == Digits.image_shape
        assert labels.dtype == torch.int64
        counts = labels.bincount(minlength=Digits.num_classes) / len(labels)
        assert (counts - 0.1).abs().max() < 0.01
    together = torch.cat([images for images, _ in (train, val, test)]).flatten(1)
    assert len(together.unique(dim=0)) == 1797
    assert hashlib.sha256(bytes(test[1].tolist())).hexdigest().startswith("6242532f73164309")


def test_digits_are_the_8x8_images_scaled():
    from sklearn.datasets import load_digits

    train, val = Digits().read_train()
    images = torch.cat([train[0], val[0], Digits().read_test()[0]])
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    # A pixel of the small image became a 4x4 block, blended with its neighbors.
    blocks = images[:, 0].float().unfold(1, 4, 4).unfold(2, 4, 4).mean((3, 4)) * 16 / 255
    expected = torch.from_numpy(load_digits().images).float()
    assert blocks.mean().item() == pytest.approx(expected.mean().item(), rel=0.01)
    assert nearest_mean_accuracy(train, val) > 0.85


def test_digits_are_normalized():
    (images, _), _ = Digits().read_train()
    pixels = images.double() / 255
    assert pixels.mean().item() == pytest.approx(Digits.mean[0], abs=1e-4)
    assert pixels.std().item() == pytest.approx(Digits.std[0], abs=1e-4)


def test_the_digits_name_scikit_learn_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        Digits().check(1)


@pytest.mark.parametrize(("shape", "num_classes"), [((3, 32, 32), 10), ((1, 8, 12), 4), ((3, 64, 48), 100)])
def test_synthetic_classes_can_be_learned(shape, num_classes):
    module = Synthetic(shape=shape, num_classes=num_classes, num_train=5 * num_classes, num_test=3 * num_classes)
    train, _ = module.read_train()
    test = module.read_test()
    assert module.image_shape == train[0].shape[1:] == shape
    assert train[1].bincount().tolist() == [5] * num_classes
    assert nearest_mean_accuracy(train, test) > 0.95


def test_synthetic_images_are_fixed_and_distinct():
    one, other = Synthetic(seed=0), Synthetic(seed=1)
    assert torch.equal(one.read_train()[0][0], other.read_train()[0][0])
    (train, _), (val, _) = one.read_train()
    assert not torch.equal(train[:256], val)
    assert not torch.equal(val, one.read_test()[0])


def test_loaders_without_a_trainer():
    module = Synthetic(num_train=40, num_val=10, num_test=7, batch_size=16)
    module.setup()
    assert [len(labels) for _, labels in module.train_dataloader()] == [16, 16]
    assert [len(labels) for _, labels in module.val_dataloader()] == [10]
    images, labels = next(iter(module.test_dataloader()))
    assert images.shape == (7, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.tolist() == list(range(7))
