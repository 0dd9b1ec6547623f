"""Training on GPUs: every strategy, the callbacks, the ring hook, the recipes and the loading of batches.

Each test runs the same code on the CPU (among the slow tests), so that where there is no GPU at least the test itself
is tested. One GPU is enough: ranks that share it talk over gloo, because NCCL refuses two ranks on one device, and NCCL
runs with one rank. With two GPUs and more NCCL runs with two. Kernels and streams have tests beside their modules:
`pytest -m gpu` runs them all.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_dp import (
    AdaptiveGlobalBatchNorm,
    KrizhevskyHybridStrategy,
    LayeredFSDPStrategy,
    LayeredSGDStrategy,
    Memonger,
    StepTimer,
)
from lightning_dp.collectives import RingState, ring_all_reduce_hook
from lightning_dp.data import Synthetic
from tests.callbacks.training import alone, fit
from tests.collectives.test_comm_hooks import network, oracle, shard
from tests.collectives.test_ring_in_lightning import RegisterRing
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet
from tests.strategies.layered_fsdp.modules import whole
from tests.strategies.layered_fsdp.test_lightning_features import Checkpoints
from tests.strategies.modules import Net, data, trainer

PACKAGE = str(Path(__file__).parents[1] / "lightning_dp")


class Place(NamedTuple):
    """Where the ranks are. Those that share a GPU are nodes of one rank each, so that all take the first device."""

    accelerator: str
    backend: str
    world_size: int
    num_nodes: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {"accelerator": self.accelerator, "num_nodes": self.num_nodes}

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Call ``function(rank, place, *args)`` on every rank."""
        return run_processes(self.world_size, function, self, *args, num_nodes=self.num_nodes, timeout=240)


def on(place: Place, name: str, num_gpus: int) -> Any:
    marks = [pytest.mark.slow]
    if num_gpus:
        needs = pytest.mark.skipif(torch.cuda.device_count() < num_gpus, reason=f"needs {num_gpus} CUDA device(s)")
        marks = [pytest.mark.gpu, needs]
    return pytest.param(place, id=name, marks=marks)


CPU = on(Place("cpu", "gloo", 2), "CPU", 0)
SHARED = on(Place("cuda", "gloo", 2, 2), "two ranks on a GPU", 1)
ONE = on(Place("cuda", "nccl", 1), "NCCL, one rank", 1)
TWO = on(Place("cuda", "nccl", 2), "NCCL, two ranks", 2)
everywhere = pytest.mark.parametrize("place", [CPU, SHARED, ONE, TWO])
STRATEGIES = {
    "DDP": DDPStrategy,
    "layered SGD": lambda **options: LayeredSGDStrategy(group_size=1, **options),
    "layered SGD, load": lambda **options: LayeredSGDStrategy(group_size=1, overlap="load", **options),
}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].cpu(), value.cpu(), rtol=1e-8, atol=1e-8, msg=lambda m, n=name: n + m)


# --- strategies, with batch norm over all ranks ---


def train_with_callbacks(rank: int, place: Place, strategy: str) -> dict[str, Tensor]:
    callbacks = [AdaptiveGlobalBatchNorm(), Memonger(), StepTimer()]
    made = STRATEGIES[strategy](process_group_backend=place.backend)
    devices = place.world_size // place.num_nodes
    net, own = fit(place.world_size, *callbacks, strategy=made, devices=devices, **place.options)
    assert own.strategy.root_device.type == place.accelerator
    assert own.callback_metrics["time/step_s"].device.type == "cpu"
    return {name: value.cpu() for name, value in net.state_dict().items()}


@everywhere
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_with_all_callbacks_equals_one_process_on_the_concatenated_batch(strategy, place):
    for state in place.run(train_with_callbacks, strategy):
        assert_close(state, alone(place.world_size))


# --- what only a GPU has of Lightning: "16-mixed", with a scaler of the loss ---


class HalfHeadNet(StepNet):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x.float()), target)


def train_in_16_bits(rank: int, place: Place) -> list[dict[str, Tensor]]:
    """Return the parameters of DDP, of layered SGD with each overlap, of the hybrid, and of DDP for the hybrid."""
    strategies = [(make, Net().float()) for make in STRATEGIES.values()]
    strategies += [(KrizhevskyHybridStrategy, HalfHeadNet()), (DDPStrategy, HalfHeadNet())]
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make, module in strategies:
            own = trainer(
                make(process_group_backend=place.backend), place.world_size, precision="16-mixed", **place.options
            )
            own.fit(module, data(place.world_size, 8))
            results.append({name: p.detach().cpu() for name, p in module.named_parameters()})
    return results


@everywhere
def test_training_in_16_bits_is_that_of_ddp(place):
    for ddp, step, load, hybrid, ddp_of_hybrid in place.run(train_in_16_bits):
        for found in (step, load):
            for name, value in ddp.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        for name, value in ddp_of_hybrid.items():
            torch.testing.assert_close(hybrid[name], value, rtol=0.02, atol=0.005)


# --- layered FSDP ---


def train_sharded(rank: int, place: Place) -> list[dict[str, Tensor]]:
    strategies: list[Any] = [DDPStrategy(process_group_backend=place.backend)]
    for overlap in ("step", "load"):
        strategies.append(LayeredFSDPStrategy(1, overlap, wrap=[nn.Linear], process_group_backend=place.backend))
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made in strategies:
            module = Net()
            trainer(made, place.world_size, **place.options).fit(module, data(place.world_size, 8))
            results.append({name: whole(p).cpu() for name, p in module.named_parameters()})
    return results


@everywhere
def test_layered_fsdp_equals_ddp(place):
    for ddp, *others in place.run(train_sharded):
        for found in others:
            assert_close(found, ddp)


def train_run_again(rank: int, place: Place) -> dict[str, dict[str, Tensor]]:
    """Return parameters of a network of which backward runs parts again: of DDP on the CPU, and of each strategy."""
    ddp = partial(DDPStrategy, process_group_backend="gloo")
    sharded = partial(LayeredFSDPStrategy, 1, wrap=[nn.Linear], process_group_backend="gloo")
    runs: dict[str, tuple[Any, bool, dict[str, Any]]] = {
        "DDP, CPU": (ddp, False, {**place.options, "accelerator": "cpu"}),
        "DDP": (ddp, False, place.options),
        "layered FSDP": (sharded, False, place.options),
        "layered FSDP, reentrant": (sharded, True, place.options),
    }
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (strategy, is_reentrant, options) in runs.items():
            module = Checkpoints(is_reentrant)
            trainer(strategy(), place.world_size, **options).fit(module, data(place.world_size, 8))
            found[name] = {each: whole(p).cpu() for each, p in module.named_parameters()}
    return found


@pytest.mark.parametrize("place", [CPU, SHARED])
def test_parts_that_backward_runs_again_are_trained_as_on_the_cpu(place):
    for found in place.run(train_run_again):
        expected = found.pop("DDP, CPU")
        errors = {
            name: max(float((own[each] - expected[each]).abs().max()) for each in expected)
            for name, own in found.items()
        }
        assert max(errors.values()) < 1e-8, errors


# --- the ring hook ---


class RingModule(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network().double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        features, cotangents = (part.to(self.device) for part in shard(self.global_rank))
        return (self.network(features) * cotangents).sum()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([0, 1], batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train_with_ring(rank: int, place: Place) -> list[Tensor]:
    # On the CPU Lightning drops hooks; a callback registers it there.
    on_cpu = place.accelerator == "cpu"
    hook = {} if on_cpu else {"ddp_comm_state": RingState(), "ddp_comm_hook": ring_all_reduce_hook}
    strategy = DDPStrategy(process_group_backend=place.backend, bucket_cap_mb=1e-5, **hook)
    options = {"max_steps": 1, "use_distributed_sampler": False, "callbacks": [RegisterRing()] if on_cpu else []}
    module = RingModule()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(strategy, place.world_size, **options, **place.options).fit(module)
    return [parameter.detach().cpu() for parameter in module.network.parameters()]


@everywhere
def test_the_ring_hook_averages_gradients(place):
    gradients = oracle(list(range(place.world_size)))
    for parameters in place.run(train_with_ring):
        for parameter, before, gradient in zip(parameters, network().double().parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter, before.detach() - gradient, rtol=1e-10, atol=1e-10)


# --- no step waits for the GPU ---


class HeadNet(HybridNet):
    """Its loss is not read in each step."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(self.head(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.trunk(x), target)


class Watched(StepTimer):
    """Records the lines of this package that make the host wait for the GPU, in steps after the first few."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._recorder = warnings.catch_warnings(record=True)
        self._record: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # DDP reads its timers in the first ten steps, and the hybrid compares the ranks in steps 1, 2, 4, 8 and 16.
        if batch_idx == 17 and pl_module.device.type == "cuda":
            self._record = self._recorder.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if batch_idx == 24 and pl_module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            self._recorder.__exit__(None, None, None)
            found = [w for w in self._record if "synchronizing CUDA operation" in str(w.message)]
            self.waits = [f"{w.filename}:{w.lineno}" for w in found if w.filename.startswith(PACKAGE)]


def train_watched(rank: int, place: Place, strategy: str) -> list[str]:
    watched = Watched()
    if strategy == "hybrid":
        module: LightningModule = HeadNet()
        made = KrizhevskyHybridStrategy(process_group_backend=place.backend)
    else:
        module, made = Net(), STRATEGIES[strategy](process_group_backend=place.backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(made, place.world_size, callbacks=[watched], **place.options).fit(module, data(place.world_size))
    return watched.waits


@pytest.mark.parametrize("place", [CPU, ONE, TWO])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hybrid"])
def test_no_line_of_the_package_waits_for_the_gpu_in_a_step(strategy, place):
    """Over NCCL: gloo sends from host memory, and waits for the copy."""
    assert place.run(train_watched, strategy) == [[]] * place.world_size


# --- recipes and loading ---


def train_recipe(rank: int, place: Place, strategy: str, folder: str) -> dict[str, float]:
    from tests.recipes.in_process import composed, train

    sizes = ("data.num_train=48", "data.num_val=20", "data.num_test=21", "data.batch_size=16")
    accelerator = "gpu" if place.accelerator == "cuda" else "cpu"
    ranks = (f"trainer.devices={place.world_size // place.num_nodes}", f"trainer.num_nodes={place.num_nodes}")
    options = (f"strategy={strategy}", f"+strategy.process_group_backend={place.backend}", "callbacks=agbn")
    quiet = ("trainer.max_epochs=2", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
    config = composed(
        Path(folder), "name=gpu", "data=synthetic", f"trainer={accelerator}", *sizes, *ranks, *options, *quiet
    )
    metrics = train(config)
    if accelerator == "gpu":
        assert torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "high"
    return metrics


@everywhere
@pytest.mark.parametrize("strategy", ["ddp", "layered_sgd_single"])
def test_a_recipe_trains(strategy, place, tmp_path):
    pytest.importorskip("hydra", reason="needs hydra-core")
    first, *others = place.run(train_recipe, strategy, str(tmp_path))
    assert 0.0 <= first["test/acc"] <= 1.0
    assert 0.0 < first["train/loss"] < 10.0
    for other in others:
        assert other["test/acc"] == first["test/acc"]


class Loading(LightningModule):
    """Records where batches come from and where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, 10)
        self.is_pinned: list[bool] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.is_pinned.append(all(part.is_pinned() for part in batch))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        assert images.device == labels.device == self.device
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def load(rank: int, place: Place) -> list[bool]:
    warnings.simplefilter("ignore")
    module = Loading()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    own = Trainer(devices=1, max_epochs=1, limit_val_batches=0, enable_model_summary=False, **quiet, **place.options)
    own.fit(module, datamodule=Synthetic(num_train=48, num_val=16, num_test=16, batch_size=16))
    return module.is_pinned


@pytest.mark.parametrize("place", [on(Place("cpu", "gloo", 1), "CPU", 0), ONE])
def test_batches_for_a_gpu_come_from_page_locked_memory(place):
    assert place.run(load) == [[place.accelerator == "cuda"] * 3]
