"""The passes of a scheme through a sharded head (arXiv 1404.5997, section 4).

Two callables take the place of the head's ``forward`` in a training step:

- `HeadPasses.own_batch`: features in and logits out are this rank's own. All passes go forward first; all go backward
  when autograd comes to it (`forward_first`).
- `HeadPasses.forward_in_pass`, during a pass of `HeadPasses.step`: features are the same on all ranks, and logits stay
  sharded. `step` knows the loss of a pass, so that each pass goes forward and backward at once (`pass_by_pass`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import FeatureExchange
from lightning_dp.strategies.krizhevsky_hybrid.forward_first import ForwardFirst
from lightning_dp.strategies.krizhevsky_hybrid.gradients import require_no_part, scale_gradient
from lightning_dp.strategies.krizhevsky_hybrid.parameter_gradients import ParameterGradients
from lightning_dp.strategies.krizhevsky_hybrid.pass_by_pass import Scale, Update, hand_out, run_passes
from lightning_dp.strategies.krizhevsky_hybrid.policy import check_hooks
from lightning_dp.strategies.krizhevsky_hybrid.schemes import Scheme, SubPass, sub_passes
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies, seeded
from lightning_dp.strategies.krizhevsky_hybrid.sharded_logits import ShardedLogits
from lightning_dp.strategies.krizhevsky_hybrid.step_arguments import StepArguments

HeadStep = Callable[[Tensor, dict[str, Any]], Tensor]


class HeadPasses(SharedByCopies):
    """The passes of one scheme through ``head``. Every call is a collective: all ranks must make it.

    Args:
        head: in its sharded state.
        scheme: "a", "b" or "c".
        channel: for features and their gradients. It needs a process group of its own: features travel while the head
            exchanges activations over its channel, and messages of one group must start in the same order on all ranks.
    """

    def __init__(self, head: ShardedHead, scheme: Scheme, channel: Channel) -> None:
        self.head = head
        self.scheme = scheme
        self.channel = channel
        self.exchange = FeatureExchange(channel)
        self.num_calls = 0  # of the head, alone and in passes
        self.num_steps = 0

    def own_batch(self, features: Tensor) -> Tensor:
        """Logits (n, C) of this rank's n examples, from their features (n, *); n may differ between ranks, and be 0."""
        self.num_calls += 1
        check_hooks(self.head)
        sizes, seed = self.exchange.exchange_batch_sizes(features, needs_seed=self.head.draws_random_numbers)
        return ForwardFirst(self, sub_passes(self.scheme, sizes), seed)(features)

    def forward_in_pass(self, features: Tensor, gradients: ParameterGradients) -> Tensor:
        """Features (N, *) of a pass, the same on all ranks, to logits (N, C) whose columns stay with their ranks."""
        self.num_calls += 1
        # The gradient of the features is summed over the K ranks, and DDP then divides the trunk's gradients by K, so
        # the sum must be K times the gradient of the loss. What else ``head_step`` computes from the features (a
        # penalty on them) has its whole gradient on every rank, so the sum alone makes it K times as large. The head's
        # part has not: each rank has the share of its own slices only. Without the factor here the trunk would be
        # trained with a K-th of the head's gradient.
        features = scale_gradient(features, self.channel.world_size)
        # `one_pass` has seeded the generator alike on all ranks. A seed drawn from it is the same on all of them, and
        # the same again when a checkpoint recomputes the head in backward.
        seed = int(torch.randint(2**62, ()).item()) if self.head.draws_random_numbers else None
        own = self.head(features, seed, gradients)
        return ShardedLogits(own, self.head.output_bounds, self.head.channel)

    def step(
        self,
        features: Tensor,
        arguments: Mapping[str, Any],
        head_step: HeadStep,
        update: Update | None = None,
        scale: Scale = lambda loss: loss,
        others: Mapping[str, Tensor] | None = None,
        only_factor: float | None = None,
    ) -> Tensor:
        """The mean loss over the examples of all ranks, the same on all; each pass goes forward and backward at once.

        Backward of the returned loss hands out gradients that are computed already. Those of the features are K times
        the gradient of the loss, because the trunk's gradients are averaged over ranks afterwards.

        Args:
            features: (n, *) of this rank's examples.
            arguments: what ``head_step`` gets beside them, by name: see `StepArguments`.
            head_step: from features and arguments of a pass to its mean loss.
            update: called with the gradients of the head's parameters after each pass (section 4.2, variable batch
                size); backward then has none left for them. None: there is one update for the whole network.
            scale: multiplies a loss before backward, and is divided out of the result (for 16-bit gradients).
            others: parameters outside the head, by name. Their gradients would be lost, so they must have none.
            only_factor: see `hand_out`.

        Raises:
            ValueError: ``head_step`` returns something else than one number, or another number than on another rank, or
                trains one of the ``others``; or see `StepArguments`.
        """
        check_hooks(self.head)
        own = StepArguments(arguments, len(features))
        sizes, seed = self.exchange.exchange_batch_sizes(features, own.tensors, own.constants, needs_seed=True)
        own.gather(self.exchange, sizes)

        def loss_of(part: SubPass, x: Tensor) -> Tensor:
            loss = head_step(x, own.of_pass(part))
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise ValueError(f"head_step returned {what}; it must return the mean loss of its examples, one number")
            if self.num_steps == 0:
                self._require_same_loss(loss)
            require_no_part(loss, others or {})
            return loss

        result = run_passes(self, features, sub_passes(self.scheme, sizes), seed, loss_of, update, scale)
        self.num_steps += 1
        return hand_out(result, features, self.head.parameters, only_factor)

    def seed_of_pass(self, seed: int | None, number: int) -> int | None:
        """Return the first of the K + 1 seeds that pass ``number`` uses: one for all ranks together, one for each."""
        return None if seed is None else seed + number * (self.channel.world_size + 1)

    @contextmanager
    def one_pass(self, seed: int | None, device: torch.device, gradients: ParameterGradients) -> Iterator[None]:
        """Forward and backward of a pass of `step`: the head keeps its logits sharded, and all ranks draw alike.

        ``head_step`` runs on every rank with the same examples. If it drew different random numbers on each (noise on
        the features, say), the ranks would compute different losses and add up gradients that do not belong together.
        """
        forward = partial(self.forward_in_pass, gradients=gradients)
        with seeded(seed, device), self.recorded(), self.head.forwarding_to(forward):
            yield

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Report the work on one pass as the stage "head"."""
        begin_s = time.perf_counter()
        yield
        if self.channel.on_stage is not None:
            self.channel.on_stage("head", begin_s, time.perf_counter())

    def _require_same_loss(self, loss: Tensor) -> None:
        """Raise ValueError if ``head_step`` has used something that differs between ranks.

        Every rank runs it with the same examples, so only data beside its arguments can make a difference: rows of this
        rank's batch that ``training_step`` left on the module, for example, which belong to other examples.
        """
        if self.channel.world_size == 1:
            return
        losses = self.head.control.all_gather("loss of a pass", loss.detach().double())
        if not torch.allclose(losses, losses[:1].expand_as(losses), rtol=1e-3, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"head_step returns different losses on the ranks for the same examples: {losses.tolist()}. It may use "
                "its arguments and the module's parameters, but nothing that belongs to this rank's batch alone. Pass "
                "such data as further arguments: self.head_step(features, target, weights)"
            )
