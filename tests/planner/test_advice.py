"""From a measured step to a ranked list of methods, a plan file and a plot."""

from __future__ import annotations

import json
import re
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
    assert "| Use layered_sgd_step: Hides" in text
    assert "batch norm's statistics from" not in text


def test_without_a_network_only_the_parts_are_told(tmp_path):
    alone = replace(PROFILE, world_size=1, exposed_communication_s=0.0, load_s=0.0)
    for found in (make_diagnosis(alone, None), make_diagnosis(alone, TWO_NODES)):
        assert found.predictions == ()
        assert "One rank needs no network" in str(found)
        with pytest.raises(ValueError, match="there is no plan"):
            found.save(tmp_path / "plan.yaml")
        with pytest.raises(ValueError, match="no network is known"):
            found.plot(tmp_path / "plan.png")
    assert make_diagnosis(alone, TWO_NODES, world_size=8).predictions


def test_on_one_rank_ddp_has_the_plan_that_no_method_has(tmp_path):
    step_s = PROFILE.step_s - PROFILE.exposed_communication_s
    alone = replace(PROFILE, world_size=1, step_s=step_s, exposed_communication_s=0.0, num_workers=0)
    plans = []
    for method in (None, "ddp"):
        make_diagnosis(alone, None, method=method).save(tmp_path / "plan.yaml")
        plans.append((tmp_path / "plan.yaml").read_text())
    assert plans[0] == plans[1]
    with pytest.raises(ValueError, match=r"method='ring'.* use one of ddp\. .*Diagnose\(network=\.\.\., world_size"):
        make_diagnosis(alone, TWO_NODES, method="ring")


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


def test_links_that_a_probe_on_one_node_cannot_find_are_named(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    note = "Links between nodes count as fast as those within one; give others"
    for network, is_named in ((Network(FAST, FAST, ranks_per_node=2), True), (TWO_NODES, False)):
        found = make_diagnosis(PROFILE, network)
        found.plot(tmp_path / "plan.png", world_sizes=(2, 4))
        assert (note in str(found)) == is_named
        assert ("links between nodes" in drawn[-1].axes[0].get_xlabel()) == is_named
    assert note not in str(make_diagnosis(PROFILE, Network(FAST, FAST, ranks_per_node=4))), "all rows are within a node"


# What is proposed follows from where the time goes. The network is fast, unless communication is to be dominant.

FAST_NODES = Network(FAST, FAST, ranks_per_node=2)
COMPUTE_ONLY = replace(PROFILE, step_s=0.16, load_s=0.0, exposed_communication_s=0.0, cores_per_rank=8.0)


def overrides(found) -> list[str]:
    return [override for part in found.advice for override in part.overrides]


def test_nothing_to_gain_is_said():
    found = make_diagnosis(COMPUTE_ONLY, FAST_NODES, is_probed=True)
    assert (found.advice, found.best.method) == ((), "ddp")
    assert "**Nothing to gain: keep ddp.**" in str(found)
    other = replace(COMPUTE_ONLY, strategy="LayeredSGDStrategy")
    assert "**Nothing to gain: use ddp.**" in str(make_diagnosis(other, FAST_NODES, is_probed=True))
    alone = replace(COMPUTE_ONLY, strategy="SingleDeviceStrategy", world_size=1)
    assert "**Nothing to gain.**" in str(make_diagnosis(alone, None)), "one rank needs no method"


def test_loading_brings_workers_and_hides_behind_them():
    loading = replace(COMPUTE_ONLY, step_s=0.46, load_s=0.3)
    found = make_diagnosis(loading, FAST_NODES, is_probed=True)
    assert overrides(found) == ["data.num_workers=2"], "two workers load a batch every 150 ms, behind 160 ms"
    assert found.advice[0].saves_s == pytest.approx(0.3, rel=0.02)
    assert found.plan.time.step_s == pytest.approx(0.16, rel=0.02)
    one_core = replace(loading, cores_per_rank=1.0)
    assert not any("num_workers" in override for override in overrides(make_diagnosis(one_core, FAST_NODES)))
    assert "No worker process is proposed for the 300.0 ms of loading" in str(make_diagnosis(one_core, FAST_NODES))


def test_workers_that_are_there_are_counted():
    # Two workers deliver a batch every 460 ms, so one of them takes 920 ms: six hide behind 160 ms.
    loading = replace(COMPUTE_ONLY, step_s=0.46, load_s=0.3, num_workers=2)
    assert overrides(make_diagnosis(loading, FAST_NODES)) == ["data.num_workers=6"]
    few = make_diagnosis(replace(loading, cores_per_rank=5.0), FAST_NODES)
    assert overrides(few) == ["data.num_workers=4"]
    assert few.plan.time.step_s == pytest.approx(0.92 / 4, rel=0.02)
    assert overrides(make_diagnosis(replace(loading, num_workers=None), FAST_NODES)) != ["data.num_workers=1"]


def test_no_method_makes_workers_faster_that_a_step_waits_for():
    waiting = replace(PROFILE, num_workers=2, cores_per_rank=2.0)  # no core is free for a third one
    found = make_diagnosis(waiting, TWO_NODES)
    assert overrides(found) == []
    assert found.now.step_s == pytest.approx(PROFILE.step_s)
    assert min(row.time.step_s for row in found.predictions) == pytest.approx(PROFILE.step_s)
    assert "The step waits for 2 worker process(es) of the loader: no method alone is faster." in str(found)
    hidden = make_diagnosis(replace(waiting, load_s=0.02), TWO_NODES)
    assert overrides(hidden)[0] == "strategy=layered_sgd", "they may be fast enough"


@pytest.mark.parametrize(
    ("batch_size", "group_size", "left_s"),
    [(8, 1, 0.0), (4, 2, 0.08 * 1e-5 / (2 * 1e-4)), (2, None, 0.08)],
    ids=["a rank has enough images", "a node has", "only all ranks have"],
)
def test_waits_of_batch_norm_bring_smaller_groups(batch_size, group_size, left_s):
    waiting = replace(COMPUTE_ONLY, step_s=0.24, batch_norm_s=0.08, batch_size=batch_size)
    found = make_diagnosis(waiting, Network(Link(1e-4, 1e10), FAST, ranks_per_node=2), is_probed=True)
    expected = [] if group_size is None else [f"callbacks.adaptive_global_batch_norm.group_size={group_size}"]
    assert overrides(found) == expected
    assert found.plan.workload.batch_norm_s == pytest.approx(left_s)
    assert sum(part.saves_s for part in found.advice) == pytest.approx(0.08 - left_s)
    assert ("global_phase=after_converged" in str(found)) == (group_size is None)


def test_exposed_communication_brings_another_method():
    found = make_diagnosis(replace(COMPUTE_ONLY, step_s=0.4, exposed_communication_s=0.24), TWO_NODES)
    assert overrides(found)[0] == "strategy=layered_sgd"
    assert re.search("`plan.method=layered_sgd_step_.*, another result: ", str(found)), "named, and not chosen"


def test_layered_fsdp_that_is_faster_is_named_as_exact():
    slow_update = replace(COMPUTE_ONLY, step_s=0.66, update_s=0.51)  # of which each of eight ranks takes an eighth
    found = make_diagnosis(slow_update, Network(FAST, FAST, ranks_per_node=8), world_size=16)
    assert "\n- `plan.method=layered_fsdp_step`, the same result: 0.33 x" in str(found)
    assert found.plan.method == "ddp"


def test_changes_are_combined_and_what_each_saves_adds_up():
    all_three = replace(PROFILE, step_s=0.65, load_s=0.25, batch_norm_s=0.2, exposed_communication_s=0.04)
    found = make_diagnosis(all_three, TWO_NODES)
    assert [part.overrides[0] for part in found.advice] == [
        "data.num_workers=1",  # the largest part first
        "callbacks.adaptive_global_batch_norm.group_size=1",
        "strategy=layered_sgd",
    ]
    assert found.now.step_s - sum(part.saves_s for part in found.advice) == pytest.approx(found.plan.time.step_s)


def test_the_plan_file_is_the_first_row_of_the_table(tmp_path):
    for profile, method in ((PROFILE, None), (PROFILE, "layered_sgd_step_int8"), (COMPUTE_ONLY, None)):
        found = make_diagnosis(profile, TWO_NODES, method=method)
        found.save(tmp_path / "plan.yaml")
        plan = json.loads((tmp_path / "plan.yaml").read_text())
        lines = str(found).splitlines()
        first = lines[next(i for i, line in enumerate(lines) if line.startswith("| method |")) + 2]
        assert first.startswith(f"| {plan['method']} | {plan['step_ms']:.1f} |")
        assert set(overrides(found)) <= set(plan["overrides"])


def test_rows_that_differ_by_less_than_the_error_are_equal_and_the_plainer_one_is_proposed():
    # Layered SGD is 5 % faster: more than the error on cores of their own, and less than on shared ones.
    network = Network(Link(1e-4, 3e9), FAST, ranks_per_node=2)
    even = replace(COMPUTE_ONLY, layers=tuple(replace(CONV, name=f"conv{i}") for i in range(6)))
    exact = make_diagnosis(even, network)
    shared = make_diagnosis(replace(even, cores_per_rank=0.5), network)
    assert exact.best.method != "ddp"
    assert shared.best.method == "ddp"
    row = next(line for line in str(shared).splitlines() if line.startswith("| layered_sgd_load |"))
    assert "| ± 6% |" in row
    assert "| equal |" in row


def test_what_the_simulation_does_not_know_of_the_measured_step_is_in_all_rows():
    found = make_diagnosis(replace(COMPUTE_ONLY, step_s=0.17), FAST_NODES, is_probed=True)
    assert found.now.step_s == pytest.approx(0.17)
    elsewhere = make_diagnosis(replace(COMPUTE_ONLY, step_s=0.17), FAST_NODES)
    rows = {row.method: row.time.step_s for row in found.predictions}
    for row in elsewhere.predictions:
        assert rows[row.method] >= row.time.step_s
    shorter = make_diagnosis(replace(COMPUTE_ONLY, step_s=0.15), FAST_NODES, is_probed=True)
    assert shorter.now.step_s == elsewhere.now.step_s, "nothing is taken away"


def test_no_prediction_is_surer_than_that_of_the_measured_step():
    far_off = replace(COMPUTE_ONLY, step_s=0.32, update_s=0.01, exposed_communication_s=0.16)
    assert make_diagnosis(far_off, FAST_NODES, is_probed=True).plan.error == pytest.approx(0.5, abs=0.02)
    assert make_diagnosis(far_off, FAST_NODES).plan.error == 0.035
    assert make_diagnosis(far_off, FAST_NODES, world_size=8, is_probed=True).plan.error == 0.035
    one_rank = replace(far_off, world_size=1, strategy="SingleDeviceStrategy", exposed_communication_s=0.0)
    assert make_diagnosis(one_rank, None).plan.error == pytest.approx(0.5)


def test_a_larger_batch_is_named_where_it_brings_something():
    sending = make_diagnosis(replace(COMPUTE_ONLY, step_s=0.4, exposed_communication_s=0.24), Network(SLOW, SLOW, 4))
    # 0.36 s for the messages, of which twice the compute hides more.
    assert 0.5 < sending.gain_of_larger_batch < 1.0
    assert "- Twice the batch: " in str(sending)
    assert "- Twice the batch: " not in str(make_diagnosis(replace(COMPUTE_ONLY, update_s=0.0), FAST_NODES))
