"""Ring all-reduce and its two halves, for any backend with point-to-point messages.

A. Gibiansky, "Bringing HPC Techniques to Deep Learning" (Baidu Research, 2017). To reduce an array of K elements, each
of the N ranks sends 2(N-1) chunks of K/N elements in 2(N-1) steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import exclusive_use, resolve_group
from lightning_dp.collectives.point_to_point import flat_buffer
from lightning_dp.collectives.ring_schedule import chunk_bounds, run_ring
from lightning_dp.collectives.same_call import require_same_call

SEGMENT_BYTES = 512 * 1024
OPS = ("sum", "mean")
WIRE_DTYPES = (torch.float16, torch.bfloat16)


def ring_all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    *,
    wire_dtype: torch.dtype | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    check_call: bool = True,
) -> torch.Tensor:
    """Replace ``tensor`` by its sum or mean over the ranks of ``group``, in place, and return it.

    Every rank of the group must call it. It blocks until the result is there; on CUDA, until the work is queued. The
    result is bitwise identical on all ranks. Before the data, each rank sends N-1 headers of
    `same_call.HEADER_BYTES`, with which the ranks verify that they make the same call.

    Only one thread may use a group at a time. A second thread gets a RuntimeError.

    Args:
        tensor: (*) any shape and any dtype that PyTorch can add. Those that it cannot add, such as float8 and uint16,
            are refused on all ranks; `ring_all_gather` accepts them. A tensor that is not contiguous is copied.
        group: None is the default group.
        op: "sum" or "mean". The mean divides before it sums, so that 16-bit sums do not overflow.
        wire_dtype: float16 or bfloat16 halves the bytes of a float32 tensor. Sums are computed in ``tensor.dtype``.
        segment_bytes: maximum size of a message. Adding one segment overlaps with receiving the next.
        check_call: False sends no headers, so that on CUDA the host does not wait for the device. Ranks that make
            different calls then get wrong sums, or wait forever.

    Raises:
        ValueError: on all ranks, if they do not make the same call or the arguments do not fit the dtype.
        PeerError: a neighbor has died, or has been silent for longer than the timeout of the group.
    """
    group = resolve_group(group)
    with exclusive_use(group, "ring_all_reduce"), flat_buffer(tensor, group) as flat:
        wire = "" if wire_dtype is None else f" as {wire_dtype} on the wire"
        if check_call:
            _require_same_call(group, f"ring_all_reduce, {op}{wire}", flat, segment_bytes)
        require_op(op, flat, segment_bytes)
        if wire_dtype is not None and (wire_dtype not in WIRE_DTYPES or not flat.is_floating_point()):
            raise ValueError(
                f"wire_dtype={wire_dtype} for a tensor of {flat.dtype}; use torch.float16 or torch.bfloat16 with real "
                "floating-point tensors, or None"
            )
        if op == "mean":
            flat.div_(group.size())
        steps = group.size() - 1
        run_ring(flat, group, num_reducing=steps, num_copying=steps, segment_bytes=segment_bytes, wire_dtype=wire_dtype)
    return tensor


def ring_reduce_scatter(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> torch.Tensor:
    """Store the sum or mean of chunk n on rank n, in place, and return that chunk. Every rank must call it.

    The chunks are those of `chunk_bounds`\\ ``(tensor.numel(), N)``, over the elements in row-major order. The other
    chunks of ``tensor`` are left with partial sums. The arguments are those of `ring_all_reduce`.

    Returns:
        (numel of chunk n,) on rank n: a view of ``tensor`` if it is contiguous, else a copy.

    Raises:
        ValueError: as `ring_all_reduce`.
        PeerError: as `ring_all_reduce`.
    """
    group = resolve_group(group)
    rank = group.rank()
    world_size = group.size()
    with exclusive_use(group, "ring_reduce_scatter"), flat_buffer(tensor, group) as flat:
        _require_same_call(group, f"ring_reduce_scatter, {op}", flat, segment_bytes)
        require_op(op, flat, segment_bytes)
        if op == "mean":
            flat.div_(world_size)
        run_ring(
            flat,
            group,
            num_reducing=world_size - 1,
            num_copying=0,
            segment_bytes=segment_bytes,
            position=rank - 1,  # the published schedule would leave the sum of chunk n+1 on rank n
        )
    begin, end = chunk_bounds(tensor.numel(), world_size)[rank]
    return tensor.detach().reshape(-1)[begin:end]


def ring_all_gather(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, segment_bytes: int = SEGMENT_BYTES
) -> torch.Tensor:
    """Fill chunk n of ``tensor`` with chunk n of rank n, for all n, in place, and return it. Every rank must call it.

    The chunks are those of `ring_reduce_scatter`. After it, this function completes an all-reduce.

    Raises:
        ValueError: as `ring_all_reduce`.
        PeerError: as `ring_all_reduce`.
    """
    group = resolve_group(group)
    with exclusive_use(group, "ring_all_gather"), flat_buffer(tensor, group) as flat:
        _require_same_call(group, "ring_all_gather", flat, segment_bytes)
        require_segment(segment_bytes)
        run_ring(flat, group, num_reducing=0, num_copying=group.size() - 1, segment_bytes=segment_bytes)
    return tensor


def _require_same_call(group: dist.ProcessGroup, call: str, flat: torch.Tensor, segment_bytes: int) -> None:
    size = f"{flat.numel()} elements of {flat.dtype}"
    require_same_call(group, f"{call}, {size}, segments of {segment_bytes} bytes", flat.device)


def require_op(op: str, flat: torch.Tensor, segment_bytes: int) -> None:
    """Raise ValueError if ``op`` does not fit the dtype of ``flat``.

    Call it after `require_same_call`: a rank that raised before it would leave its peers waiting.
    """
    dtype = flat.dtype
    if op not in OPS:
        raise ValueError(f"op={op!r} is not known; use one of {', '.join(OPS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"the mean of {dtype} is not defined; sum and divide, or use a floating-point tensor")
    # Without this trial, the ranks would fail at different steps of the ring, and blame each other.
    trial = flat.new_empty(1)
    try:
        trial.add_(trial)
        if op == "mean":
            trial.div_(2)
    except RuntimeError as error:  # also NotImplementedError
        raise ValueError(
            f"PyTorch cannot compute the {op} of {dtype} on {flat.device.type}; cast the tensor to a dtype that it can "
            "add, such as torch.int32 or torch.float32"
        ) from error
    require_segment(segment_bytes)


def require_segment(segment_bytes: int) -> None:
    """Raise ValueError if ``segment_bytes`` is not positive."""
    if segment_bytes < 1:
        raise ValueError(f"segment_bytes={segment_bytes} is not positive; leave the default of {SEGMENT_BYTES}")
