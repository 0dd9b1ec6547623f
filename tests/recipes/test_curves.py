from __future__ import annotations

import pytest

from lightning_dp.runs.metrics import draw_curves, main, phases, read_metrics

HEADER = "agbn/is_global,epoch,lr-SGD,step,test/acc,train/acc,train/loss,val/acc,val/loss\n"
ROWS = (
    ",,0.1,0,,,,,\n",
    ",0,,4,,,,0.3,2.0\n",
    "1.0,0,,4,,0.4,1.5,,\n",
    ",,0.05,5,,,,,\n",
    "1.0,1,,9,,0.7,0.5,,\n",
    "0.0,2,,14,,0.9,0.2,,\n",
    ",3,,15,0.8,,,,\n",
)


def test_columns_become_series_over_epochs(tmp_path):
    (tmp_path / "metrics.csv").write_text(HEADER + "".join(ROWS))
    series = read_metrics(tmp_path)
    assert series["train/loss"] == [(1.0, 1.5), (2.0, 0.5), (3.0, 0.2)]
    assert series["val/acc"] == [(1.0, 0.3)]
    assert series["lr-SGD"] == [(0.2, 0.1), (1.2, 0.05)]


def test_a_last_row_that_was_cut_is_not_drawn(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,lr-SGD,step,train/loss\n0,0.1,3,1.0\n1,0.1")
    assert read_metrics(tmp_path) == {"lr-SGD": [(1.0, 0.1)], "train/loss": [(1.0, 1.0)]}
    assert draw_curves(tmp_path).exists()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 1, 0, 0], [(0, 2, True), (2, 4, False)]),
        ([0, 1, 1], [(0, 1, False), (1, 3, True)]),
        ([1], [(0, 1, True)]),
        ([], []),
    ],
)
def test_the_phases_of_batch_norm_are_found(values, expected):
    assert phases([(epoch + 1.0, value) for epoch, value in enumerate(values)]) == expected


@pytest.mark.parametrize("columns", ["all", "without batch norm's", "nothing"])
def test_a_plot_is_drawn_for_any_logged_columns(tmp_path, columns):
    text = {"all": HEADER + "".join(ROWS), "nothing": "epoch,step\n"}.get(columns)
    if text is None:
        text = HEADER.replace("agbn/is_global", "other") + "".join(ROWS)
    (tmp_path / "metrics.csv").write_text(text)
    assert draw_curves(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_a_run_that_goes_on_does_not_mark_it_as_ended(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").write_text(HEADER + "".join(ROWS))
    monkeypatch.setattr("sys.argv", ["curves.py", str(tmp_path)])
    main()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "curves_so_far.png"}
    draw_curves(tmp_path).write_bytes(b"")
    main()
    assert (tmp_path / "curves.png").read_bytes(), "it is drawn again"
