"""A few synthetic images in the place of any data, to run every part of an experiment in seconds."""

from __future__ import annotations

from typing import Any

from lightning_dp.data.synthetic import Synthetic


def smoke_data(num_classes: int, image_size: int = 32, batch_size: int = 4, seed: int = 0, **ignored: Any) -> Synthetic:
    """Return two batches of images for training, and one each for validation and test.

    Args:
        num_classes: number of classes of the model.
        image_size: height and width of the images.
        batch_size: number of images in a global batch, over all ranks.
        seed: seed of the order of the images.
        **ignored: all other options of the data that it stands in for. An experiment sets some of them.
    """
    return Synthetic(
        shape=(3, image_size, image_size),
        num_classes=num_classes,
        num_train=2 * batch_size,
        num_val=batch_size,
        num_test=batch_size,
        batch_size=batch_size,
        eval_batch_size=batch_size,
        seed=seed,
    )
