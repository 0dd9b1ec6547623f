"""The plots can be read: every column has a label, nothing lies over anything else, and every color has a legend."""

from __future__ import annotations

import itertools
from typing import Any

import all_reduce
import global_batch_norm_throughput
import hybrid_accuracy
import layered_sgd_overlap
import layered_sgd_throughput
import pytest
from support.bars import Bar, draw_bars
from support.data_parallel_methods import methods
from support.data_parallel_report import Measured, draw_step_times
from support.headless import pyplot
from support.host_jobs import Job
from support.hybrid_stages import COLORS, draw_step
from support.layered_sgd_parts import INTER_GROUP_ALL_REDUCE, WAIT
from support.spread import Spread, min_max


@pytest.fixture
def figures(monkeypatch) -> list[Any]:
    """The figures that are drawn, kept open until the test ends."""
    drawn: list[Any] = []
    plt = pyplot()
    close = plt.close
    monkeypatch.setattr(plt, "close", drawn.append)
    yield drawn
    close("all")


def bar_extents(axes: Any) -> list[tuple[float, float]]:
    """Where each bar begins and ends on the axis of the labels."""
    return sorted((bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches)


def assert_bars_lie_apart(axes: Any) -> None:
    for (_, end), (begin, _) in itertools.pairwise(bar_extents(axes)):
        assert end < begin


def labels(axes: Any) -> list[str]:
    """The labels of the bars. Panels side by side share them, and the left one alone draws them."""
    left = axes.get_subplotspec().get_gridspec()[axes.get_subplotspec().rowspan.start, 0]
    owner = next(other for other in axes.figure.axes if other.get_subplotspec() == left)
    return [tick.get_text() for tick in owner.get_yticklabels()]


def legend_labels(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_bars_lie_apart_and_each_has_its_label_and_its_bound(figures, tmp_path):
    bars = [Bar("ours", min_max([1.0, 2.0]), bound=0.5), Bar("theirs", min_max([2.0]), bound=1.5, hatched=True)]
    draw_bars({"a": bars, "b": bars, "c": bars}, tmp_path / "plot.png", title="t", axis="ms", hatched_label="not exact")
    (figure,) = figures
    for axes in figure.axes:
        assert labels(axes) == ["ours", "theirs"]
        assert_bars_lie_apart(axes)
        assert axes.get_xscale() == "linear"
        assert axes.get_xlim()[0] == 0
        assert len(axes.collections[-1].get_segments()) == 2  # the bounds
    assert legend_labels(figure) == ["bound", "not exact"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_bar_is_at_the_top(figures, tmp_path):
    draw_bars({"": [Bar("first", min_max([1.0])), Bar("last", min_max([1.0]))]}, tmp_path / "p.png", title="", axis="")
    bottom, top = figures[0].axes[0].get_ylim()
    assert bottom > top


def test_panels_with_different_bars_have_labels_of_their_own(figures, tmp_path):
    panels = {"two": [Bar("a", min_max([1.0])), Bar("b", min_max([1.0]))], "one": [Bar("c", min_max([1.0]))]}
    draw_bars(panels, tmp_path / "p.png", title="", axis="")
    two, one = figures[0].axes
    assert [tick.get_text() for tick in two.get_yticklabels()] == ["a", "b"]
    assert [tick.get_text() for tick in one.get_yticklabels()] == ["c"]


def test_layered_sgd_throughput_marks_what_is_not_exact(figures, tmp_path):
    options = layered_sgd_throughput.parser().parse_args([])
    rows = methods(2)
    result = {
        "step_s": {name: [0.3 + 0.01 * place, 0.31 + 0.01 * place] for place, name in enumerate(rows)},
        "difference": {name: [1e-6] for name in rows},
        "shapes": [[1024, 1024], [1024]],
    }
    jobs = [Job(options, 2, 2, rate) for rate in ("200mbit", "1gbit", "none")]
    measured = {job.network: Measured(job, result, local_s=0.25) for job in jobs}
    draw_step_times(measured, rows, tmp_path / "plot.png", "title")
    (figure,) = figures
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["200 Mbit/s", "1 Gbit/s", "unlimited rate"]
    for axes in shown:
        assert labels(axes) == list(rows)
        assert_bars_lie_apart(axes)
        hatched = [bool(bar.get_hatch()) for bar in sorted(axes.patches, key=lambda bar: bar.get_y())]
        assert hatched == [bool(method.departs) for method in rows.values()]
    assert "not exact" in legend_labels(figure)


@pytest.mark.parametrize("megabytes", [[16], [1, 16]])
def test_all_reduce_shows_every_method_at_every_number_of_hosts(figures, tmp_path, megabytes):
    records = [
        {"num_hosts": hosts, "num_bytes": size * 2**20, "method": method, "bound_s": 0.9, "seconds": [1.0, 1.01]}
        for hosts in (2, 4, 8)
        for size in megabytes
        for method in all_reduce.METHODS
    ]
    all_reduce.draw(records, "200mbit", tmp_path / "plot.png")
    shown = [axes for axes in figures[0].axes if axes.get_visible()]
    expected = ["2 hosts, 16 MB", "4 hosts, 16 MB", "8 hosts, 16 MB"] + ["8 hosts, 1 MB"] * (len(megabytes) - 1)
    assert [axes.get_title() for axes in shown] == expected
    for axes in shown:
        assert labels(axes) == list(all_reduce.METHODS)
        assert_bars_lie_apart(axes)


def test_hybrid_accuracy_has_a_tick_under_every_column(figures, tmp_path):
    rows = [
        {"batch": list(batch), "seed": seed, "test error": 0.3 + 0.01 * seed}
        for factor in (4, 8)
        for batch in hybrid_accuracy.batches_of(64, factor).values()
        for seed in (0, 1)
    ]
    hybrid_accuracy.draw(rows, 64, [4, 8], tmp_path / "plot.png")
    for axes, large in zip(figures[0].axes, (256, 512), strict=True):
        ticks = [tick.get_text() for tick in axes.get_xticklabels()]
        assert ticks == [
            f"large batch\n({large}, {large})",
            f"variable batch\n({large}, 64)",
            "small batch\n(64, 64)",
        ]
        points = [float(x) for dots in axes.collections for x in dots.get_offsets()[:, 0]] if axes.collections else []
        assert {0.0, 1.0, 2.0} <= set(points)


def test_a_ratio_to_local_statistics_shows_the_papers_beside_ours(figures, tmp_path):
    times = {"local": [1.0, 1.0], "global": [1.25, 1.2], "adaptive": [1.1, 1.1]}
    results = [{"ranks": ranks, "local_batch_size": 32, "times": times} for ranks in (2, 4)]
    global_batch_norm_throughput.draw(results, tmp_path / "plot.png")
    for axes in figures[0].axes:
        assert labels(axes) == ["global", "adaptive", "global, paper (GPUs)"]


def test_every_color_of_the_hybrids_timeline_and_the_empty_rows_are_in_the_legend(figures, tmp_path):
    ranks = [
        [
            ("trunk forward", 0.0, 1.0),
            ("features", 1.0, 3.0),
            ("wait for features", 1.5, 3.0),
            ("head", 3.0, 6.0),
            ("hidden activations", 4.0, 4.5),
            ("wait for hidden activations", 4.0, 4.5),
            ("trunk backward", 6.5, 8.0),
        ]
    ] * 2
    draw_step(ranks, tmp_path / "plot.png", "title")
    (figure,) = figures
    assert legend_labels(figure) == [*COLORS, "nothing on its way"]
    # From 3 to 6 the rank computes in the head; from 6 to 6.5 nobody says what it does: that gap has a color, too.
    own_row = [bar for bar in figure.axes[0].patches if round(bar.get_y() + bar.get_height() / 2) == 0]
    covered = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in own_row[1:])
    assert any(begin == pytest.approx(6.0) and end == pytest.approx(6.5) for begin, end in covered)


def test_every_color_of_layered_sgds_timeline_and_the_idle_communicator_are_in_the_legend(figures, tmp_path):
    steps = range(5)
    stages = [("load", 10.0 * step, 10.0 * step + 4) for step in steps]
    stages += [("forward", 10.0 * step + 4, 10.0 * step + 6) for step in steps]
    stages += [(INTER_GROUP_ALL_REDUCE, 10.0 * step + 1, 10.0 * step + 5) for step in steps]
    stages += [(WAIT, 10.0 * step + 4, 10.0 * step + 5) for step in steps]
    layered_sgd_overlap.draw({0: stages}, "title", tmp_path / "plot.png")
    assert legend_labels(figures[0]) == [*layered_sgd_overlap.COLORS, "communicator has nothing to do"]
    # The all-reduce takes 4 s a step, and the rank waits for 1 s of it.
    assert layered_sgd_overlap.hidden_shares({0: stages, 1: []}) == {0: pytest.approx(0.75)}


def test_whiskers_end_at_the_spread(figures, tmp_path):
    draw_bars({"": [Bar("a", Spread(2.0, 1.5, 4.0))]}, tmp_path / "plot.png", title="", axis="")
    whisker = figures[0].axes[0].collections[0].get_segments()[0]
    assert [point[0] for point in whisker] == [1.5, 4.0]
