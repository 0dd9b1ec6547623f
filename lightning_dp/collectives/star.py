"""All-reduce through a single reducer, the baseline for the ring.

"Every GPU sends its gradient to a single GPU, which takes the average of all the gradients, and sends the average back
to all the other GPUs" ("Bringing HPC Techniques to Deep Learning", section "The Communication Problem").
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import exclusive_use, resolve_group
from lightning_dp.collectives.point_to_point import Transfer, flat_buffer, post
from lightning_dp.collectives.ring import SEGMENT_BYTES, require_op
from lightning_dp.collectives.same_call import require_same_call


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
        call = f"star_all_reduce, {op} on rank {reducer}, {flat.numel()} elements of {flat.dtype}"
        require_same_call(group, f"{call}, segments of {segment_bytes} bytes", flat.device)
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
            _wait(received + sent)
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
        _wait(incoming[index])
        for buffer in inboxes[index % 2]:
            segment.add_(buffer[: segment.numel()])
        # The inbox has been read, so the segment after the next one may arrive in it.
        if index + 2 < len(segments):
            incoming.append(receive(index + 2))
        sends += post(group, [], [(segment, leaf) for leaf in leaves])[1]
    _wait(sends)


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
