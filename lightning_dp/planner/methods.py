"""The ways to train that the planner compares."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.planner.checks import require_count, require_positive

MEBIBYTE = 2**20
FAMILIES = ("ddp", "layered_sgd", "hybrid")


@dataclass(frozen=True)
class Method:
    """A way to train, with the options that its time depends on.

    Attributes:
        family: ``"ddp"``, ``"layered_sgd"`` or ``"hybrid"``.
        overlap: of layered SGD: ``"load"`` or ``"step"``.
        communicator: of layered SGD: ``"leader"`` or ``"sharded"``.
        order: of layered SGD with overlap ``"step"``: ``"priority"``, nearest the input first among the buckets that
            are ready, as over gloo; or ``"fifo"``, as backward produces them, as over NCCL.
        scheme: of the hybrid: ``"a"``, ``"b"`` or ``"c"``.
        compression: bytes sent between nodes over bytes of the gradients; 0.5 for 16 bits.
        accumulate: micro-batches between two reductions. The time of a step is that of one micro-batch.
        bucket_bytes: capacity of a gradient bucket.
        global_batch_norm: whether each batch norm layer gathers statistics, in forward and in backward.
    """

    family: str = "ddp"
    overlap: str = "step"
    communicator: str = "leader"
    scheme: str = "c"
    compression: float = 1.0
    accumulate: int = 1
    bucket_bytes: float = 25 * MEBIBYTE
    global_batch_norm: bool = False
    order: str = "priority"

    def __post_init__(self) -> None:
        require_count("accumulate", self.accumulate)
        require_positive("compression", self.compression)
        require_positive("bucket_bytes", self.bucket_bytes)
        options = {"family": FAMILIES, "overlap": ("load", "step"), "communicator": ("leader", "sharded")}
        options["order"] = ("priority", "fifo")
        for name, known in {**options, "scheme": ("a", "b", "c")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, known))}")


def _layered(overlap: str, communicator: str, compression: float = 1.0) -> Method:
    # Layered SGD makes small buckets, so that the one that the next forward needs first arrives early.
    return Method("layered_sgd", overlap, communicator, compression=compression, bucket_bytes=2 * MEBIBYTE)


METHODS = {
    "ddp": Method(),
    "ddp_bf16": Method(compression=0.5),
    "ddp_accumulate_4": Method(accumulate=4),
    "layered_sgd_load": _layered("load", "leader"),
    "layered_sgd_step": _layered("step", "leader"),
    "layered_sgd_step_sharded": _layered("step", "sharded"),
    "layered_sgd_step_bf16": _layered("step", "leader", compression=0.5),
    "hybrid_a": Method("hybrid", scheme="a"),
    "hybrid_b": Method("hybrid", scheme="b"),
    "hybrid_c": Method("hybrid", scheme="c"),
}
"""Methods by name. `ring_all_reduce_hook` takes as long as ``"ddp"`` on a network whose all-reduce is a ring."""
