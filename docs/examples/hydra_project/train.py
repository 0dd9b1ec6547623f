"""Another Hydra project, laid out as lightning-hydra-template is. Its own configuration does not name lightning_dp.

python docs/examples/hydra_project/train.py
python docs/examples/hydra_project/train.py callbacks=agbn +strategy@trainer.strategy=layered_sgd_single
"""

import hydra
import pytorch_lightning as pl
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    """Instantiate what the configuration names, and train."""
    pl.seed_everything(cfg.seed)
    model = hydra.utils.instantiate(cfg.model)
    data = hydra.utils.instantiate(cfg.data)
    callbacks = [hydra.utils.instantiate(callback) for callback in cfg.callbacks.values()]
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    print(f"{type(trainer.strategy).__name__}: {', '.join(type(callback).__name__ for callback in callbacks)}")


if __name__ == "__main__":
    main()
