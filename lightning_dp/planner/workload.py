"""What a rank does in a step, as the simulation needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from typing_extensions import override

from lightning_dp.planner.formulas import require_count, require_not_negative, require_positive


@dataclass(frozen=True)
class Block:
    """A few consecutive layers, whose gradients are ready at the same time.

    Attributes:
        num_bytes: of the gradients.
        forward_s: time of their forward.
        backward_s: time of their backward.
        shapes: of their parameters, on which the bytes of compressed gradients depend; () if they are not known.
    """

    num_bytes: float
    forward_s: float
    backward_s: float
    shapes: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("shapes", "layers"):
                require_not_negative(name, value)

    def larger(self, factor: int) -> Self:
        """Return the block with ``factor`` times the batch. Its gradients stay as large."""
        return replace(self, forward_s=factor * self.forward_s, backward_s=factor * self.backward_s)


@dataclass(frozen=True)
class Head(Block):
    """Fully-connected layers, which hybrid parallelism shards (arXiv 1404.5997).

    The times are those of one rank's batch in the whole head on one device.

    Attributes:
        feature_bytes: of the features of one rank's batch, which enter the head.
        hidden_bytes: of all hidden activations of one rank's batch.
        layers: one by one, as data parallelism reduces their gradients. (): they are not known, and count as two whose
            gradients are ready at the same time.
    """

    feature_bytes: float
    hidden_bytes: float
    layers: tuple[Block, ...] = ()

    @property
    def num_hidden(self) -> int:
        """Number of layers with hidden activations, which travel by themselves: all but the last one."""
        return len(self.layers) - 1 if self.layers else 1

    @override
    def larger(self, factor: int) -> Self:
        longer = super().larger(factor)
        return replace(
            longer,
            feature_bytes=factor * self.feature_bytes,
            hidden_bytes=factor * self.hidden_bytes,
            layers=tuple(layer.larger(factor) for layer in self.layers),
        )


@dataclass(frozen=True)
class Recomputation:
    """What `Memonger` would make of a step, as `lightning_dp.recompute` plans it.

    Attributes:
        plain_bytes: activations that are kept between forward and backward without it.
        held_bytes: the most that the plan holds in backward.
        recompute_s: time of what runs again.
        record_s: time in which a forward is recorded. It does not grow with the batch.
    """

    plain_bytes: float
    held_bytes: float
    recompute_s: float
    record_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive("held_bytes", self.held_bytes)
        require_not_negative("recompute_s", self.recompute_s)
        require_not_negative("record_s", self.record_s)
        if self.plain_bytes < self.held_bytes:
            raise ValueError(
                f"plain_bytes={self.plain_bytes} must be at least held_bytes={self.held_bytes}: a plan never holds more"
            )

    @property
    def batch_factor(self) -> int:
        """How many times as large a batch fits into the memory of the present batch's activations.

        Activations grow with the batch. Only whole multiples count, so that the batch has images for all ranks.
        """
        return int(self.plain_bytes // self.held_bytes)


@dataclass(frozen=True)
class Workload:
    """A training step of one rank.

    Attributes:
        blocks: from the input to the output, as the forward meets them; without the head, if it is given apart. Their
            times are those of one batch.
        batch_size: images per rank in one batch.
        load_s: time to load a batch.
        loads_in_background: whether worker processes load the next batches while the rank computes.
        update_s: time of the optimizer step.
        head: the fully-connected layers, if hybrid parallelism is to be simulated.
        num_batch_norms: number of batch norm layers, each of which gathers statistics if they are global.
        jitter: standard deviation of a rank's compute time over its mean. Ranks wait for the slowest.
        recomputation: of activations, if `Memonger` is to be simulated.
        accumulate: batches whose gradients a step adds up before it sends them.
        batch_norm_s: measured waits for global batch norm's statistics in one batch, whatever the method.
        codec_s: processor time in which a compressor encodes and decodes the gradients of a step, by its name in
            `Method.compression`. What is not there takes none.
        frozen_s: time of the forward before the first block, in layers that are not trained. It waits for no gradients.
        rest_s: what a step takes beyond all that is known of it, whatever the method.
    """

    blocks: tuple[Block, ...]
    batch_size: int = 1
    load_s: float = 0.0
    loads_in_background: bool = False
    update_s: float = 0.0
    head: Head | None = None
    num_batch_norms: int = 0
    jitter: float = 0.0
    recomputation: Recomputation | None = None
    accumulate: int = 1
    batch_norm_s: float = 0.0
    codec_s: Mapping[str, float] = field(default_factory=dict)
    frozen_s: float = 0.0
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        require_count("batch_size", self.batch_size)
        require_count("accumulate", self.accumulate)
        require_count("num_batch_norms", self.num_batch_norms, least=0)
        for name in ("load_s", "update_s", "jitter", "batch_norm_s", "frozen_s", "rest_s"):
            require_not_negative(name, getattr(self, name))
        for name, seconds in self.codec_s.items():
            require_not_negative(f"codec_s[{name!r}]", seconds)
        if not self.blocks:
            raise ValueError("blocks=() is empty; give at least one block of layers, with its bytes and times")

    @classmethod
    def uniform(
        cls, gradient_bytes: float, forward_s: float, backward_s: float, num_blocks: int = 16, **others: Any
    ) -> Workload:
        """Return a workload of equal blocks, for when nothing is known of the layers.

        Args:
            gradient_bytes: of all blocks.
            forward_s: time of the forward.
            backward_s: time of the backward.
            num_blocks: number of blocks.
            **others: further arguments of `Workload`.
        """
        require_count("num_blocks", num_blocks)
        block = Block(gradient_bytes / num_blocks, forward_s / num_blocks, backward_s / num_blocks)
        return cls((block,) * num_blocks, **others)

    @property
    def compute_s(self) -> float:
        """Time of forward, backward and update in a step, with the head on one device."""
        batch_s = sum(block.forward_s + block.backward_s for block in self.whole().blocks)
        return self.accumulate * (self.frozen_s + batch_s) + self.update_s

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients, those of the head included."""
        return sum(block.num_bytes for block in self.whole().blocks)

    def whole(self) -> Workload:
        """Return the workload with the head's layers as its last blocks, as data parallelism treats them."""
        if self.head is None:
            return self
        head = self.head
        last = head.layers or (Block(head.num_bytes, head.forward_s, head.backward_s, shapes=head.shapes),)
        return replace(self, blocks=(*self.blocks, *last), head=None)

    def larger(self, factor: int) -> Workload:
        """Return the step with ``factor`` times the batch.

        Compute and loading take that many times as long. Gradients, the update and batch norm's messages stay as they
        are. `recomputation` is that of another batch, and is left out.
        """
        return replace(
            self,
            blocks=tuple(block.larger(factor) for block in self.blocks),
            head=self.head and self.head.larger(factor),
            batch_size=factor * self.batch_size,
            load_s=factor * self.load_s,
            frozen_s=factor * self.frozen_s,
            recomputation=None,
        )

    def recomputed(self, larger_batch: bool) -> Workload:
        """Return the step as data parallelism with `Memonger` does it.

        Args:
            larger_batch: whether the batch grows by `Recomputation.batch_factor`. Recomputation then takes that many
                times as long, and recording as long as before.

        Raises:
            ValueError: there is no `recomputation`.
        """
        if self.recomputation is None:
            raise ValueError("the workload has no recomputation; give Workload(recomputation=...), or another method")
        factor = self.recomputation.batch_factor if larger_batch else 1
        step = self.whole().larger(factor)
        record_s = self.recomputation.record_s
        again_s = factor * self.recomputation.recompute_s
        total_s = sum(block.forward_s for block in step.blocks)
        blocks = []
        for block in step.blocks:
            # What runs again are parts of the forward: each block's share is that of its forward.
            share = block.forward_s / total_s if total_s else 1 / len(step.blocks)
            forward_s = block.forward_s + share * record_s
            backward_s = block.backward_s + share * again_s
            blocks.append(replace(block, forward_s=forward_s, backward_s=backward_s))
        return replace(step, blocks=tuple(blocks))


def fill_buckets(blocks: Sequence[Block], bucket_bytes: float, first_bucket_bytes: float) -> list[Block]:
    """Return the gradient buckets into which DDP puts these blocks, from the input to the output.

    DDP goes from the output to the input, and closes a bucket as soon as it has reached its capacity, so that a bucket
    may be larger than that. The first one is small, so that communication starts early.
    """
    buckets: list[Block] = []
    filling: list[Block] = []
    capacity = min(first_bucket_bytes, bucket_bytes)
    for block in reversed(blocks):
        filling.append(block)
        if sum(part.num_bytes for part in filling) >= capacity:
            buckets.append(joined(filling))
            filling = []
            capacity = bucket_bytes
    if filling:
        buckets.append(joined(filling))
    return buckets[::-1]


def joined(blocks: Sequence[Block]) -> Block:
    """Return these blocks as one. Its shapes are () if those of one of them are not known."""
    is_known = all(block.shapes or not block.num_bytes for block in blocks)
    return Block(
        sum(block.num_bytes for block in blocks),
        sum(block.forward_s for block in blocks),
        sum(block.backward_s for block in blocks),
        shapes=tuple(shape for block in blocks for shape in block.shapes) if is_known else (),
    )


# What was measured of a job's steps, and the workload that it makes for the simulation.

# A share of a step, or of the gradients, that is worth naming.
WORTH_NAMING = 0.05


@dataclass(frozen=True)
class LayerProfile:
    """A layer with parameters.

    Attributes:
        name: of the module.
        num_bytes: of its gradients.
        forward_s: time of its forward.
        is_linear: whether it is a fully-connected layer.
        input_bytes: of its inputs in all calls, for one rank's batch.
        shapes: of its parameters.
    """

    name: str
    num_bytes: int
    forward_s: float
    is_linear: bool
    input_bytes: int
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StepProfile:
    """Where the steps of one rank went: medians over the measured steps, in seconds.

    A step goes from one update to the next.

    Attributes:
        strategy: the strategy's class.
        batch_size: images per rank in one batch.
        world_size: number of ranks.
        num_steps: number of measured steps.
        step_s: whole step.
        load_s: wait for the batch.
        forward_s: forward, without waiting for messages.
        backward_s: backward, without waiting for messages.
        update_s: what follows backward: the optimizer step, logging, other callbacks.
        exposed_communication_s: wait for gradients, as `StepTimer` has it.
        batch_norm_s: wait for the statistics of global batch norm.
        num_batch_norms: number of batch norm layers.
        layers: those with parameters, as the forward meets them.
        recomputation: what `Memonger` would make of the step, None if it was not planned.
        why_no_recomputation: a reason for None, "" if nobody asked for a plan.
        accumulate: batches in a step, whose gradients are added up (``accumulate_grad_batches``).
        num_workers: processes of the loader, of each rank. None: it is no loader that has them.
        cores_per_rank: processor cores of the machine over its ranks; None if it is not known.
        codec_s: see `Workload.codec_s`.
        statistics_ranks: ranks that share batch norm's statistics; None: all of them.
        unmeasured: waits that no clock tells from compute, in which they are counted.
        frozen_part: of the forward, before the first of the layers.
    """

    strategy: str
    batch_size: int
    world_size: int
    num_steps: int
    step_s: float
    load_s: float
    forward_s: float
    backward_s: float
    update_s: float
    exposed_communication_s: float
    batch_norm_s: float
    num_batch_norms: int
    layers: tuple[LayerProfile, ...]
    recomputation: Recomputation | None = None
    why_no_recomputation: str = ""
    accumulate: int = 1
    num_workers: int | None = 0
    cores_per_rank: float | None = None
    codec_s: Mapping[str, float] = field(default_factory=dict)
    statistics_ranks: int | None = None
    unmeasured: tuple[str, ...] = ()
    frozen_part: float = 0.0

    @property
    def compute_s(self) -> float:
        """Time that is neither loading nor waiting for messages."""
        return self.step_s - self.load_s - self.exposed_communication_s - self.batch_norm_s

    @property
    def overhead_ratio(self) -> float:
        """R_O of Lemma 3.1: what more GPUs do not shorten, over compute."""
        return (self.step_s - self.compute_s) / self.compute_s if self.compute_s > 0 else float("inf")

    @property
    def waits_for_workers(self) -> bool:
        """Whether the loader's workers bring a batch as often as the rank takes one, and no faster to a faster step."""
        return bool(self.num_workers) and self.load_s >= WORTH_NAMING * self.step_s

    def parts(self) -> dict[str, float]:
        """Return the parts of a step, in seconds."""
        return {
            "loading": self.load_s,
            "compute": self.compute_s,
            "exposed communication": self.exposed_communication_s,
            "batch norm's waits": self.batch_norm_s,
        }

    def table(self) -> str:
        """Return the parts as a Markdown table."""
        lines = ["| part of a step | ms | share |", "|---|---|---|"]
        for name, seconds in {**self.parts(), "step": self.step_s}.items():
            lines.append(f"| {name} | {1e3 * seconds:.1f} | {seconds / self.step_s:.0%} |")
        return "\n".join(lines)

    def workload(self) -> Workload:
        """Return the workload. Each layer has its part of forward and backward by the time of its forward.

        What the forward does before the first of them, in a frozen trunk, is no layer's.

        The fully-connected layers at the end are the head, if they have most of the bytes.
        """
        total_s = sum(layer.forward_s for layer in self.layers)
        batch_forward_s, batch_backward_s = self.forward_s / self.accumulate, self.backward_s / self.accumulate
        frozen_s = self.frozen_part * batch_forward_s
        blocks = []
        for layer in self.layers:
            share = layer.forward_s / total_s if total_s else 1 / len(self.layers)
            forward_s = share * (batch_forward_s - frozen_s)
            blocks.append(Block(layer.num_bytes, forward_s, share * batch_backward_s, shapes=layer.shapes))
        first = self._head_begins()
        head = None
        if first is not None:
            feature_bytes, *hidden_bytes = (layer.input_bytes for layer in self.layers[first:])
            layers = tuple(blocks[first:])
            head = Head(
                **vars(joined(layers)), feature_bytes=feature_bytes, hidden_bytes=sum(hidden_bytes), layers=layers
            )
            blocks = blocks[:first]
        return Workload(
            tuple(blocks),
            batch_size=self.batch_size,
            load_s=(self.step_s if self.waits_for_workers else self.load_s) / self.accumulate,
            loads_in_background=self.waits_for_workers,
            update_s=self.update_s,
            head=head,
            num_batch_norms=self.num_batch_norms,
            recomputation=self.recomputation,
            accumulate=self.accumulate,
            batch_norm_s=self.batch_norm_s / self.accumulate,
            codec_s=self.codec_s,
            frozen_s=frozen_s,
        )

    def _head_begins(self) -> int | None:
        """Return the place of the first layer of the head, None if no head is worth sharding."""
        first = len(self.layers)
        while first > 0 and self.layers[first - 1].is_linear:
            first -= 1
        head_bytes = _bytes(self.layers[first:])
        return first if first > 0 and head_bytes > _bytes(self.layers[:first]) else None


def _bytes(layers: Sequence[LayerProfile]) -> int:
    return sum(layer.num_bytes for layer in layers)
