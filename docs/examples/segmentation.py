"""Segment images with one image per device, where local batch norm fails, and global batch norm does not.

python docs/examples/segmentation.py
"""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import AdaptiveGlobalBatchNorm


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Return convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


class UNet(nn.Module):
    """A U-Net of one level: (N, 1, H, W) to logits (N, 1, H, W), for even H and W."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = block(1, width)
        self.bottom = nn.Sequential(nn.MaxPool2d(2), block(width, 2 * width), nn.Upsample(scale_factor=2))
        self.up = nn.Sequential(block(3 * width, width), nn.Conv2d(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a logit for each pixel."""
        skipped = self.down(x)
        return self.up(torch.cat([skipped, self.bottom(skipped)], dim=1))


class Segmentation(pl.LightningModule):
    """Foreground against background."""

    def __init__(self) -> None:
        super().__init__()
        self.model = UNet()

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        x, mask = batch
        loss = F.binary_cross_entropy_with_logits(self.model(x), mask)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train for two epochs on two processes, with one image each per step."""
    images = torch.randn(16, 1, 16, 16)
    masks = (F.avg_pool2d(images, 3, stride=1, padding=1) > 0).float()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy="ddp",
        callbacks=[AdaptiveGlobalBatchNorm(global_phase="always")],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Segmentation(), DataLoader(TensorDataset(images, masks), batch_size=1, shuffle=True))
    if trainer.is_global_zero:
        print(f"train_loss={trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
