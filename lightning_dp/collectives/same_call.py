"""Check that all ranks make the same call before any of them sends data.

Without this check, a rank that passes another size or dtype than its peers gives them wrong sums or leaves them waiting
forever. The check sends N-1 headers of `HEADER_BYTES` per rank and call, in ceil(log2 N) messages. Remembering earlier
calls cannot avoid it: a rank that trusts its memory would not take part when another rank has something new to say.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives.point_to_point import post

HEADER_BYTES = 160


def require_same_call(group: dist.ProcessGroup, call: str, device: torch.device) -> None:
    """Return if ``call``, a description in words, is equal on all ranks of the group. Every rank must call it.

    Args:
        group: the ranks.
        call: name and arguments of the collective, at most `HEADER_BYTES` long in UTF-8.
        device: of the header messages. It must be one that the backend can send from.

    Raises:
        ValueError: on every rank, with the call of each rank. The group can still be used.
        PeerError: a peer has died or is silent.
    """
    calls = _gather(group, call, device)
    if len(set(calls)) <= 1:
        return
    ranks = {call: [rank for rank, other in enumerate(calls) if other == call] for call in calls}
    listing = "; ".join(f"rank {', '.join(map(str, callers))}: {call}" for call, callers in ranks.items())
    raise ValueError(
        f"the ranks of the group do not make the same call. {listing}. "
        "Pass the same number of elements, dtype and arguments on all ranks"
    )


def _gather(group: dist.ProcessGroup, call: str, device: torch.device) -> list[str]:
    """Return ``call`` of each rank in rank order, by Bruck's all-gather."""
    rank = group.rank()
    world_size = group.size()
    header = call.encode().ljust(HEADER_BYTES)
    assert len(header) == HEADER_BYTES, f"{len(header)} bytes in a header: {call}"
    # Row k holds the header of rank + k. In this order the known rows are always the first ones, on every rank.
    headers = torch.empty(world_size, HEADER_BYTES, dtype=torch.uint8)
    headers[0] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    headers = headers.to(device)
    # A rank that knows the headers of `distance` ranks gets as many more from the rank at that distance.
    distance = 1
    while distance < world_size:
        count = min(distance, world_size - distance)
        received, sent = post(
            group,
            [(headers[distance : distance + count], (rank + distance) % world_size)],
            [(headers[:count], (rank - distance) % world_size)],
        )
        for transfer in (*received, *sent):
            transfer.wait()
        distance *= 2
    in_rank_order = headers.roll(rank, dims=0)
    return [bytes(row).decode().rstrip() for row in in_rank_order.tolist()]
