"""Train and test one configuration, or with --multirun several, one after the other.

python recipes/train.py experiment=digits_resnet20
python recipes/train.py experiment=digits_resnet20 strategy=ddp trainer.devices=4 data.batch_size=128
python recipes/train.py experiment=digits_resnet20 ckpt_path=last
python recipes/train.py experiment=digits_resnet20 --multirun strategy=ddp,layered_sgd seed=1,2,3
torchrun --nproc-per-node=4 recipes/train.py experiment=digits_resnet20 trainer.devices=4
"""

from lightning_dp.runs import train_command

if __name__ == "__main__":
    train_command()
