"""Record of the messages that ranks send."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist


class Message(NamedTuple):
    destination: int
    num_bytes: int
    dtype: torch.dtype


def count_messages(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Message]]:
    """Return a record of the messages that each group rank sends from now on, in order."""
    sent: dict[int, list[Message]] = defaultdict(list)
    original = dist.isend

    def isend(tensor: torch.Tensor, *, group: dist.ProcessGroup, group_dst: int, tag: int) -> dist.Work | None:
        sent[group.rank()].append(Message(group_dst, tensor.nbytes, tensor.dtype))
        return original(tensor, group=group, group_dst=group_dst, tag=tag)

    monkeypatch.setattr(dist, "isend", isend)
    return sent
