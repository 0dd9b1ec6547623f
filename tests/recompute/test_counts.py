"""Which operators run twice, and how much is kept: exactly."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lightning_dp.recompute import apply_recompute
from lightning_dp.recompute.policies import Cheap
from tests.recompute.counting import Operators, counted_step, recomputed, saved_bytes, small_parameter_bytes
from tests.recompute.models import build, loss_of

# Of the model "residual" with a batch of 4: bytes of a tensor after the first convolution, and of all others.
LARGE, SMALL = 4 * 8 * 10 * 10 * 4, 4 * 8 * 5 * 5 * 4
SMALL_VECTORS = SMALL  # statistics, logits and losses are less than one more tensor


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Memory must be freed by reference counts: a cycle would keep it until the collector runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def step(policy):
    model = build("residual")
    if policy is not None:
        apply_recompute(model, policy)
    return counted_step(model, loss_of)


def test_forward_runs_each_operator_once():
    plain, *_ = step(None)
    for policy in ("cheap", "sublinear"):
        forward, *_ = step(policy)
        # Small parameters are copied: two of each batch norm and the last weight. With "sublinear" also
        # that one transposed, the weights of six 1 x 1 convolutions, and two biases.
        copies = {"cheap": 2 * 13 + 1, "sublinear": 2 * 13 + 1 + 1 + 6 + 2}[policy]
        assert {name: n for name, n in (forward - plain).items() if name != "detach"} == {"clone": copies}


def test_cheap_recomputes_normalization_activation_pooling_and_addition_once():
    # Computing the output of residual block 4 would run 15 operators: 3 of the stem, 3 of each block. So it is kept,
    # and the second batch norm of that block, its addition and its activation do not run again.
    expected = {"native_batch_norm": 12, "relu": 12, "add": 5, "max_pool2d_with_indices": 1, "mean": 0}
    found = recomputed(step(None)[1], step("cheap")[1])
    assert found == {name: n for name, n in expected.items() if n}


def test_sublinear_also_recomputes_each_convolution_once():
    found = recomputed(step(None)[1], step("sublinear")[1])
    assert found["convolution"] == 13
    assert found["max_pool2d_with_indices"] == 1
    # The segments of the 13 blocks: the stem, residual blocks 1 to 4, 5 and 6 with the pool, and the linear layer. The
    # first request in a segment computes it from its beginning, and keeps convolutions and the output of block 2. What
    # else backward asks for is computed a second time, from these. By segment, batch norms: 1, 7 + 6, 4 + 3.
    assert (found["native_batch_norm"], found["relu"], found["add"]) == (21, 21, 8)


def test_what_is_kept_has_the_expected_bytes():
    kept = {policy: step(policy)[2] for policy in (None, "cheap", "sublinear")}
    # Plain: convolution, activation, indices (int64) and result of the pool; four tensors of each residual block.
    assert 0 <= kept[None] - (2 * LARGE + 3 * SMALL + 6 * 4 * SMALL) < SMALL_VECTORS
    # Cheap: outputs of the 13 convolutions, and of the fourth block.
    assert 0 <= kept["cheap"] - (LARGE + 12 * SMALL + SMALL) < SMALL_VECTORS
    # Sublinear: outputs of the stem and of the fourth block, and copies of small parameters.
    assert 0 <= kept["sublinear"] - 2 * SMALL - small_parameter_bytes(build("residual")) < SMALL_VECTORS


def test_bytes_by_autograds_own_hooks_agree():
    found = saved_bytes(build("residual"), loss_of) - 4 * 3 * 12 * 12 * 4  # the images
    assert abs(found - step(None)[2]) < SMALL_VECTORS / 2


def test_the_peak_falls_with_what_is_kept():
    none, cheap, sublinear = (step(policy)[3] for policy in (None, "cheap", "sublinear"))
    assert sublinear < cheap < none


def test_a_policy_that_keeps_everything_is_seen():
    class KeepAll(Cheap):
        def keeps(self, kind, key):
            return True

    assert recomputed(step(None)[1], step(KeepAll())[1]) == {}
    assert step(KeepAll())[2] >= step(None)[2]


def test_memory_is_freed_without_the_collector():
    """The fixture has switched it off: a cycle of values and calls would keep the tensors of every step."""
    for policy in ("cheap", "sublinear"):
        model = build("residual")
        apply_recompute(model, policy)
        parameters = [*model.parameters(), *model.buffers()]
        with Operators(parameters) as operators:
            loss_of(model).backward()
            model.zero_grad()
            assert operators.living_bytes() == 0, policy


def test_nothing_is_recorded_where_no_gradient_is_computed():
    model = build("residual")
    apply_recompute(model)
    with torch.no_grad(), Operators() as operators:
        loss_of(model)
    plain = step(None)[0]
    assert operators.counts["convolution"] == plain["convolution"]
    assert operators.counts["detach"] == 0


def test_a_part_without_gradient_holds_no_memory_until_the_end_of_the_forward():
    model = build("residual")
    teacher = build("residual")

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.teacher = model, teacher
            self.living = 0

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            self.living = operators.living_bytes()
            return self.model(x) - target

    both = Both()
    apply_recompute(both)
    with Operators([*both.parameters(), *both.buffers()]) as operators:
        loss_of(both)
    assert both.living < SMALL_VECTORS
