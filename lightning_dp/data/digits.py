"""The handwritten digits of scikit-learn: real images that come with the package and need no download."""

from __future__ import annotations

import torch

from lightning_dp.data.loading import stratified_holdout
from lightning_dp.data.module import ImageDataModule, Split

TEST_SIZE, VAL_SIZE = 360, 180
SPLIT_SEED = 2015


class Digits(ImageDataModule):
    """1797 digits (Alpaydin and Kaynak, UCI 1998), 8x8 pixels scaled to 3x32x32: 1257 train, 180 val, 360 test.

    The split is stratified and fixed. It depends neither on ``seed`` nor on the version of scikit-learn. The images are
    not augmented, because a flipped digit is a different sign. The arguments are those of `ImageDataModule`.
    """

    num_classes = 10
    image_shape = (3, 32, 32)
    mean = (0.3049,) * 3  # of the training images
    std = (0.3236,) * 3

    def read_train(self) -> tuple[Split, Split]:
        """Return the 1257 training and the 180 validation images."""
        images, labels = read_digits()
        rest, _ = stratified_holdout(labels, TEST_SIZE, SPLIT_SEED)
        train, val = (rest[part] for part in stratified_holdout(labels[rest], VAL_SIZE, SPLIT_SEED))
        return (images[train], labels[train]), (images[val], labels[val])

    def read_test(self) -> Split:
        """Return the 360 test images."""
        images, labels = read_digits()
        _, test = stratified_holdout(labels, TEST_SIZE, SPLIT_SEED)
        return images[test], labels[test]


def read_digits() -> Split:
    """Return all images, (1797, 3, 32, 32) uint8, and labels.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits are part of scikit-learn, which is not installed: pip install 'lightning-dp[recipes]'"
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None]  # 0 to 16
    images = torch.nn.functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    images = images.mul_(255 / 16).round_().to(torch.uint8)
    return images.repeat(1, 3, 1, 1), torch.from_numpy(digits.target).long()
