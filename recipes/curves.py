"""Plot a run again from its metrics.csv: loss and accuracy over epochs, and the phases of batch norm.

python recipes/curves.py runs/digits_resnet20/DATE
"""

from lightning_dp.runs import curves_command

if __name__ == "__main__":
    curves_command()
