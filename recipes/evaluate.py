"""Test a checkpoint on one device, with the configuration in its run folder.

python recipes/evaluate.py runs/digits_resnet20/DATE/checkpoints/last.ckpt
"""

from lightning_dp.runs import evaluate_command

if __name__ == "__main__":
    evaluate_command()
