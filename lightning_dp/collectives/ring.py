"""Ring all-reduce and its two halves, for any backend with point-to-point messages.

A. Gibiansky, "Bringing HPC Techniques to Deep Learning" (Baidu Research, 2017). To reduce an array of K elements, each
of the N ranks sends 2(N-1) chunks of K/N elements in 2(N-1) steps.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import exclusive_use, resolve_group
from lightning_dp.collectives.point_to_point import Transfer, flat_buffer, post, require_same_call, wait_for_all

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
    `point_to_point.HEADER_BYTES`, with which the ranks verify that they make the same call.

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
    return tensor.detach().reshape(-1).tensor_split(world_size)[rank]


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


# --- The ring: which chunk each rank sends at which step, and the loop that moves the chunks.
#
# A. Gibiansky, "Bringing HPC Techniques to Deep Learning" (Baidu Research, 2017), sections "The Scatter-Reduce" and
# "The Allgather". "Scatter-reduce" is the source's name for reduce-scatter. A rank sends to its right neighbor only and
# receives from its left neighbor only.


def chunk_bounds(num_elements: int, num_chunks: int) -> list[tuple[int, int]]:
    """Return begin and end of each chunk, larger first. Sizes differ by at most one, as in `torch.tensor_split`."""
    size, num_larger = divmod(num_elements, num_chunks)
    begins = [chunk * size + min(chunk, num_larger) for chunk in range(num_chunks + 1)]
    return list(pairwise(begins))


def chunk_schedule(rank: int, world_size: int, step: int) -> tuple[int, int]:
    """Return (chunk that ``rank`` sends, chunk that it receives) at ``step``.

    "The nth GPU starts by sending chunk n and receiving chunk n - 1, and then proceeds backwards." Steps 0 ... N-2
    are the reduce-scatter. The all-gather, steps N-1 ... 2N-3, "starts by sending the n+1th chunk". It continues the
    same sequence, because n + 1 = n - (N-1) modulo N.
    """
    return (rank - step) % world_size, (rank - step - 1) % world_size


# Long because the inner functions and the loop share one schedule.
def run_ring(
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    num_reducing: int,
    num_copying: int,
    segment_bytes: int,
    position: int | None = None,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Run ``num_reducing`` steps that add the received chunk, then ``num_copying`` steps that store it, in place.

    Every rank of the group must call it with the same arguments, except for ``position``. A partial sum is rounded to
    ``wire_dtype`` at each hop. The rank that completes a sum rounds its own copy too, so that the result is bitwise
    identical on all ranks.

    Args:
        flat: (numel,) contiguous, with the same size and dtype on every rank.
        group: the ranks of the ring, in its order.
        num_reducing: N-1 for a reduce-scatter, else 0.
        num_copying: N-1 for an all-gather, else 0.
        segment_bytes: approximate size of a message. Chunks are split into segments that move independently: while
            one segment is added, the following ones arrive, and the previous one is on its way to the neighbor.
        position: position of this rank in the schedule. None: its group rank. A rank at position p ends the
            reduce-scatter with the sum of chunk p + 1, so position n - 1 leaves chunk n on group rank n.
        wire_dtype: dtype of the messages. None: ``flat.dtype``. Sums are computed in ``flat.dtype``.
    """
    rank = group.rank()
    world_size = group.size()
    left = (rank - 1) % world_size
    right = (rank + 1) % world_size
    position = rank if position is None else position
    wire_dtype = wire_dtype or flat.dtype
    casts = wire_dtype != flat.dtype
    chunks = flat.tensor_split(world_size)
    # Chunk 0 is the largest. Every rank must compute the same number of segments, also for a smaller chunk.
    num_segments = max(1, math.ceil(chunks[0].numel() * wire_dtype.itemsize / segment_bytes))
    pieces = [chunk.tensor_split(num_segments) for chunk in chunks]
    # Messages that must be added or cast arrive here. The segments of chunk 0 are at least as large as any other.
    inbox = [torch.empty_like(piece, dtype=wire_dtype) for piece in pieces[0]] if num_reducing or casts else []

    def destination(step: int, segment: int) -> torch.Tensor:
        piece = pieces[chunk_schedule(position, world_size, step)[1]][segment]
        if step < num_reducing or casts:
            return inbox[segment][: piece.numel()]
        # This may overwrite a piece whose own send has not been awaited. That is safe: the piece was sent in the
        # reduce-scatter, and the sum that arrives now includes it, so it has been received.
        return piece

    def start(step: int, segment: int) -> tuple[Transfer, Transfer]:
        piece = pieces[chunk_schedule(position, world_size, step)[0]][segment]
        outgoing = piece.to(wire_dtype)
        if casts and step == num_reducing:
            # First step of the all-gather. This rank holds the exact sum and the others will get the rounded one.
            piece.copy_(outgoing)
        (received,), (sent,) = post(group, [(destination(step, segment), left)], [(outgoing, right)])
        return received, sent

    def accept(step: int, segment: int) -> None:
        piece = pieces[chunk_schedule(position, world_size, step)[1]][segment]
        if step < num_reducing:
            piece.add_(destination(step, segment))
        elif casts:
            piece.copy_(destination(step, segment))

    num_steps = num_reducing + num_copying
    in_flight = [start(0, segment) for segment in range(num_segments)] if num_steps else []
    for step in range(num_steps):
        for segment in range(num_segments):
            received, sent = in_flight[segment]
            received.wait()
            accept(step, segment)
            # What was just received is what the next step sends. Starting it here, before the other segments of this
            # step have arrived, keeps the link to the right neighbor busy.
            if step + 1 < num_steps:
                in_flight[segment] = start(step + 1, segment)
            sent.wait()


# --- All-reduce through a single reducer, the baseline for the ring.
#
# "Every GPU sends its gradient to a single GPU, which takes the average of all the gradients, and sends the average
# back to all the other GPUs" ("Bringing HPC Techniques to Deep Learning", section "The Communication Problem").


def star_all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: str = "sum",
    *,
    reducer: int = 0,
    segment_bytes: int = SEGMENT_BYTES,
) -> torch.Tensor:
    """Replace ``tensor`` by its sum or mean over the ranks of ``group``, in place, and return it.

    Every rank of the group must call it. The reducer receives and sends the array N-1 times, so the time grows linearly
    with N. Segments are pipelined: while one is sent back, the following ones arrive. That halves the time of two
    separate phases and makes the baseline fair. The reducer adds in rank order, and its result is sent to all ranks, so
    that it is bitwise identical on all of them.

    Args:
        tensor: as in `ring_all_reduce`.
        group: as in `ring_all_reduce`.
        op: "sum" or "mean".
        reducer: group rank of the reducer.
        segment_bytes: maximum size of a message.

    Raises:
        ValueError: on all ranks, if they do not make the same call or an argument does not fit.
        PeerError: a rank has died, or has been silent for longer than the timeout of the group.
    """
    group = resolve_group(group)
    with exclusive_use(group, "star_all_reduce"), flat_buffer(tensor, group) as flat:
        _require_same_call(group, f"star_all_reduce, {op} on rank {reducer}", flat, segment_bytes)
        require_op(op, flat, segment_bytes)
        if not 0 <= reducer < group.size():
            raise ValueError(
                f"reducer={reducer} is not in a group of {group.size()} ranks; use 0 to {group.size() - 1}"
            )
        if op == "mean":
            flat.div_(group.size())
        segments = [*flat.split(max(1, segment_bytes // flat.element_size()))]
        if group.rank() == reducer:
            _reduce(segments, group)
        else:
            # A received segment may overwrite the sent one: the sum cannot arrive before this rank's part was read.
            messages = [(segment, reducer) for segment in segments]
            received, sent = post(group, messages, messages)
            wait_for_all(received + sent)
    return tensor


def _reduce(segments: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each segment over the group and send the sum back. Two sets of receive buffers are used in turn."""
    leaves = [rank for rank in range(group.size()) if rank != group.rank()]
    # The first segments are the largest: the last one may be shorter.
    inboxes = [[torch.empty_like(segment) for _ in leaves] for segment in segments[:2]]
    sends: list[Transfer] = []

    def receive(index: int) -> list[Transfer]:
        inbox = inboxes[index % 2]
        messages = [(buffer[: segments[index].numel()], leaf) for buffer, leaf in zip(inbox, leaves, strict=True)]
        return post(group, messages, [])[0]

    incoming = [receive(index) for index in range(len(inboxes))]
    for index, segment in enumerate(segments):
        wait_for_all(incoming[index])
        for buffer in inboxes[index % 2]:
            segment.add_(buffer[: segment.numel()])
        # The inbox has been read, so the segment after the next one may arrive in it.
        if index + 2 < len(segments):
            incoming.append(receive(index + 2))
        sends += post(group, [], [(segment, leaf) for leaf in leaves])[1]
    wait_for_all(sends)
