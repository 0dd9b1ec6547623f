"""Rows of the diagnosis for compressed methods, Memonger, the ring and global batch norm: against sums made by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_dp.planner import (
    METHODS,
    Block,
    LayerProfile,
    Link,
    Method,
    Network,
    Recomputation,
    StepProfile,
    Workload,
    make_diagnosis,
    simulate,
)
from lightning_dp.planner.report import WITH_PLAN, overrides_of
from lightning_dp.planner.simulation import sent_bytes

ALPHA, RATE = 1e-3, 1e8
SLOW, FAST = Link(ALPHA, RATE), Link(1e-5, 1e10)
WEIGHT = ((1000, 5000), (1000,))
NUMEL = 5_001_000
ONE_BLOCK = Workload(
    (Block(4 * NUMEL, 0.1, 0.2, shapes=WEIGHT),),
    batch_size=32,
    update_s=0.01,
    load_s=0.05,
    recomputation=Recomputation(plain_bytes=9e6, held_bytes=3e6, recompute_s=0.04, record_s=0.02),
    codec_s={"int8": 0.006},
)
COMPUTE_S = 0.1 + 0.2 + 0.01
# The weight has 19,532 blocks of 256 elements, the last one not full, and the bias 4; each sends 256 bytes and a scale.
INT8_BYTES = (19_532 + 4) * 260
# Factors of 1000 x 4 and 5000 x 4; the bias is sent whole.
POWER_SGD_BYTES = 4 * (4 * (1000 + 5000) + 1000)

# Method -> seconds of its step on two nodes, by hand. Both directions of an all-reduce send half of the bytes each; two
# compressing nodes exchange all bytes at once.
BY_HAND = {
    "ddp_ring": 0.05 + COMPUTE_S + 2 * (ALPHA + 4 * NUMEL / 2 / RATE),
    "ddp_bf16": 0.05 + COMPUTE_S + 2 * (ALPHA + 2 * NUMEL / 2 / RATE),
    # PyTorch's hook: what is not compressed, first factors, second factors, one all-reduce after the other.
    "ddp_power_sgd": 0.05 + COMPUTE_S + 3 * 2 * ALPHA + 2 * POWER_SGD_BYTES / 2 / RATE,
    "layered_sgd_step_bf16": COMPUTE_S + ALPHA + 2 * NUMEL / RATE,  # loading is hidden behind it
    "layered_sgd_step_int8": COMPUTE_S + 0.003 + ALPHA + INT8_BYTES / RATE + 0.003,
    "layered_sgd_step_power_sgd": COMPUTE_S + 0.05,  # 2 latencies and 1 ms hide behind loading
    "ddp_memonger": 0.05 + COMPUTE_S + 0.04 + 0.02 + 2 * (ALPHA + 4 * NUMEL / 2 / RATE),
    "ddp_memonger_larger_batch": 3 * (0.05 + 0.1 + 0.2 + 0.04) + 0.02 + 0.01 + 2 * (ALPHA + 4 * NUMEL / 2 / RATE),
}


def check_rows() -> None:
    """Raise AssertionError if a row is not what a hand computes."""
    for name, expected in BY_HAND.items():
        assert simulate(ONE_BLOCK, Network(SLOW, FAST), 2, name).step_s == pytest.approx(expected, rel=1e-9), name


def test_rows_are_what_a_hand_computes():
    check_rows()


def test_four_nodes_send_three_quarters_in_each_direction():
    network = Network(SLOW, FAST)
    layered = simulate(ONE_BLOCK, network, 4, "layered_sgd_step_int8").step_s
    assert layered == pytest.approx(COMPUTE_S + 0.006 + 2 * (ALPHA + 3 / 4 * INT8_BYTES / RATE))
    ddp = simulate(ONE_BLOCK, network, 4, "ddp_power_sgd").step_s
    assert ddp == pytest.approx(0.36 + 3 * 6 * ALPHA + 2 * 3 / 4 * POWER_SGD_BYTES / RATE), "a ring has six messages"
    unhidden = replace(ONE_BLOCK, load_s=0.0)
    factors = simulate(unhidden, network, 4, "layered_sgd_step_power_sgd").step_s
    assert factors == pytest.approx(COMPUTE_S + 4 * ALPHA + 2 * 3 / 4 * POWER_SGD_BYTES / RATE)


def one_direction(self: Network, num_bytes: float, world_size: int, num_rounds: int = 1) -> float:
    nodes = self.num_nodes(world_size)
    return 2 * num_rounds * self.inter.latency_s + (nodes - 1) / nodes * num_bytes / self.inter.bytes_per_s


def wrong_sign(self: Workload, larger_batch: bool) -> Workload:
    block = self.blocks[0]
    assert self.recomputation is not None
    less = replace(block, backward_s=block.backward_s - self.recomputation.recompute_s)
    return replace(self, blocks=(less,))


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        ("network.Network.compressed_all_reduce_s", one_direction),
        ("network.ring_all_reduce_s", lambda n, members, link: (members - 1) * link.message_s(n / members)),
        ("workload.Workload.recomputed", wrong_sign),
        ("workload.Recomputation.batch_factor", 1),
        ("simulation.num_rounds", lambda method: 1),
        ("simulation.sent_bytes", lambda block, compression: block.num_bytes),
    ],
    ids=["one direction", "one direction of the ring", "wrong sign", "same batch", "one round", "not compressed"],
)
def test_mutants_are_found(place, mutant, monkeypatch):
    monkeypatch.setattr(f"lightning_dp.planner.{place}", mutant)
    with pytest.raises(AssertionError):
        check_rows()


def test_the_larger_batch_counts_its_own_images():
    larger = simulate(ONE_BLOCK, Network(SLOW, FAST), 2, "ddp_memonger_larger_batch")
    assert larger.images_per_s == pytest.approx(2 * 3 * 32 / BY_HAND["ddp_memonger_larger_batch"])
    # It pays where the network limits, and not where compute does.
    assert larger.images_per_s > simulate(ONE_BLOCK, Network(SLOW, FAST), 2, "ddp").images_per_s
    larger = simulate(ONE_BLOCK, Network(FAST, FAST), 2, "ddp_memonger_larger_batch")
    assert larger.images_per_s < simulate(ONE_BLOCK, Network(FAST, FAST), 2, "ddp").images_per_s


def test_recomputation_is_spread_by_forward_and_keeps_the_head():
    halves = replace(ONE_BLOCK, blocks=(Block(8.0, 0.3, 0.0), Block(8.0, 0.1, 0.0)))
    first, second = halves.recomputed(larger_batch=False).blocks
    assert (first.backward_s, second.backward_s) == pytest.approx((0.03, 0.01))
    nothing = replace(ONE_BLOCK, blocks=(Block(8.0, 0.0, 0.0),) * 2)
    assert nothing.recomputed(False).compute_s == pytest.approx(0.04 + 0.02 + 0.01)


def test_power_sgd_of_ddp_begins_after_backward():
    half = Block(2 * NUMEL, 0.05, 0.1, shapes=((1000, 2500),))
    split = replace(ONE_BLOCK, blocks=(half, half))
    sent = 2 * 4 * 4 * 3500
    assert simulate(split, Network(SLOW, FAST), 2, "ddp_power_sgd").step_s == pytest.approx(
        0.36 + 6 * ALPHA + sent / RATE
    )


def test_the_ring_differs_from_a_network_of_trees():
    tree = Network(Link(1e-2, RATE), FAST, all_reduce="tree")
    times = {name: simulate(ONE_BLOCK, tree, 16, name).step_s for name in ("ddp", "ddp_ring")}
    assert times["ddp_ring"] == pytest.approx(0.36 + 30 * (1e-2 + 4 * NUMEL / 16 / RATE))
    assert times["ddp"] == pytest.approx(0.36 + 8 * 1e-2 + 2 * 4 * NUMEL / RATE)


def test_gradients_of_unknown_shapes_count_as_a_square_matrix():
    block = Block(4e6, 0.0, 0.0)
    assert sent_bytes(block, "bf16") == 2e6
    assert sent_bytes(block, "int8") == pytest.approx(260 / 256 * 1e6, rel=1e-3)
    assert sent_bytes(block, "power_sgd") == 4 * 4 * (1000 + 1000)
    assert sent_bytes(Block(0.0, 0.0, 0.0), "int8") == 0
    assert sent_bytes(Block(12.0, 0.0, 0.0), "power_sgd") == 12.0
    assert sent_bytes(block, 0.25) == 1e6


# --- in a diagnosis ---

LAYER = LayerProfile("fc", 4 * NUMEL, 0.03, False, 1000, WEIGHT)
PROFILE = StepProfile(
    strategy="DDPStrategy",
    batch_size=32,
    world_size=2,
    num_steps=20,
    step_s=0.5,
    load_s=0.05,
    forward_s=0.1,
    backward_s=0.2,
    update_s=0.01,
    exposed_communication_s=0.14,
    batch_norm_s=0.0,
    num_batch_norms=3,
    layers=(LAYER,),
    recomputation=ONE_BLOCK.recomputation,
    codec_s=ONE_BLOCK.codec_s,
    num_workers=None,  # loading stays in the foreground
)
SENTENCES = {
    "ddp_ring": "All-reduces 20.0 MB by ring_all_reduce_hook in 202 ms, behind backward; waits 202 ms of 562 ms.",
    "ddp_power_sgd": "All-reduces 0.1 MB, as factors of rank 4, in 7 ms, after backward; waits 7 ms of 367 ms.",
    "layered_sgd_step_int8": "Hides 52 ms between nodes, rounded to 8 bits in 6 ms of processor time, behind loading, "
    "backward and the next forward; waits 1 ms of 368 ms.",
    "ddp_memonger": "DDP that holds 3.0 of 9.0 MB of activations for 40 ms of compute and 20 ms of recording; waits "
    "202 ms of 622 ms.",
    "ddp_memonger_larger_batch": "96 images per rank in the 9.0 MB of activations of 32, for one all-reduce of "
    "20.0 MB; waits 202 ms of 1402 ms.",
    "ddp_global_batch_norm": "DDP that also gathers batch norm's statistics 6 times, 6 ms, for batches below 8 images "
    "per rank; waits 208 ms of 568 ms.",
}


def test_each_row_has_its_sentence():
    found = {p.method: p for p in make_diagnosis(PROFILE, Network(SLOW, FAST)).predictions}
    assert {name: found[name].reason for name in SENTENCES} == SENTENCES
    assert found["ddp_memonger"].time.step_s == pytest.approx(BY_HAND["ddp_memonger"])
    assert "hybrid_a" not in found


def test_rows_are_left_out_where_there_is_nothing_to_predict():
    bare = replace(PROFILE, recomputation=None, num_batch_norms=0, why_no_recomputation="it is compiled")
    found = make_diagnosis(bare, Network(SLOW, FAST))
    names = {p.method for p in found.predictions}
    assert not names & {"ddp_memonger", "ddp_memonger_larger_batch", "ddp_global_batch_norm"}
    assert "\nMemonger is not among them: it is compiled" in str(found)
    tight = replace(PROFILE, recomputation=Recomputation(9e6, 5e6, 0.04))
    names = {p.method for p in make_diagnosis(tight, Network(SLOW, FAST)).predictions}
    assert "ddp_memonger" in names
    assert "ddp_memonger_larger_batch" not in names, "the memory of one batch does not hold two"


def test_waits_that_count_as_compute_are_named():
    unmeasured = replace(PROFILE, unmeasured=("the waits of ModelParallelStrategy for messages",))
    said = "\nNot measured, and so part of compute here: the waits of ModelParallelStrategy for messages."
    assert said in str(make_diagnosis(unmeasured, Network(SLOW, FAST)))
    assert "Not measured" not in str(make_diagnosis(PROFILE, Network(SLOW, FAST)))


def test_a_plan_for_another_number_of_ranks_says_how_many_images_each_has(tmp_path):
    found = make_diagnosis(PROFILE, Network(SLOW, FAST), world_size=4)
    assert "\nSimulated, 4 ranks of 32 images; " in str(found)
    assert "whose `data.batch_size` is that of all ranks, it is 128." in str(found)
    assert "`data.batch_size`" not in str(make_diagnosis(PROFILE, Network(SLOW, FAST)))
    for method, images in (("ddp", 32), ("ddp_accumulate_4", 32), ("ddp_memonger_larger_batch", 96)):
        profile = replace(PROFILE, accumulate=2)
        make_diagnosis(profile, Network(SLOW, FAST), world_size=4, method=method).save(tmp_path / "plan.yaml")
        assert json.loads((tmp_path / "plan.yaml").read_text())["images_per_rank"] == images


def test_what_changes_the_computation_is_not_chosen_but_can_be_asked_for(tmp_path):
    found = make_diagnosis(PROFILE, Network(SLOW, FAST))
    assert METHODS[found.predictions[0].method].compression != 1.0, "the fastest is compressed"
    assert found.best.method in ("layered_sgd_load", "layered_sgd_step")
    make_diagnosis(PROFILE, Network(SLOW, FAST), method="layered_sgd_step_int8").save(tmp_path / "plan.yaml")
    assert '"strategy.compression=int8"' in (tmp_path / "plan.yaml").read_text()
    for name in ("ddp_power_sgd", "hybrid_a", "zero"):
        with pytest.raises(ValueError, match=f"no plan for method='{name}'; use one of ddp,"):
            make_diagnosis(PROFILE, Network(SLOW, FAST), method=name)


def test_exact_are_those_that_compute_what_ddp_computes():
    exact = {name for name, method in METHODS.items() if method.is_exact}
    assert exact == {
        *("ddp", "ddp_ring", "ddp_memonger", "layered_sgd_load", "layered_sgd_step", "layered_sgd_step_sharded"),
        *("layered_fsdp_load", "layered_fsdp_step", "hybrid_a", "hybrid_b", "hybrid_c"),
    }


def test_layered_fsdp_has_rows_where_a_node_has_several_ranks_and_is_planned_on_request():
    nodes = Network(SLOW, FAST, ranks_per_node=2)
    found = make_diagnosis(PROFILE, nodes, world_size=4)
    rows = {row.method: row for row in found.predictions}
    assert {"layered_fsdp_load", "layered_fsdp_step", "layered_fsdp_step_int8"} <= set(rows)
    assert "holds 1/2 of parameters, gradients and optimizer states" in rows["layered_fsdp_step"].reason
    assert "rounded to 8 bits in 3 ms of processor time" in rows["layered_fsdp_step_int8"].reason, "of a half"
    assert rows["layered_fsdp_step"].error > rows["layered_sgd_step"].error, "it was not measured in the cells"
    assert found.plan.method != "layered_fsdp_step"
    planned = make_diagnosis(PROFILE, nodes, world_size=4, method="layered_fsdp_step")
    assert planned.plan.method == "layered_fsdp_step"
    assert overrides_of("layered_fsdp_step", PROFILE, 4) == ["strategy=layered_fsdp", "strategy.overlap=step"]
    for network in (Network(SLOW, FAST), Network(FAST, FAST, ranks_per_node=4)):
        assert not any("fsdp" in row.method for row in make_diagnosis(PROFILE, network, world_size=4).predictions)


def test_memonger_is_told_its_budget_and_its_batch():
    memonger = "++callbacks.memonger={_target_:lightning_dp.Memonger,policy:budget,budget_bytes:%d}"
    assert overrides_of("ddp_memonger", PROFILE, 2)[-1] == memonger % 3_000_000
    larger = overrides_of("ddp_memonger_larger_batch", PROFILE, 2)
    # The budget is for the larger batch, and the recipes' batch size counts the images of all ranks.
    assert larger[-2:] == [memonger % 9_000_000, "data.batch_size=192"]
    assert overrides_of("ddp_memonger", replace(PROFILE, recomputation=None), 2) is None


def test_a_step_of_a_larger_batch_is_compared_for_as_many_images():
    text = str(make_diagnosis(PROFILE, Network(SLOW, FAST), method="ddp_memonger_larger_batch"))
    now_ms, larger_ms = 1e3 * BY_HAND["ddp_ring"], 1e3 * BY_HAND["ddp_memonger_larger_batch"] / 3
    assert f"**{now_ms:.1f} ms per step (simulated) become {larger_ms:.1f} ms for as many images" in text
    assert f"| {now_ms - larger_ms:.1f} ms |" in text, "what it saves is the difference"


def test_each_method_of_the_recipes_has_overrides_that_choose_it():
    found = {name: overrides_of(name, PROFILE, 2) for name in METHODS}
    assert {name for name, overrides in found.items() if overrides is None} == {"ddp_ring", "ddp_bf16", "ddp_power_sgd"}
    assert set(METHODS) - set(WITH_PLAN) == {"ddp_ring", "ddp_bf16", "ddp_power_sgd"}
    assert len({tuple(overrides) for overrides in found.values() if overrides}) == len(WITH_PLAN)
    assert found["ddp"] == ["strategy=ddp"]
    step = ["strategy=layered_sgd", "strategy.overlap=step"]
    assert found["layered_sgd_step_sharded"] == [*step, "strategy.communicator=sharded"]
    assert found["layered_sgd_step_power_sgd"][:2] == step
    assert found["layered_fsdp_step_int8"] == [
        "strategy=layered_fsdp",
        "strategy.overlap=step",
        "strategy.compression=int8",
    ]
    assert found["hybrid_b"] == ["strategy=krizhevsky_hybrid", "strategy.scheme=b"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Method(compression="zip"), "compression='zip' must be one of 'bf16', 'int8', 'power_sgd'"),
        (lambda: Method(recompute="twice"), "recompute='twice' must be one of '', 'same_batch'"),
        (lambda: Method(all_reduce="tree"), "all_reduce='tree' must be one of 'native', 'ring'"),
        (lambda: Recomputation(1.0, 2.0, 0.1), "plain_bytes=1.0 must be at least held_bytes=2.0"),
        (lambda: Recomputation(1.0, 0.0, 0.1), "held_bytes=0.0"),
        (lambda: Recomputation(2.0, 1.0, -0.1), "recompute_s=-0.1"),
        (
            lambda: simulate(replace(ONE_BLOCK, recomputation=None), Network(SLOW, FAST), 2, "ddp_memonger"),
            "the workload has no recomputation",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
