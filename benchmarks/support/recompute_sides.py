"""The sides of the recomputation benchmark: each computes the same gradients, and keeps something else for them."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_dp._private.torch_names import activation_memory_budget
from lightning_dp.recompute import Policy, activation_bytes, apply_recompute, plan_recompute
from lightning_dp.recompute.policies import find_blocks


class Side:
    """Training steps of one model in one way.

    Args:
        model: the sides share it, and each leaves it as it was.
        x: images (N, C, H, W).
        target: labels (N,).
    """

    is_mixed = False
    """Whether all sides compute in bfloat16, by autocast."""

    def __init__(self, model: nn.Module, x: Tensor, target: Tensor) -> None:
        self.model = model
        self.x = x
        self.target = target

    def step(self) -> None:
        """Compute the gradients once."""
        self.model.zero_grad(set_to_none=True)
        with self._precision():
            loss = F.cross_entropy(self.logits(), self.target)
        torch.autograd.backward(loss)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.is_mixed)

    def logits(self) -> Tensor:
        logits: Tensor = self.model(self.x)
        return logits

    def kept_bytes(self) -> int:
        """Return what is kept between forward and backward."""
        with self._precision():
            return activation_bytes(self.model, self.x).total_bytes


class Recomputing(Side):
    """`apply_recompute` with a policy."""

    def __init__(self, model: nn.Module, x: Tensor, target: Tensor, policy: Any) -> None:
        super().__init__(model, x, target)
        self.policy: Policy | Any = policy

    def step(self) -> None:
        handle = apply_recompute(self.model, self.policy)
        super().step()
        handle.remove()

    def kept_bytes(self) -> int:
        handle = apply_recompute(self.model, self.policy)
        try:
            return super().kept_bytes()
        finally:
            handle.remove()


class Checkpointed(Side):
    """`torch.utils.checkpoint` on every block that has more than one module, and on the layers between them."""

    def step(self) -> None:
        with self._checkpointed():
            super().step()

    def kept_bytes(self) -> int:
        with self._checkpointed():
            return super().kept_bytes()

    @contextmanager
    def _checkpointed(self) -> Any:
        blocks = find_blocks(self.model)
        for block in blocks:
            block.forward = _checkpointed(block.forward)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


class Compiled(Side):
    """`torch.compile`, with its default partitioner or a share of the activations."""

    def __init__(self, model: nn.Module, x: Tensor, target: Tensor, share: float | None) -> None:
        super().__init__(model, x, target)

        def forward(model: nn.Module, x: Tensor) -> Any:
            return model(x)

        # The compiler's cache belongs to the code: sides with the same code would share what was compiled first.
        code = forward.__code__.replace(co_name=f"forward_{share}")
        self._compiled = torch.compile(types.FunctionType(code, globals()))
        self._budget = nullcontext if share is None else lambda: activation_memory_budget(share)
        with self._budget():
            self.step()

    def logits(self) -> Tensor:
        logits: Tensor = self._compiled(self.model, self.x)
        return logits

    def kept_bytes(self) -> int:
        """Return what autograd's hooks see: no dispatch mode sees inside of compiled code."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers())}
        own.add(self.x.untyped_storage().data_ptr())
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = self.logits()
        found.pop(logits.untyped_storage().data_ptr(), None)
        return sum(found.values())


def plan_side(model: nn.Module, x: Tensor, target: Tensor, share: float) -> tuple[Recomputing, dict[str, Any]]:
    """Return a side with a plan for this share of the bytes of plain training, and what the plan promises."""
    plain_bytes = activation_bytes(model, x).total_bytes
    plan = plan_recompute(model, x, int(share * plain_bytes))
    promise = {"solver": plan.solver, "peak_bytes": plan.peak_bytes, "recompute_s": plan.recompute_s}
    return Recomputing(model, x, target, plan), promise
