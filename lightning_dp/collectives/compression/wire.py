"""Messages between the ranks that carry a piece of a bucket, and an all-reduce made of them. All bytes are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dp.collectives.point_to_point import Transfer, post, wait_for_all

PAIR_MESSAGE = 512 * 1024
"""Elements that each of two ranks sends to the other in a message.

With a quarter of it, an all-reduce of 25 MB takes about twice the CPU time: each message costs some of its own.
"""
MESSAGE = 64 * 1024
"""Elements that a rank sends to each of several others in a message.

With twice as many, four ranks sum a bucket of 2 MB in one piece, and the link waits for the sum. With half as many, the
messages of eight ranks take too much processor time. docs/measurements/layered_sgd.md has the figures.
"""


class Transport:
    """Direct messages between all ranks of a group. One thread starts them; another one may wait for them.

    Args:
        group: the ranks that carry the same piece, one of each group of ranks.

    Attributes:
        bytes_sent: of all messages that this rank has started to send.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()
        self.bytes_sent = 0

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Transfer]:
        """Start to send ``outgoing[k]`` to rank k, and to fill ``incoming[k]`` with what rank k sends to this rank.

        Every rank of the group must call it, in one order, with tensors in host memory that are contiguous and whose
        sizes the receivers know. None of them may be changed before `wait_for_all`. This rank's own message is copied.

        Raises:
            PeerError: a peer has died.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        received, sent = post(
            self.group, [(incoming[peer], peer) for peer in peers], [(outgoing[peer], peer) for peer in peers]
        )
        self.bytes_sent += sum(outgoing[peer].nbytes for peer in peers)
        return received + sent

    @property
    def is_pair(self) -> bool:
        """Whether there are two ranks. They swap all they have, in one exchange; more ranks need two exchanges."""
        return self.num_ranks == 2

    @property
    def segment(self) -> int:
        """Elements that are processed together, while the messages of other segments are on their way."""
        return PAIR_MESSAGE if self.is_pair else self.num_ranks * MESSAGE

    def start_swap(self, own: Tensor) -> tuple[list[Tensor], list[Transfer]]:
        """Start to send ``own`` to the other one of two ranks. Return both ranks' messages, in rank order."""
        messages = [own, own]
        messages[1 - self.rank] = torch.empty_like(own)
        return messages, self.start([own, own], messages)

    def all_reduce(self, tensor: Tensor, message_dtype: torch.dtype, sum_dtype: torch.dtype) -> Iterator[None]:
        """Replace ``tensor``, (numel,), by its sum over the ranks, in place; bitwise identical on all ranks.

        Each value is rounded to ``message_dtype`` before it is sent. A rank sends 2 (N-1)/N of the messages' bytes, as
        a ring would, which would round at each of its 2 (N-1) steps.

        - Two ranks send each other all they have, and both add. The sum is rounded to the dtype of ``tensor`` only.
        - Of more ranks, rank k adds chunk k of all ranks in ``sum_dtype``, in rank order, rounds the sum to
          ``message_dtype``, and sends it to the others.

        Returns:
            The sum that is under way. It yields once, when its last messages have been started.
        """
        exchange = self._exchange_all if self.is_pair else self._exchange_chunks
        parts = in_segments(tensor, self.segment)
        return self.run_in_turn([exchange(part, message_dtype, sum_dtype) for part in parts])

    def run_in_turn(self, segments: Sequence[Iterator[None]]) -> Iterator[None]:
        """Advance each of ``segments`` to its next ``yield`` in turn, until all have ended.

        A segment yields when it has started messages; then the others compute. It does so once for each exchange.

        Returns:
            An iterator that does so. It yields once, when the last messages of all segments have been started.
        """
        for _ in range(1 if self.is_pair else 2):
            for segment in segments:
                next(segment)
        yield
        for segment in segments:
            next(segment, None)

    def _exchange_all(self, tensor: Tensor, message_dtype: torch.dtype, sum_dtype: torch.dtype) -> Iterator[None]:
        messages, transfers = self.start_swap(tensor.to(message_dtype))
        yield
        wait_for_all(transfers)
        torch.add(messages[0].to(sum_dtype), messages[1], out=tensor)  # in rank order, for the bits of a NaN

    def _exchange_chunks(self, tensor: Tensor, message_dtype: torch.dtype, sum_dtype: torch.dtype) -> Iterator[None]:
        messages = tensor.to(message_dtype)
        chunks = messages.tensor_split(self.num_ranks)
        inbox = chunks[self.rank].new_empty(self.num_ranks, len(chunks[self.rank]))
        transfers = self.start(chunks, list(inbox))
        yield
        wait_for_all(transfers)
        total = inbox[0].to(sum_dtype)
        for contribution in inbox[1:]:
            total += contribution  # in rank order, so that the sum does not depend on who adds it
        # If nothing was converted, the chunks are views of `tensor`, and the sums arrive in their place.
        transfers = self.start([total.to(message_dtype)] * self.num_ranks, chunks)
        yield
        wait_for_all(transfers)
        if messages.data_ptr() != tensor.data_ptr():
            tensor.copy_(messages)


def in_segments(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    """Split ``tensor`` along its first dimension into equal parts of about ``length``."""
    return tensor.tensor_split(max(1, round(len(tensor) / length)))


def complete(sum_under_way: Iterator[None]) -> None:
    """Return when a sum that is under way has ended."""
    for _ in sum_under_way:
        pass
