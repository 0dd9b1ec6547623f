"""The rows of layered_sgd_throughput: what they send and what they compute is what the table says."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from support.data_parallel_methods import (
    LOCAL_STEPS,
    REFERENCE,
    all_reduce_s,
    full_bytes,
    int8_bytes,
    inter_host_bytes,
    methods,
    power_sgd_bytes,
)
from support.emulated_compute import TimedModule, Timing, slow_loader
from support.sharded_strategies import flat_parameters
from support.training import make_trainer, quiet

from lightning_dp.strategies import LayeredSGDStrategy
from tests.ranks import run_processes

STEPS = 9
FAST = Timing(0.0, 0.0, 0.0)
WIDTH = 32


class Steps(pl.Callback):
    """Begins a new count with each step, and keeps the counts as they are at its end."""

    def __init__(self, sent: list[int]) -> None:
        self.sent = sent
        self.per_step: list[int] = []
        self.compressed: list[int] = []  # by layered SGD since the start

    def on_train_batch_start(self, *_) -> None:
        self.sent.append(0)

    def on_train_batch_end(self, trainer, *_) -> None:
        self.per_step = list(self.sent)
        strategy = trainer.strategy
        if isinstance(strategy, LayeredSGDStrategy):
            strategy.finish_update()
            self.compressed.append(strategy.compressed_bytes_sent or 0)


def train(rank: int, names: list[str], width: int = WIDTH, per_host: int = 1, clip: float | None = None) -> dict:
    """Train by each method on two ranks; return parameters before and after, and the bytes all-reduced in each step."""
    quiet()
    results = {}
    for name in names:
        sent: list[int] = []
        all_reduce = dist.all_reduce

        def counted(tensor, *args, sent=sent, all_reduce=all_reduce, **kwargs):
            if sent:
                sent[-1] += tensor.nbytes
            return all_reduce(tensor, *args, **kwargs)

        steps = Steps(sent)
        dist.all_reduce = counted
        try:
            method = methods(per_host)[name]
            strategy = method.make()
            options = {"max_steps": STEPS, "gradient_clip_val": clip, **method.trainer_options}
            trainer = make_trainer(strategy, per_host=per_host, num_hosts=2 // per_host, callbacks=[steps], **options)
            module = TimedModule("emulated", FAST, width)
            before = flat_parameters(module)
            trainer.fit(module, slow_loader(STEPS, 2, "emulated", FAST))
        finally:
            dist.all_reduce = all_reduce
        after = flat_parameters(module)
        buckets = len(getattr(getattr(strategy, "state", None), "error_dict", ()))
        results[name] = {
            "sent": steps.per_step,
            "compressed": steps.compressed,
            "buckets": buckets,
            "before": before.tolist(),
            "after": after.tolist(),
        }
    return results


def shapes() -> list[list[int]]:
    return [list(p.shape) for p in TimedModule("emulated", FAST, WIDTH).parameters()]


@pytest.fixture(scope="module")
def trained() -> list[dict]:
    return run_processes(2, train, list(methods(per_host=1)), num_nodes=2)


def test_every_method_trains_under_lightning_on_cpu(trained):
    assert set(trained[0]) == set(methods(per_host=1))
    for result in trained[0].values():
        assert result["before"] != result["after"]


def test_exact_methods_compute_what_ddp_computes_and_the_others_do_not(trained):
    reference = torch.tensor(trained[0][REFERENCE]["after"])
    moved = (reference - torch.tensor(trained[0][REFERENCE]["before"])).abs().max()
    for name, method in methods(per_host=1).items():
        difference = (torch.tensor(trained[0][name]["after"]) - reference).abs().max() / moved
        if method.departs:
            assert difference > 1e-4, name
        else:
            assert difference < 1e-5, name


def test_sharded_methods_compute_what_ddp_computes_with_clipping():
    names = [REFERENCE, "FSDP2", "HSDP"]
    (results, _) = run_processes(2, train, names, WIDTH, 2, 0.1)
    reference = torch.tensor(results[REFERENCE]["after"])
    moved = (reference - torch.tensor(results[REFERENCE]["before"])).abs().max()
    for name in names:
        assert (torch.tensor(results[name]["after"]) - reference).abs().max() < 1e-5 * moved, name


def test_all_ranks_agree_after_every_method_that_reduces_all_gradients(trained):
    for name in trained[0]:
        # The ranks of post-local SGD differ between two averages.
        if name not in ("post-local SGD", "DDP, nothing sent"):
            assert trained[0][name]["after"] == trained[1][name]["after"], name


@pytest.mark.parametrize("name", ["DDP + bf16 hook", "DDP + PowerSGD rank 4"])
def test_compressed_methods_send_the_bytes_of_the_formula_in_every_measured_step(trained, name):
    bound = methods(per_host=1)[name].payload_bytes(shapes())
    assert 0 < bound < full_bytes(shapes())
    # Three steps warm up. PowerSGD needs the first two: it does not compress before.
    assert trained[0][name]["sent"][3:] == [bound] * (STEPS - 3)


@pytest.mark.parametrize("choice", ["bf16", "int8", "PowerSGD rank 4"])
def test_compressed_layered_sgd_sends_the_bytes_of_the_formula_in_every_step(trained, choice):
    name = f"layered SGD step, {choice}"
    bound = inter_host_bytes(methods(per_host=1)[name].payload_bytes(shapes()), 2)
    # Of both hosts, because the shares of the two may differ by an element or a block.
    sent = [sum(both) for both in zip(*(rank[name]["compressed"] for rank in trained), strict=True)]
    assert sent == [2 * bound * (step + 1) for step in range(STEPS)]


def test_power_sgd_does_not_compress_before_its_start(trained):
    assert trained[0]["DDP + PowerSGD rank 4"]["sent"][:2] == [full_bytes(shapes())] * 2


def test_power_sgd_has_one_bucket_where_ddp_would_have_several():
    """With several, the ranks start its all-reduces in different orders over gloo."""
    name = "DDP + PowerSGD rank 4"
    (result, _) = run_processes(2, train, [name], 512, num_nodes=2)
    first_bucket_of_ddp = 2**20
    assert result[name]["sent"][0] > 4 * first_bucket_of_ddp
    assert result[name]["buckets"] == 1


def test_post_local_sgd_sends_a_fourth_of_the_parameters_in_the_mean_of_four_steps(trained):
    sent = trained[0]["post-local SGD"]["sent"]
    # With one rank a host, the gradients of a host are all-reduced within that one rank: they never leave it.
    within_a_host = full_bytes(shapes())
    between_hosts = [step - within_a_host for step in sent[:8]]
    assert sum(between_hosts) / 8 == methods(per_host=1)["post-local SGD"].payload_bytes(shapes())
    assert between_hosts == [full_bytes(shapes()), *[0] * (LOCAL_STEPS - 1)] * 2


def test_power_sgd_keeps_vectors_and_small_matrices_whole():
    assert power_sgd_bytes([[100]]) == 400
    assert power_sgd_bytes([[8, 8]]) == 256
    assert power_sgd_bytes([[1024, 1024]]) == 4 * 4 * 2048
    assert power_sgd_bytes([[64, 3, 11, 11]]) == 4 * 4 * (64 + 3 * 11 * 11)


def test_int8_has_a_scale_for_each_block_of_each_parameter():
    assert int8_bytes([[256]]) == 260
    assert int8_bytes([[1], [257]]) == 3 * 260


def test_a_host_sends_twice_its_share_of_the_payload():
    assert inter_host_bytes(100.0, 1) == 0.0
    assert inter_host_bytes(100.0, 2) == 100.0
    assert inter_host_bytes(100.0, 4) == 150.0


def test_equal_links_take_the_time_of_a_ring_over_the_hosts():
    for num_hosts in (1, 2, 4):
        assert all_reduce_s(100.0, [10.0] * num_hosts) == inter_host_bytes(100.0, num_hosts) / 10.0
    assert all_reduce_s(100.0, [float("inf")] * 2) == 0.0


def test_a_slow_link_carries_every_byte_once_and_all_links_together_carry_the_rest():
    assert all_reduce_s(100.0, [10.0, 5.0]) == 20.0
    assert all_reduce_s(100.0, [10.0, 10.0, 10.0, 5.0]) == 20.0
    assert all_reduce_s(100.0, [10.0, 10.0, 10.0, 9.0]) == 600.0 / 39.0
