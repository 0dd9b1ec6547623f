from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch

from lightning_dp.runs import metrics
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


@pytest.mark.parametrize(
    "rows",
    [
        "0,4,2.0,,\n0,4,,2.5,\n1,7,,1.5,\n",  # the end of a run by max_steps
        "0,4,2.0,,\n0,2,,2.5,\n1,6,,1.5,\n",  # a module that logs its loss in steps
        "0,4,2.0,,\n1,9,1.0,,\n,9,,,3.0\n2,10,,,\n",  # one that logs no train/loss; the test's row is the last
    ],
)
def test_an_epoch_is_an_epoch_whatever_the_last_row_is_of(tmp_path, rows):
    (tmp_path / "metrics.csv").write_text(f"epoch,step,val/loss,train/loss,other\n{rows}")
    assert read_metrics(tmp_path)["val/loss"][0] == (1.0, 2.0)


@pytest.mark.parametrize("step", ["{epoch}", "{images}"])
def test_a_validation_has_its_place_whatever_the_module_logs_as_its_step(tmp_path, step):
    """Lightning names no epoch in such a row. The second epoch has two validations; the last row is the test's."""
    rows = "".join(
        f",{step},{{epoch}}.5,\n{{epoch}},{end},,1.0\n".format(epoch=epoch, images=64 * end)
        for epoch, end in ((0, 9), (1, 14), (1, 19))
    )
    (tmp_path / "metrics.csv").write_text(f"epoch,step,val/loss,train/loss\n{rows}2,20,0.1,\n")
    assert read_metrics(tmp_path)["val/loss"][:3] == [(1.0, 0.5), (1.5, 1.5), (2.0, 1.5)]


def test_epochs_may_have_fewer_and_fewer_steps(tmp_path):
    """As with GradientAccumulationScheduler."""
    ends = [(0, 99), (1, 199), (2, 224), (3, 249), (4, 254)]  # max_steps ends the run within the last one
    rows = "".join(f"{epoch},{step},1.0,\n" for epoch, step in ends)
    # The test's row comes last, in the default recipe.
    (tmp_path / "metrics.csv").write_text(f"epoch,step,train/loss,test/acc\n{rows}5,255,,1.0\n")
    assert [epoch for epoch, _ in read_metrics(tmp_path)["train/loss"]] == [1.0, 2.0, 3.0, 4.0, 4.2]


@pytest.mark.parametrize("losses", [("inf", "nan"), ("1.0", "inf")])
def test_a_run_that_has_diverged_has_a_plot(tmp_path, losses):
    rows = "".join(f"{epoch},{4 * epoch + 3},{loss},{loss}\n" for epoch, loss in enumerate(losses))
    (tmp_path / "metrics.csv").write_text(f"epoch,step,train/loss,val/loss\n{rows}")
    assert draw_curves(tmp_path).is_file()


def test_learning_rates_of_several_groups_have_one_scale(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").write_text("epoch,lr-SGD/head,lr-SGD/trunk,step\n0,0.1,0.4,4\n1,0.01,0.04,9\n")
    drawn = []
    monkeypatch.setattr(metrics.Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    draw_curves(tmp_path)
    _, _, right = drawn[0].axes
    assert [list(line.get_ydata()) for line in right.lines] == [[0.1, 0.01], [0.4, 0.04]]


def test_metrics_may_have_the_names_that_users_give_them(tmp_path, monkeypatch):
    rows = "0,4,,1.5,\n0,4,,,0.5\n1,5,0.7,,\n"
    (tmp_path / "metrics.csv").write_text(f"epoch,step,test_acc,train_loss_epoch,val_acc\n{rows}")
    drawn = []
    monkeypatch.setattr(metrics.Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    draw_curves(tmp_path)
    shown = [{line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in drawn[0].axes]
    assert shown == [{"train": [1.5]}, {"validation": [0.5], "test, at the end: 0.7000": [0.7, 0.7]}]


def test_a_tensor_that_a_module_logs_directly_is_a_number(tmp_path):
    file = metrics.MetricsFile(str(tmp_path))
    file.log_metrics({"own": torch.tensor(0.5)}, step=3)
    assert metrics.rows_of(tmp_path) == [{"own": "0.5", "step": "3"}]
    assert draw_curves(tmp_path).exists()


@pytest.mark.parametrize("step", [3.0, torch.tensor(3)])
def test_the_step_that_a_module_logs_with_need_not_be_an_integer_of_python(tmp_path, step):
    """The plot at the end of training could not read it."""
    metrics.MetricsFile(str(tmp_path)).log_metrics({"own": 0.5}, step=step)
    assert metrics.rows_of(tmp_path) == [{"own": "0.5", "step": "3"}]


def test_a_module_finds_its_folder_and_logs_hyperparameters_as_with_lightnings_loggers(tmp_path):
    logger = metrics.MetricsFile(str(tmp_path))
    assert logger.log_dir == str(tmp_path)
    logger.log_hyperparams(Namespace(width=3))
    logger.log_hyperparams({"rate": np.float64(0.5), "name": np.str_("net")})
    assert (tmp_path / "hparams.yaml").read_text() == "width: 3\nrate: 0.5\nname: net\n"


def test_a_text_that_a_module_logs_directly_is_not_drawn(tmp_path):
    file = metrics.MetricsFile(str(tmp_path))
    file.log_metrics({"phase": "warm-up", "train/loss": 0.5}, step=3)
    assert read_metrics(tmp_path).keys() == {"train/loss"}
    assert metrics.last_values(metrics.rows_of(tmp_path)) == {"train/loss": 0.5}


def test_the_mean_of_what_is_logged_of_each_step_too_has_its_own_name(tmp_path):
    metrics.MetricsFile(str(tmp_path)).log_metrics({"loss_step": 3.0, "loss_epoch": 2.0, "one_step": 1.0}, step=0)
    expected = {"loss_step": 3.0, "loss_epoch": 2.0, "loss": 2.0, "one_step": 1.0}
    assert metrics.last_values(metrics.rows_of(tmp_path)) == expected


def test_a_program_for_tables_may_put_a_mark_before_the_first_column(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,step,train/loss\n0,3,1.0\n", encoding="utf-8-sig")
    assert metrics.rows_of(tmp_path) == [{"epoch": "0", "step": "3", "train/loss": "1.0"}]


def test_a_file_with_other_signs_between_its_columns_is_an_error(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch;step;train/loss\n0;3;1.0\n")
    with pytest.raises(ValueError, match="metrics.csv does not begin with the names of its columns"):
        read_metrics(tmp_path)


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


@pytest.mark.ci
def test_a_plot_of_a_run_that_goes_on_does_not_mark_it_as_ended(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").write_text(HEADER + "".join(ROWS))
    monkeypatch.setattr("sys.argv", ["curves.py", str(tmp_path)])
    main()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "curves_so_far.png"}
    draw_curves(tmp_path).write_bytes(b"")
    main()
    assert (tmp_path / "curves.png").read_bytes(), "it is drawn again"
