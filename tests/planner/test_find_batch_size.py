"""Batch sizes by trial: ranks agree, nothing hangs, and nothing stays changed."""

from __future__ import annotations

import random
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.loggers import Logger
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, TensorDataset
from torchmetrics import MeanMetric

from lightning_dp import AdaptiveGlobalBatchNorm, LayeredSGDStrategy
from lightning_dp.planner import FindBatchSize, try_batch_sizes
from lightning_dp.planner.find_batch_size import alone
from lightning_dp.recompute import profile
from tests.ranks import RankError, run_processes, run_threads


def out_of_memory_from(limit: int, tried: list[int]):
    def step(size: int) -> None:
        tried.append(size)
        if size >= limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return step


def test_sizes_are_tried_from_the_smallest_until_one_does_not_fit():
    tried: list[int] = []
    found = try_batch_sizes(out_of_memory_from(32, tried), (64, 8, 16, 32), repeats=1)
    assert sorted(set(tried)) == [8, 16, 32]
    assert (list(found.images_per_s), found.too_large) == ([8, 16], 32)
    assert found.table().splitlines()[-1] == "| 32 | does not fit |"


def test_the_fastest_size_wins_and_not_the_largest(monkeypatch):
    # 100 images/s with 4, 200 with 8, 160 with 16. A clock of the test's own: the machine may pause.
    seconds = {4: 0.04, 8: 0.04, 16: 0.1}
    now = [0.0]
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(size: int) -> None:
        now[0] += seconds[size]

    found = try_batch_sizes(step, seconds, repeats=1)
    assert (found.batch_size, found.too_large) == (8, None)
    assert found.images_per_s == pytest.approx({4: 100.0, 8: 200.0, 16: 160.0})


def trials_of_rank(rank, group, limits):
    return try_batch_sizes(out_of_memory_from(limits[rank], []), (8, 16, 32, 64), group=group, repeats=1)


def test_ranks_agree_if_one_of_them_is_out_of_memory():
    first, second, third = run_threads(3, trials_of_rank, (1000, 32, 64))
    assert first == second == third
    assert (list(first.images_per_s), first.too_large) == ([8, 16], 32)


def test_if_nothing_fits_all_ranks_say_so():
    with pytest.raises(RankError) as caught:
        run_threads(2, trials_of_rank, (1000, 8))
    assert str(caught.value).count("not even 8 images per rank fit") >= 2


def failing(rank, group):
    def step(size: int) -> None:
        if rank == 1 and size == 16:
            raise KeyError("a mistake")

    return try_batch_sizes(step, (8, 16), group=group, repeats=1)


def test_another_error_ends_the_trials_of_all_ranks():
    with pytest.raises(RankError) as caught:
        run_threads(2, failing)
    assert "batch size 16 raised an error on another rank" in str(caught.value)
    assert "KeyError: 'a mistake'" in str(caught.value)


def different(rank, group):
    return try_batch_sizes(lambda size: None, (8, 16 + rank), group=group, repeats=1)


def test_different_sizes_are_refused_on_all_ranks():
    with pytest.raises(RankError) as caught:
        run_threads(2, different)
    assert str(caught.value).count("differ between the ranks") >= 2


def test_memory_that_the_host_does_not_have_is_known():
    tried = try_batch_sizes(lambda size: torch.empty(size, dtype=torch.uint8), (8, 2**60), repeats=1)
    assert tried.too_large == 2**60


# The callback.


class Data(pl.LightningDataModule):
    def __init__(self, num_shares: int = 1) -> None:
        super().__init__()
        self.batch_size, self.num_shares = 2, num_shares

    def train_dataloader(self) -> DataLoader:
        images = TensorDataset(torch.randn(32, 3, 6, 6), torch.arange(32) % 4)
        return DataLoader(images, batch_size=self.batch_size // self.num_shares)


class Net(pl.LightningModule):
    """Runs out of memory at batches of ``limit`` images."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(64, 4))
        self.mean = MeanMetric()
        self.sizes: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        if len(x) >= self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.mean.update(loss.detach())
        self.log("loss", self.mean)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(net: Net, data: Data, *callbacks: pl.Callback, ckpt_path=None, max_epochs=1, **options) -> pl.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=max_epochs,
            **{"logger": False, **options},
        )
        trainer.fit(net, datamodule=data, ckpt_path=ckpt_path)
    return trainer


class StateAtStart(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.weights = {name: value.clone() for name, value in pl_module.named_parameters()}
        self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        self.total = float(pl_module.mean.update_count)


def test_training_starts_as_if_nothing_had_been_tried():
    net, data, seen = Net(limit=16), Data(), StateAtStart()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    finder = FindBatchSize((2, 4, 8, 16, 32), repeats=1)
    fit(net, data, finder, seen)
    assert finder.trials.too_large == 16
    assert data.batch_size == finder.trials.batch_size in (2, 4, 8)
    assert all(torch.equal(value, before[name]) for name, value in seen.state.items())
    assert seen.total == 0
    assert net.sizes == [data.batch_size] * (32 // data.batch_size), "training uses the new size"
    assert "log" not in vars(net)


class Student(Net):
    """Has a teacher that follows it, in each training step, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(limit=100)
        self.teacher = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.generator = torch.Generator()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.net[0].weight, 0.1)
        noise = torch.randn(batch[0].shape, generator=self.generator)
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


class Drawn(Data):
    """Its loader shuffles by a generator that the data module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def train_dataloader(self) -> DataLoader:
        images = super().train_dataloader().dataset
        batches = BatchSampler(RandomSampler(images, generator=self.generator), self.batch_size, drop_last=False)
        return DataLoader(images, batch_sampler=batches)


class Noisy(Dataset):
    """Draws noise for each image from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.drawn = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        return torch.from_numpy(self.drawn.random((3, 6, 6), dtype=np.float32)), index


class PartOfTwo(Data):
    """Takes its images from two datasets of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.images = Subset(ConcatDataset([Noisy(1), Noisy(2)]), [0, 4, 1, 5])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.images, batch_size=self.batch_size)


class Counting(Data):
    """Seeds each loader by the number of those that it has made."""

    num_made = 0

    def train_dataloader(self) -> DataLoader:
        self.num_made += 1
        generator = torch.Generator().manual_seed(self.num_made)
        return DataLoader(super().train_dataloader().dataset, self.batch_size, shuffle=True, generator=generator)


@pytest.mark.parametrize("data", [Drawn, PartOfTwo, Counting])
def test_a_training_with_a_teacher_and_generators_of_its_own_is_the_same(data):
    states = []
    for callbacks in ([], [FindBatchSize((2,), repeats=1)]):
        torch.manual_seed(0)
        net = Student()
        fit(net, data(), *callbacks, limit_train_batches=2)
        states.append(net.state_dict())
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


class FrozenNorm(Net):
    """Its batch norm stays in evaluation, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__(limit=100)
        self.net[1].eval()

    def training_step(self, batch, batch_idx):
        assert self.net[2].training
        assert not self.net[1].training
        return super().training_step(batch, batch_idx)


def test_a_trial_and_the_training_keep_the_modes_of_parts():
    net = FrozenNorm()
    fit(net, Data(), FindBatchSize((2, 4), repeats=1))
    assert not net.net[1].running_mean.any()


class LoadsLate(SingleDeviceStrategy):
    """Loads a checkpoint after `on_fit_start`, as layered FSDP does."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, LoadsLate])
def test_a_fit_that_continues_takes_the_size_of_its_checkpoint(tmp_path, strategy):
    """Times differ from run to run, and so would the fastest size."""
    path = tmp_path / "last.ckpt"
    fit(Net(100), Data(), FindBatchSize((4,), repeats=1)).save_checkpoint(path)
    net, data, finder = Net(100), Data(), FindBatchSize((8,), repeats=1)
    fit(net, data, finder, ckpt_path=path, max_epochs=2, strategy=strategy("cpu"))
    assert (data.batch_size, finder.trials.batch_size, net.sizes[-1]) == (4, 4, 4)
    fit(net, data, finder)
    assert data.batch_size == 8, "another fit searches again"


class Loaders(pl.LightningDataModule):
    """``factors`` times the batch size from each of several loaders."""

    def __init__(self, num_images: int, *factors: int) -> None:
        super().__init__()
        self.batch_size, self.num_images, self.factors = 2, num_images, factors

    def train_dataloader(self):
        images = torch.randn(self.num_images, 6)
        return [DataLoader(images, factor * self.batch_size, drop_last=True) for factor in self.factors]


class Rows(pl.LightningModule):
    """Notes how many rows its batches have."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def training_step(self, batch, batch_idx):
        rows.append(tuple(map(len, batch)))
        return sum(self.layer(x).square().mean() for x in batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


rows: list[tuple[int, ...]] = []


class TakesIterator(Rows):
    """Fetches its batches itself, two in a step."""

    def training_step(self, dataloader_iter):
        batches = [batch for batch, _, _ in (next(dataloader_iter), next(dataloader_iter))]
        return super().training_step([x for batch in batches for x in batch], 0)


def test_a_step_that_takes_the_iterator_of_the_loader_is_tried_with_one():
    rows.clear()
    finder = FindBatchSize((4, 8), repeats=1)
    trainer = fit(TakesIterator(nn.Linear(6, 2)), Loaders(64, 1), finder)
    assert trainer.global_step == 64 // (2 * finder.trials.batch_size)
    assert set(rows) == {(4, 4), (8, 8)}


def test_a_loader_with_larger_batches_has_them_in_the_trials_too():
    rows.clear()
    data = Loaders(64, 1, 3)
    fit(Rows(nn.Linear(6, 2)), data, FindBatchSize((4, 8), repeats=1))
    assert set(rows) == {(4, 12), (8, 24)}


def test_no_size_is_tried_that_a_rank_has_no_images_for():
    rows.clear()
    finder = FindBatchSize((4, 8, 16), repeats=1)
    trainer = fit(Rows(nn.Linear(6, 2)), Loaders(10, 1), finder)
    assert list(finder.trials.images_per_s) == [4, 8]
    assert trainer.global_step > 0, "there would be no batch of 16"
    finder = FindBatchSize((2, 4, 8), repeats=1)
    assert fit(Rows(nn.Linear(6, 2)), Loaders(12, 1, 3), finder).global_step > 0, "the second takes three times as many"
    assert list(finder.trials.images_per_s) == [2, 4]
    finder = FindBatchSize((16, 32), repeats=1)
    fit(Rows(nn.Linear(6, 2)), Loaders(10, 1), finder)
    assert list(finder.trials.images_per_s) == [16], "there is none that fits"


def test_lazy_layers_have_their_sizes_when_the_optimizer_is_counted():
    finder = FindBatchSize((4,), repeats=1)
    assert fit(Rows(nn.LazyLinear(2)), Loaders(16, 1), finder).global_step == 4


class Branches(Rows):
    """Does not use a branch in the first step, which the trials use."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6))
        self.branch = nn.Linear(6, 6)

    def training_step(self, batch, batch_idx):
        x = self.layer(batch[0])
        is_trial = self.trainer.train_dataloader is None
        return (self.branch(x) if is_trial or batch_idx else x).square().mean()


def fit_branches(rank):
    strategies = {
        "ddp": DDPStrategy,
        **{overlap: partial(LayeredSGDStrategy, 1, overlap=overlap) for overlap in ("load", "step")},
        "one group": partial(LayeredSGDStrategy, 2),
    }
    weights = {}
    for name, make in strategies.items():
        for finders in ((), (FindBatchSize((2,), repeats=1),)):
            torch.manual_seed(0)
            net = Branches()
            fit(net, Loaders(16, 1), *finders, devices=2, strategy=make(find_unused_parameters=True))
            weights[name, bool(finders)] = torch.cat([value.flatten() for value in net.parameters()])
    for name in strategies:
        assert torch.equal(weights[name, True], weights[name, False]), name


def test_parameters_that_the_trials_used_may_be_unused_in_the_first_step():
    run_processes(2, fit_branches)


def fit_static_graph(rank):
    weights = []
    strategies = DDPStrategy, partial(LayeredSGDStrategy, 1)
    for make in strategies:
        for finders in ((), (FindBatchSize((2,), repeats=1),)):
            torch.manual_seed(0)
            net = Rows(nn.Linear(6, 6))
            fit(net, Loaders(16, 1), *finders, devices=2, strategy=make(static_graph=True))
            weights.append(net.layer.weight.detach())
    return weights


def test_the_gradients_of_a_static_graph_are_averaged_after_trials():
    ranks = run_processes(2, fit_static_graph)
    assert all(torch.equal(weight, ranks[0][0]) for weights in ranks for weight in weights)


def find_on_rank(rank):
    net, data = Net(limit=(1000, 8)[rank]), Data(num_shares=2)
    finder = FindBatchSize((2, 4, 8, 16), is_global=True, repeats=1)
    trainer = fit(net, data, AdaptiveGlobalBatchNorm(), finder, devices=2, strategy="ddp", limit_train_batches=2)
    return finder.trials, data.batch_size, trainer.world_size


def test_under_ddp_the_ranks_agree_though_one_is_out_of_memory():
    (first, size, world_size), (second, other, _) = run_processes(2, find_on_rank)
    assert first == second
    assert (list(first.images_per_s), first.too_large) == ([2, 4], 8)
    assert size == other == first.batch_size * world_size


def test_what_cannot_be_tried_is_refused_before_training():
    data = Data()
    data.batch_size = None
    with pytest.raises(ValueError, match=r"sets batch_size of the data module, and .* has none that is an integer"):
        fit(Net(100), data, FindBatchSize((2,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_dp.planner.find_batch_size.require_own_trainer", lambda *args: None)
        for strategy in (SimpleNamespace(gather_head=None), SimpleNamespace(num_parameter_shards=2)):
            with pytest.raises(ValueError, match="cannot try steps under SimpleNamespace, which exchange features"):
                FindBatchSize((2,)).setup(SimpleNamespace(datamodule=Data(), strategy=strategy), Net(100), "fit")
    with pytest.raises(ValueError, match="batch_sizes=0"):
        FindBatchSize((0,))
    with pytest.raises(ValueError, match="batch_sizes is empty"):
        try_batch_sizes(lambda size: None, ())


class RandomData(Data):
    """Draws from all generators for each image."""

    def train_dataloader(self) -> DataLoader:
        def collate(images):
            torch.rand(1), random.random(), np.random.rand()
            return torch.utils.data.default_collate(images)

        images = TensorDataset(torch.randn(32, 3, 6, 6), torch.arange(32) % 4)
        return DataLoader(images, batch_size=self.batch_size, shuffle=True, collate_fn=collate)


def test_all_random_numbers_are_put_back():
    states = []
    for callbacks in ([], [FindBatchSize((2, 4), repeats=1)]):
        pl.seed_everything(0, verbose=False)
        seen = StateAtStart()
        fit(Net(100), RandomData(), *callbacks, seen, limit_train_batches=1)
        states.append(seen.random)
    (torch_state, *others), (torch_found, *found) = states
    assert torch.equal(torch_state, torch_found)
    assert others == found


class Own(Net):
    """By all the ways of Lightning: layers made late, hooks of a batch, a dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32, late: str = "setup") -> None:
        super().__init__(limit=1000)
        self.dtypes: set[torch.dtype] = set()
        self.hooks: list[str] = []
        self.late, self.expected = late, dtype
        del self.net

    def make(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))

    def setup(self, stage):
        if self.late == "setup":
            self.make()

    def configure_model(self):
        self.make()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.hooks.append("before")
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.hooks.append("after")
        return batch[0] / 2, batch[1]

    def training_step(self, batch, batch_idx):
        assert self.hooks[-2:] == ["before", "after"]
        self.dtypes |= {batch[0].dtype, self.net[1].weight.dtype}
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("precision", "dtype", "late"),
    [
        ("32-true", torch.float32, "setup"),
        ("64-true", torch.float64, "configure_model"),
        ("bf16-true", torch.bfloat16, "setup"),
    ],
)
def test_the_module_is_as_training_has_it(precision, dtype, late):
    net, finder = Own(dtype, late), FindBatchSize((2, 4), repeats=1)
    fit(net, Data(), finder, precision=precision, limit_train_batches=1)
    assert set(finder.trials.images_per_s) == {2, 4}
    assert net.dtypes == {dtype}


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        schedule.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_manual_optimization_is_tried_without_a_step_of_its_optimizers():
    net, finder, seen = Manual(limit=16), FindBatchSize((2, 4, 16), repeats=1), StateAtStart()
    before = {name: value.clone() for name, value in net.named_parameters()}
    trainer = fit(net, Data(), finder, seen, limit_train_batches=1)
    assert finder.trials.too_large == 16
    assert all(torch.equal(value, before[name]) for name, value in seen.weights.items())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.005, "one step of the schedule, in training"
    assert not {"optimizers", "lr_schedulers", "manual_backward"} & vars(net).keys()
    assert all(parameter.requires_grad for parameter in net.parameters())


class OwnSteps(Net):
    """Changes what Lightning's optimizer holds, and has an optimizer and a schedule of its own."""

    automatic_optimization = False

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.own = torch.optim.Adam(self.net[0].parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.own, 1, 0.5)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.optimizer.step()
        self.own.step()
        self.schedule.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[4].parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_optimizers_and_schedules_are_put_back_that_a_step_changes():
    weights, rates = [], []
    for callbacks in ((), (FindBatchSize((2,), repeats=1),)):
        torch.manual_seed(0)
        net = OwnSteps(limit=16)
        trainer = fit(net, Data(), *callbacks, limit_train_batches=3)
        weights.append(torch.cat([value.flatten() for value in net.parameters()]))
        rates.append([one.param_groups[0]["lr"] for one in (net.own, *trainer.optimizers)])
    assert rates[0] == rates[1] == [0.00125, 0.0125]
    assert torch.equal(*weights)


class Lossless(Net):
    def training_step(self, batch, batch_idx):
        return None


class Asking(Net):
    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class AskingInStep(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.estimated_stepping_batches


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Lossless(100), "training_step returned no loss for the first batch"),
        (Asking(100), "FindBatchSize comes too late: configure_optimizers or training_step has asked"),
        (AskingInStep(100), "FindBatchSize comes too late: configure_optimizers or training_step has asked"),
    ],
)
def test_what_would_give_a_wrong_size_is_one_error(net, message):
    data = Data()
    with pytest.raises(ValueError, match=message):
        fit(net, data, FindBatchSize((2, 4), repeats=1))
    assert data.batch_size == 2


@pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning")
def test_a_search_for_a_learning_rate_before_the_trials_is_named(tmp_path):
    net = Net(limit=100)
    net.lr = 0.1
    finders = FindBatchSize((2, 4), repeats=1), LearningRateFinder(num_training_steps=2)
    with pytest.raises(ValueError, match="or LearningRateFinder has trained, which Lightning puts first"):
        fit(net, Data(), *finders, default_root_dir=tmp_path)


class MakesLoaderEarly(Data):
    def setup(self, stage):
        self.loader = super().train_dataloader()

    def train_dataloader(self) -> DataLoader:
        return self.loader


def test_a_loader_that_does_not_take_the_size_is_one_error():
    with pytest.raises(ValueError, match="has set batch_size=4, and the loader has batches of 2, as before; make"):
        fit(Net(limit=100), MakesLoaderEarly(), FindBatchSize((4,), repeats=1))
    fit(Net(limit=100), MakesLoaderEarly(), FindBatchSize((2,), repeats=1), limit_train_batches=1)


class SingleImages(Data):
    def train_dataloader(self) -> DataLoader:
        images = torch.randn(4, 3, 6, 6)
        return DataLoader(images, batch_size=self.batch_size, collate_fn=lambda rows: (list(rows), torch.zeros(4)))


class OfList(Net):
    def training_step(self, batch, batch_idx):
        return sum(self.net[0](image).square().mean() for image in batch[0])


def test_an_error_of_a_trial_says_what_the_step_was_given():
    with pytest.raises(RuntimeError) as caught:
        fit(OfList(100), SingleImages(), FindBatchSize((2,), repeats=1))
    assert "repeated or cut to 2 rows, which packed sequences and lists" in caught.value.__notes__[0]


class Without(Net):
    """Takes no ``batch_idx``."""

    def training_step(self, batch):
        return super().training_step(batch, None)


def test_a_training_step_may_have_no_batch_idx():
    net, finder = Without(limit=8), FindBatchSize((2, 4, 8), repeats=1)
    fit(net, Data(), finder, limit_train_batches=1)
    assert (list(finder.trials.images_per_s), finder.trials.too_large) == ([2, 4], 8)


class Saved(Data):
    """Its loader reads the size among its hyperparameters."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        self.batch_size = self.hparams.batch_size
        return super().train_dataloader()


class SavedNet(Net):
    def __init__(self, limit: int, batch_size: int) -> None:
        super().__init__(limit)
        self.save_hyperparameters()


@pytest.mark.parametrize("of_module", [2, 5])
def test_the_size_is_also_that_among_the_hyperparameters(tmp_path, of_module):
    net, data, finder = SavedNet(100, of_module), Saved(2), FindBatchSize((4,), repeats=1)
    trainer = fit(net, data, finder, limit_train_batches=1)
    assert net.sizes[-1] == data.batch_size == 4
    assert net.hparams.batch_size == (4 if of_module == 2 else 5), "another number means something else"
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert Saved.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False).batch_size == 4


def test_hyperparameters_may_be_a_configuration_that_is_read_only():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"batch_size": 2})
    omegaconf.OmegaConf.set_readonly(config, True)
    data = Data()
    data.save_hyperparameters(config)
    fit(Net(100), data, FindBatchSize((4,), repeats=1), limit_train_batches=1)
    assert data.hparams.batch_size == data.batch_size == 4


class Lines(Logger):
    name = version = "lines"
    log_dir = "here"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics, step=None):
        self.lines.append(metrics)

    def log_hyperparams(self, params):
        pass


class WritesItself(Net):
    """Logs past `self.log`."""

    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"images": len(batch[0])}, self.global_step)
        assert self.logger.log_dir == "here"
        return super().training_step(batch, batch_idx)


def test_trials_leave_no_lines_in_the_logger():
    logger, net = Lines(), WritesItself(100)
    trainer = fit(net, Data(), FindBatchSize((4, 8), repeats=1), logger=logger, limit_train_batches=2)
    assert [line["images"] for line in logger.lines if "images" in line] == net.sizes, "those of training"
    assert trainer.logger is logger


class Gathering(Net):
    """Compares its features with those of all ranks, as contrastive losses do."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        gathered = self.all_gather({"x": batch[0]}, sync_grads=True)["x"]
        assert gathered.shape == (2, *batch[0].shape)
        return loss + gathered.mean()


def test_a_trial_has_gradients_where_its_caller_has_none():
    with torch.no_grad(), alone(Net(1000)):
        assert torch.is_grad_enabled()


class Reducing(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        torch.distributed.all_reduce(total := loss.detach().clone())
        return loss + total


def find_with_collectives(rank):
    options = {"devices": 2, "strategy": "ddp", "limit_train_batches": 1}
    finder = FindBatchSize((2, 4, 8), is_global=True, repeats=1)
    fit(Gathering((1000, 8)[rank]), Data(2), finder, **options)
    net = Net((1000, 8)[rank])
    net.net[1] = nn.SyncBatchNorm(4)
    # SyncBatchNorm itself trains on GPUs only: the trial is what runs here.
    trainer = SimpleNamespace(world_size=2)
    with alone(net, trainer.world_size):
        net.train().training_step((torch.randn(2, 3, 6, 6), torch.zeros(2, dtype=torch.long)), 0).backward()
    try:
        fit(Reducing((1000, 2)[rank]), Data(2), FindBatchSize((2, 4), repeats=1), **options)
    except (ValueError, RuntimeError) as error:
        return finder.trials, str(error)
    raise AssertionError("nothing was raised")


def test_collectives_of_the_step_leave_no_rank_waiting_if_one_is_out_of_memory():
    (first, refused), (second, other) = run_processes(2, find_with_collectives)
    assert first == second
    assert (list(first.images_per_s), first.too_large) == ([2, 4], 8)
    assert "calls c10d.allreduce_.default, a message to other ranks" in refused
    assert "batch size 2 raised an error on another rank" in other
