"""From a measured step to a ranked list of methods, a plan file and a plot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from lightning_dp.planner import (
    METHODS,
    LayerProfile,
    Link,
    Network,
    StepProfile,
    make_diagnosis,
    read_overrides,
    simulate,
)

SLOW, FAST = Link(1e-4, 1e8), Link(1e-5, 1e10)
CONV = LayerProfile("conv", 4_000_000, 0.03, False, 1000)
PROFILE = StepProfile(
    strategy="DDPStrategy",
    batch_size=32,
    world_size=4,
    num_steps=20,
    step_s=0.5,
    load_s=0.1,
    forward_s=0.05,
    backward_s=0.1,
    update_s=0.01,
    exposed_communication_s=0.24,
    batch_norm_s=0.0,
    num_batch_norms=3,
    layers=(CONV, replace(CONV, name="conv2", num_bytes=20_000_000, forward_s=0.01)),
)
TWO_NODES = Network(SLOW, FAST, ranks_per_node=2)


def test_the_parts_of_a_step_add_up():
    assert sum(PROFILE.parts().values()) == pytest.approx(PROFILE.step_s)
    assert PROFILE.compute_s == pytest.approx(0.16)
    assert PROFILE.overhead_ratio == pytest.approx(0.34 / 0.16)
    assert "| exposed communication | 240.0 | 48% |" in PROFILE.table()


def test_time_is_spread_over_layers_by_their_forward():
    workload = PROFILE.workload()
    first, second = workload.blocks
    assert (first.forward_s, first.backward_s) == pytest.approx((0.05 * 3 / 4, 0.1 * 3 / 4))
    assert (second.num_bytes, second.forward_s) == pytest.approx((20e6, 0.05 / 4))
    assert workload.compute_s == pytest.approx(0.16)


def test_fully_connected_layers_at_the_end_are_a_head_if_they_have_most_bytes():
    hidden = LayerProfile("head.0", 40_000_000, 0.01, True, 9000)
    logits = LayerProfile("head.1", 1_000_000, 0.01, True, 500)
    head = replace(PROFILE, layers=(CONV, hidden, logits)).workload().head
    assert (head.num_bytes, head.feature_bytes, head.hidden_bytes) == (41_000_000, 9000, 500)
    assert replace(PROFILE, layers=(CONV, logits)).workload().head is None
    assert replace(PROFILE, layers=(hidden, logits)).workload().head is None, "no trunk is left"
    assert replace(PROFILE, layers=(hidden, CONV)).workload().head is None


def test_methods_are_ranked_by_their_simulated_time():
    found = make_diagnosis(PROFILE, TWO_NODES)
    rates = [prediction.time.images_per_s for prediction in found.predictions]
    assert rates == sorted(rates, reverse=True)
    assert {prediction.method for prediction in found.predictions} == {
        name for name, method in METHODS.items() if method.family != "hybrid" and not method.recompute
    }
    for prediction in found.predictions:
        assert prediction.time == simulate(PROFILE.workload(), TWO_NODES, 4, prediction.method)
        assert prediction.reason.endswith(".")
    assert found.best.method in ("layered_sgd_step", "layered_sgd_step_sharded"), "a plan does not change gradients"


def test_a_head_brings_the_hybrid_and_one_node_takes_layered_sgd_away():
    big = replace(PROFILE, layers=(CONV, LayerProfile("head", 400_000_000, 0.01, True, 100_000)))
    found = make_diagnosis(big, Network(SLOW, FAST, ranks_per_node=1))
    assert found.best.method.startswith("hybrid")
    names = {prediction.method for prediction in make_diagnosis(PROFILE, Network(FAST, FAST, 4)).predictions}
    assert names == {"ddp", "ddp_ring", "ddp_bf16", "ddp_power_sgd", "ddp_accumulate_4", "ddp_global_batch_norm"}


def test_the_text_names_the_largest_part_and_the_choice():
    text = str(make_diagnosis(PROFILE, TWO_NODES))
    assert text.startswith("DDPStrategy, 4 ranks, 32 images per rank: 48% of a step is exposed communication")
    assert "Overhead ratio (Lemma 3.1): 2.125" in text
    assert "\nUse layered_sgd_step" in text
    assert "Global batch norm" not in text
    waiting = replace(PROFILE, batch_norm_s=0.05, exposed_communication_s=0.19)
    assert "Global batch norm waits 50.0 ms per step" in str(make_diagnosis(waiting, TWO_NODES))


def test_without_a_network_only_the_parts_are_told(tmp_path):
    alone = replace(PROFILE, world_size=1, exposed_communication_s=0.0)
    for found in (make_diagnosis(alone, None), make_diagnosis(alone, TWO_NODES)):
        assert found.predictions == ()
        assert "One rank needs no network" in str(found)
        with pytest.raises(ValueError, match="there is no plan"):
            found.save(tmp_path / "plan.yaml")
        with pytest.raises(ValueError, match="no network is known"):
            found.plot(tmp_path / "plan.png")
    assert make_diagnosis(alone, TWO_NODES, world_size=8).predictions


def test_the_plan_file_is_yaml_with_overrides_for_the_recipes(tmp_path):
    found = make_diagnosis(PROFILE, TWO_NODES)
    found.save(tmp_path / "plan.yaml")
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert plan == json.loads((tmp_path / "plan.yaml").read_text())
    assert plan["overrides"][:2] == ["strategy=layered_sgd", "strategy.overlap=step"]
    assert plan["measured_ms"]["loading"] == 100.0
    assert set(plan["predicted_ms"]) == {prediction.method for prediction in found.predictions}


def test_a_plan_file_can_be_read_and_anything_else_is_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    make_diagnosis(PROFILE, TWO_NODES).save(path)
    assert read_overrides(path)[0] == "strategy=layered_sgd"
    plan = json.loads(path.read_text())
    with pytest.raises(FileNotFoundError):
        read_overrides(tmp_path / "nothing.yaml")
    for text, message in (
        ("strategy: ddp", "is no plan"),
        ("[1]", "is no plan"),
        (json.dumps({**plan, "version": 2}), "has version 2, and this package reads version 1"),
        (json.dumps({**plan, "overrides": ["ddp"]}), "must be a list of texts like 'strategy=ddp'"),
        (json.dumps({**plan, "overrides": "strategy=ddp"}), "must be a list"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_overrides(path)


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    make_diagnosis(PROFILE, TWO_NODES).plot(tmp_path / "plan.png", world_sizes=(2, 4, 8))
    assert (tmp_path / "plan.png").stat().st_size > 10_000
