"""Ranks that are not in the same place are found before they wait for each other until the timeout."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.collectives.all_to_all import CallMismatchError
from lightning_dp.collectives.point_to_point import peer_error

_MARK = 2


def require_same_place(device: torch.device, hint: str) -> None:
    """Raise CallMismatchError if rank 0 is in another batch, while this rank gathers the head. All ranks must call it.

    A rank whose loader has ended gathers the head at the end of training, while the others begin another batch. There
    Lightning broadcasts from rank 0 whether the job was told to stop: 0 or 1, one integer in the default group. This
    rank receives that number in place of the mark that rank 0 would send here. In the other direction, Lightning takes
    the mark for no reason to stop, and the exchanges of that batch find the mismatch.
    """
    mark = torch.tensor([_MARK if dist.get_rank() == 0 else 0], device=device)
    try:
        dist.broadcast(mark, src=0)
    except RuntimeError as error:
        group = dist.group.WORLD
        assert group is not None
        raise peer_error(group, "reach", 0 if dist.get_rank() else 1, error) from error
    if mark.item() != _MARK:
        raise CallMismatchError(
            f"rank {dist.get_rank()} gathers the head, to evaluate, to save a checkpoint or to end training, and rank "
            f"0 is in another batch: one of them has made a call that the other has not. {hint}"
        )
