"""Measure some training steps, and say where they go and what would make them faster.

python recipes/plan.py experiment=digits_resnet20 trainer.devices=2
"""

from lightning_dp.runs import plan_command

if __name__ == "__main__":
    plan_command()
