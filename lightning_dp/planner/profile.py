"""What was measured of a job's steps, and the workload that it makes for the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dp.planner.workload import Block, Head, Recomputation, Workload, join_shapes


@dataclass(frozen=True)
class LayerProfile:
    """A layer with parameters.

    Attributes:
        name: of the module.
        num_bytes: of its gradients.
        forward_s: time of its forward.
        is_linear: whether it is a fully-connected layer.
        input_bytes: of its input, for one rank's batch.
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

    Attributes:
        strategy: the strategy's class.
        batch_size: images per rank.
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

    @property
    def compute_s(self) -> float:
        """Time that is neither loading nor waiting for messages."""
        return self.step_s - self.load_s - self.exposed_communication_s - self.batch_norm_s

    @property
    def overhead_ratio(self) -> float:
        """R_O of Lemma 3.1: what more GPUs do not shorten, over compute."""
        return (self.step_s - self.compute_s) / self.compute_s if self.compute_s > 0 else float("inf")

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

        The fully-connected layers at the end are the head, if they have most of the bytes.
        """
        total_s = sum(layer.forward_s for layer in self.layers) or 1.0
        blocks = [
            Block(
                layer.num_bytes,
                self.forward_s * layer.forward_s / total_s,
                self.backward_s * layer.forward_s / total_s,
                shapes=layer.shapes,
            )
            for layer in self.layers
        ]
        first = self._head_begins()
        head = None
        if first is not None:
            parts, layers = blocks[first:], self.layers[first:]
            head = Head(
                sum(part.num_bytes for part in parts),
                sum(part.forward_s for part in parts),
                sum(part.backward_s for part in parts),
                layers[0].input_bytes,
                sum(layer.input_bytes for layer in layers[1:]),
                shapes=join_shapes(parts),
            )
            blocks = blocks[:first]
        return Workload(
            tuple(blocks),
            batch_size=self.batch_size,
            load_s=self.load_s,
            update_s=self.update_s,
            head=head,
            num_batch_norms=self.num_batch_norms,
            recomputation=self.recomputation,
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
