"""A sentence for each method: why its step takes as long as it does."""

from __future__ import annotations

from lightning_dp.planner.messages import sent_bytes
from lightning_dp.planner.methods import LARGER_BATCH, METHODS, Method
from lightning_dp.planner.network import Network
from lightning_dp.planner.simulation import StepTime, all_reduce_s, inter_group_s
from lightning_dp.planner.workload import Block, Workload, join_shapes

ROUNDED = {
    "bf16": ", rounded to 16 bits",
    "int8": ", rounded to 8 bits (their processor time not counted)",
    "power_sgd": ", as factors of rank 4 (their processor time not counted)",
}


def reason(name: str, workload: Workload, network: Network, world_size: int, time: StepTime) -> str:
    """Return a sentence: why a step of this method takes as long as it does."""
    method = METHODS[name]
    waits = f"waits {1e3 * time.waiting_s:.0f} ms of {1e3 * time.step_s:.0f} ms"
    if method.family == "hybrid":
        head = workload.head
        assert head is not None
        sent = 2 * (world_size - 1) * (head.feature_bytes + head.hidden_bytes)
        return f"Sends {sent / 1e6:.1f} MB of activations for {head.num_bytes / 1e6:.1f} MB of gradients; {waits}."
    if method.recompute:
        return _recomputes(method, workload, waits)
    if method.global_batch_norm:
        exchanges = 2 * workload.num_batch_norms
        exchange_s = exchanges * network.small_exchange_s(world_size)
        return (
            f"DDP that also gathers batch norm's statistics {exchanges} times, {1e3 * exchange_s:.0f} ms, "
            f"for batches below 8 images per rank; {waits}."
        )
    gradients = _gradients(workload)
    rounded = ROUNDED.get(str(method.compression), "")
    if method.family == "layered_sgd":
        between_s = inter_group_s(gradients, method, network, world_size)
        behind = "loading" if method.overlap == "load" else "loading, backward and the next forward"
        return f"Hides {1e3 * between_s:.0f} ms between nodes{rounded}, behind {behind}; {waits}."
    megabytes = sent_bytes(gradients, method.compression) / 1e6
    if method.accumulate > 1:
        return f"Sends {megabytes:.1f} MB once in {method.accumulate} batches, a larger batch; {waits}."
    network_s = all_reduce_s(gradients, method, network, world_size)
    how = " by ring_all_reduce_hook" if method.all_reduce == "ring" else ""
    place = "after" if method.first_bucket_bytes >= workload.gradient_bytes else "behind"
    rounded += "," if rounded else ""
    return f"All-reduces {megabytes:.1f} MB{rounded}{how} in {1e3 * network_s:.0f} ms, {place} backward; {waits}."


def _recomputes(method: Method, workload: Workload, waits: str) -> str:
    plan = workload.recomputation
    assert plan is not None
    held, plain = plan.held_bytes / 1e6, plan.plain_bytes / 1e6
    if method.recompute != LARGER_BATCH:
        again_ms = 1e3 * plan.recompute_s
        return f"DDP that holds {held:.1f} of {plain:.1f} MB of activations for {again_ms:.0f} ms of compute; {waits}."
    images = plan.batch_factor * workload.batch_size
    return (
        f"{images} images per rank in the {plain:.1f} MB of activations of {workload.batch_size}, for one all-reduce "
        f"of {workload.gradient_bytes / 1e6:.1f} MB; {waits}."
    )


def _gradients(workload: Workload) -> Block:
    """Return all gradients as one block."""
    blocks = workload.whole().blocks
    return Block(workload.gradient_bytes, 0.0, 0.0, shapes=join_shapes(blocks))
