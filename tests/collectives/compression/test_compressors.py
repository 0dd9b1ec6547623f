"""Each compressor against one process that plays all groups: bitwise where rounding decides, else within 1e-10."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.local_wire import local_wires, run_ranks

from lightning_dp.collectives.compression.compressors import (
    LARGEST,
    SCALE_BYTES,
    Int8,
    PowerSGDCompressor,
    Residuals,
    make_compressor,
    message_bytes,
    quantize,
)
from lightning_dp.collectives.compression.layout import BLOCK, ParameterTable, ParamSlice, cut, whole_shard
from lightning_dp.collectives.compression.options import PowerSGD
from lightning_dp.collectives.compression.wire import complete
from tests.collectives.compression import oracle

SHAPES = [(40, 30), (7,), (3, 100), (600,), (1,)]
STEPS = 4
CHOICES = ["bf16", "fp16", "int8", PowerSGD(rank=2)]


def gradients(step: int, group: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + group)
    scales = [1.0, 1e-3, 30.0, 1e-12, 1.0]
    return [(s * torch.randn(shape, generator=generator)).to(dtype) for s, shape in zip(scales, SHAPES, strict=True)]


def summed(compressor_of, num_groups, orders, dtype=torch.float32, steps=range(STEPS)):
    """For each group: sums of each parameter, step by step; its compressor, the bytes it has sent, and its parameters.

    ``orders`` gives the buckets of a step, as lists of places in `SHAPES`.
    """

    def carry(wire):
        parameters = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
        table = ParameterTable((str(place), p) for place, p in enumerate(parameters))
        compressor = compressor_of()
        results = []
        for step in steps:
            given = gradients(step, wire.rank, dtype)
            result = [None] * len(SHAPES)
            for bucket in orders(step):
                flat = torch.cat([given[place].flatten() for place in bucket])
                piece = whole_shard([table(parameters[place]) for place in bucket])
                compressor.all_reduce(flat, piece, wire)
                for place, part in zip(bucket, piece.split(flat), strict=True):
                    result[place] = part.view(SHAPES[place])
            results.append(result)
        return results, compressor, wire.bytes_sent, table

    return run_ranks(local_wires(num_groups), carry)


def test_a_rank_whose_part_of_a_parameter_shrinks_takes_that_part_of_the_residual():
    weight = torch.zeros(600)
    info = ParameterTable([("weight", weight)])(weight)
    residuals = Residuals()
    residuals.keep(ParamSlice(info, 200, 600), torch.arange(200.0, 600.0))
    for begin, end in ((200, 600), (200, 300), (300, 400), (400, 600)):
        assert torch.equal(residuals.get(ParamSlice(info, begin, end)), torch.arange(float(begin), float(end)))


def test_the_smallest_scale_that_is_a_normal_number_is_used():
    values = torch.full((1, BLOCK), LARGEST * torch.finfo(torch.float32).tiny)
    assert quantize(values)[:, SCALE_BYTES:].view(torch.int8).eq(LARGEST).all()
    assert not values.any(), "nothing is left out"


def one_bucket(step):
    return [[4, 3, 2, 1, 0]]


def rebuilt(step):
    return [[4, 3, 2, 1, 0]] if step == 0 else [[0, 3], [2], [4, 1]]


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bits_round_each_contribution_and_the_sum(name, num_groups):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    for results, *_ in summed(lambda: make_compressor(name), num_groups, one_bucket):
        for step in range(STEPS):
            contributions = [gradients(step, group) for group in range(num_groups)]
            for place, got in enumerate(results[step]):
                expected = oracle.sixteen_bit([each[place] for each in contributions], dtype)
                assert torch.equal(got, expected)


@pytest.mark.parametrize("values", [(65504.0, -65000.0), (float("nan"), -float("nan")), (1 + 2**-8, -1.0)], ids=str)
@pytest.mark.parametrize("num_groups", [2, 3])
def test_16_bits_of_another_kind_are_the_same_on_all_carriers(values, num_groups):
    def carry(wire):
        flat = torch.tensor([*values, 0.0][wire.rank : wire.rank + 1], dtype=torch.float16)
        complete(wire.all_reduce(flat, torch.bfloat16, torch.float32))
        return flat.view(torch.int16).item()

    assert len(set(run_ranks(local_wires(num_groups), carry))) == 1


def int8_oracle(num_groups, dtype=torch.float32):
    first_blocks = [0, 5, 6, 8, 11]
    return [
        oracle.Int8Groups(num_groups, torch.Size(shape).numel(), first, dtype)
        for shape, first in zip(SHAPES, first_blocks, strict=True)
    ]


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_8_bits_are_bitwise_those_of_one_process_that_plays_all_groups(num_groups, dtype):
    groups = int8_oracle(num_groups, dtype)
    expected = [
        [g.sum([gradients(step, group, dtype)[place] for group in range(num_groups)]) for place, g in enumerate(groups)]
        for step in range(STEPS)
    ]
    for results, *_ in summed(Int8, num_groups, one_bucket, dtype):
        for step in range(STEPS):
            assert all(map(torch.equal, results[step], expected[step]))


def test_8_bits_without_error_feedback_differ_from_the_second_step_on():
    with_feedback, *_ = summed(Int8, 2, one_bucket)[0]
    without, *_ = summed(lambda: Int8(error_feedback=False), 2, one_bucket)[0]
    assert all(map(torch.equal, without[0], with_feedback[0]))
    assert not torch.equal(without[1][0], with_feedback[1][0])


@pytest.mark.parametrize("num_groups", [2, 3])
def test_power_sgd_projects_the_sum_of_gradients_and_residuals(num_groups):
    dtype = torch.float64
    start = torch.randn(30, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    groups = oracle.PowerSGDGroups(num_groups, start)
    results = summed(lambda: make_compressor(PowerSGD(rank=2)), num_groups, one_bucket, dtype)
    for step in range(STEPS):
        contributions = [gradients(step, group, dtype) for group in range(num_groups)]
        matrix = groups.sum([each[0] for each in contributions])
        for got, *_ in results:
            torch.testing.assert_close(got[step][0], matrix, rtol=1e-10, atol=1e-10)
            for place in (1, 3, 4):  # vectors are sent whole
                exact = sum(each[place] for each in contributions)
                torch.testing.assert_close(got[step][place], exact, rtol=1e-14, atol=0)


def test_power_sgd_is_exact_until_its_start():
    results, *_ = summed(lambda: make_compressor(PowerSGD(rank=1, start_step=2)), 2, one_bucket)[0]
    for step in range(STEPS):
        is_exact = torch.equal(results[step][0], gradients(step, 0)[0] + gradients(step, 1)[0])
        assert is_exact == (step < 2)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("num_groups", [2, 3])
def test_all_carriers_end_with_the_same_bits_whatever_the_buckets_are(choice, num_groups):
    first, *others = (r for r, *_ in summed(lambda: make_compressor(choice), num_groups, one_bucket))
    others += [r for r, *_ in summed(lambda: make_compressor(choice), num_groups, rebuilt)]
    for result in others:
        for step in range(STEPS):
            for place in range(len(SHAPES)):
                assert torch.equal(result[step][place], first[step][place])


@pytest.mark.parametrize("options", [PowerSGD(rank=1, error_feedback=False), PowerSGD(rank=2, start_step=1)], ids=str)
def test_the_place_of_a_matrix_in_its_bucket_does_not_change_the_bits(options):
    """Nor does it without a residual, when the gradient itself would be multiplied: BLAS rounds by the alignment."""
    shape, others = (37, 128), range(1, 8)

    def carry(wire, num_before):
        matrix, vector = torch.zeros(shape), torch.zeros(num_before)
        table = ParameterTable([("matrix", matrix), ("vector", vector)])
        compressor = make_compressor(options)
        sums = []
        for step in range(2):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2 * step + wire.rank))
            flat = torch.cat([vector, gradient.flatten()])
            compressor.all_reduce(flat, whole_shard([table(vector), table(matrix)]), wire)
            sums.append(flat[num_before:])
        return sums

    aligned, *shifted = (run_ranks(local_wires(2), lambda wire, n=n: carry(wire, n))[0] for n in (0, *others))
    for sums in shifted:
        assert all(map(torch.equal, sums, aligned))


class MixesResiduals(Int8):
    """Keeps the residual of a parameter with its place in the bucket."""

    def all_reduce(self, tensor, piece, wire):
        self.by_place = getattr(self, "by_place", {})
        for place, part in enumerate(piece.parts):
            held = self.by_place.get(place, torch.zeros(0))[: part.numel]
            self.residuals.keep(part, torch.cat([held, torch.zeros(part.numel - len(held))]))
        super().all_reduce(tensor, piece, wire)
        for place, part in enumerate(piece.parts):
            self.by_place[place] = self.residuals.get(part)


def test_residuals_that_stay_with_a_place_in_the_bucket_give_other_bits_after_a_rebuild():
    kept, *_ = summed(MixesResiduals, 2, one_bucket)[0]
    mixed, *_ = summed(MixesResiduals, 2, rebuilt)[0]
    right, *_ = summed(Int8, 2, one_bucket)[0]
    assert torch.equal(kept[2][0], right[2][0]), "while buckets stay, a place is as good as a parameter"
    assert not torch.equal(mixed[2][0], right[2][0])


@pytest.mark.parametrize("choice", ["int8", PowerSGD(rank=2)], ids=str)
def test_what_was_not_delivered_is_the_sum_of_all_residuals(choice):
    dtype = torch.float64
    results = summed(lambda: make_compressor(choice), 3, one_bucket, dtype)
    for place in (0, 2) if choice == "int8" else (0,):
        given = sum(gradients(step, group, dtype)[place] for step in range(STEPS) for group in range(3))
        delivered = sum(results[0][0][step][place] for step in range(STEPS))
        left = sum(c.residuals.expanded(table.all()[place]) for _, c, _, table in results).view(SHAPES[place])
        torch.testing.assert_close(delivered + left, given, rtol=1e-10, atol=1e-10)
        assert (given - delivered).abs().max() > 1e-4


@pytest.mark.parametrize("choice", ["int8", PowerSGD(rank=2)], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinite_gradient_is_seen_and_does_not_reach_the_next_step(choice, bad):
    compressor = {}

    def carry(wire):
        parameter = torch.zeros(40, 30)
        info = ParameterTable([("weight", parameter)])(parameter)
        compressor[wire.rank] = make_compressor(choice)
        results = []
        for step in range(3):
            flat = gradients(step, wire.rank)[0].flatten()
            if step == 1 and wire.rank == 0:
                flat[3] = bad
            compressor[wire.rank].all_reduce(flat, whole_shard([info]), wire)
            results.append(flat)
        return results

    first, second = run_ranks(local_wires(2), carry)
    assert first[0].isfinite().all()
    assert not first[1][3].isfinite()
    assert first[2].isfinite().all()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_gradients_that_are_too_small_for_a_scale_are_kept_for_later():
    def carry(wire):
        parameter = torch.zeros(4)
        info = ParameterTable([("bias", parameter)])(parameter)
        compressor = Int8()
        tiny = torch.full((4,), 1e-43)
        compressor.all_reduce(tiny, whole_shard([info]), wire)
        return tiny, compressor.residuals.expanded(info)

    for delivered, residual in run_ranks(local_wires(2), carry):
        assert not delivered.any()
        assert torch.equal(residual, torch.full((4,), 1e-43))


def test_bytes_are_counted_as_they_are_sent():
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    whole = numel - 40 * 30  # of PowerSGD; the second matrix is too small
    for num_groups in (2, 3):
        steps = STEPS * num_groups  # the sums of all ranks, since shares differ by an element
        for choice, per_step in (
            ("bf16", 2 * numel),
            ("int8", 12 * (256 + 4)),  # 12 blocks of all parameters
            (PowerSGD(rank=2), 4 * (whole + 2 * (40 + 30))),
        ):
            sent = sum(
                bytes_sent for *_, bytes_sent, _ in summed(lambda c=choice: make_compressor(c), num_groups, one_bucket)
            )
            assert sent == steps * 2 * (num_groups - 1) / num_groups * per_step
            assert message_bytes(SHAPES, choice) == per_step
    assert message_bytes(SHAPES, None) == 4 * numel


def test_a_matrix_is_compressed_only_where_that_saves_enough():
    def rank_of(shape, **options):
        parameter = torch.zeros(shape)
        return PowerSGDCompressor(PowerSGD(**options)).rank_of(ParameterTable()(parameter))

    assert rank_of((40, 30), rank=2) == 2
    assert rank_of((40, 30), rank=9) is None
    assert rank_of((40, 30), rank=9, min_compression_rate=1.0) == 9
    assert rank_of((1200,)) is None
    assert rank_of((64, 3, 11, 11)) == 4


def test_pieces_are_cut_at_blocks_of_parameters_and_cover_the_bucket():
    parameters = [torch.zeros(shape) for shape in SHAPES]
    infos = [ParameterTable(zip("abcde", parameters, strict=True))(p) for p in parameters]
    for num_pieces in (1, 2, 3, 20):
        pieces = cut(infos, num_pieces)
        assert len(pieces) == num_pieces
        parts = [part for piece in pieces for part in piece.parts]
        assert all(part.begin % 256 == 0 for part in parts)
        for info in infos:
            ranges = [(part.begin, part.end) for part in parts if part.info is info]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == info.numel
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("parameter", "stride", "matrix"),
    [
        (torch.zeros(5, 4, 3, 2), (24, 6, 2, 1), (5, 24)),
        (torch.zeros(5, 4, 3, 2).to(memory_format=torch.channels_last), (24, 1, 8, 4), (5, 24)),
        (torch.zeros(4, 5).t(), (1, 5), (4, 5)),
        (torch.zeros(4, 10)[:, :5], (5, 1), (4, 5)),
        (torch.zeros(3, 1), (1, 1), (3, 1)),
        (torch.zeros(6), (1,), None),
        (torch.zeros(()), (), None),
        (torch.zeros(4, 0), (1, 1), None),
        (torch.zeros(3, 4, 5).permute(1, 0, 2), (5, 20, 1), None),
    ],
)
def test_a_gradient_lies_in_a_bucket_as_ddp_puts_it(parameter, stride, matrix):
    info = ParameterTable()(parameter)
    assert info.matrix_shape == matrix
    if parameter.numel() and parameter.dim():
        assert info.stride == stride
    values = torch.randn(info.shape)
    assert torch.equal(info.as_parameter(info.as_flat(values)), values)
