"""Point-to-point messages within a group.

Ring, star and `require_same_call` send every message through `post`, all-to-all through `start_message`. That gives one
place where an unresponsive peer is named.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lightning_dp.collectives.groups import dense, needs_host_copy

Message = tuple[torch.Tensor, int]
"""A contiguous tensor, and the group rank that it goes to or comes from."""


class PeerError(RuntimeError):
    """A message to or from a peer failed: the connection is closed, or the timeout of the group has expired.

    The group cannot be used any more, because messages may have been delivered in part.

    Attributes:
        group_rank: rank of the peer in the group.
    """

    def __init__(self, text: str, group_rank: int) -> None:
        super().__init__(text)
        self.group_rank = group_rank


@dataclass
class Transfer:
    """One message in flight.

    Attributes:
        group: the group of both ranks.
        action: "send to" or "receive from", for the error message.
        message: tensor and peer. gloo does not hold a reference to the tensor: without this one its memory could be
            reused while the message is in flight.
        works: the backend's handles. Empty if nothing is sent.
        failure: the backend's error, if the message could not be started. `wait` raises it.
    """

    group: dist.ProcessGroup
    action: str
    message: Message
    works: Sequence[dist.Work]
    failure: RuntimeError | None = None

    def wait(self) -> None:
        """Block until a received tensor may be read, or a sent one changed. On CUDA only the current stream waits.

        Raises:
            PeerError: the peer has died, or has been silent for longer than the timeout of the group.
        """
        try:
            if self.failure is not None:
                raise self.failure
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            _, peer = self.message
            raise peer_error(self.group, self.action, peer, error) from error


def wait_for_all(transfers: Iterable[Transfer]) -> None:
    """Block until all messages have been sent and received; raises as `Transfer.wait` does."""
    for transfer in transfers:
        transfer.wait()


def post(
    group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
) -> tuple[list[Transfer], list[Transfer]]:
    """Start all messages.

    Messages between two ranks arrive in the order in which they are posted. Empty tensors are not sent: both ranks know
    the sizes.

    Returns:
        The transfers of ``receives`` and of ``sends``, in the order given.
    """
    if any(tensor.is_cuda for tensor, _ in (*receives, *sends)):
        # NCCL runs messages of a group one after another. In a ring each rank would wait in its send for its neighbor
        # to receive; a batch makes NCCL start them together.
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t, peer in receives if t.numel()]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for t, peer in sends if t.numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        return (
            [Transfer(group, "receive from", message, works) for message in receives],
            [Transfer(group, "send to", message, works) for message in sends],
        )
    # Receives first, so that a peer that is ready to send finds the buffer posted.
    return (
        [start_message(group, "receive from", message) for message in receives],
        [start_message(group, "send to", message) for message in sends],
    )


def start_message(
    group: dist.ProcessGroup, action: Literal["send to", "receive from"], message: Message, tag: int = 0
) -> Transfer:
    """Start one message, from host memory. gloo matches messages between two ranks by ``tag``, and then by order.

    If the peer has died, only `Transfer.wait` raises, after the messages to other ranks have been started. A rank that
    raised here would keep theirs back, and they would blame this rank, after the whole timeout.
    """
    tensor, peer = message
    if not tensor.numel():
        return Transfer(group, action, message, [])
    try:
        if action == "send to":
            work = dist.isend(tensor, group=group, group_dst=peer, tag=tag)
        else:
            work = dist.irecv(tensor, group=group, group_src=peer, tag=tag)
    except RuntimeError as error:
        return Transfer(group, action, message, [], error)
    assert work is not None, "this rank is not a member of the group"
    return Transfer(group, action, message, [work])


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether ``error`` comes from a signal handler that ran during a wait, and not from the backend.

    The handler of torch's loader raises where the process happens to be when one of its workers has died.
    """
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


@contextmanager
def naming_backend_errors(what: Callable[[], str]) -> Iterator[None]:
    """Let a backend's error say which operation failed, between which ranks.

    Args:
        what: returns the operation and its ranks. Called after an error only: to list all ranks takes long.
    """
    try:
        yield
    except RuntimeError as error:
        if raised_by_signal_handler(error):
            raise
        raise RuntimeError(
            f"{what()} failed: one of these ranks has died, or has been silent for longer than the strategy's timeout; "
            f"look at its log first. The backend says: {error}"
        ) from error


def peer_error(group: dist.ProcessGroup, action: str, peer: int, error: Exception) -> PeerError:
    """Return a `PeerError` that gives the group rank of the peer, and its global rank if torch.distributed knows it.

    An ``error`` that says nothing of the peer, because a signal handler has raised it, is raised again.
    """
    if raised_by_signal_handler(error):
        raise error
    name = f"rank {peer} of the group"
    with suppress(ValueError, RuntimeError):  # the group was not created by `dist.new_group`
        name += f" (global rank {dist.get_global_rank(group, peer)})"
    return PeerError(
        f"rank {group.rank()} could not {action} {name}: that rank has died, is stuck, or waits for one that has. "
        f"Look at its log first, then stop this job: the group cannot be used again. The backend says: {error}",
        peer,
    )


@contextmanager
def flat_buffer(tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """Yield ``tensor`` as a contiguous (numel,) buffer that the group can send; copy it back on exit if it is a copy.

    The buffer is a copy if ``tensor`` is not contiguous, is a conjugate or negated view, or is on a GPU while the
    group's backend for GPUs is gloo, which sends point-to-point messages from the CPU only.

    Raises:
        ValueError: ``tensor`` is sparse or quantized.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"layout={tensor.layout} is not dense; use .to_dense(), or reduce indices and values apart")
    if tensor.is_quantized:
        raise ValueError(f"a quantized tensor ({tensor.dtype}) cannot be sent; use .dequantize()")
    tensor = tensor.detach()
    flat = dense(tensor).view(-1)
    if needs_host_copy(tensor, group):
        flat = flat.cpu()
    # Outside of inference mode, torch lets nobody write to its tensors.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        yield flat
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


# --- Check that all ranks make the same call before any of them sends data.
#
# Without this check, a rank that passes another size or dtype than its peers gives them wrong sums or leaves them
# waiting forever. The check sends N-1 headers of `HEADER_BYTES` per rank and call, in ceil(log2 N) messages.
# Remembering earlier calls cannot avoid it: a rank that trusts its memory would not take part when another rank has
# something new to say.

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
        wait_for_all(received + sent)
        distance *= 2
    in_rank_order = headers.roll(rank, dims=0)
    return [bytes(row).decode().rstrip() for row in in_rank_order.tolist()]
