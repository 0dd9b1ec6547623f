"""One color for a method in all plots, under each of its names; labels at lines that do not overlap."""

from __future__ import annotations

import itertools

import pytest

from lightning_dp.planner import METHODS
from lightning_dp.planner.plots import COLORS, color_of, colors_of, label_lines


def test_each_method_of_a_plan_has_its_own_color():
    colors = [color_of(name) for name in METHODS]
    assert None not in colors
    assert len(set(colors)) == len(METHODS)


@pytest.mark.parametrize(
    "names",
    [
        ("ddp", "DDP", "strategy=ddp"),
        ("ddp_power_sgd", "DDP + PowerSGD rank 4"),
        ("layered_sgd_load", "layered SGD load, leader", "strategy=layered_sgd strategy.overlap=load"),
        ("layered_sgd_step", "layered SGD step, leader", "strategy=layered_sgd_single seed=1"),
        ("layered_sgd_step_int8", "layered SGD step, sharded, int8", "strategy=layered_sgd strategy.compression=int8"),
        ("hybrid_a", "hybrid a", "strategy=krizhevsky_hybrid"),
        ("hybrid_c", "hybrid c"),
        ("ddp_global_batch_norm", "global", "callbacks=agbn"),
        ("ddp_ring", "ring (ours)"),
        ("strategy=layered_fsdp", "layered FSDP step"),
    ],
)
def test_a_method_has_one_color_under_all_its_names(names):
    assert len({color_of(name) for name in names}) == 1
    assert color_of(names[0]) is not None


def test_words_are_whole_words():
    assert color_of("hybrid in stages") == COLORS["hybrid"]
    assert color_of("model.width=32") is None
    assert color_of("loading") is None


def test_jobs_of_one_method_have_different_colors():
    names = ["strategy=ddp seed=1", "strategy=ddp seed=2", "model=resnet20", "strategy=layered_sgd"]
    colors = colors_of(names)
    assert len(set(colors)) == len(names)
    assert (colors[0], colors[3]) == (COLORS["ddp"], COLORS["layered"])


def test_labels_keep_their_order_and_lie_apart_within_the_axes():
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.set_ylim(0, 100)
    label_lines(axes, [(f"{y}", 1.0, y, "black") for y in (99.0, 50.0, 99.5, 50.5, 51.0)])
    places = {text.get_text(): text.xyann[1] for text in axes.texts}
    assert list(places) == ["50.0", "50.5", "51.0", "99.0", "99.5"]
    assert all(above - below > 3 for below, above in itertools.pairwise(places.values()))
    assert max(places.values()) <= 100
