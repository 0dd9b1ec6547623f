"""Small modules and data for strategy tests: float64, several buckets, ranks that see different data."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 6, 3
# 200 bytes, in DDP's unit: a layer of `Net` in each bucket. DDP closes a bucket when it has reached the limit.
SMALL_BUCKETS_MB = 200 / 2**20


def optimizers(name: str, parameters: Any) -> torch.optim.Optimizer:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1e-2),
        "lbfgs": lambda p: torch.optim.LBFGS(p),
    }
    return makers[name](parameters)


class Net(pl.LightningModule):
    """Four linear layers, one of them used twice (shared) and one frozen."""

    def __init__(self, optimizer: str = "momentum", schedule: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.optimizer_name, self.schedule = optimizer, schedule
        self.first = nn.Linear(FEATURES, 8)
        self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.frozen(x))
        return self.last(torch.tanh(self.shared(x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x.to(self.first.weight.dtype)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = optimizers(self.optimizer_name, [p for p in self.parameters() if p.requires_grad])
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class TogglesOptimizers(Net):
    """Steps its optimizers one after the other; the others' parameters do not require gradients meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def data(world_size: int, steps: int = 30, local_batch_size: int = 3) -> DataLoader:
    """Random batches, ``steps`` of them on each rank."""
    generator = torch.Generator().manual_seed(3)
    count = world_size * steps * local_batch_size
    x = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=local_batch_size)


class SeveralBuckets(pl.Callback):
    """Sees that steps have several buckets. With a single one, nothing is done bucket by bucket."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = trainer.strategy.model._get_ddp_logging_data()
        sizes = found.get("rebuilt_bucket_sizes") or found["bucket_sizes"]
        if trainer.global_step > 2:  # DDP starts with one bucket, divides it after the first step, and logs it later
            assert "," in sizes, f"each step has a single bucket, of {sizes} bytes"


def trainer(strategy: Any, world_size: int, num_nodes: int = 1, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size // num_nodes,
        "num_nodes": num_nodes,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if getattr(strategy, "_ddp_kwargs", {}).get("bucket_cap_mb") == SMALL_BUCKETS_MB:
        options["callbacks"] = [*options.get("callbacks", ()), SeveralBuckets()]
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def snapshot(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Tensor]:
    """Parameters and optimizer state, by name."""
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    names = {p: name for name, p in module.named_parameters()}
    for index, optimizer in enumerate(trainer.optimizers):
        for p, state in optimizer.state.items():
            values |= {f"{names[p]}.{index}.{k}": v.clone() for k, v in state.items() if isinstance(v, Tensor)}
    return values


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=rtol, atol=rtol * 1e-2, msg=lambda m, n=name: f"{n}: {m}"
        )


# Options of `Net`, under "net", and of the Trainer.
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "nesterov": {"net": {"optimizer": "nesterov"}},
    "adamw": {"net": {"optimizer": "adamw"}},
    "clip norm": {"gradient_clip_val": 0.1},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 2},
    "schedule": {"net": {"schedule": "step"}},
    "all together": {
        "net": {"optimizer": "adamw", "schedule": "step"},
        "gradient_clip_val": 0.1,
        "accumulate_grad_batches": 3,
    },
}
