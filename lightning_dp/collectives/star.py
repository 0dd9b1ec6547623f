"""All-reduce through one reducer: what the ring is measured against.

"Every GPU sends its gradient to a single GPU, which takes the average of all the gradients, and sends the average back
to all the other GPUs" ("Bringing HPC Techniques to Deep Learning", section "The Communication Problem").
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import resolve_group
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
    """Replace ``tensor`` by its sum or mean over the ranks of ``group``, and return it. Every rank must call it.

    The reducer receives and sends the array N-1 times, so the time grows linearly with N. It works on segments: one is
    on its way back while the next ones arrive, which makes this the fastest star, and an honest baseline. The reducer
    adds in the order of ranks, and all ranks get its bits.

    Args:
        tensor: as in `ring_all_reduce`.
        group: as in `ring_all_reduce`.
        op: "sum" or "mean".
        reducer: rank in the group.
        segment_bytes: size of a message at most.

    Raises:
        ValueError: on all ranks, where they do not make the same call or an argument does not fit.
        PeerError: a rank is gone or silent for longer than the group's timeout; names it.
    """
    group = resolve_group(group)
    with flat_buffer(tensor, group) as flat:
        call = f"star_all_reduce, {op} on rank {reducer}, {flat.numel()} elements of {flat.dtype}"
        require_same_call(group, f"{call}, segments of {segment_bytes} bytes", flat.device)
        require_op(op, flat.dtype, segment_bytes)
        if not 0 <= reducer < group.size():
            raise ValueError(f"reducer={reducer} is no rank of a group of {group.size()}; use 0 to {group.size() - 1}")
        if op == "mean":
            flat.div_(group.size())
        segments = [*flat.split(max(1, segment_bytes // flat.element_size()))]
        if group.rank() == reducer:
            _reduce(segments, group)
        else:
            # The segment that comes back may be written over the one that was sent: it contains it.
            received, sent = post(
                group, [(segment, reducer) for segment in segments], [(segment, reducer) for segment in segments]
            )
            _wait(received + sent)
    return tensor


def _reduce(segments: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    leaves = [rank for rank in range(group.size()) if rank != group.rank()]
    inboxes = [[torch.empty_like(segment) for _ in leaves] for segment in segments[:2]]
    sends: list[Transfer] = []

    def receive(index: int) -> list[Transfer]:
        inbox = inboxes[index % 2]
        messages = [(buffer[: segments[index].numel()], leaf) for buffer, leaf in zip(inbox, leaves, strict=True)]
        return post(group, messages, [])[0]

    arriving = [receive(index) for index in range(len(inboxes))]
    for index, segment in enumerate(segments):
        _wait(arriving[index])
        for buffer in inboxes[index % 2]:
            segment.add_(buffer[: segment.numel()])
        if index + 2 < len(segments):
            arriving.append(receive(index + 2))
        sends += post(group, [], [(segment, leaf) for leaf in leaves])[1]
    _wait(sends)


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
