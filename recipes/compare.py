"""Compare the jobs of a sweep: a table and a plot.

python recipes/compare.py runs/digits_resnet20/sweep_DATE
"""

from lightning_dp.runs import compare_command

if __name__ == "__main__":
    compare_command()
