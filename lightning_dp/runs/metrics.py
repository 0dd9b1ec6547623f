"""The metrics of a run: metrics.csv, which a continued run completes, and curves.png, the plot of it."""

from __future__ import annotations

import csv
import logging
import math
import sys
from argparse import Namespace
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from lightning_dp._private.lightning_names import epoch_means, validation_batches
from lightning_dp.planner.plots import COLORS
from lightning_dp.runs.checkpoints import CURVES, METRICS, read_checkpoint, run_folder
from lightning_dp.runs.command_line import argument_parser

log = logging.getLogger("train")

Series = list[tuple[float, float]]  # (epochs trained, value)
Phase = tuple[float, float, bool]  # start, end (epochs trained), whether statistics were global

TRAIN_COLOR = "#1f77b4"
VAL_COLOR = "#e66101"
TEST_COLOR = "#111111"
RATE_COLOR = "#7b3294"
IS_GLOBAL = "agbn/is_global"
IMAGES_PER_S = "time/images_per_s"
TRAIN_S = "time/train_s"  # seconds of training, at the end of an epoch


class MetricsFile(Logger):
    """Writes ``metrics.csv`` and ``hparams.yaml`` of a run, on rank 0.

    Each row is written when it is logged, so a run that is killed has lost none.

    Args:
        run_dir: where the files are.
        rows: what the file begins with; see `rows_before`.
        writes_hyperparameters: False keeps the hyperparameters of the training, where its run is tested again.
    """

    name = ""
    version = ""

    def __init__(self, run_dir: str, rows: Sequence[dict[str, Any]] = (), writes_hyperparameters: bool = True) -> None:
        super().__init__()
        self._folder = Path(run_dir)
        self._rows = list(rows)
        self._columns: list[str] = []
        self._hyperparameters: dict[str, Any] = {}
        self._writes_hyperparameters = writes_hyperparameters

    def write_first(self) -> int:
        """Write the rows that the file begins with, if none was logged since; return how many rows it has.

        A checkpoint counts them. A run that logs nothing before its first one has not written the file.
        """
        if self._rows and not self._columns:
            self._write_all()
        return len(self._rows)

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        """The run folder, by the name that Lightning's loggers of files have for it."""
        return str(self._folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Add to the hyperparameters, and write them. Like those of Lightning, they may be a Namespace."""
        self._hyperparameters |= vars(params) if isinstance(params, Namespace) else dict(params)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._writes_hyperparameters:
            (self._folder / "hparams.yaml").write_text(OmegaConf.to_yaml(_as_yaml(self._hyperparameters)))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Append a row. A module that logs directly may have tensors, as Lightning's loggers accept."""
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self._rows.append({**values, "step": len(self._rows) if step is None else int(step)})
        path = self._folder / METRICS
        if self._rows[-1].keys() <= set(self._columns):
            with open(path, "a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(self._rows[-1])
        else:
            self._write_all()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the rows of a run that continued and logged nothing, if the file has fewer or those of later epochs."""
        if status == "success" and len(rows_of(self._folder)) != len(self._rows):
            self._write_all()

    def _write_all(self) -> None:
        path = self._folder / METRICS
        self._columns = sorted(set().union(*self._rows))
        part = path.with_suffix(".part")
        with open(part, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        # At once, so that there is never half a file.
        part.replace(path)


def _as_yaml(node: Any) -> Any:
    """Return hyperparameters as YAML has them. Objects, which a module may have among its own, become texts."""
    if isinstance(node, Mapping):
        return {str(key): _as_yaml(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_as_yaml(value) for value in node]
    # Exact types: OmegaConf takes no subclass, such as numpy.float64.
    kind = next((each for each in (bool, int, float, str) if isinstance(node, each)), str)
    return node if node is None else kind(node)


class RowsInCheckpoint(Callback):
    """Puts into checkpoints how many rows ``metrics.csv`` has, and the row that comes next.

    Lightning logs the means of an epoch after its checkpoint. A run that is killed in between has not written that row,
    and one that continues trains the next epoch: without the row in the checkpoint it would be lost.

    A row's step does not tell whether it was logged before: a module may log any number as its step, and loggers count
    batches where a checkpoint counts the steps of all optimizers.
    """

    def __init__(self, file: MetricsFile) -> None:
        self._file = file

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the number of rows, the steps of the next rows that belong to the same batch or epoch, and its means.

        All ranks must call it, as Lightning does.
        """
        loop = checkpoint["loops"]["fit_loop"]
        epoch, num_batches = loop["epoch_progress"]["current"], loop["epoch_loop.state_dict"]["_batches_that_stepped"]
        # The means of an epoch are logged after its checkpoint, with the step of its last batch or the module's own.
        is_at_end = epoch["processed"] > epoch["completed"]
        steps = [num_batches - is_at_end, int(trainer.callback_metrics.get("step", -1))]
        # After an exception other ranks may not come to the collectives of the means.
        means = epoch_means(trainer) if is_at_end and trainer.training and not trainer.interrupted else {}
        checkpoint["callbacks"][self.state_key] = {
            "num_rows": self._file.write_first(),
            "steps": steps,
            "means": _as_logged(means, trainer, steps[0]),
            # The next validation logs its batches under these numbers.
            "validated": [0, *validation_batches(trainer).values()],
        }


def _as_logged(means: dict[str, Any], trainer: Trainer, step: int) -> dict[str, Any]:
    """Return means of an epoch as the row that Lightning makes of them. A metric named step is the row's step."""
    if not means:
        return {}
    if "step" in means:
        return means | {"step": int(means["step"])}
    return {"epoch": trainer.current_epoch, **means, "step": step}


def rows_before(checkpoint: Path) -> list[dict[str, str]]:
    """Return the rows of a checkpoint's run up to the end of its batch or epoch."""
    rows, content = rows_of(run_folder(checkpoint)), read_checkpoint(checkpoint)
    state = content["callbacks"].get(RowsInCheckpoint.__qualname__)
    if state is None:  # of version 0.1
        return [row for row in rows if int(row["step"]) < content["global_step"]]
    if len(rows) < state["num_rows"]:
        log.warning(
            "%s has %d of the %d rows before this checkpoint: curves and times of the epochs before it lack the others",
            run_folder(checkpoint) / METRICS,
            len(rows),
            state["num_rows"],
        )
    after = list(takewhile(lambda row: int(row["step"]) in state["steps"], rows[state["num_rows"] :]))
    if means := {name: str(value) for name, value in state.get("means", {}).items()}:
        names = means.keys() - {IMAGES_PER_S}  # a folder that a run continued in does not have the speed
        written = [names <= row.keys() and row["step"] == means["step"] for row in after]
        if any(written):
            end = written.index(True) + 1
            # Then come rows of the same batch, as of the end of the run. The next epoch may begin with the means' step,
            # and its validation with that of the batch.
            is_of_batch = state["steps"][0] not in state.get("validated", ())
            after = after[:end] + [row for row in after[end:] if is_of_batch and int(row["step"]) == state["steps"][0]]
        else:  # the run may have been killed before it wrote them
            after.append(means)
    return rows[: state["num_rows"]] + after


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    """Return the rows of a metrics.csv, with the values that each has. The last one is left out if it was cut.

    A full disk cuts it, or the end of a job that is killed.

    Raises:
        ValueError: it has no column ``step``, as after a program for tables has written it with semicolons.
    """
    if not (run_dir / METRICS).is_file():
        return []
    with open(run_dir / METRICS, newline="", encoding="utf-8-sig") as file:  # a program for tables may write the mark
        lines = file.readlines()
    # A row that was cut within its last value has as many as the others.
    whole = lines if not lines or lines[-1].endswith("\n") else lines[:-1]
    if whole and "step" not in next(csv.reader(whole)):
        path = run_dir / METRICS
        raise ValueError(
            f"{path} does not begin with the names of its columns, of which one is step, and commas between them"
        )
    rows = [row for row in csv.DictReader(whole) if None not in row.values()]
    return [{name: value for name, value in row.items() if value} for row in rows]


def last_values(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return the last value of each metric.

    A metric that is logged of each step and as a mean has two columns; the mean also has the metric's own name.
    """
    found = {name: value for row in rows for name, value in _numbers(row).items()}
    forked = [name.removesuffix("_step") for name in found if name.endswith("_step")]
    return found | {name: found[f"{name}_epoch"] for name in forked if f"{name}_epoch" in found}


def _numbers(row: dict[str, str]) -> dict[str, float]:
    """Return the metrics of a row. A module that logs directly may have texts among them, as Lightning's loggers do."""
    found = {}
    for name, text in row.items():
        if name not in ("epoch", "step"):
            with suppress(ValueError):
                found[name] = float(text)
    return found


def read_metrics(run_dir: Path) -> dict[str, Series]:
    """Return each column of metrics.csv as a series.

    The file has one row for each time of logging, with gaps. Steps count from 0.
    """
    rows = rows_of(run_dir)
    steps, epochs = _ends_of_epochs(rows)
    trained = np.interp([step + 1 for step in steps_of(rows)], steps, epochs).tolist()
    series: dict[str, Series] = {}
    for place, row in zip(trained, rows, strict=True):
        for name, value in _numbers(row).items():
            series.setdefault(name, []).append((place, value))
    return series


def steps_of(rows: Sequence[dict[str, str]]) -> list[int]:
    """Return the step of each row of metrics.csv.

    A module may log a metric ``step`` of its own, such as the epoch, and Lightning names no epoch in that row. It is
    known by a step that does not fit between the rows around it. The steps of its metrics are then those of the next
    rows that name their epoch.
    """
    steps = [int(row["step"]) for row in rows]
    known = [place for place, row in enumerate(rows) if "epoch" in row and not _is_of_test(row)]
    moved: dict[int, int] = {}
    own: set[str] = set()
    for place, row in enumerate(rows):
        if "epoch" in row or not known:
            continue
        after = bisect(known, place)
        least = steps[known[after - 1]] if after else 0
        moved[place] = steps[known[min(after, len(known) - 1)]]
        if steps[place] < least or (after < len(known) and steps[place] > moved[place]):
            own |= row.keys() - {"step"}
    return [moved[place] if place in moved and own & row.keys() else steps[place] for place, row in enumerate(rows)]


def _is_of_test(row: dict[str, str]) -> bool:
    return any(name.startswith(("test/", "test_")) for name in row)


def _ends_of_epochs(rows: Sequence[dict[str, str]]) -> tuple[list[float], list[float]]:
    """Return the steps after which epochs had ended, as far as rows tell, and how many epochs had; both from 0 on.

    Without any epoch in the rows, each step is one.
    """
    last: dict[float, float] = {}
    for row in rows:
        # The row of a test names the epoch after the last one, which has no steps.
        if "epoch" in row and not _is_of_test(row):
            epoch = float(row["epoch"]) + 1
            last[epoch] = max(last.get(epoch, 0.0), int(row["step"]) + 1.0)
    if not last:
        end = max((int(row["step"]) + 1.0 for row in rows), default=1.0)
        return [0.0, end], [0.0, end]
    epochs = [0.0, *sorted(last)]
    steps = [0.0, *accumulate((last[epoch] for epoch in epochs[1:]), max)]
    if len(epochs) > 2:
        # The last one may not have ended, where max_steps ends a run. It is taken to be as long as the one before.
        in_epoch = (steps[-2] - steps[-3]) / (epochs[-2] - epochs[-3])
        steps[-1] = max(steps[-1], steps[-2] + in_epoch * (epochs[-1] - epochs[-2]))
    return steps, epochs


def phases(is_global: Series) -> list[Phase]:
    """Return the intervals with the same kind of statistics. A logged value is for the interval that ends there."""
    found: list[Phase] = []
    start = 0.0
    for end, value in is_global:
        state = value >= 0.5
        if found and found[-1][2] == state:
            start = found.pop()[0]
        found.append((start, end, state))
        start = end
    return found


def draw_curves(run_dir: str | Path, at_end: bool = True) -> Path:
    """Write a plot into the run folder and return its path.

    ``curves.png`` is also the sign of a run that has ended.

    Args:
        run_dir: the run folder.
        at_end: of the run. False does not mark it as ended: the plot is ``curves_so_far.png`` if it is not.

    Raises:
        FileNotFoundError: the folder has no ``metrics.csv``.
    """
    folder = Path(run_dir).resolve()
    if not (folder / METRICS).is_file():
        raise FileNotFoundError(f"{folder} has no metrics.csv; give the folder of a run")
    series = read_metrics(folder)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    for axes, metric, title in ((loss, "loss", "loss"), (accuracy, "acc", "accuracy")):
        _shade(axes, phases(series.get(IS_GLOBAL, [])))
        _plot(axes, _named(series, "train", metric), TRAIN_COLOR, "train")
        _plot(axes, _named(series, "val", metric), VAL_COLOR, "validation")
        axes.set(title=title, xlabel="epoch")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    losses = [value for _, value in _named(series, "train", "loss") if math.isfinite(value)]  # a run may have diverged
    if min(losses, default=0.0) > 0:
        loss.set_yscale("log")
    if tested := _named(series, "test", "acc"):
        _, value = max(tested, key=lambda each: each[0])  # later tests in the folder (train=false) have step 0
        label = f"test, at the end: {value:.4f}"
        accuracy.axhline(value, color=TEST_COLOR, linewidth=1, linestyle=":", label=label)
    if rates := [values for name, values in series.items() if name.startswith("lr-")]:
        _plot_learning_rates(loss, rates)
    for axes in (loss, accuracy):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize=8, framealpha=0.9)
    figure.suptitle(f"{folder.parent.name}/{folder.name}", fontsize=9, color="#555555")
    path = folder / CURVES if at_end or (folder / CURVES).exists() else folder / "curves_so_far.png"
    figure.savefig(path, dpi=120)
    return path


def _named(series: dict[str, Series], kind: str, metric: str) -> Series:
    """Return a metric by our name for it, train/loss, by a user's, train_loss, or with the end that Lightning gives."""
    names = (f"{kind}{sign}{metric}{end}" for end in ("", "_epoch") for sign in "/_")
    return next((series[name] for name in names if name in series), [])


def _plot(axes: Axes, values: Series, color: str, label: str) -> None:
    if values:
        marker = "o" if len(values) <= 60 else None
        axes.plot(*zip(*values, strict=True), marker=marker, markersize=3.5, color=color, label=label)


def _plot_learning_rates(axes: Axes, rates: list[Series]) -> None:
    """Plot those of all parameter groups on an axis of their own at the right. The legend of ``axes`` names it."""
    right = axes.twinx()
    for values in rates:
        right.plot(*zip(*values, strict=True), color=RATE_COLOR, linewidth=1, linestyle="--")
    right.set_ylim(bottom=0)
    right.tick_params(labelsize=8, colors=RATE_COLOR)
    right.spines["top"].set_visible(False)
    axes.plot([], [], color=RATE_COLOR, linewidth=1, linestyle="--", label="learning rate (right)")


def _shade(axes: Axes, intervals: list[Phase]) -> None:
    named: set[str] = set()
    for start, end, is_global in intervals:
        kind = "global" if is_global else "local"
        label = None if kind in named else f"batch norm: {kind} statistics"
        named.add(kind)
        axes.axvspan(start, end, color=COLORS[kind], alpha=0.22, linewidth=0, label=label)


def main() -> None:
    """Plot a run again, and print the path of the plot."""
    parser = argument_parser("recipes/curves.py", "Plot a run from its metrics.csv.")
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    try:
        print(draw_curves(run_dir, at_end=False))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
