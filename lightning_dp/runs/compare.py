"""Compare the jobs of a sweep: a table and a plot over strategies, with the spread over seeds.

lightning-dp-compare runs/digits_resnet20/sweep_DATE
lightning-dp-compare SWEEP_DIR --metric val/acc --accuracy 0.95

Jobs that differ only in their seed are one row: the median over seeds, and the minimum to maximum. Jobs that have not
finished are counted as such, and have no result. The folder gets compare.md and compare.png. To count bytes, the models
that the jobs' configurations name are built, which runs code that these name. For a sweep of somebody whom you do not
trust, use --metrics-only: then nothing is built.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from lightning_dp.planner.plots import colors_of
from lightning_dp.runs.checkpoints import CONFIGURATION, CURVES, METRICS, OF_A_RUN
from lightning_dp.runs.command_line import argument_parser, hydra_of, message_of
from lightning_dp.runs.metrics import IMAGES_PER_S, IS_GLOBAL, TRAIN_S, rows_of, steps_of
from lightning_dp.runs.traffic import bytes_per_step
from lightning_dp.runs.validation import resolved_part

log = logging.getLogger("compare")

TESTED = "test/acc"
DEFAULT_METRICS = ("val/acc", "train/acc")
LOSS = re.compile("loss|error|(?<![a-z])err(?![a-z])")  # in the name of a metric that is best where it is lowest
LEAST_SPAN = 0.02  # of the accuracy's axis
OVERRIDES = ".hydra/overrides.yaml"  # in the folder of a job
CONTINUED = {f"ckpt_path={requested}" for requested in OF_A_RUN}  # a job continues its own checkpoint

Points = list[tuple[float, float]]  # (seconds of training, metric)


@dataclass(frozen=True)
class Job:
    """What one job of a sweep found.

    Attributes:
        label: its overrides that other jobs of the sweep do not share, without the seed.
        finished: it came to its end.
        accuracy: what the jobs are compared by, at its last step; None if the job has not finished, or if it is NaN.
        images_per_s: training images per second, the mean over the epochs but the first, which warms up.
        global_share: share of the steps with global statistics; None without AGBN.
        num_bytes: bytes that a rank sends in a step, by calculation; None if `bytes_per_step` cannot say.
        curve: the metric over the time of training, which within an epoch is taken to pass evenly over its steps.
        lower_is_better: of this metric.
    """

    label: str
    finished: bool
    accuracy: float | None
    images_per_s: float | None
    global_share: float | None
    num_bytes: float | None
    curve: Points
    lower_is_better: bool = False

    def time_to(self, accuracy: float) -> float | None:
        """Return the seconds of training until the metric had reached ``accuracy``, or None if it never did."""
        return next((seconds for seconds, value in self.curve if self._is_as_good(value, accuracy)), None)

    def best(self) -> float | None:
        """Return the best value of the metric, or None if there is none."""
        return (min if self.lower_is_better else max)((value for _, value in self.curve), default=None)

    def _is_as_good(self, value: float, other: float) -> bool:
        return value <= other if self.lower_is_better else value >= other


def read_sweep(
    folder: Path, metric: str, result: str = TESTED, count_bytes: bool = True, mode: str | None = None
) -> list[Job]:
    """Return the jobs of a sweep, in order, also those that have not finished.

    Args:
        folder: of the sweep.
        metric: of the curves.
        result: metric that the jobs are compared by.
        count_bytes: build the models that the configurations name, to count the bytes that a rank sends.
        mode: ``"min"`` or ``"max"``, which values of ``metric`` are better. None: ``optimized_mode`` of a job if it is
            its ``optimized_metric``, else the least of what is called a loss or an error.

    Raises:
        FileNotFoundError: there are none with metrics.
        ValueError: a file is damaged.
    """
    folders = _job_folders(folder)
    overrides = [_overrides(path / OVERRIDES) for path in folders]
    shared = set.intersection(*map(set, overrides))
    jobs = []
    for path, own in zip(folders, overrides, strict=True):
        different = [text for text in own if text not in shared and text not in CONTINUED]
        jobs.append((path, " ".join(text for text in different if not text.startswith("seed="))))
    # One of several rows may have no overrides of its own: the defaults.
    empty = "defaults" if any(label for _, label in jobs) else "all jobs"
    return [_read_job(path, label or empty, metric, result, count_bytes, mode) for path, label in jobs]


def _overrides(path: Path) -> list[str]:
    """Return the overrides of a job, spelled as Hydra spells them in a sweep. Its folder may have been run singly."""
    texts = list(map(str, _load(path)))
    with naming_damage(path):
        parsed = OverridesParser.create().parse_overrides(texts)
        return [f"{each.get_key_element()}={each.get_value_element_as_str()}" for each in parsed]


def _job_folders(folder: Path) -> list[Path]:
    found, metrics = (list(folder.glob(f"*/{name}")) for name in (OVERRIDES, METRICS))
    if not found and not metrics and (folder / "multirun.yaml").exists():  # hydra.sweep.subdir may have several parts
        found, metrics = (list(folder.rglob(name)) for name in (OVERRIDES, METRICS))
    paths = [path.parents[1] for path in found]
    # A copy by a pattern such as * has no hidden folders. Left out, the job would be missing in its row.
    if lost := sorted(path.parent for path in metrics if set(paths).isdisjoint(path.parents)):
        raise ValueError(
            f"{lost[0]} has a {METRICS} and no {OVERRIDES}, which says what it ran; copy the hidden folder, too, or "
            "move the job out of the sweep's folder"
        )
    if not any((path / METRICS).exists() for path in paths):
        raise FileNotFoundError(f"{folder} has no jobs with a metrics.csv; give the folder of a sweep, sweep_DATE")
    return sorted(paths, key=lambda path: [(len(part), part) for part in path.relative_to(folder).parts])


def choose_metrics(folder: Path, wanted: str | None) -> tuple[str, str]:
    """Return the metric of the curves, and what the jobs are compared by.

    The first is ``wanted``; None stands for val/acc or, where no job validates, train/acc. The second is test/acc or,
    where no job tests, the first.

    Raises:
        FileNotFoundError: there are no jobs.
        ValueError: no job of the sweep has the metric.
    """
    folders = _job_folders(folder)
    logged = {name for path in folders for row in _rows(path, _load(path / CONFIGURATION)) for name in row}
    for metric in DEFAULT_METRICS if wanted is None else (wanted,):
        if metric in logged:
            return metric, TESTED if TESTED in logged else metric
    known = ", ".join(sorted(logged - {"epoch", "step"}))
    if wanted is None:
        raise ValueError(f"no job of {folder} has logged {' or '.join(DEFAULT_METRICS)}; give --metric one of {known}")
    raise ValueError(f"--metric {wanted} was logged by no job of {folder}; use one of {known}")


def _rows(folder: Path, config: Any) -> list[dict[str, str]]:
    """Return the rows of a job, but no later test in its folder (train=false), which may be of any weights."""
    with naming_damage(folder / CONFIGURATION):
        trains = config.get("train", True)
    with naming_damage(folder / METRICS):
        kept: list[dict[str, str]] = []
        has_ended = False  # the first epoch
        for row in rows_of(folder):
            # Lightning logs a later test with step 0. Its metrics may have any names.
            if not (trains and row["step"] == "0" and (has_ended or TESTED in row)):
                kept.append(row)
            has_ended |= TRAIN_S in row
        return kept


def _values(rows: Sequence[dict[str, str]], name: str) -> dict[int, float]:
    """Return the values of a metric by their steps."""
    return {step: float(row[name]) for step, row in zip(steps_of(rows), rows, strict=True) if name in row}


def _global_share(rows: Sequence[dict[str, str]]) -> float | None:
    """Return the share of the steps with global statistics; None without AGBN, which logs the share of each epoch."""
    shares = _values(rows, IS_GLOBAL)
    if not shares:
        return None
    # Steps count from 0. Epochs may differ in length, and those before a continuation may have been without AGBN.
    lasts = sorted(shares.keys() | _values(rows, TRAIN_S).keys())
    return sum((last - before) * shares.get(last, 0.0) for before, last in pairwise([-1, *lasts])) / (lasts[-1] + 1)


def _load(path: Path) -> Any:
    with naming_damage(path):
        # With the interpolations as they are: those of an override name values of its job.
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Let every error of reading a file of a job name it, as a ValueError of one line."""
    try:
        yield
    except Exception as error:  # of YAML, OmegaConf or csv, or of a value that is not what it should be
        reason = " ".join(message_of(error).split())
        raise ValueError(f"{path} is damaged ({reason}); move its job out of the sweep's folder") from error


def _read_job(folder: Path, label: str, metric: str, result: str, count_bytes: bool, mode: str | None) -> Job:
    config = _load(folder / CONFIGURATION)
    rows = _rows(folder, config)

    # The plot is drawn at the end of a run, and removed where a run begins or continues.
    finished = (folder / CURVES).exists()
    with naming_damage(folder / METRICS):
        seconds, logged = sorted(_values(rows, TRAIN_S).items()), sorted(_values(rows, metric).items())
        share = _global_share(rows)
        rates = list(_values(rows, IMAGES_PER_S).values())
        found = _values(rows, result) if finished else {}
        reached = found[max(found)] if found else math.nan
    if mode is None:
        with naming_damage(folder / CONFIGURATION):
            is_optimized, optimized_mode = metric == config["optimized_metric"], config["optimized_mode"]
        usual = "min" if LOSS.search(metric) else "max"
        mode = optimized_mode if is_optimized else usual
    # Steps count from 0. The time is logged where an epoch ends, and a validation may come within one.
    ends, times = [0, *(step + 1 for step, _ in seconds)], [0.0, *(value for _, value in seconds)]
    return Job(
        label=label,
        finished=finished,
        # NaN has no place in an order, so that a median of it would be any value.
        accuracy=None if math.isnan(reached) else reached,
        images_per_s=mean(rates[1:] or rates) if rates else None,
        global_share=share,
        num_bytes=_num_bytes(config, folder, share or 0.0) if count_bytes else None,
        lower_is_better=mode == "min",
        curve=[
            (float(np.interp(step + 1, ends, times)), value)
            for step, value in logged
            if step < ends[-1] and not math.isnan(value)
        ],
    )


def _num_bytes(config: Any, folder: Path, global_share: float) -> float | None:
    try:
        with hydra_of(folder):
            # The folder of a run may have been moved since.
            cfg = OmegaConf.create(config | {"run_dir": str(folder)})
            found = resolved_part(cfg, ("data", "model", "trainer", "strategy", "callbacks"))
        return bytes_per_step(found, global_share)
    except Exception as error:  # a model of the user's can raise any error, or is not importable here
        log.warning("bytes are not counted: the model of %s cannot be built (%s)", folder, message_of(error))
        return None


def common_accuracy(jobs: Sequence[Job]) -> float | None:
    """Return the best value of the metric that every job has reached; if some have finished, every one of them."""
    compared = [job for job in jobs if job.finished] or jobs
    best = [value for job in compared if (value := job.best()) is not None]
    worst = max if compared[0].lower_is_better else min
    return worst(best) if len(best) == len(compared) else None


def by_label(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Return the jobs by label, in order."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.label, []).append(job)
    return groups


def table(jobs: Sequence[Job], metric: str, accuracy: float | None, result: str = TESTED) -> str:
    """Return a Markdown table with a row for each label."""
    columns: list[tuple[str, str, Callable[[Job], float | None]]] = [
        (result, ".4f", lambda job: job.accuracy),
        ("images/s", ".0f", lambda job: job.images_per_s),
        ("global steps (%)", ".0f", lambda job: None if job.global_share is None else 100 * job.global_share),
        ("MB sent per rank and step", ".3f", lambda job: None if job.num_bytes is None else job.num_bytes / 1e6),
    ]
    if accuracy is not None:
        target, relation = accuracy, "<=" if jobs[0].lower_is_better else ">="
        columns.append((f"s of training to {metric} {relation} {target:.4g}", ".1f", lambda job: job.time_to(target)))
    header = ["", "jobs", *(title for title, _, _ in columns)]
    rows = [header, ["---"] * len(header)]
    for label, group in by_label(jobs).items():
        cells = [_spread([value(job) for job in group], spec) for _, spec, value in columns]
        unfinished = sum(not job.finished for job in group)
        count = f"{len(group)} ({unfinished} unfinished)" if unfinished else str(len(group))
        rows.append([label, count, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spread(values: Sequence[float | None], spec: str) -> str:
    """Return the median with minimum and maximum, and how many jobs have none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, middle, high = (format(value, spec) for value in (min(known), median(known), max(known)))
    text = middle if low == high else f"{middle} ({low} to {high})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} without"


def draw(jobs: Sequence[Job], metric: str, path: Path, result: str = TESTED) -> None:
    """Plot the metric over the time of training, dotted for jobs that have not finished, and the result of each job."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    curves, final = figure.subplots(1, 2)
    groups = by_label(jobs)
    for place, ((label, group), color) in enumerate(zip(groups.items(), colors_of(groups), strict=True)):
        name: str | None = label  # in the legend once
        for job in group:
            if job.curve:
                style = "-" if job.finished else ":"
                curves.plot(*zip(*job.curve, strict=True), style, color=color, marker=".", alpha=0.8, label=name)
                name = None
        known = [job.accuracy for job in group if job.accuracy is not None]
        final.plot([place] * len(known), known, "o", color=color, alpha=0.5)
        if known:
            final.hlines(median(known), place - 0.3, place + 0.3, color=color)
    curves.set(title=f"{metric} of each job", xlabel="time of training (rank 0)")
    curves.xaxis.set_major_formatter("{x:g} s")
    low, high = final.get_ylim()
    if high - low < LEAST_SPAN:  # else a difference of nothing would fill the plot
        final.set_ylim((low + high - LEAST_SPAN) / 2, (low + high + LEAST_SPAN) / 2)
    final.set(title=f"{result} at the end: each job, and the median", xlim=(-0.6, len(groups) - 0.4))
    final.set_xticks(range(len(groups)), [label.replace(" ", "\n") for label in groups], fontsize=8)
    for axes in (curves, final):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if curves.get_legend_handles_labels()[0]:
        curves.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print the table, and write it and the plot to the sweep's folder."""
    parser = argument_parser("lightning-dp-compare", __doc__)
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("--metric", help="of the curves and of the time to accuracy (default: val/acc, else train/acc)")
    parser.add_argument("--mode", choices=["min", "max"], help="which values of --metric are better")
    parser.add_argument("--accuracy", type=float, help="of --metric (default: the best that every job has reached)")
    parser.add_argument("--metrics-only", action="store_true", help="build no model, and count no bytes")
    arguments = parser.parse_args()
    try:
        if arguments.accuracy is not None and not math.isfinite(arguments.accuracy):
            raise ValueError(f"--accuracy {arguments.accuracy} must be finite")
        metric, result = choose_metrics(arguments.sweep_dir, arguments.metric)
        jobs = read_sweep(arguments.sweep_dir, metric, result, not arguments.metrics_only, arguments.mode)
        if arguments.metric and not any(job.curve for job in jobs):  # else it would seem that no job has reached it
            reason = "no job has logged it beside time/train_s, before its training ended"
            log.warning("--metric %s: the plot has no curve of it, and no time to it is known: %s", metric, reason)
        accuracy = common_accuracy(jobs) if arguments.accuracy is None else arguments.accuracy
        text = table(jobs, metric, accuracy, result)
        print(text, flush=True)  # before it is written: the folder may be somebody else's, and closed to this user
        (arguments.sweep_dir / "compare.md").write_text(text + "\n")
        draw(jobs, metric, arguments.sweep_dir / "compare.png", result)
        print(f"\nwritten to {arguments.sweep_dir / 'compare.md'} and compare.png", flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
