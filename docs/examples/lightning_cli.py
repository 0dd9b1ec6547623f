"""LightningCLI with a strategy and a callback of this package in its YAML file.

Needs: pip install "jsonargparse[signatures]"

python docs/examples/lightning_cli.py fit --config docs/examples/lightning_cli.yaml
python docs/examples/lightning_cli.py fit --config docs/examples/lightning_cli.yaml --trainer.strategy=layered_sgd
"""

from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel

import lightning_dp  # noqa: F401  registers the names of the strategies, and the classes for the command line


def main() -> None:
    """Run the command line."""
    LightningCLI(BoringModel, save_config_callback=None)


if __name__ == "__main__":
    main()
