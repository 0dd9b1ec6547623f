from __future__ import annotations

import pytest

from lightning_dp.collectives.compression.options import PowerSGD, check_compression, has_error_feedback


@pytest.mark.parametrize("compression", [None, "bf16", "fp16", "int8", PowerSGD(), PowerSGD(rank=1, start_step=100)])
def test_known_compressors_are_accepted(compression):
    check_compression(compression)


@pytest.mark.parametrize("compression", ["int4", "powersgd", "none", "", 16, True, PowerSGD, ["bf16"]])
def test_others_are_refused_by_name(compression):
    with pytest.raises(ValueError, match="compression=.* is not known; use None, 'bf16', 'fp16', 'int8' or PowerSGD"):
        check_compression(compression)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"PowerSGD\(rank=0\) must be an integer of 1 or more"),
        ({"rank": 2.5}, r"PowerSGD\(rank=2.5\) must be an integer of 1 or more"),
        ({"rank": True}, r"PowerSGD\(rank=True\) must be an integer of 1 or more"),
        ({"start_step": -1}, r"PowerSGD\(start_step=-1\) must be an integer of 0 or more"),
        ({"min_compression_rate": 0.5}, r"PowerSGD\(min_compression_rate=0.5\) must be 1 or more"),
        ({"min_compression_rate": float("nan")}, r"PowerSGD\(min_compression_rate=nan\) must be 1 or more"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        PowerSGD(**options)


def test_error_feedback_is_known_by_choice():
    assert [has_error_feedback(c) for c in (None, "bf16", "fp16", "int8", PowerSGD())] == [False] * 3 + [True] * 2
    assert not has_error_feedback(PowerSGD(error_feedback=False))
