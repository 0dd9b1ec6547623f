"""The traffic between data-parallel trunks and a model-parallel head (arXiv 1404.5997, section 4).

Each method starts an exchange and returns what finishes it: other work goes in between. All ranks make the same calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SubPass
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import Bounds, sum_in_order

Finish = Callable[[], Tensor]


class FeatureExchange:
    """Examples go from the rank that has them to all ranks, and what belongs to them comes back.

    N is the number of examples of a pass, n that of this rank's batch, m that of the batch's part in the pass.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank = channel.rank

    def assemble(self, features: Tensor, part: SubPass) -> Finish:
        """(n, *) on each rank to (N, *) on all of them: the pass's examples, rank by rank."""
        begin, end = part.rows[self.rank]
        assembled = features.new_empty(part.num_examples, *features.shape[1:])
        blocks = list(assembled.split(part.counts))
        blocks[self.rank].copy_(features[begin:end].detach())
        return self._start("features", [blocks[self.rank]] * len(blocks), blocks, lambda: assembled)

    def sum_back(self, gradient: Tensor, part: SubPass) -> Finish:
        """(N, *), each rank's part of a sum, to (m, *): the sum, of this rank's examples."""
        blocks = list(gradient.contiguous().split(part.counts))
        parts = [torch.empty_like(blocks[self.rank]) for _ in blocks]
        parts[self.rank] = blocks[self.rank]
        return self._start("feature gradients", blocks, parts, lambda: sum_in_order(parts))

    def to_owners(self, columns: Tensor, part: SubPass, bounds: Bounds) -> Finish:
        """(N, own columns) on each rank to (m, C): all columns of this rank's examples."""
        blocks = list(columns.contiguous().split(part.counts))
        parts = [columns.new_empty(len(blocks[self.rank]), end - begin) for begin, end in bounds]
        parts[self.rank] = blocks[self.rank].detach()
        return self._start("logits", blocks, parts, lambda: torch.cat(parts, dim=1))

    def from_owners(self, rows: Tensor, part: SubPass, bounds: Bounds) -> Finish:
        """(n, C) on each rank to (N, own columns): the way back of `to_owners`."""
        (begin, end), (first, last) = part.rows[self.rank], bounds[self.rank]
        assembled = rows.new_empty(part.num_examples, last - first)
        parts = list(assembled.split(part.counts))
        blocks = [rows[begin:end, first:last] for first, last in bounds]
        parts[self.rank].copy_(blocks[self.rank])
        return self._start("logit gradients", blocks, parts, lambda: assembled)

    def _start(self, what: str, sends: Sequence[Tensor], receives: Sequence[Tensor], result: Finish) -> Finish:
        exchange = self.channel.all_to_all(what, sends, receives)

        def finish() -> Tensor:
            exchange.wait()
            return result()

        return finish

    def gather_targets(self, leaves: Sequence[Tensor], batch_sizes: Sequence[int]) -> list[list[Tensor]]:
        """Return, for each tensor (n, *), that of every rank."""
        gathered = []
        for leaf in leaves:
            parts = [leaf.new_empty(size, *leaf.shape[1:]) for size in batch_sizes]
            parts[self.rank] = leaf.detach()
            self.channel.all_to_all("targets", [leaf] * len(parts), parts).wait()
            gathered.append(parts)
        return gathered

    def exchange_batch_sizes(
        self, features: Tensor, targets: Sequence[Tensor] = (), constants: Any = (), needs_seed: bool = False
    ) -> tuple[list[int], int | None]:
        """Return the batch size of each rank, and, if it is needed, a seed that is the same on all.

        Raises:
            ValueError: ranks differ in more than the number of examples.
        """
        call = str([(tuple(tensor.shape[1:]), tensor.dtype) for tensor in (features, *targets)])
        call += f" with {constants}" if constants else ""
        call += "" if torch.is_grad_enabled() else " without gradients"
        # The number is for NCCL, whose messages have no labels: a call that one rank has made alone is seen here.
        call += f" as exchange {self.channel.num_exchanges}"
        seed = int(torch.randint(2**62, ()).item()) if needs_seed else -1
        own = torch.tensor([len(features), zlib.crc32(call.encode()), seed], device=features.device)
        sizes, calls, seeds = self.channel.all_gather("sizes", own).T.tolist()
        if len(set(calls)) > 1:
            raise ValueError(
                f"the ranks pass different things to the head, this one {call} (shapes without the number of examples);"
                " only that number may differ, and all ranks must train, or validate, at the same time"
            )
        return sizes, seeds[0] if needs_seed else None


def prefetch_one(begin: Callable[[SubPass], Finish], plan: Iterable[SubPass]) -> Iterator[tuple[SubPass, Tensor]]:
    """Each pass with what arrives for it; that of the next one is on its way while the caller works on this one."""
    waiting: tuple[SubPass, Finish] | None = None
    for part in plan:
        following = part, begin(part)
        if waiting is not None:
            yield waiting[0], waiting[1]()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1]()
