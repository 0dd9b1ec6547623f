"""All passes forward, and later all passes backward: what a sharded head does where the module calls it directly.

The loss is computed afterwards, outside, so no pass can run backward before all have run forward. The graphs of all
passes stay in memory until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import Finish, prefetch_one
from lightning_dp.strategies.krizhevsky_hybrid.gradients import FeatureGradients, gradients_of, take_once
from lightning_dp.strategies.krizhevsky_hybrid.parameter_gradients import ParameterGradients, require_first_derivative
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SubPass

if TYPE_CHECKING:
    from lightning_dp.strategies.krizhevsky_hybrid.head_passes import HeadPasses


class ForwardFirst:
    """One call of the head, whose passes keep their graphs from forward to backward. Both are collectives.

    Args:
        passes: the head and its channels.
        plan: which samples are in which pass.
        seed: seed for dropout, the same on all ranks. None: nothing is drawn.
    """

    def __init__(self, passes: HeadPasses, plan: list[SubPass], seed: int | None) -> None:
        self._passes = passes
        self._plan = plan
        self._seed = seed
        self._graphs: list[tuple[Tensor, Tensor]] | None = None  # features and own logits of each pass
        # Each rank's loss is the mean over its own samples, and the gradient of the whole is the mean over ranks. DDP
        # divides the trunk's gradients by K. The head's, which sum up the samples of all ranks, are divided here.
        self._gradients = ParameterGradients(passes.head.parameters, 1 / passes.channel.world_size)

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits (n, C) for the features (n, *) of this rank's samples, as part of the autograd graph."""
        # Within a Function gradients are always off, so the mode outside is passed in.
        return _ForwardFirst.apply(self, torch.is_grad_enabled(), features, *self._passes.head.parameters)

    def forward(self, features: Tensor, needs_gradient: bool, with_graph: bool) -> Tensor:
        """Run all passes forward. Keep their graphs if ``with_graph``."""
        passes, bounds = self._passes, self._passes.head.output_bounds
        graphs: list[tuple[Tensor, Tensor]] = []
        arriving: list[Finish] = []
        parts = prefetch_one(lambda part: passes.exchange.assemble(features, part), self._plan)
        for number, (part, x) in enumerate(parts):
            with torch.set_grad_enabled(with_graph), passes.recorded(), _keep_activations():
                x.requires_grad_(with_graph and needs_gradient)
                own = passes.head(x, passes.seed_of_pass(self._seed, number), self._gradients)
            graphs.append((x, own))
            # The logits travel to the ranks that have the samples, while the next pass is computed.
            arriving.append(passes.exchange.to_owners(own.detach(), part, bounds))
        self._graphs = graphs if with_graph else None
        if not arriving:  # no rank has any sample
            return features.new_empty(0, bounds[-1][1])
        return torch.cat([finish() for finish in arriving])

    def backward(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the features (n, *) and of the parameters, given that of the logits (n, C)."""
        passes, bounds = self._passes, self._passes.head.output_bounds
        of_features = FeatureGradients(passes.exchange)
        arriving = prefetch_one(lambda part: passes.exchange.from_owners(gradient, part, bounds), self._plan)
        for (part, of_own), (x, own) in zip(arriving, take_once(self, "_graphs"), strict=True):
            with passes.recorded():
                of_x, *of_parameters = gradients_of(own, [x, *passes.head.parameters], of_own)
            of_features.send_back(of_x, part)
            self._gradients.add(of_parameters)
        return of_features.finish(), *self._gradients.take()


class _ForwardFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: ForwardFirst, with_graph: bool, features: Tensor, *parameters: Tensor) -> Tensor:
        ctx.work = work
        return work.forward(features, ctx.needs_input_grad[2], with_graph)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        return None, None, *ctx.work.backward(gradients[0])


def _keep_activations() -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which the activations of the passes are kept, even within `torch.utils.checkpoint`.

    A checkpoint around the head would free them and run the head again in backward, and all messages of the forward
    would be sent twice.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
