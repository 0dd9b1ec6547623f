"""Shard the fully-connected layers of a VGG16, 90 % of its parameters, over two processes.

python docs/examples/vgg16.py
"""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.losses import sharded_cross_entropy

LAYERS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


class VGG16(nn.Module):
    """VGG16 for 32 x 32 images (Simonyan & Zisserman 2014), named as in torchvision: features and classifier.

    Args:
        width: factor of all widths; 1 is the published network.
    """

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for layer in LAYERS:
            if isinstance(layer, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, int(layer * width), 3, padding=1), nn.ReLU()]
                channels = int(layer * width)
        hidden = int(4096 * width)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(channels, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout()),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        return self.classifier(self.features(x).flatten(1))


class Classifier(pl.LightningModule):
    """Any network with a head. ``head_step`` lets the strategy keep the logits sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.model = VGG16(num_classes=10, width=1 / 16)

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss, computed from the arguments and the head only."""
        return sharded_cross_entropy(self.model.classifier, features, target)

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        x, target = batch
        loss = self.head_step(self.model.features(x).flatten(1), target)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    """Train for one epoch on two processes."""
    images = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=KrizhevskyHybridStrategy(head="model.classifier"),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(images, batch_size=8, shuffle=True))
    print(f"train_loss={trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
