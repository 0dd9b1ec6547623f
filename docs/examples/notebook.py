"""What to write in a notebook: the strategies whose names end in _notebook fork the processes from the notebook's.

python docs/examples/notebook.py
"""

# %%
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel

import lightning_dp  # noqa: F401  registers the names

# %%
# With GPUs: no cell may use CUDA before this one, because CUDA does not survive a fork.
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    limit_train_batches=4,
    limit_val_batches=0,
    strategy="layered_sgd_notebook",
    logger=False,
    enable_checkpointing=False,
)
model = BoringModel()
before = model.layer.weight.detach().clone()
trainer.fit(model)

# %%
# The trained weights are in the notebook's own model.
assert not model.layer.weight.equal(before)
print(f"changed by {(model.layer.weight - before).abs().max().item():.3f}")
