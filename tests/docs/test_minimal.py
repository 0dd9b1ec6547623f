"""The one-page versions in docs/minimal: plain PyTorch, and the same weights as the package's own methods."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import (
    AdaptiveGlobalBatchNorm,
    KrizhevskyHybridStrategy,
    LayeredFSDPStrategy,
    LayeredSGDStrategy,
    Memonger,
    Plateau,
)
from lightning_dp.collectives import RingState, ring_all_reduce, ring_all_reduce_hook
from tests.commands import run_command
from tests.docs.pages import DOCS, ROOT, blocks
from tests.ranks import SYNC_BUFFERS, run_processes

MINIMAL = DOCS / "minimal"
NAMES = sorted(path.stem for path in MINIMAL.glob("*.py"))
WORLD_SIZE, CLASSES, EPOCHS = 4, 5, 3
MAX_LINES = 150
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
SMALL_BUCKETS_MB = 1000 / 2**20
Batches = list[tuple[Tensor, Tensor]]


def page(name: str) -> ModuleType:
    return importlib.import_module(f"docs.minimal.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_a_minimal_version_is_one_page_of_plain_pytorch(name):
    text = (MINIMAL / f"{name}.py").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= {"torch", *sys.stdlib_module_names}


def batches(rank: int, *shape: int) -> Batches:
    """Batches of this rank: of different sizes, in a step on different ranks and on a rank in different steps."""
    generator = torch.Generator().manual_seed(10 + rank)
    sizes = [2 + (rank * rank + step) % 4 for step in range(5)]
    return [
        (
            torch.randn(size, *shape, dtype=torch.float64, generator=generator) + rank,
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


class Module(pl.LightningModule):
    """The same network for the package, as a user of Lightning has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        # Ranks and steps count equally, as on the page.
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), **SGD)


class HybridModule(Module):
    """With the boundary between trunk and head marked."""

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model[1](features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return self.head_step(self.model[0](x), target)


def fit(module: pl.LightningModule, own: Batches, strategy: Any, *callbacks: pl.Callback) -> dict[str, Tensor]:
    """Train with the package, and return the weights and buffers."""
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(own, batch_size=None))
    return module.model.state_dict()


class RegisterRing(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.model.register_comm_hook(RingState(), ring_all_reduce_hook)


def linear_network() -> nn.Sequential:
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, CLASSES)
    return nn.Sequential(*layers)


def convolutions(norm: type[nn.Module] = nn.BatchNorm2d, cheap: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        cheap(norm(3), nn.ReLU()),
        nn.Conv2d(3, 4, 3),
        cheap(norm(4), nn.Tanh(), nn.MaxPool2d(2)),
        cheap(norm(4)),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def build(network: Callable[..., nn.Sequential], *args: Any) -> nn.Sequential:
    torch.manual_seed(7)
    return network(*args).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **SGD)


# Each function below trains with the package, or, on its page, with the minimal version.


def layered_sgd(rank: int, minimal: ModuleType | None, overlap: str) -> dict[str, Tensor]:
    model, own = build(linear_network), batches(rank, 6)
    if minimal is None:
        return fit(Module(model), own, LayeredSGDStrategy(2, overlap=overlap, bucket_cap_mb=SMALL_BUCKETS_MB))
    minimal.train(model, optimizer_of(model), own * EPOCHS, 2, overlap)
    return model.state_dict()


def layered_fsdp(rank: int, minimal: ModuleType | None) -> dict[str, Tensor]:
    model, own = build(linear_network), batches(rank, 6)
    if minimal is None:
        fit(Module(model), own, LayeredFSDPStrategy(2, wrap=[nn.Linear]))
    else:
        minimal.train(model, lambda parameters: torch.optim.SGD(parameters, **SGD), own * EPOCHS, 2)
    return {name: shard.full_tensor() for name, shard in model.state_dict().items()}


def ring(rank: int, minimal: ModuleType | None) -> dict[str, Tensor]:
    model, own = build(linear_network), batches(rank, 6)
    if minimal is None:
        return fit(Module(model), own, DDPStrategy(bucket_cap_mb=SMALL_BUCKETS_MB), RegisterRing())
    minimal.train(model, optimizer_of(model), own * EPOCHS)
    return model.state_dict()


def global_batch_norm(
    rank: int, minimal: ModuleType | None, max_batch_size: int | None, min_delta: float
) -> dict[str, Tensor]:
    own = batches(rank, 2, 6, 6)
    if minimal is None:
        callback = AdaptiveGlobalBatchNorm(max_batch_size, Plateau(patience=1, min_delta=min_delta))
        return fit(Module(build(convolutions)), own, DDPStrategy(**{SYNC_BUFFERS: False}), callback)
    model = build(convolutions, minimal.AdaptiveBatchNorm2d)
    minimal.train(model, optimizer_of(model), [own] * EPOCHS, max_batch_size or float("inf"), min_delta)
    return model.state_dict()


def memonger(rank: int, minimal: ModuleType | None) -> dict[str, Tensor]:
    own = batches(rank, 2, 6, 6)
    if minimal is None:
        return fit(Module(build(convolutions)), own, DDPStrategy(**{SYNC_BUFFERS: False}), Memonger("cheap"))
    model = build(convolutions, nn.BatchNorm2d, minimal.Cheap)
    minimal.train(model, optimizer_of(model), own * EPOCHS)
    return model.state_dict()


def split_network() -> nn.Sequential:
    """A head whose sizes four ranks do not divide; one rank has two classes, the others one."""
    trunk = nn.Sequential(nn.Linear(6, 9), nn.Tanh())
    return nn.Sequential(trunk, nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, CLASSES)))


def hybrid(rank: int, minimal: ModuleType | None, scheme: str) -> dict[str, Tensor]:
    model, own = build(split_network), batches(rank, 6)
    if minimal is None:
        return fit(HybridModule(model), own, KrizhevskyHybridStrategy(head="model.1", scheme=scheme))
    torch.set_default_dtype(torch.float64)
    try:
        minimal.train(*model, own * EPOCHS, scheme, **SGD)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.state_dict()


CASES: dict[str, tuple[str, Callable[..., dict[str, Tensor]], tuple[Any, ...]]] = {
    "layered SGD, load": ("layered_sgd", layered_sgd, ("load",)),
    "layered SGD, step": ("layered_sgd", layered_sgd, ("step",)),
    "layered FSDP": ("layered_fsdp", layered_fsdp, ()),
    "ring": ("ring_all_reduce", ring, ()),
    "global batch norm": ("adaptive_global_batch_norm", global_batch_norm, (None, 0.0)),
    "global until a plateau": ("adaptive_global_batch_norm", global_batch_norm, (None, 1e9)),
    "global in small batches": ("adaptive_global_batch_norm", global_batch_norm, (14, 0.0)),
    "hybrid, a": ("krizhevsky_hybrid", hybrid, ("a",)),
    "hybrid, b": ("krizhevsky_hybrid", hybrid, ("b",)),
    "hybrid, c": ("krizhevsky_hybrid", hybrid, ("c",)),
    "Memonger": ("memonger", memonger, ()),
}


def no_all_reduce(tensor: Tensor, *_: Any, **__: Any) -> Any:
    return mock.Mock(spec=dist.Work)


def no_all_gather(gathered: list[Tensor], tensor: Tensor) -> None:
    for each in gathered:
        each.copy_(tensor)


def no_exchange(parts: Any, shapes: Any) -> list[Tensor]:
    """What a rank has for itself arrives; from the others, zeros."""
    return [parts[k] if k == dist.get_rank() else parts[k].new_zeros(shape) for k, shape in enumerate(shapes)]


@contextlib.contextmanager
def broken(name: str, what: str) -> Iterator[None]:
    """Replace a part of a minimal version, most often its communication by the identity."""
    target: Any = page(name)
    replacements = {
        "all_reduce": (dist, "all_reduce", no_all_reduce),
        "all_gather": (dist, "all_gather", no_all_gather),
        "ring": (target, "ring_all_reduce", lambda flat: 0),
        "exchange": (target, "exchange", no_exchange),
        "copies": (target, "functional_call", lambda layers, copies, x: layers(x)),
        "nothing": (target, "train", target.train),
    }
    with mock.patch.object(*replacements[what]):
        yield


# Case and the part of its minimal version that is broken.
TWINS = [
    ("layered SGD, load", "all_reduce"),
    ("layered SGD, step", "all_reduce"),
    ("layered FSDP", "all_reduce"),
    ("ring", "ring"),
    ("global batch norm", "all_gather"),
    ("global in small batches", "all_gather"),
    ("hybrid, a", "exchange"),
    ("hybrid, c", "all_reduce"),
    ("Memonger", "all_reduce"),
    ("Memonger", "copies"),
]


def train_all(rank: int, name: str) -> dict[tuple[str, str], dict[str, float]]:
    """Train all cases of one page with the package, with the minimal version and with its broken twins.

    Returns, for each case and twin, the largest difference to the package, of each parameter and buffer.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = {}
    for case, (its_name, method, options) in CASES.items():
        if its_name != name:
            continue
        expected = {key: value.clone() for key, value in method(rank, None, *options).items()}
        for what in ("nothing", *(what for twin, what in TWINS if twin == case)):
            with broken(name, what):
                actual = method(rank, page(name), *options)
            assert actual.keys() == expected.keys()
            found[case, what] = {key: (actual[key] - value).abs().max().item() for key, value in expected.items()}
    return found


@cache
def differences(name: str) -> list[dict[tuple[str, str], dict[str, float]]]:
    """What `train_all` returns, of each rank: one launch for all tests of a page."""
    return run_processes(WORLD_SIZE, train_all, name)


@pytest.mark.parametrize("case", CASES)
def test_a_minimal_version_equals_the_package(case):
    for rank, found in enumerate(differences(CASES[case][0])):
        assert {key: value for key, value in found[case, "nothing"].items() if value > 1e-10} == {}, f"rank {rank}"


@pytest.mark.parametrize(("case", "what"), TWINS)
def test_without_its_communication_it_differs(case, what):
    for found in differences(CASES[case][0]):
        assert max(found[case, what].values()) > 1e-3


def ring_sums(rank: int, sizes: list[int]) -> list[tuple[bool, int]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found = []
    for size in sizes:
        ours, theirs = torch.randn(2, size, generator=torch.Generator().manual_seed(rank)).unbind()
        theirs.copy_(ours)
        sent_bytes = page("ring_all_reduce").ring_all_reduce(ours)
        found.append((torch.equal(ours, ring_all_reduce(theirs)), sent_bytes))
    return found


def test_the_ring_sums_as_the_package_does_whatever_the_size():
    sizes = [1, 3, 4, 5, 8, 1003]
    results = run_processes(WORLD_SIZE, ring_sums, sizes)
    for size, *ranks in zip(sizes, *results, strict=True):
        assert all(equal for equal, _ in ranks)
        assert sum(sent for _, sent in ranks) == 2 * (WORLD_SIZE - 1) * size * 4


def shown(name: str) -> str:
    """What the method's page says that the minimal version prints."""
    text = (DOCS / "methods" / f"{name}.md").read_text()
    (block, *_) = [block for block in blocks(text) if block.language == "text"]
    return block.text


def rounded(text: str) -> str:
    """The text without the last digits of differences between sums in another order."""
    return re.sub(r"\de-1[4-9]", "ROUNDING", text)


def printed_by_main(rank: int, name: str) -> str:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.ExitStack() as stack,
    ):
        if dist.is_initialized():  # ranks that keep their group
            stack.enter_context(mock.patch.object(dist, "init_process_group"))
            stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        page(name).main()
    return out.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_what_the_method_page_shows(name):
    printed = run_processes(WORLD_SIZE, printed_by_main, name)
    assert rounded(printed[0]) == rounded(shown(name))
    assert printed[1:] == [""] * (WORLD_SIZE - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_by_the_command_of_the_method_page(name):
    command = f"torchrun --nproc-per-node=4 docs/minimal/{name}.py"
    page_text = (DOCS / "methods" / f"{name}.md").read_text()
    assert command in [block.text.strip() for block in blocks(page_text) if block.language == "bash"]
    done = run_command([sys.executable, "-m", "torch.distributed.run", *command.split()[1:]], ROOT)
    assert done.returncode == 0, done.stderr
    assert rounded(done.stdout) == rounded(shown(name))
