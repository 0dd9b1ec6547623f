"""The passes of a scheme through a sharded head (arXiv 1404.5997, section 4).

In a training step one of two functions takes the place of the head's ``forward``:

- `HeadPasses.own_batch`, where the module calls the head itself. Features and logits are those of this rank's samples.
  The loss is computed afterwards, outside. So all passes first run forward, and all run backward when autograd reaches
  the head (`forward_first`).
- `HeadPasses.forward_in_pass`, within `HeadPasses.step`, where the module has a ``head_step``. Features are those of
  the pass's samples, the same on all ranks, and the logits stay sharded. `step` knows the loss of each pass, so each
  pass runs backward right after its forward (`pass_by_pass`), and only one pass's activations are in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.deferred_checks import DeferredChecks
from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import FeatureExchange
from lightning_dp.strategies.krizhevsky_hybrid.forward_first import ForwardFirst
from lightning_dp.strategies.krizhevsky_hybrid.gradients import reaches_any, require_no_part, scale_gradient
from lightning_dp.strategies.krizhevsky_hybrid.parameter_gradients import ParameterGradients
from lightning_dp.strategies.krizhevsky_hybrid.pass_by_pass import Scale, Update, hand_out, require_factor, run_passes
from lightning_dp.strategies.krizhevsky_hybrid.policy import check_hooks, require_unchanged
from lightning_dp.strategies.krizhevsky_hybrid.schemes import Scheme, SubPass, sub_passes
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies, seeded
from lightning_dp.strategies.krizhevsky_hybrid.sharded_logits import ShardedLogits
from lightning_dp.strategies.krizhevsky_hybrid.step_arguments import StepArguments, require_features

log = logging.getLogger(__name__)

HeadStep = Callable[[Tensor, dict[str, Any]], Tensor]


class HeadPasses(SharedByCopies):
    """The passes of one scheme through ``head``. Every method is a collective: all ranks must call it.

    Args:
        head: in its sharded state.
        scheme: "a", "b" or "c".
        channel: for features and their gradients. It needs a process group of its own. Features travel while the head
            exchanges activations over its channel, and the messages of one group must be issued in the same order on
            all ranks.
    """

    def __init__(self, head: ShardedHead, scheme: Scheme, channel: Channel) -> None:
        self.head = head
        self.scheme = scheme
        self.channel = channel
        self.exchange = FeatureExchange(channel)
        self.checks = DeferredChecks()
        self.num_calls = 0  # calls of the head, in passes and outside
        self.num_steps = 0  # calls of `step`
        self._results: list[Any] = []  # nodes of the graph: what this training step has got from the head
        self._has_warned = False  # of weights in ``head_step``

    def own_batch(self, features: Tensor) -> Tensor:
        """Return the logits (n, C) for the features (n, *) of this rank's samples. n may differ, and may be 0."""
        self.num_calls += 1
        check_hooks(self.head)
        require_features(features, f"the argument of {self.head.name!r}")
        sizes, seed = self.exchange.exchange_batch_sizes(features, needs_seed=self.head.draws_random_numbers)
        return self._remembered(ForwardFirst(self, sub_passes(self.scheme, sizes), seed)(features))

    def forward_in_pass(self, features: Tensor, gradients: ParameterGradients) -> Tensor:
        """Return the sharded logits (N, C) for the features (N, *) of a pass, which are the same on all ranks."""
        self.num_calls += 1
        # DDP divides the trunk's gradients by K, so the features' gradients, summed over the K ranks, must be K times
        # the gradient of the loss. The features' gradient has two parts:
        # - what ``head_step`` computes from the features directly, such as a penalty on them: each rank computes this
        #   part in full, so the sum over ranks is K times as large by itself;
        # - what comes through the head: each rank computes the part that its shard contributes, so the sum is the
        #   gradient once. This factor makes it K times as large, too. Without it the head's part of the trunk's
        #   gradient would be K times too small.
        features = scale_gradient(features, self.channel.world_size)
        # `one_pass` gives all ranks the same generator state, so this draws the same seed on all of them. It draws the
        # same once more when torch.utils.checkpoint calls the head again in backward, because that restores the state.
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
        """Run each pass forward and backward, and return the mean loss over all ranks' samples, the same on all ranks.

        The gradients are known when this returns, and backward of the loss only hands them out. The features' are K
        times the gradient of the loss, because DDP averages the trunk's gradients afterwards.

        Args:
            features: (n, *) of this rank's samples.
            arguments: the other arguments of ``head_step``, by name. See `StepArguments`.
            head_step: returns the mean loss for the features and arguments of a pass.
            update: called after each pass with the gradients of the head's parameters (section 4.2, variable batch
                size). Backward then has none left for them. None: there is one update of the whole network.
            scale: multiplies a loss before backward, and is divided out of the result (for 16-bit gradients).
            others: parameters outside the head, by name. Their gradients would be lost, so they must have none.
            only_factor: the only factor by which the loss may be multiplied before backward. None: any.

        Raises:
            ValueError: ``head_step`` does not return a single number, or returns different ones on the ranks, or uses
                one of the ``others``; in backward, the loss was multiplied by different factors on the ranks, or by
                another one than ``only_factor`` (on a GPU in the next backward, see `DeferredChecks`). See also
                `StepArguments`.
        """
        check_hooks(self.head)
        own = StepArguments(arguments, len(features))
        sizes, seed = self.exchange.exchange_batch_sizes(features, own.tensors, own.constants, needs_seed=True)
        own.gather(self.exchange, sizes)

        def loss_of(part: SubPass, x: Tensor) -> Tensor:
            loss = _require_number(head_step(x, own.of_pass(part)))
            if self.num_steps == 0:
                self._require_same_loss(loss, lambda: head_step(0.5 * x.detach(), own.of_pass(part)))
            require_no_part(loss, others or {})
            return loss

        result = run_passes(self, features, sub_passes(self.scheme, sizes), seed, loss_of, update, scale)
        self.num_steps += 1
        loss = hand_out(result, features, self.head.parameters, partial(self._check_backward, only_factor))
        return self._remembered(loss)

    def begin_training_step(self, module: nn.Module) -> None:
        """Forget what the last training step has got from the head.

        Raises:
            RuntimeError: the head of ``module`` has been changed since set-up.
        """
        self._results.clear()
        require_unchanged(module, self.head)

    def _remembered(self, result: Tensor) -> Tensor:
        if result.grad_fn is not None:
            self._results.append(result.grad_fn)
        return result

    def require_part_in(self, loss: Tensor) -> None:
        """Raise ValueError if the head was called in this training step, and ``loss`` depends on no result of it.

        Backward of the head is a collective. Without this check, the other ranks would wait there for this one, and
        this one for them in the reduction of the trunk's gradients, until the timeout. No rank is asked: DDP, too,
        refuses a loss that leaves parameters out, on all ranks or on one.
        """
        if self._results and self.channel.world_size > 1 and not reaches_any(loss, self._results):
            raise ValueError(
                f"the loss of rank {self.channel.rank} does not depend on what {self.head.name!r} has returned in this "
                "training step, so this rank would not take part in the backward of the head, which is a collective. "
                "If the losses of other ranks depend on it, add it times 0 to the loss of this one (0 * logits.sum()). "
                f"If none does, call {self.head.name!r} under torch.no_grad()"
            )

    def seed_of_pass(self, seed: int | None, number: int) -> int | None:
        """Return the first of the K + 1 seeds of pass ``number``: one that all ranks share, and one for each rank."""
        return None if seed is None else seed + number * (self.channel.world_size + 1)

    @contextmanager
    def one_pass(self, seed: int | None, device: torch.device, gradients: ParameterGradients) -> Iterator[None]:
        """Run one pass of `step` within the context: the head returns sharded logits, and ranks draw the same numbers.

        ``head_step`` runs on every rank with the same samples. If it drew different random numbers on each, as noise
        on the features for example, the ranks would compute different losses, and the sum of their gradients would be
        the gradient of none of them.
        """
        forward = partial(self.forward_in_pass, gradients=gradients)
        with seeded(seed, device), self.recorded(), self.head.forwarding_to(forward):
            yield

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Report the work on one pass, within the context, as the stage "head"."""
        begin_s = time.perf_counter()
        yield
        if self.channel.on_stage is not None:
            self.channel.on_stage("head", begin_s, time.perf_counter())

    def _check_backward(self, only_factor: float | None, loss: Tensor, factor: Tensor) -> None:
        """Check with what all ranks go backward. All ranks must call it.

        Args:
            only_factor: the only factor that is allowed, if there is only one.
            loss: from which this rank goes backward.
            factor: by which it was multiplied.
        """
        self.checks.finish()
        if self.channel.world_size > 1:
            number = torch.stack([factor.detach().double(), loss.double()])
            gathered = self.head.control.all_gather("agreement", number)
            self.checks.add(gathered, partial(self._require_same_backward, dtype=loss.dtype))
        if only_factor is not None:
            self.checks.add(factor.detach(), lambda factor: require_factor(factor.item(), only_factor))

    def _require_same_backward(self, gathered: Tensor, dtype: torch.dtype) -> None:
        """Raise ValueError unless all ranks go backward from the same loss, times the same factor.

        The gradients of the head belong to the samples of all ranks, so a rank cannot weight its own samples by
        multiplying the loss. And ``head_step`` may begin to use this rank's own data in a later step than the first.

        Args:
            gathered: (ranks, 2), factor and loss of each rank.
            dtype: of the loss, before it was gathered.
        """
        factors, losses = gathered.unbind(1)
        if not torch.allclose(factors, factors[:1].expand_as(factors), rtol=1e-6, atol=0, equal_nan=True):
            raise ValueError(
                f"the loss of head_step was multiplied by different factors on the ranks before backward: "
                f"{factors.tolist()}. It is the loss of all ranks' samples, so the factor must be the same on all "
                "ranks. To weight samples, pass the weights to head_step: self.head_step(features, target, weights)"
            )
        # After the warning of weights, the losses differ by each rank's part of a penalty.
        if not self._has_warned and not _is_same(losses, dtype):
            raise ValueError(_different_losses(losses))

    def _require_same_loss(self, loss: Tensor, loss_of_other_features: Callable[[], Tensor]) -> None:
        """Raise ValueError if ``head_step`` has used data that differs between ranks. All ranks must call it.

        Every rank runs it with the same samples, so its result can differ only by what it uses beside its arguments:

        - rows of this rank's batch that ``training_step`` has left on the module. They do not belong to the samples of
          the pass, so the gradients would be wrong.
        - the head's weights, of which each rank has its rows, in a penalty. The gradients are right if that is a sum.

        The second does not depend on the features: with other features, the loss changes by the same on all ranks.
        """
        if self.channel.world_size == 1:
            return
        losses = self.head.control.all_gather("loss of a pass", loss.detach().double())
        if _is_same(losses, loss.dtype):
            return
        with torch.no_grad():
            change = loss.detach().double() - loss_of_other_features().double()
        changes = self.head.control.all_gather("change of the loss", change)
        if not _is_same(changes, loss.dtype, scale=losses.abs().max().item()):
            raise ValueError(_different_losses(losses))
        if not self._has_warned:
            log.warning(
                f"head_step uses the weights of {self.head.name!r} directly, and each rank has its own rows of them. A "
                "penalty on its weights must be a sum over them (L1, L2); a norm, a mean or a product of rows has "
                "wrong gradients. The logged loss contains this rank's part of the penalty only"
            )
            self._has_warned = True


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The ranks compute a loss from the same numbers in the same order, so it differs at most by rounding."""


def _is_same(numbers: Tensor, dtype: torch.dtype, scale: float = 0.0) -> bool:
    """Return whether all ``numbers`` are one, but for rounding: of ``dtype``, and of terms as large as ``scale``."""
    rtol = _TOLERANCES.get(dtype, 1e-3)
    atol = rtol * max(scale, 0.1)
    return torch.allclose(numbers, numbers[:1].expand_as(numbers), rtol=rtol, atol=atol, equal_nan=True)


def _different_losses(losses: Tensor) -> str:
    return (
        f"head_step returns different losses on the ranks for the same samples: {losses.tolist()}. It may use its "
        "arguments and the head, but nothing that belongs to this rank's batch alone. Pass such data as further "
        "arguments: self.head_step(features, target, weights)"
    )


def _require_number(loss: Any) -> Tensor:
    """Return what ``head_step`` has returned, or raise ValueError if it is not a single number in a tensor."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"head_step returned {what}; it must return the mean loss of its samples, one number")
    return loss
