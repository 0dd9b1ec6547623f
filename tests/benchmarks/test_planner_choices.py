"""The benchmark of the planner's choices: its cells, its figures, and a rerun that measures only what is missing."""

from __future__ import annotations

import argparse
import json

import planner_choices as benchmark
import pytest
import torch
from support import planner_cells as cells
from support import planner_report as figures
from support.emulated_compute import TimedLinear, Timing
from support.planner_batches import batch_table, lost_images

from lightning_dp.planner import METHODS

TIMING = Timing(0.1, 0.05, 0.1)
RESULT = {
    "chosen": "layered_sgd_load",
    "predicted_s": {"ddp": 0.44, "layered_sgd_load": 0.3, "layered_sgd_step": 0.31, "layered_sgd_step_int8": 0.1},
    "step_s": {
        "ddp": [0.5, 0.3, 0.4],
        "layered_sgd_load": [0.36],
        "layered_sgd_step": [0.30],
        "layered_sgd_step_int8": [0.2],  # not exact, so that it is no choice
    },
}


def test_twenty_cells_have_all_rates_hosts_and_models():
    found = cells.all_cells()
    assert len(set(found)) == 20
    assert {cell.rate for cell in found} == {"100mbit", "300mbit", "1gbit", "3gbit", "10gbit"}
    assert {cell.num_hosts for cell in found} == {2, 4, 8}
    for name in cells.MODELS:
        own = [cell for cell in found if cell.model == name]
        assert len({cell.rate for cell in own}) == 5
        assert len({(cell.num_hosts, cell.per_host) for cell in own}) == 4
    assert [cells.cell_of(cell.name) for cell in found] == found


@pytest.mark.parametrize("model", cells.MODELS)
def test_models_have_ten_megabytes_and_one_of_them_a_head(model):
    with torch.device("meta"):
        module = cells.CellModule(model, TIMING)
    assert 10e6 < 4 * sum(parameter.numel() for parameter in module.parameters()) < 12e6
    head = sum(parameter.numel() for parameter in module.head.parameters())
    rows = cells.cell_methods(cells.Cell(model, 4, 1, "1gbit"))
    assert ("hybrid_c" in rows) == (4 * head > 5e6) == (model == "head")
    assert set(rows) < set(METHODS)
    assert "layered_sgd_step_sharded" not in rows, "with one rank on a host it is the leader's"
    assert "layered_sgd_step_sharded" in cells.cell_methods(cells.Cell(model, 2, 2, "1gbit"))


def test_a_layer_takes_its_part_of_the_time():
    module = cells.CellModule("head", Timing(0.0, 0.01, 0.02))
    layers = [layer for layer in module.trunk if isinstance(layer, TimedLinear)]
    assert [layer._timing.forward_s for layer in layers] == pytest.approx([0.002] * 5)


def test_the_best_is_the_fastest_that_may_be_chosen():
    assert figures.best_of(RESULT) == "layered_sgd_step"
    assert figures.loss_of(RESULT) == pytest.approx(0.36 / 0.30 - 1)
    errors = figures.errors_of(RESULT)
    assert errors["ddp"] == pytest.approx(0.1), "of the median"
    assert errors["layered_sgd_step_int8"] == pytest.approx(-0.5)
    assert figures.mean_error([RESULT]) == pytest.approx((0.1 + 1 / 6 + 1 / 30 + 0.5) / 4)
    assert figures.mean_error([RESULT], figures.NOT_COUNTED) == pytest.approx((0.1 + 1 / 6 + 1 / 30) / 3)
    table = figures.cell_table({"a": RESULT, "b": {**RESULT, "chosen": "layered_sgd_step"}})
    assert "Within 5 % of the best: 1 of 2 cells." in table


def test_slower_links_take_longer_to_measure():
    times = [cells.estimated_s(cells.Cell("even", 4, 2, rate), TIMING, 12, 2) for rate in cells.RATES]
    assert times == sorted(times, reverse=True)
    assert times[-1] > cells.START_S + 12 * 2 * 10 * 0.15


def test_a_rerun_measures_what_is_missing_or_was_measured_with_other_options(tmp_path, monkeypatch):
    jobs = []

    def measured(script, job, folder):
        jobs.append(job.options.cell)
        return [RESULT]

    monkeypatch.setattr(benchmark, "measure_on_hosts", measured)
    arguments = benchmark.parser().parse_args([])
    first = cells.all_cells()[0]
    result = benchmark.measure_cell(arguments, first, tmp_path)
    assert json.loads((tmp_path / "cells" / f"{first.name}.json").read_text()) == result
    assert benchmark.measure_cell(arguments, first, tmp_path) == result
    assert jobs == [first.name]
    changed = argparse.Namespace(**{**vars(arguments), "steps": 12})
    benchmark.measure_cell(changed, first, tmp_path)
    assert jobs == [first.name, first.name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cells", "even-2x2"], "'even-2x2' is no cell; use one like"),
        (["--cells", "vgg-2x2-1gbit"], "use a model of even, back, head"),
        (["--cells", "even-1x4-1gbit"], "two hosts or more"),
        (["--cells", "even-2x2-fast"], "is no cell; use one like"),
        (["--steps", "6"], "--steps 6 is no multiple of 4"),
    ],
)
def test_mistakes_are_refused_by_name(options, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(options)
    assert message in capsys.readouterr().err


def test_the_list_says_how_long_it_takes(capsys):
    benchmark.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    assert lines[-1].startswith("all")


def test_the_batch_that_was_chosen_is_compared_with_the_fastest():
    results = {
        "bound_bytes": 4e8,
        "chosen": "16 plain",
        "chosen_by_sums": "8 plain",
        "predicted_images_per_s": {"8 plain": 90.0, "16 plain": 100.0},
        "summed_images_per_s": {"8 plain": 80.0, "16 plain": 70.0},
        "images_per_s": {"8 plain": [110.0, 100.0, 90.0], "16 plain": [97.0]},
        "planned_bytes": {"8 plain": 100e6, "16 plain": 190e6},
        "resident_bytes": {"8 plain": 100e6, "16 plain": 200e6},
    }
    assert lost_images(results) == pytest.approx(0.03)
    assert "| 16 plain (chosen) | 70.0 | 100.0 | 97.0 (97.0-97.0) | 190.0 | 200.0 |" in batch_table(results)
    assert batch_table(results).endswith("loses 3.0% of the images/s. Sums of layers choose 8 plain.")
