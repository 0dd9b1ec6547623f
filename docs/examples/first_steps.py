"""Train a small network on two CPU processes: with DDP, or with layered SGD if the argument says so.

python docs/examples/first_steps.py ddp
python docs/examples/first_steps.py layered_sgd
"""

import sys

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import LayeredSGDStrategy


class Net(pl.LightningModule):
    """A module as you have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train for two epochs."""
    # Two groups of one rank, as on two machines. On several nodes leave group_size out.
    strategy = LayeredSGDStrategy(group_size=1) if sys.argv[1:] == ["layered_sgd"] else "ddp"
    pl.seed_everything(0, verbose=False)
    images = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(4, (64,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(images, batch_size=8))
    if trainer.is_global_zero:
        print(f"train_loss={trainer.callback_metrics['train_loss']:.6f}")


if __name__ == "__main__":
    main()
