from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from lightning_dp.collectives import chunk_bounds, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lightning_dp.collectives import ring as ring_module
from lightning_dp.collectives.point_to_point import HEADER_BYTES
from tests.collectives.counting import count_messages
from tests.ranks import run_processes, run_threads

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
# Empty, smaller than the number of ranks, not divisible by it, and of several segments.
SIZES = (0, 1, 5, 24, 1003)
SEGMENT_BYTES = 64


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype in INTEGERS:
        return torch.randint(0, 2 if dtype == torch.bool else 16, (size,), generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(size, generator=generator, dtype=wide).to(dtype)


def all_values(world_size: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, size, dtype) for rank in range(world_size)])


def oracle(world_size: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum, computed in one process with a wide dtype."""
    stacked = all_values(world_size, size, dtype)
    if dtype == torch.bool:
        return stacked.any(0)
    if dtype in INTEGERS:
        return stacked.sum(0)
    return stacked.to(torch.complex128 if dtype.is_complex else torch.float64).sum(0)


def assert_equals(result: torch.Tensor, expected: torch.Tensor, world_size: int) -> None:
    if result.dtype in INTEGERS:
        assert torch.equal(result, expected.to(result.dtype))
    else:
        # Each of the N-1 additions rounds once.
        tolerance = world_size * 4 * torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


def reduce_all(rank, group, sizes, dtypes):
    results = {}
    for dtype in dtypes:
        for size in sizes:
            tensor = values(rank, size, dtype)
            returned = ring_all_reduce(tensor, group, segment_bytes=SEGMENT_BYTES)
            assert returned is tensor
            results[size, dtype] = tensor
    return results


def check_all_reduce(world_size: int, sizes=SIZES, dtypes=INTEGERS + FLOATS) -> None:
    results = run_threads(world_size, reduce_all, sizes, dtypes)
    for size, dtype in results[0]:
        expected = oracle(world_size, size, dtype)
        for result in results:
            assert_equals(result[size, dtype], expected, world_size)
            assert torch.equal(result[size, dtype], results[0][size, dtype]), "not bitwise identical on all ranks"


@pytest.mark.parametrize("world_size", range(1, 9))
def test_all_reduce_is_the_sum_on_every_rank(world_size):
    # All dtypes for the small rings, one of each kind for the large ones.
    few = (torch.int64, torch.bfloat16, torch.float32)
    check_all_reduce(world_size, dtypes=INTEGERS + FLOATS if world_size in (2, 3) else few)


def test_the_comparison_fails_without_communication(monkeypatch):
    monkeypatch.setattr(ring_module, "run_ring", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError):
        check_all_reduce(3, sizes=(24,), dtypes=(torch.float32,))


def beside_native(rank, group):
    own, native = values(rank, 1003, torch.int64), values(rank, 1003, torch.int64)
    ring_all_reduce(own, group)
    dist.all_reduce(native, group=group)
    return torch.equal(own, native)


def test_integer_sums_equal_the_native_all_reduce():
    assert all(run_threads(5, beside_native))


def halves(rank, group, size):
    tensor = values(rank, size, torch.float64)
    chunk = ring_reduce_scatter(tensor, group, segment_bytes=SEGMENT_BYTES)
    begin, end = chunk_bounds(size, group.size())[rank]
    is_view = chunk.data_ptr() == tensor[begin:end].data_ptr()
    chunk = chunk.clone()
    returned = ring_all_gather(tensor, group, segment_bytes=SEGMENT_BYTES)
    assert returned is tensor
    return chunk, is_view, tensor


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 2, 1003])
def test_reduce_scatter_then_all_gather(world_size, size):
    expected = oracle(world_size, size, torch.float64)
    for (begin, end), (chunk, is_view, whole) in zip(
        chunk_bounds(size, world_size), run_threads(world_size, halves, size), strict=True
    ):
        assert is_view
        torch.testing.assert_close(chunk, expected[begin:end])
        torch.testing.assert_close(whole, expected)


def shaped(rank, group):
    base = values(rank, 120, torch.float64).view(2, 3, 4, 5)
    tensors = {
        "4d": base.clone(),
        "transposed": base.clone().transpose(0, 2),
        "channels_last": base.clone(memory_format=torch.channels_last),
        "every other": values(rank, 240, torch.float64)[::2],
        "scalar": torch.tensor(float(rank), dtype=torch.float64),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    chunks = {}
    for tensor in tensors.values():
        strides = tensor.stride()
        ring_all_reduce(tensor, group)
        assert tensor.stride() == strides
    chunks["transposed"] = ring_reduce_scatter(base.clone().transpose(0, 2), group)
    return tensors, chunks


def test_any_shape_and_stride():
    world_size = 3
    base = oracle(world_size, 120, torch.float64).view(2, 3, 4, 5)
    expected = {
        "4d": base,
        "transposed": base.transpose(0, 2),
        "channels_last": base,
        "every other": oracle(world_size, 240, torch.float64)[::2],
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "parameter": base,
    }
    for rank, (tensors, chunks) in enumerate(run_threads(world_size, shaped)):
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor.detach(), expected[name], msg=name)
        begin, end = chunk_bounds(120, world_size)[rank]
        torch.testing.assert_close(chunks["transposed"], base.transpose(0, 2).reshape(-1)[begin:end])


def means(rank, group):
    large = torch.full((10,), 60000.0, dtype=torch.float16)
    exact = values(rank, 50, torch.float64)
    share = values(rank, 50, torch.float64)
    ring_all_reduce(large, group, "mean")
    ring_all_reduce(exact, group, "mean")
    return large, exact, ring_reduce_scatter(share, group, "mean")


def test_mean():
    for rank, (large, exact, share) in enumerate(run_threads(4, means)):
        expected = oracle(4, 50, torch.float64) / 4
        assert (large == 60000.0).all(), "the sum of four overflows float16, their mean does not"
        torch.testing.assert_close(exact, expected)
        begin, end = chunk_bounds(50, 4)[rank]
        torch.testing.assert_close(share, expected[begin:end])


def on_the_wire(rank, group, wire_dtype):
    normal, large = values(rank, 1003, torch.float32), torch.full((7,), 60000.0)
    ring_all_reduce(normal, group, wire_dtype=wire_dtype, segment_bytes=SEGMENT_BYTES)
    ring_all_reduce(large, group, "mean", wire_dtype=wire_dtype)
    return normal, large


@pytest.mark.parametrize("wire_dtype", [torch.float16, torch.bfloat16])
def test_16_bit_messages(wire_dtype, monkeypatch):
    world_size = 4
    sent = count_messages(monkeypatch)
    results = run_threads(world_size, on_the_wire, wire_dtype)
    assert {message.dtype for messages in sent.values() for message in messages} == {torch.uint8, wire_dtype}
    expected = oracle(world_size, 1003, torch.float32)
    for normal, large in results:
        assert normal.dtype == torch.float32
        assert torch.equal(normal, results[0][0]), "not bitwise identical on all ranks"
        # One rounding per hop, of partial sums that are below 16 here.
        torch.testing.assert_close(normal.double(), expected, rtol=0, atol=world_size * 8 * torch.finfo(wire_dtype).eps)
        torch.testing.assert_close(large, torch.full((7,), 60000.0), rtol=torch.finfo(wire_dtype).eps, atol=0)


def accumulate_on_the_wire(rank, group):
    # bfloat16 cannot represent 1 + 2^-9. A sum that is kept in bfloat16 between hops would lose each 2^-9.
    tensor = torch.full((1,), 1.0 + 2.0**-9)
    ring_all_reduce(tensor, group, wire_dtype=torch.bfloat16)
    return tensor


def test_the_wire_format_rounds_messages_only():
    # float32(bfloat16(1 + 2^-9)) + (1 + 2^-9) = 2 + 2^-9, which bfloat16 rounds to 2 on all ranks.
    assert [float(result) for result in run_threads(2, accumulate_on_the_wire)] == [2.0, 2.0]


def sub_groups(rank):
    dist.init_process_group("gloo")
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([3, 1])
    tensor = torch.tensor([float(rank), 1.0])
    everyone = ring_all_reduce(tensor.clone())
    mine, other = (evens, odds) if rank % 2 == 0 else (odds, evens)
    with pytest.raises(ValueError, match="call the collective on member ranks only"):
        ring_all_reduce(tensor, other)
    return everyone.tolist(), ring_all_reduce(tensor, mine).tolist()


def test_default_group_and_sub_groups():
    evens, odds = [6.0, 3.0], [4.0, 2.0]
    results = run_processes(5, sub_groups)
    assert [everyone for everyone, _ in results] == [[10.0, 5.0]] * 5
    assert [mine for _, mine in results] == [evens, odds, evens, odds, evens]


def reduce_once(rank, group, size, segment_bytes):
    ring_all_reduce(torch.ones(size), group, segment_bytes=segment_bytes)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_rank_sends_exactly_the_published_number_of_bytes(world_size, monkeypatch):
    num_chunk_elements = 10
    size = world_size * num_chunk_elements
    for segment_bytes, num_segments in ((1024, 1), (20, 2), (8, 5)):
        sent = count_messages(monkeypatch)
        run_threads(world_size, reduce_once, size, segment_bytes)
        for rank in range(world_size):
            data = [message for message in sent[rank] if message.dtype == torch.float32]
            headers = [message for message in sent[rank] if message.dtype != torch.float32]
            assert sum(message.num_bytes for message in data) * world_size == 2 * (world_size - 1) * size * 4
            assert len(data) == 2 * (world_size - 1) * num_segments
            assert {message.destination for message in data} == {(rank + 1) % world_size}
            assert sum(message.num_bytes for message in headers) == (world_size - 1) * HEADER_BYTES
            assert len(headers) == math.ceil(math.log2(world_size))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_on_gpus(backend):
    world_size = 2 if backend == "gloo" else torch.cuda.device_count()
    if not torch.cuda.is_available() or world_size < 2:
        pytest.skip("needs a GPU; NCCL needs one for each rank, and two ranks")
    for result in run_processes(world_size, on_gpu, backend):
        assert torch.equal(result, oracle(world_size, 1003, torch.int64))


def on_gpu(rank, backend):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend)
    tensor = values(rank, 1003, torch.int64).cuda()
    ring_all_reduce(tensor, segment_bytes=1024)
    return tensor.cpu()
