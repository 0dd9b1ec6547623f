"""Random trainings end as under DDP, and all that their callbacks and threads read in between is the same."""

from __future__ import annotations

import random
import threading
import warnings
from functools import partialmethod
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_dp.strategies import LayeredSGDStrategy
from lightning_dp.strategies.layered_sgd.host_communicator import BucketReduction, Communicator
from lightning_dp.strategies.layered_sgd.update import UpdateQueue
from tests.ranks import RankError, run_processes
from tests.strategies.modules import FEATURES, assert_same, data, snapshot, trainer

STEPS = 4
NUM_LAYERS = 4
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
]
has_arrived = BucketReduction.has_arrived


class Reader(pl.Callback):
    """Looks at a random thing at random places, now and then in another thread, and notes what it sees."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: list[float] = []

    def look(self, module: Any) -> None:
        if self.random.random() < 0.5:
            return
        parameter = self.random.choice(list(module.parameters()))
        state = self.random.choice(module.trainer.optimizers)
        acts = [
            lambda: parameter.detach().square().sum(),
            lambda: sum(p.detach().abs().sum() for p in module.parameters()),
            lambda: -1.0 if parameter.grad is None else parameter.grad.square().sum(),
            lambda: sum(v.sum() for s in state.state.values() for v in s.values() if isinstance(v, torch.Tensor)),
            lambda: len(state.state_dict()["state"]),
        ]
        act = self.random.choice(acts)
        if self.random.random() < 0.5:
            thread = threading.Thread(target=lambda: self.seen.append(float(act())))
            thread.start()
            thread.join()
        else:
            self.seen.append(float(act()))

    def on_after_backward(self, t: Any, module: Any) -> None:
        self.look(module)

    def on_train_batch_start(self, t: Any, module: Any, *_: Any) -> None:
        self.look(module)

    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        self.look(module)


class Program(pl.LightningModule):
    """Two or three optimizers that share the layers at random; forwards, backwards and steps in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.automatic_optimization = self.random.random() < 0.3
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(NUM_LAYERS)]).double()
        self.num_optimizers = 1 if self.automatic_optimization else self.random.choice([2, 3])

    def configure_optimizers(self) -> Any:
        layers = list(self.layers)
        self.random.shuffle(layers)
        optimizers = []
        for index in range(self.num_optimizers):
            own = layers[index :: self.num_optimizers]
            if self.random.random() < 0.3:
                own = [*own, self.random.choice([layer for layer in layers if layer not in own] or own)]
            parameters = {p: None for layer in own for p in layer.parameters()}
            optimizers.append(self.random.choice(OPTIMIZERS)(list(parameters)))
        return optimizers

    def loss(self, batch: Any) -> Any:
        x, y = batch
        order = self.random.sample(range(NUM_LAYERS), self.random.randint(2, NUM_LAYERS))
        for index in order if not self.automatic_optimization else range(NUM_LAYERS):
            x = torch.tanh(self.layers[index](x))
        return F.cross_entropy(x, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        for _ in range(self.random.randint(1, 3)):
            optimizer = self.random.choice(self.optimizers())
            if self.random.random() < 0.7:
                optimizer.zero_grad(set_to_none=self.random.random() < 0.7)
            losses = [self.loss(batch) for _ in range(self.random.choice([1, 1, 2]))]
            self.manual_backward(sum(losses))
            if self.random.random() < 0.8:
                optimizer.step()
            if self.random.random() < 0.3:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
        return None


def fit(strategy: Any, seed: int, **place: Any) -> dict[str, torch.Tensor]:
    """Run a program; return parameters, state and all that was read. ``place``: options of the Trainer."""
    module, reader = Program(seed), Reader(seed)
    options: dict[str, Any] = {"callbacks": [reader], "max_epochs": 2, **place}
    if module.automatic_optimization:
        options["accumulate_grad_batches"] = module.random.choice([1, 2, 3])
        options["gradient_clip_val"] = module.random.choice([None, None, 0.1])
        options["gradient_clip_algorithm"] = module.random.choice(["norm", "value"])
    t = trainer(strategy, 2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        t.fit(module, data(2, STEPS))
    return {**snapshot(module, t), "seen": torch.tensor(reader.seen, dtype=torch.float64)}


def run_programs(rank: int, seeds: range, mutate: bool = False) -> int:
    """Compare programs with DDP; return the largest number of buckets of a backward pass."""
    if mutate:
        UpdateQueue._before_gradient = lambda self, parameter: None
    numbers: list[int] = [0]
    submit = Communicator.submit
    Communicator.submit = lambda self, index, *args: (numbers.append(index + 1), submit(self, index, *args))[1]
    for seed in seeds:
        BucketReduction.has_arrived = property(lambda self: False) if seed % 2 else has_arrived
        options = {"find_unused_parameters": True, "bucket_cap_mb": 400 / 2**20}
        expected = fit(DDPStrategy(**options), seed)
        overlap = "load" if seed % 5 == 4 else "step"
        try:
            assert_same(fit(LayeredSGDStrategy(1, overlap=overlap, **options), seed), expected)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {overlap}: {error}") from error
    return max(numbers)


def test_12_random_programs():
    assert min(run_processes(2, run_programs, range(12))) >= 3, "a backward pass has several buckets"


def run_programs_on_gpu(rank: int, seeds: range) -> None:
    # With `foreach`, its default on GPUs, SGD with nesterov adds the momentum to the gradients that the user has.
    torch.optim.SGD.__init__ = partialmethod(torch.optim.SGD.__init__, foreach=False)
    place = {"accelerator": "cuda", "num_nodes": 2}
    options = {"find_unused_parameters": True, "bucket_cap_mb": 400 / 2**20, "process_group_backend": "gloo"}
    for seed in seeds:
        expected = fit(DDPStrategy(**options), seed, **place)
        for overlap, device in (("step", "cpu"), ("load", "cpu"), ("step", "gpu")):
            layered = LayeredSGDStrategy(1, overlap=overlap, communicator_device=device, **options)
            try:
                assert_same(fit(layered, seed, **place), expected)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {overlap}, {device}: {error}") from error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_12_random_programs_on_one_gpu():
    run_processes(2, run_programs_on_gpu, range(12), num_nodes=2)


@pytest.mark.ci
def test_gradients_that_nobody_waits_for_are_seen():
    """The twin: the programs do look at what is pending."""
    with pytest.raises(RankError, match="seed"):
        run_processes(2, run_programs, range(20), True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(12, 1012, 100))
def test_1000_random_programs(first):
    run_processes(2, run_programs, range(first, first + 100), timeout=3600)
