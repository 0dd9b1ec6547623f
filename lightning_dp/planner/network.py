"""How long messages take: an alpha-beta model of the links, and of the collectives that run over them. Pure functions.

A message of n bytes takes alpha + n / B: a latency, and the bytes over the bandwidth (arXiv 1906.05936 and Gibiansky's
ring all-reduce count the same two). Each node has one NIC, which all its ranks share; ranks of a node talk over a link
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dp.planner.formulas import require_count, require_not_negative, require_positive

ALL_REDUCES = ("ring", "tree", "auto")


@dataclass(frozen=True)
class Link:
    """A link in one direction.

    Attributes:
        latency_s: alpha, time of an empty message.
        bytes_per_s: bandwidth.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_not_negative("latency_s", self.latency_s)
        require_positive("bytes_per_s", self.bytes_per_s)

    def message_s(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s

    @classmethod
    def fit(cls, sizes: Sequence[float], times_s: Sequence[float]) -> Link:
        """Return the link that explains the times of messages best: least squares of relative errors.

        Raises:
            ValueError: there are fewer than two sizes, or longer messages do not take longer.
        """
        if len(sizes) != len(times_s) or len(set(sizes)) < 2 or min(times_s) <= 0:
            raise ValueError(f"sizes={list(sizes)}, times_s={list(times_s)}: give two different sizes, and their times")
        # Each measurement has the weight 1 / t^2, so that small messages, which tell the latency, count as well.
        weights = [1 / time_s**2 for time_s in times_s]
        total = sum(weights)
        mean_size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
        mean_time = sum(w * t for w, t in zip(weights, times_s, strict=True)) / total
        covariance = sum(w * (n - mean_size) * (t - mean_time) for w, n, t in zip(weights, sizes, times_s, strict=True))
        slope = covariance / sum(w * (n - mean_size) ** 2 for w, n in zip(weights, sizes, strict=True))
        if slope <= 0:
            raise ValueError(f"times_s={list(times_s)} do not grow with sizes={list(sizes)}; measure larger messages")
        return cls(max(0.0, mean_time - slope * mean_size), 1 / slope)


@dataclass(frozen=True)
class Network:
    """The links of a job.

    Attributes:
        inter: of a node's NIC, per direction.
        intra: between two ranks of a node, per direction.
        ranks_per_node: number of ranks that share a NIC.
        all_reduce: how DDP's all-reduce sends: ``"ring"`` (gloo; NCCL on few nodes), ``"tree"`` (NCCL's double binary
            tree), or ``"auto"``, the faster of the two.
        overhead_s: time that a message of an exchange takes a rank itself, to start it and to take the one that comes
            back: the overhead of the LogP model (Culler et al. 1993). 0: none was measured.
        direct_bytes_per_s: of a node's NIC, per direction, when each node sends to all others at once. Then some links
            wait while the queues of others are full, so that it is less than in a ring. 0: none was measured.
    """

    inter: Link
    intra: Link
    ranks_per_node: int = 1
    all_reduce: str = "ring"
    overhead_s: float = 0.0
    direct_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        require_count("ranks_per_node", self.ranks_per_node)
        require_not_negative("overhead_s", self.overhead_s)
        require_not_negative("direct_bytes_per_s", self.direct_bytes_per_s)
        if self.all_reduce not in ALL_REDUCES:
            raise ValueError(f"all_reduce={self.all_reduce!r} must be one of {', '.join(map(repr, ALL_REDUCES))}")

    def num_nodes(self, world_size: int) -> int:
        """Return the number of nodes that ``world_size`` ranks fill.

        Raises:
            ValueError: the last node would not be full.
        """
        require_count("world_size", world_size)
        if world_size > self.ranks_per_node and world_size % self.ranks_per_node:
            raise ValueError(
                f"world_size={world_size} is not a multiple of ranks_per_node={self.ranks_per_node}; fill the last node"
            )
        return max(1, world_size // self.ranks_per_node)

    def slowest(self, world_size: int) -> Link:
        """Return the link that limits a message between any two of ``world_size`` ranks."""
        return self.inter if self.num_nodes(world_size) > 1 else self.intra

    def all_reduce_s(self, num_bytes: float, world_size: int, algorithm: str | None = None) -> float:
        """Return the time of DDP's all-reduce over all ranks; ``algorithm`` takes the place of the network's.

        A ring visits each node once, so that every link carries 2(N-1)/N of the bytes, in 2(N-1) steps. A tree takes
        about 2 log2(N) steps, and each link carries the bytes twice; between two nodes once, because NCCL has two
        trees with half of the bytes each, and a node is the root of one and the leaf of the other.
        """
        if world_size == 1:
            return 0.0
        link = self.slowest(world_size)
        ring_s = ring_all_reduce_s(num_bytes, world_size, link)
        copies = 1 if self.num_nodes(world_size) == 2 else 2
        tree_s = 2 * math.ceil(math.log2(world_size)) * link.latency_s + copies * num_bytes / link.bytes_per_s
        return {"ring": ring_s, "tree": tree_s, "auto": min(ring_s, tree_s)}[algorithm or self.all_reduce]

    def inter_group_all_reduce_s(self, num_bytes: float, world_size: int) -> float:
        """Return the time of layered SGD's all-reduce between nodes (a ring, Algorithm 3, line 8).

        It is the same with the sharded communicator: its rings, one for each local rank, share the NIC.
        """
        return ring_all_reduce_s(num_bytes, self.num_nodes(world_size), self.inter)

    def compressed_all_reduce_s(self, num_bytes: float, world_size: int, num_rounds: int = 1) -> float:
        """Return the time of layered SGD's compressed all-reduce between nodes.

        Two carriers exchange all they have. More send to each other directly, first to the owners of the parts, then
        the owners' sums to all: 2(G-1)/G of the bytes as in a ring, in one step a round for two nodes, in two for more.
        It is the same with the sharded communicator.

        Args:
            num_bytes: of the compressed gradients, in all rounds.
            world_size: number of ranks.
            num_rounds: all-reduces that wait for each other: PowerSGD's second factor depends on the first one's sum.
        """
        num_nodes = self.num_nodes(world_size)
        if num_nodes == 1:
            return 0.0
        sent = 2 * (num_nodes - 1) / num_nodes * num_bytes
        num_steps = num_rounds if num_nodes == 2 else 2 * num_rounds
        bytes_per_s = self.direct_bytes_per_s if num_nodes > 2 else 0.0
        return num_steps * self.inter.latency_s + sent / (bytes_per_s or self.inter.bytes_per_s)

    def intra_group_s(self, num_bytes: float, world_size: int, communicator: str = "leader") -> float:
        """Return the time of layered SGD's reduce, or of its broadcast, within a node (lines 6 and 9)."""
        size = min(world_size, self.ranks_per_node)
        if size == 1:
            return 0.0
        if communicator == "sharded":  # reduce-scatter, or all-gather
            return (size - 1) * self.intra.message_s(num_bytes / size)
        # A binary tree whose stages are pipelined: each link carries the bytes once.
        return math.ceil(math.log2(size)) * self.intra.latency_s + num_bytes / self.intra.bytes_per_s

    def exchange_s(self, num_bytes_sent: float, world_size: int, senders_per_node: int | None = None) -> float:
        """Return the time of an exchange in which each rank sends ``num_bytes_sent`` in all to its peers.

        The ranks of a node that send share its NIC for what leaves the node: ``senders_per_node``, by default all. A
        rank starts further messages while earlier ones travel: the longer of the two counts.
        """
        if world_size == 1:
            return 0.0
        local = min(world_size, self.ranks_per_node)
        leaving = num_bytes_sent * (world_size - local) / (world_size - 1)
        intra_s = (num_bytes_sent - leaving) / self.intra.bytes_per_s
        inter_s = (senders_per_node or local) * leaving / self.inter.bytes_per_s
        travels_s = self.slowest(world_size).latency_s + max(intra_s, inter_s)
        return max(travels_s, (world_size - 1) * self.overhead_s)

    def small_exchange_s(self, world_size: int) -> float:
        """Return the time of an exchange of a few bytes between all ranks, as global batch norm makes them."""
        if self.overhead_s:
            return self.exchange_s(0.0, world_size)
        return math.ceil(math.log2(world_size)) * self.slowest(world_size).latency_s


def ring_all_reduce_s(num_bytes: float, num_members: int, link: Link) -> float:
    """Return the time of a ring all-reduce: 2(N-1) steps, each with an N-th of the bytes."""
    return 2 * (num_members - 1) * link.message_s(num_bytes / num_members)
