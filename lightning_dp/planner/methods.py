"""The ways to train that the planner compares."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.planner.checks import require_count, require_positive
from lightning_dp.planner.workload import Workload

MEBIBYTE = 2**20
FAMILIES = ("ddp", "layered_sgd", "hybrid")
COMPRESSIONS = ("bf16", "int8", "power_sgd")
SAME_BATCH, LARGER_BATCH = "same_batch", "larger_batch"


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
        compression: bytes sent between nodes over bytes of the gradients, in each direction; 0.5 for 16 bits. Or a
            compressor, whose bytes depend on the shapes of the parameters: ``"bf16"``, ``"int8"`` or ``"power_sgd"``,
            which is PowerSGD of rank 4. The processor time of compressing is not simulated.
        accumulate: micro-batches between two reductions. The time of a step is that of one micro-batch.
        bucket_bytes: capacity of a gradient bucket.
        first_bucket_bytes: capacity of the bucket that backward fills first, so that communication starts early.
        global_batch_norm: whether each batch norm layer gathers statistics, in forward and in backward.
        all_reduce: of DDP: ``"native"``, the network's; or ``"ring"``, `ring_all_reduce_hook`. Between the groups of
            layered SGD exact sums always travel in a ring.
        recompute: whether `Memonger` recomputes activations: ``""``, no; ``"same_batch"``; or ``"larger_batch"``, as
            large as fits into the memory of the present batch's activations.
    """

    family: str = "ddp"
    overlap: str = "step"
    communicator: str = "leader"
    scheme: str = "c"
    compression: float | str = 1.0
    accumulate: int = 1
    bucket_bytes: float = 25 * MEBIBYTE
    global_batch_norm: bool = False
    order: str = "priority"
    first_bucket_bytes: float = MEBIBYTE  # DDP's constant
    all_reduce: str = "native"
    recompute: str = ""

    def __post_init__(self) -> None:
        require_count("accumulate", self.accumulate)
        require_positive("bucket_bytes", self.bucket_bytes)
        require_positive("first_bucket_bytes", self.first_bucket_bytes)
        options: dict[str, tuple[str, ...]] = {
            "family": FAMILIES,
            "overlap": ("load", "step"),
            "communicator": ("leader", "sharded"),
            "order": ("priority", "fifo"),
            "all_reduce": ("native", "ring"),
            "recompute": ("", SAME_BATCH, LARGER_BATCH),
        }
        if isinstance(self.compression, str):
            options["compression"] = COMPRESSIONS
        else:
            require_positive("compression", self.compression)
        for name, known in {**options, "scheme": ("a", "b", "c")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, known))}")

    @property
    def is_exact(self) -> bool:
        """Whether it computes what DDP computes with the same batches."""
        changes = (self.accumulate > 1, self.compression != 1.0, self.global_batch_norm, self.recompute == LARGER_BATCH)
        return not any(changes)

    def applies_to(self, workload: Workload) -> bool:
        """Return whether the workload has what the method needs: a head, batch norm layers, or activations to drop."""
        if self.family == "hybrid" and workload.head is None:
            return False
        if self.global_batch_norm and workload.num_batch_norms == 0:
            return False
        if not self.recompute:
            return True
        plan = workload.recomputation
        return plan is not None and (self.recompute != LARGER_BATCH or plan.batch_factor > 1)


def _layered(overlap: str, communicator: str, compression: float | str = 1.0) -> Method:
    # Layered SGD makes small buckets, so that the one that the next forward needs first arrives early.
    return Method("layered_sgd", overlap, communicator, compression=compression, bucket_bytes=2 * MEBIBYTE)


# PyTorch's PowerSGD hook has all gradients in one bucket: over gloo it crashes with several.
_ONE_BUCKET = float(2**40)

METHODS = {
    "ddp": Method(),
    "ddp_ring": Method(all_reduce="ring"),
    "ddp_bf16": Method(compression="bf16"),
    "ddp_power_sgd": Method(compression="power_sgd", bucket_bytes=_ONE_BUCKET, first_bucket_bytes=_ONE_BUCKET),
    "ddp_accumulate_4": Method(accumulate=4),
    "ddp_memonger": Method(recompute=SAME_BATCH),
    "ddp_memonger_larger_batch": Method(recompute=LARGER_BATCH),
    "ddp_global_batch_norm": Method(global_batch_norm=True),
    "layered_sgd_load": _layered("load", "leader"),
    "layered_sgd_step": _layered("step", "leader"),
    "layered_sgd_step_sharded": _layered("step", "sharded"),
    "layered_sgd_step_bf16": _layered("step", "leader", "bf16"),
    "layered_sgd_step_int8": _layered("step", "leader", "int8"),
    "layered_sgd_step_power_sgd": _layered("step", "leader", "power_sgd"),
    "hybrid_a": Method("hybrid", scheme="a"),
    "hybrid_b": Method("hybrid", scheme="b"),
    "hybrid_c": Method("hybrid", scheme="c"),
}
"""Methods by name. `Method.applies_to` says which of them a workload can use."""
