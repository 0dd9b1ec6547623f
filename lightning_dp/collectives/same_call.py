"""All ranks check that they make the same call before any of them sends data.

Without it a rank that passes another size or dtype than its peers leaves them with wrong sums or waiting for ever.
The price: in each call a rank sends N-1 headers of `HEADER_BYTES` in ceil(log2 N) messages. It cannot be saved by
remembering: a rank that trusts its memory would not take part just when another one has something new to say.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives.point_to_point import post

HEADER_BYTES = 160


def require_same_call(group: dist.ProcessGroup, call: str, device: torch.device) -> None:
    """Return if ``call``, a description in words, is the same on all ranks of the group. All ranks must call it.

    Raises:
        ValueError: on every rank, with what each of them calls. The group can still be used.
        PeerError: a peer is gone or silent.
    """
    calls = _gather(group, call, device)
    if len(set(calls)) <= 1:
        return
    ranks = {call: [rank for rank, other in enumerate(calls) if other == call] for call in calls}
    said = "; ".join(f"rank {', '.join(map(str, who))}: {call}" for call, who in ranks.items())
    raise ValueError(
        f"the ranks of the group do not make the same call. {said}. "
        "Pass the same number of elements, dtype and arguments on all ranks"
    )


def _gather(group: dist.ProcessGroup, call: str, device: torch.device) -> list[str]:
    """``call`` of each rank. Bruck's all-gather: at distance 1, 2, 4, ... a rank passes on all that it knows."""
    rank, world_size = group.rank(), group.size()
    header = call.encode().ljust(HEADER_BYTES)
    assert len(header) == HEADER_BYTES, f"{len(header)} bytes in a header: {call}"
    headers = torch.empty(world_size, HEADER_BYTES, dtype=torch.uint8)  # row k: of rank + k
    headers[0] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    headers = headers.to(device)
    distance = 1
    while distance < world_size:
        count = min(distance, world_size - distance)
        arriving, known = headers[distance : distance + count], headers[:count]
        transfers = post(
            group,
            [(arriving, (rank + distance) % world_size)],
            [(known, (rank - distance) % world_size)],
        )
        for transfer in (*transfers[0], *transfers[1]):
            transfer.wait()
        distance *= 2
    return [bytes(row).decode().rstrip() for row in headers.roll(rank, dims=0).tolist()]
