"""Point-to-point messages inside a group, as the collectives of this package use them.

Every message of `ring` and `star` passes through `post`, so that what a rank sends can be counted in one place, and a
peer that does not answer is named in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import needs_host_copy

Message = tuple[torch.Tensor, int]
"""A contiguous tensor and the rank in the group that it goes to or comes from."""


class PeerError(RuntimeError):
    """A peer did not send or did not take a message within the group's timeout, or its connection is gone.

    The group is of no more use after it: messages may be half-way. ``group_rank`` is the peer's rank in the group.
    """

    def __init__(self, text: str, group_rank: int) -> None:
        super().__init__(text)
        self.group_rank = group_rank


class Transfer:
    """One message on its way."""

    def __init__(self, group: dist.ProcessGroup, what: str, message: Message, works: Sequence[dist.Work]) -> None:
        self._group, self._what, self._works = group, what, works
        self._buffer, self._peer = message  # the buffer must outlive the message

    def wait(self) -> None:
        """Return when the buffer may be read (received) or changed (sent); on CUDA, when the stream may.

        Raises:
            PeerError: the peer is gone, or silent for longer than the group's timeout.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise peer_error(self._group, self._what, self._peer, error) from error


def post(
    group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
) -> tuple[list[Transfer], list[Transfer]]:
    """Start the messages, all at once where the backend knows how (NCCL must), and return (receives, sends).

    Empty tensors are not sent: both sides know the sizes. Messages between two ranks arrive in the order of posting.
    """
    if any(tensor.is_cuda for tensor, _ in (*receives, *sends)):
        todo = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t, peer in receives if t.numel()]
        todo += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for t, peer in sends if t.numel()]
        works = dist.batch_isend_irecv(todo) if todo else []
        return (
            [Transfer(group, "receive from", message, works) for message in receives],
            [Transfer(group, "send to", message, works) for message in sends],
        )
    # Receives first: a peer that is ready to send finds the buffer waiting.
    return (
        [_start(group, "receive from", message) for message in receives],
        [_start(group, "send to", message) for message in sends],
    )


def _start(group: dist.ProcessGroup, what: str, message: Message) -> Transfer:
    tensor, peer = message
    if not tensor.numel():
        return Transfer(group, what, message, [])
    try:
        if what == "send to":
            work = dist.isend(tensor, group=group, group_dst=peer)
        else:
            work = dist.irecv(tensor, group=group, group_src=peer)
    except RuntimeError as error:
        raise peer_error(group, what, peer, error) from error
    assert work is not None, "a rank outside the group came here"
    return Transfer(group, what, message, [work])


def peer_error(group: dist.ProcessGroup, what: str, peer: int, error: Exception) -> PeerError:
    """Name the peer, in the group and in the whole job where the group is known to it."""
    name = f"rank {peer} of the group"
    with suppress(ValueError, RuntimeError):  # a group of which torch.distributed has no list
        name += f" (global rank {dist.get_global_rank(group, peer)})"
    return PeerError(
        f"rank {group.rank()} could not {what} {name}: that rank has died, is stuck, or waits for one that has. "
        f"Look at its log first, then stop this job: the group cannot be used again. The backend says: {error}",
        peer,
    )


@contextmanager
def flat_buffer(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """``tensor`` as one dense row that the group can send, written back at the end where it had to be copied.

    It is copied where it is not contiguous, and where it lies on a GPU and the group's backend for GPUs is gloo, whose
    point-to-point messages carry CPU memory only.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"layout={tensor.layout} is not dense; use .to_dense(), or reduce indices and values apart")
    tensor = tensor.detach()
    flat = tensor.contiguous().view(-1)
    if needs_host_copy(tensor, group):
        flat = flat.cpu()
    with torch.no_grad():
        yield flat
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
