"""Who gets which images: the same global batches for any number of ranks, and every test image exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dp.data.loading import (
    CropAndFlip,
    EvaluationSampler,
    ImageDataset,
    TrainingSampler,
    derive_seed,
    slice_bounds,
    stratified_holdout,
)


def dataset(num_images: int, augment: bool = True) -> ImageDataset:
    images = torch.randint(0, 256, (num_images, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return ImageDataset(images, torch.arange(num_images), (0.5,) * 3, (0.25,) * 3, augment)


def global_batches(data: ImageDataset, world_size: int, num_workers: int, **options) -> list[list[torch.Tensor]]:
    """Images and labels of every batch of two epochs, all ranks' slices put together."""
    batches: list[list[torch.Tensor]] = []
    samplers = [TrainingSampler(data, 12, rank, world_size, **options) for rank in range(world_size)]
    loaders = [
        DataLoader(data, None, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
        for sampler in samplers
    ]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for slices in zip(*loaders, strict=True):
            batches.append([torch.cat(tensors) for tensors in zip(*slices, strict=True)])
    return batches


def equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 0), (3, 0), (4, 0), (1, 2), (2, 2), (3, 2), (4, 2)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_batches_do_not_depend_on_the_number_of_ranks_or_workers(world_size, num_workers):
    data = dataset(50)
    expected = global_batches(data, 1, 0, seed=5)
    assert len(expected) == 8
    assert equal(global_batches(data, world_size, num_workers, seed=5), expected)
    assert not equal(expected[:4], expected[4:])  # the epochs differ


def test_the_test_above_detects_augmentation_that_each_rank_draws_for_itself(monkeypatch):
    data = dataset(50)
    expected = global_batches(data, 1, 0)
    rows = CropAndFlip.rows
    monkeypatch.setattr(CropAndFlip, "rows", lambda drawn, start, stop: rows(drawn, 0, stop - start))
    assert not equal(global_batches(data, 2, 0), expected)


def test_an_epoch_is_a_permutation_without_its_tail():
    data = dataset(50, augment=False)
    epochs = [
        torch.cat([labels for _, labels in batches])
        for batches in (lambda b: (b[:4], b[4:]))(global_batches(data, 3, 0))
    ]
    for labels in epochs:
        assert len(labels) == len(labels.unique()) == 48
    assert set(range(50)) - set(epochs[0].tolist()) != set(range(50)) - set(epochs[1].tolist())


def test_seed_and_epoch_determine_order_and_augmentation():
    data = dataset(24)
    assert not equal(global_batches(data, 1, 0, seed=1), global_batches(data, 1, 0, seed=2))
    first = [next(iter(sampler)) for sampler in (TrainingSampler(data, 12, seed=0), TrainingSampler(data, 12, seed=1))]
    first[0].indices.sort()
    later = TrainingSampler(data, 12, seed=0)
    later.set_epoch(1)
    assert len({first[0].seed, first[1].seed, next(iter(later)).seed}) == 3
    numbers = [derive_seed(*key) for key in [(0, 1), (1, 0), (1,), (0,), (0, 0), (0, 0, 1), (0, 1, 0)]]
    assert len(set(numbers)) == len(numbers)
    assert derive_seed(np.int64(3), torch.tensor(1)) == derive_seed(3, 1), "as a loop over np.arange has them"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_drop_last_every_image_is_there_once(world_size):
    batches = global_batches(dataset(41), world_size, 0, drop_last=False)
    assert [len(labels) for _, labels in batches] == [12, 12, 12, 5] * 2
    assert torch.cat([labels for _, labels in batches[:4]]).sort().values.equal(torch.arange(41))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_images", [5, 7, 10, 101, 360])
@pytest.mark.parametrize("batch_size", [5, 6, 9, 50, 1000])
def test_evaluation_is_exact_with_equally_many_batches_on_all_ranks(world_size, num_images, batch_size):
    data = dataset(num_images, augment=False)
    ranks = [
        [labels for _, labels in DataLoader(data, None, sampler=EvaluationSampler(data, batch_size, rank, world_size))]
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    sizes = Counter(len(labels) for batches in ranks for labels in batches)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= -(-batch_size // world_size) + 1
    together = torch.cat([labels for batches in zip(*ranks, strict=True) for labels in batches])
    assert torch.equal(together, torch.arange(num_images))


def test_an_index_of_a_single_image_is_refused():
    with pytest.raises(TypeError, match="overfit_batches"):
        dataset(4)[0]


@pytest.mark.parametrize(("total", "parts"), [(0, 3), (1, 3), (10, 4), (12, 4)])
def test_slices_cover_everything_and_are_even(total, parts):
    cuts = [slice_bounds(total, part, parts) for part in range(parts)]
    assert [n for start, stop in cuts for n in range(start, stop)] == list(range(total))
    assert max(b - a for a, b in cuts) - min(b - a for a, b in cuts) <= 1


@pytest.mark.parametrize("size", [0, 1, 40, 399, 400])
def test_holdout_keeps_the_proportions(size):
    labels = torch.arange(10).repeat_interleave(40)[torch.randperm(400)]
    kept, held = stratified_holdout(labels, size, seed=0)
    assert torch.cat([kept, held]).sort().values.equal(torch.arange(400))
    assert len(held) == size
    counts = labels[held].bincount(minlength=10)
    assert counts.max() - counts.min() <= 1
    assert not torch.equal(held, stratified_holdout(labels, size, seed=1)[1]) or size in (0, 400)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(4, 3, 8, 8), "4 images, a Tensor of torch.float32, with 4 labels must be a tensor of torch.uint8"),
        (
            torch.zeros(4, 3, 8, 8).byte().numpy(),
            "4 images, a ndarray of uint8, with 4 labels must be a tensor of torch.uint8",
        ),
        (torch.zeros(3, 3, 8, 8).byte(), "3 images.* with 4 labels must be .* with a label each; .* in read_train"),
    ],
)
def test_what_a_subclass_may_read_by_mistake_is_named(images, message):
    with pytest.raises(ValueError, match=message):
        ImageDataset(images, torch.arange(4), (0.5,), (0.5,))
