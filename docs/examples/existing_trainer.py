"""Add a strategy and callbacks to a Trainer that you have. Nothing else in the script changes.

python docs/examples/existing_trainer.py
"""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AdaptiveGlobalBatchNorm, LayeredSGDStrategy


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


def main() -> None:
    """Train for two epochs on two processes."""
    images = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=LayeredSGDStrategy(group_size=1),  # was: "ddp". On several nodes leave group_size out.
        callbacks=[AdaptiveGlobalBatchNorm(max_batch_size=128)],  # new
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(), DataLoader(images, batch_size=8, shuffle=True))
    print(f"train_loss={trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
