"""Published throughputs, simulated with nothing fitted: what the page shows is what the simulation gives."""

from __future__ import annotations

from pathlib import Path

import planner_public_points as benchmark
import pytest
import torch
from support import public_points

from lightning_dp.models import ResNet50
from lightning_dp.planner import simulate

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "planner.md"


@pytest.fixture(scope="module")
def points() -> list[benchmark.Point]:
    return benchmark.all_points()


@pytest.mark.parametrize("table", [benchmark.summary_table, benchmark.spread_table, benchmark.point_table])
def test_the_page_has_the_simulations_figures(points, table):
    """A change of the simulation changes the page, too, and nobody can do the one without the other."""
    shown = PAGE.read_text().splitlines()
    assert [line for line in table(points).splitlines() if line not in shown] == []


def test_the_figures_depend_on_the_network(monkeypatch):
    """The twin: without it the page would be another one."""
    monkeypatch.setattr(public_points.Network, "all_reduce_s", lambda *_: 0.0)
    shown = PAGE.read_text().splitlines()
    lines = benchmark.point_table(benchmark.all_points()).splitlines()
    assert sum(line not in shown for line in lines) > len(lines) / 2


def test_every_figure_has_a_source_and_more_than_one_gpu():
    assert {series.source for series in public_points.SERIES} == set(public_points.SOURCES)
    assert all(num_gpus > 1 for series in public_points.SERIES for num_gpus in series.published)


def test_gradients_have_the_sizes_of_the_networks():
    """ResNet-50 as the recipes have it; VGG-16 has 138 million parameters (arXiv 1409.1556, Table 2)."""
    with torch.device("meta"):
        model = ResNet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == public_points.PARAMETERS["ResNet-50"]
    parameters = {name: sum(layer.parameters for layer in layers) for name, layers in public_points.LAYERS.items()}
    assert parameters["VGG-16"] == 138_357_544
    features_to_classes = 9217 * 4096 + 4097 * 4096 + 4097 * 1000
    assert parameters["AlexNet"] - features_to_classes == sum(
        filters * (weights + 1) for filters, weights in ((64, 363), (192, 1600), (384, 1728), (384, 3456), (256, 3456))
    )


def test_a_simulated_gpu_alone_has_the_published_throughput():
    """The simulation is given that figure, and so must return it."""
    for series in public_points.SERIES:
        network = series.machine.network(min(series.published))
        alone = simulate(series.workload(), network, 1, series.method)
        assert alone.images_per_s == pytest.approx(series.one_gpu), series


def test_hours_of_table_1_give_its_speedups():
    (series,) = [series for series in public_points.SERIES if series.source == "Krizhevsky"]
    speedups = {num_gpus: rate / series.one_gpu for num_gpus, rate in series.published.items()}
    assert speedups == pytest.approx({2: 1.95, 4: 3.74, 8: 6.25}, abs=0.005)


def test_without_overlap_the_ring_of_all_gradients_follows_the_step():
    (series,) = [s for s in public_points.SERIES if (s.what, s.model, s.one_gpu) == ("RDMA", "VGG-16", 130.9)]
    ring_s = 30 * 9.6e-6 + 30 / 16 * 4 * 138_357_544 / 3.125e9
    assert series.without_overlap(16) == pytest.approx(16 * 64 / (64 / 130.9 + ring_s))


def test_the_best_single_value_is_equally_far_from_both_ends():
    assert benchmark.least_error([0.8, 0.9, 1.0]) == pytest.approx(1 / 9)
    best = 0.8 * (1 + 1 / 9)
    assert best == pytest.approx(1.0 * (1 - 1 / 9))
