"""Train with layered SGD in the workers of Ray Train, here two on one machine. Needs: pip install "ray[train]".

python docs/examples/ray_train.py

Ray prefers `lightning.pytorch`. Where only pytorch_lightning is installed, import that: the two must not be mixed.
"""

import os
import tempfile

import lightning.pytorch as pl
import ray
import ray.train
import torch
import torch.nn.functional as F
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_NODES, WORKERS_PER_NODE = 1, 2


class Net(pl.LightningModule):
    """A module as you have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_worker(config) -> None:
    """Train in each worker: the usual Trainer, told by Ray which rank it is."""
    # Here, not above: in a worker Ray would import it first, before it knows which of the two packages is used.
    from lightning_dp import AdaptiveGlobalBatchNorm, LayeredSGDStrategy

    images = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        num_nodes=NUM_NODES,
        devices=WORKERS_PER_NODE,
        plugins=[RayLightningEnvironment()],
        max_epochs=2,
        strategy=LayeredSGDStrategy(group_size=1),  # on several nodes leave group_size out
        callbacks=[AdaptiveGlobalBatchNorm(max_batch_size=128)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(images, batch_size=8, shuffle=True))
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(os.path.join(folder, "last.ckpt"))  # on all ranks
        checkpoint = ray.train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
        ray.train.report({"train_loss": trainer.callback_metrics["train_loss"].item()}, checkpoint=checkpoint)


def main() -> None:
    """Start the workers, and print what they report."""
    num_workers = NUM_NODES * WORKERS_PER_NODE
    ray.init(num_cpus=num_workers + 1, include_dashboard=False)  # on a cluster: without arguments
    with tempfile.TemporaryDirectory() as folder:  # on a cluster: storage that all nodes see
        result = TorchTrainer(
            train_worker,
            scaling_config=ray.train.ScalingConfig(num_workers=num_workers),  # on GPUs: use_gpu=True
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
    print(f"train_loss={result.metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
