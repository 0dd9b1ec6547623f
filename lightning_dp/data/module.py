"""The base class of all data modules: the three loaders, and batch sizes that are checked against the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_dp._lightning import LightningDataModule
from lightning_dp.data.loading import BatchSlice, EvaluationSampler, ImageDataset, TrainingSampler

# Images and labels (N,) int64. Images in memory are (N, C, H, W) uint8; a subclass may have others, such as file names.
Split = tuple[Any, Tensor]


class ImageDataModule(LightningDataModule):
    """Global batches, and exact evaluation, of images in memory.

    The global batches of an epoch depend only on ``seed`` and the epoch. For any number of ranks, they have the same
    images in the same order with the same augmentation. A batch is ``(images, labels)``: normalized (n, C, H, W)
    float32, and (n,) int64.

    The Trainer tells a loader's sampler the epoch. In a loop of your own, call ``loader.sampler.set_epoch(epoch)``, as
    for `torch.utils.data.DistributedSampler`: all passes of an epoch have the same batches, with the same augmentation.
    So have those of a loader that Lightning's ``CombinedLoader`` begins again within an epoch.

    A subclass defines ``num_classes``, ``image_shape``, ``mean``, ``std``, `read_train` and `read_test`.

    Args:
        batch_size: number of images in a global training batch. Each rank gets ``batch_size / world_size`` of them.
        eval_batch_size: number of images in a global evaluation batch. Results do not depend on it.
        seed: seed of the order of the images and of the augmentation.
        num_workers: number of worker processes of each loader. 0 suits images in memory: a batch takes about a
            millisecond.
        drop_last: in each epoch, leave out the images that do not fill a whole training batch. If False, the last batch
            is smaller. If its slices then differ in size, averaging over ranks gives its images unequal weights.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    augment: bool = False

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int = 1000,
        seed: int = 0,
        num_workers: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.drop_last = drop_last
        self._splits: dict[str, Split] = {}

    def read_train(self) -> tuple[Split, Split]:
        """Return the training images and the validation images. The latter have length 0 if there is no validation."""
        raise NotImplementedError

    def read_test(self) -> Split:
        """Return the test images."""
        raise NotImplementedError

    def sizes(self) -> dict[str, int]:
        """Return the number of images in ``"train"``, ``"val"`` and ``"test"``."""
        train, val = self.read_train()
        return {"train": len(train[1]), "val": len(val[1]), "test": len(self.read_test()[1])}

    def check(self, world_size: int) -> None:
        """Check that training on ``world_size`` ranks can work, before any process or Trainer is started.

        This reads the data and discards it. It downloads nothing.

        Raises:
            ValueError: a batch size does not fit the ranks or the data, or a file has unexpected contents.
            FileNotFoundError: the data is missing, and ``download`` is not set.
        """
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} must be 0, no processes that load images, or more")
        self._check_batch_sizes(world_size)
        self._check_sizes(world_size, self.sizes())

    def setup(self, stage: str | None = None) -> None:
        """Read what ``stage`` needs. Lightning calls this on every rank."""
        if stage not in ("test", "predict"):
            self._splits["train"], self._splits["val"] = self.read_train()
        if stage in (None, "test", "predict"):
            self._splits["test"] = self.read_test()
        self._check_loaded()
        if self.num_workers == 0:
            # Lightning advises more workers. That helps loaders that work image by image; here it would be wrong.
            warnings.filterwarnings("ignore", message=".*does not have many workers")

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this rank's slices of the global batches. The order differs between epochs."""
        self._read_if_needed("train")
        rank, world_size = self._rank()
        dataset = self._dataset("train", self.augment)
        sampler = TrainingSampler(
            dataset, self.batch_size, rank, world_size, self.seed, self.drop_last, self.image_size_of()
        )
        return self._loader(dataset, sampler, persistent_workers=self.num_workers > 0)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the loader of this rank's validation images, or an empty list if there are none."""
        self._read_if_needed("val")
        if len(self._splits["val"][1]):
            return self._evaluation_loader("val")
        # No validation is what the user asked for.
        warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        return []

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this rank's test images."""
        self._read_if_needed("test")
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this rank's test images, with their labels."""
        return self.test_dataloader()

    def image_size_of(self) -> Callable[[int], int] | None:
        """Return a function from an epoch to the size of its training images, or None if it never changes."""
        return None

    def _read_if_needed(self, split: str) -> None:
        """Read a split that no stage so far has needed, as the test images after a fit."""
        if split not in self._splits:
            self.setup("test" if split == "test" else "fit")

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        rank, world_size = self._rank()
        dataset = self._dataset(split, augment=False)
        return self._loader(dataset, EvaluationSampler(dataset, self.eval_batch_size, rank, world_size))

    def _dataset(self, split: str, augment: bool) -> Dataset[Any]:
        """Return the dataset of a split, to be indexed by `BatchSlice`."""
        return ImageDataset(*self._splits[split], self.mean, self.std, augment)

    def _loader(
        self, dataset: Dataset[Any], sampler: DistributedSampler[BatchSlice], persistent_workers: bool = False
    ) -> DataLoader[Any]:
        # Again: since `setup`, a process group may have been made, or a callback have set another batch size.
        self._check_loaded()
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        loader = _LateLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=on_cuda,
            persistent_workers=persistent_workers,
        )
        loader.is_for_one_process = self.trainer is None and not dist.is_initialized()
        return loader

    def _rank(self) -> tuple[int, int]:
        """Return which part of the batches is this rank's, and how many there are.

        There is one for each rank of the Trainer or, without one, of the default process group. Ranks that hold parts
        of the same layers (``ModelParallelStrategy`` with tensor parallelism) share one.
        """
        if self.trainer is not None:
            parts = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)  # what Lightning's sampler gets
            if parts is None:  # one device
                return self.trainer.global_rank, self.trainer.world_size
            return parts["rank"], parts["num_replicas"]
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def _check_batch_sizes(self, world_size: int) -> None:
        """Raise ValueError if a batch cannot be divided among the ranks."""
        for name, size in (("batch_size", self.batch_size), ("eval_batch_size", self.eval_batch_size)):
            if size < world_size:
                raise ValueError(
                    f"{name}={size} is smaller than the number of ranks ({world_size}), and each rank needs an "
                    f"image of every batch; use {name}={world_size} or more, or at most {max(1, size)} ranks"
                )
        below = self.batch_size // world_size * world_size
        if below != self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of {world_size} ranks; "
                f"use {below} or {below + world_size}"
            )

    def _check_loaded(self) -> None:
        _, world_size = self._rank()
        self._check_batch_sizes(world_size)
        self._check_sizes(world_size, {name: len(labels) for name, (_, labels) in self._splits.items()})

    def _check_sizes(self, world_size: int, sizes: dict[str, int]) -> None:
        """Raise ValueError if a split has too few images."""
        train = sizes.get("train")
        if train is not None and self.batch_size > train:
            raise ValueError(
                f"batch_size={self.batch_size} is larger than the training set ({train} images); "
                f"use at most {train // world_size * world_size}"
            )
        if train is not None and not self.drop_last and 0 < train % self.batch_size < world_size:
            raise ValueError(
                f"the last batch would hold {train % self.batch_size} of {train} training images, too few for "
                f"{world_size} ranks; use drop_last=true or another batch_size"
            )
        for name in ("val", "test"):
            if 0 < sizes.get(name, 0) < world_size:
                raise ValueError(f"{sizes[name]} {name} images are too few for {world_size} ranks; use more images")


class _LateLoader(DataLoader[Any]):
    """A loader whose workers start when the first batch is asked for.

    Lightning makes the first iterator of a run before it tells the sampler the epoch that the run continues with.
    Workers that started with the iterator would load the images of epoch 0, in its order.

    Attributes:
        is_for_one_process: it was made before there was a Trainer or a process group, which tell the ranks.
    """

    is_for_one_process = False

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.is_for_one_process and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"this loader was made for one process, so each of the {dist.get_world_size()} ranks would get all "
                "images; pass the data module to the Trainer, or make the loader once there is a process group"
            )
        yield from super().__iter__()
