"""The passes of a scheme through a sharded head (arXiv 1404.5997, section 4).

In a training step one of two functions takes the place of the head's ``forward``:

- Where the module calls the head itself: `HeadPasses.forward_local_batch`. Features and logits are those of this rank's
  samples, and the loss is computed afterwards, outside. So all passes first run forward, and all run backward when
  autograd reaches the head (`_LocalBatch`).
- Where the module has a ``head_step``, which `HeadPasses.step` calls with the samples of a pass, a *micro batch*, the
  same on all ranks: `MicroBatch`. The loss of each pass is known, so each runs backward right after its forward
  (`run_passes`). Only one pass's activations are in memory.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dp._private.torch_names import has_tensor_hooks, keeps_graph, version_of
from lightning_dp.collectives.all_to_all import CallMismatchError, Channel, Finish
from lightning_dp.collectives.point_to_point import PeerError
from lightning_dp.losses import CHUNK_BYTES, LastLayer, ShardedForward
from lightning_dp.strategies.krizhevsky_hybrid.checks import require_unchanged
from lightning_dp.strategies.krizhevsky_hybrid.exchange import (
    FeatureExchange,
    Scheme,
    StepArguments,
    SubPass,
    prefetch_one,
    require_features,
    sub_passes,
)
from lightning_dp.strategies.krizhevsky_hybrid.head import (
    ParameterGradients,
    ShardedHead,
    SharedOnDeepcopy,
    as_saved,
    gradients_of,
    saved,
    seeded,
    summed,
    summed_in_backward,
)

log = logging.getLogger(__name__)

HeadStep = Callable[[Tensor, dict[str, Any]], Tensor]
Update = Callable[[Sequence[Tensor | None]], None]
Scale = Callable[[Tensor], Tensor]


class HeadPasses(SharedOnDeepcopy):
    """The passes of one scheme through ``head``. Every method is a collective: all ranks must call it.

    Args:
        head: in its sharded state.
        scheme: "a", "b" or "c".
        num_passes: of b and c. None: as many as there are ranks.
        channel: for features and their gradients. It needs a process group of its own. Features travel while the head
            exchanges activations over its channel, and the messages of one group must be issued in the same order on
            all ranks.

    Attributes:
        gradient_memory: see `ParameterGradients`.
        mark: a number with a gradient of 0 wherever a result of the head has one. None: nobody looks at it.
    """

    def __init__(self, head: ShardedHead, scheme: Scheme, channel: Channel, num_passes: int | None = None) -> None:
        self.head = head
        self._plan = partial(sub_passes, scheme, num_passes=num_passes)
        self.channel = channel
        self.exchange = FeatureExchange(channel)
        # In the group of what ``head_step`` exchanges, so that a call of the head by one rank alone meets it, and both
        # raise. In another group they would wait for each other. Its bytes are not counted.
        self._comparison = Channel(head.channel.group, hint=head.channel.hint)
        self.num_calls = 0  # calls of the head, in passes and outside
        self.num_steps = 0  # calls of `step`
        self.num_training_steps = 0
        self.gradient_memory: dict[Tensor, Tensor] = {}
        self.mark: nn.Parameter | None = None
        self._results: list[Any] = []  # nodes of the graph: what this training step has got from the head
        self._direct: list[Any] = []  # those of them in whose backward the ranks meet
        self._after_trunk: AfterTrunk | None = None  # of this training step, until a call of the head takes it
        self._factors: list[Tensor] = []  # one for each call of `step`, until `take_factors`
        self._has_warned_of_weights = False
        self._has_warned_of_logits = False

    @property
    def channels(self) -> tuple[Channel, Channel]:
        """Those whose messages are counted and timed: of features, and of activations within the head."""
        return self.channel, self.head.channel

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank has sent in training steps, by kind of message."""
        total: Counter[str] = Counter()
        for channel in self.channels:
            total.update(channel.bytes_sent)
        return dict(total)

    @torch.compiler.disable  # a compiled training_step may call it
    def forward_local_batch(self, input: Tensor) -> Tensor:
        """Return the logits (n, *, C) for the features (n, *) of this rank's samples. n may differ, and may be 0."""
        self.num_calls += 1
        require_features(input, f"the argument of {self.head.name!r}")
        return self.head.by_rows(self._forward_rows, input)

    def _forward_rows(self, features: Tensor) -> Tensor:
        sizes, seed = self.exchange.exchange_batch_sizes(features, needs_seed=self.head.draws_random_numbers)
        after_trunk, receivers = self._take_after_trunk()
        with_graph = torch.is_grad_enabled()
        with self._leaving_nothing_in_flight():
            logits = _LocalBatch.apply(self, self._plan(sizes), seed, after_trunk, with_graph, features, *receivers)
        logits = self._remembered(logits)
        if logits.grad_fn is not None:
            self._direct.append(logits.grad_fn)
        return logits

    def step(
        self,
        features: Tensor,
        arguments: Mapping[str, Any],
        head_step: HeadStep,
        update: Update | None = None,
        scale: Scale = lambda loss: loss,
        others: Mapping[str, Tensor] | None = None,
        only_factor: float | None = None,
        probing: Callable[[], AbstractContextManager[None]] = nullcontext,
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
            probing: returns a context for a call of ``head_step`` whose result counts for nothing.

        Raises:
            ValueError: ``head_step`` does not return a single number, or calls backward, or uses one of the
                ``others``; or it returns different losses on the ranks, which on a GPU is seen in step 1, 2, 4, 8, ....
                In backward: the loss was multiplied by another factor than ``only_factor``. See also `StepArguments`.
        """
        # On a GPU in steps 1, 2, 4, 8, ..., because reading a loss waits for the device. By calls and by training
        # steps, because a training step may have several calls, or none. Losses with a penalty on weights differ in
        # each step, and only further calls of ``head_step`` tell them from mistakes.
        is_power = 1 in ((self.num_steps + 1).bit_count(), self.num_training_steps.bit_count())
        is_compared = is_power or not (features.is_cuda or self._has_warned_of_weights)
        own = StepArguments(arguments, features)
        sizes, seed = self.exchange.exchange_batch_sizes(features, own.tensors, own.constants, needs_seed=True)
        own.gather(self.channel, sizes)
        has_graph = False

        def loss_instead(part: SubPass, x: Tensor) -> Tensor:
            with probing():
                return head_step(x, own.of_pass(part)).detach()

        def loss_of(part: SubPass, x: Tensor) -> Tensor:
            nonlocal has_graph
            loss = _require_number(head_step(x, own.of_pass(part)))
            has_graph |= loss.requires_grad
            if is_compared:
                self._require_same_loss(loss, x, partial(loss_instead, part))
            _require_no_part(loss, others or {})
            return loss

        after_trunk, receivers = self._take_after_trunk()
        # Within torch.utils.checkpoint, what the passes keep must not count: they run backward at once.
        with _keep_activations(), self._leaving_nothing_in_flight():
            result = run_passes(self, features, self._plan(sizes), seed, loss_of, update, scale)
        self.num_steps += 1
        if not has_graph:  # the result has none either, so that a backward from it alone is torch's error
            return result.loss
        self._factors.append(torch.tensor(math.nan, dtype=torch.float64))
        check_factor = partial(self._check_factor, self._factors[-1], is_compared, only_factor)
        return self._remembered(_HandOut.apply(result, check_factor, after_trunk, features, *receivers))

    @contextmanager
    def _leaving_nothing_in_flight(self) -> Iterator[None]:
        """Finish the messages that an exception within the context has left, as of the next pass.

        All ranks may raise it, as for a target that is no class, and a ``training_step`` may catch it and go on.
        """
        try:
            yield
        except (CallMismatchError, PeerError):  # they may never come
            raise
        except Exception:
            with suppress(RuntimeError):  # of a rank that is gone: the first error counts
                for channel in self.channels:
                    channel.finish_begun()
            raise

    def _check_factor(self, kept: Tensor, is_compared: bool, only_factor: float | None, factor: Tensor) -> None:
        # The ranks compare it where all of them come next. One rank may have run a backward of its own before this one,
        # to look at a gradient. On a GPU it is kept of some steps only, because reading it waits for the device.
        if is_compared or not factor.is_cuda:
            kept.copy_(factor)
        if only_factor is not None:
            _require_factor(factor, only_factor)

    def _take_after_trunk(self) -> tuple[AfterTrunk | None, list[Tensor]]:
        """Return what lets the head's gradients come after the trunk's, for one call of the head, and what gets them.

        Only the first call of a training step has the former. Autograd gives the gradients of others to the parameters.
        """
        if torch.is_grad_enabled():
            after_trunk, self._after_trunk = self._after_trunk, None
            if after_trunk is not None and after_trunk.receives(self.head.parameters):
                return after_trunk, [after_trunk.token]
        return None, self.head.parameters

    def begin_training_step(self, module: nn.Module) -> None:
        """Forget what the last training step has got from the head. It comes before the forward of the trunk.

        Raises:
            RuntimeError: the head of ``module`` has been changed since set-up.
        """
        self.num_training_steps += 1
        self._results.clear()
        self._direct.clear()
        require_unchanged(module, self.head)
        self._after_trunk = AfterTrunk(self.head.parameters)

    def take_factors(self) -> Tensor:
        """Return, (1 + calls,), by what the losses of `step` were multiplied before backward. NaN: unknown, as of [0].

        They are those of the calls since the last time: equally many on all ranks.
        """
        factors, self._factors = self._factors, []
        return torch.stack([torch.tensor(math.nan, dtype=torch.float64), *factors])  # an empty one would not be sent

    def _remembered(self, result: Tensor) -> Tensor:
        if result.grad_fn is not None:
            if self.mark is not None:
                result = _Marked.apply(result, self.mark)
            self._results.append(result.grad_fn)
        return result

    def require_part_in(self, loss: Tensor) -> None:
        """Raise ValueError if the head was called in this training step, and ``loss`` depends on no result of it.

        Backward of the head is a collective. Without this check, the other ranks would wait there for this one, and
        this one for them in the reduction of the trunk's gradients, until the timeout. No rank is asked: DDP, too,
        refuses a loss that leaves parameters out, on all ranks or on one.
        """
        if self._results and self.channel.world_size > 1 and not _reaches_any(loss, self._results):
            raise ValueError(
                f"the loss of rank {self.channel.rank} does not depend on what {self.head.name!r} has returned in this "
                "training step, so this rank would not take part in the backward of the head, which is a collective. "
                "If the losses of other ranks depend on it, add it times 0 to the loss of this one (0 * logits.sum()). "
                f"If none does, call {self.head.name!r} under torch.no_grad()"
            )

    def sends_in_backward_of(self, loss: Tensor) -> bool:
        """Return whether the ranks meet in backward of ``loss``: it depends on a direct call of the head."""
        return bool(self._direct) and _reaches_any(loss, self._direct)

    def seed_of_pass(self, seed: int | None, number: int) -> int | None:
        """Return the first of the K + 1 seeds of pass ``number``: one that all ranks share, and one for each rank."""
        return None if seed is None else seed + number * (self.channel.world_size + 1)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Report the work on one pass, within the context, as the stage "head"."""
        begin_s = time.perf_counter()
        yield
        if self.channel.on_stage is not None:
            self.channel.on_stage("head", begin_s, time.perf_counter())

    def warn_of_logits(self, logits: Tensor) -> None:
        """Log once, on rank 0, that a loss by name needs no whole logits, if they are a large part of the messages."""
        # What ranks exchange for each sample, in each direction.
        num_inputs = sum(layer.in_features for layer in self.head.layers if isinstance(layer, nn.Linear))
        is_large = logits.nbytes > 2**20 and logits.shape[1] > num_inputs / 10
        if is_large and not self._has_warned_of_logits and self.channel.world_size > 1 and not self.channel.rank:
            self._has_warned_of_logits = True
            log.warning(
                f"head_step gathers the logits of {self.head.name!r} from all ranks, {logits.nbytes / 1e6:.0f} MB in "
                "each pass. For cross-entropy, call lightning_dp.losses.sharded_cross_entropy"
                f"(self.{self.head.name}, features, target): it sends a few numbers per sample, and holds at most "
                f"{CHUNK_BYTES / 2**20:.0f} MB of logits"
            )

    def _require_same_loss(self, loss: Tensor, features: Tensor, loss_of: Callable[[Tensor], Tensor]) -> None:
        """Raise ValueError if ``head_step`` has used data that differs between ranks. All ranks must call it.

        Every rank runs it with the same samples, so its result can differ only by what it uses beside its arguments:

        - rows of this rank's batch that ``training_step`` has left on the module. They do not belong to the samples of
          the pass, so the gradients would be wrong.
        - the head's weights, of which each rank has its local shard, in a penalty. The gradients are right if that is
          a sum.

        The second does not depend on the features: with other features, the loss changes by the same on all ranks.
        """
        if self.channel.world_size == 1:
            return
        losses = self._comparison.all_gather("loss of a pass", loss.detach().double())
        if _is_same(losses, loss.dtype):
            return
        for others in _other_features(features):
            change = loss.detach().double() - loss_of(others).double()
            changes = self._comparison.all_gather("change of the loss", change)
            if changes.isfinite().all():
                break
        if not _is_same(changes, loss.dtype, scale=losses.abs().max().item()):
            raise ValueError(
                f"head_step returns different losses on the ranks for the same samples: {losses.tolist()}. It may use "
                "its arguments and the head, but nothing that belongs to this rank's batch alone. Pass such data as "
                "further arguments: self.head_step(features, target, weights)"
            )
        if not self._has_warned_of_weights:
            log.warning(
                f"head_step uses the weights of {self.head.name!r} directly, and each rank has only its local shard. A "
                "penalty on its weights must be a sum over them (L1, L2); a norm, a mean or a product of rows has "
                "wrong gradients. The logged loss contains this rank's part of the penalty only"
            )
            self._has_warned_of_weights = True


def _other_features(features: Tensor) -> Iterator[Tensor]:
    """Yield features to compare the loss of ``features`` with, the second for a loss that is NaN with the first."""
    # As those of a pass, they may need a gradient, which head_step may take, and are no leaf, so it may change them.
    x = features.detach().requires_grad_(features.requires_grad)
    # Another sign, so that also a loss of normalized features changes; and larger, so that it changes much.
    yield -3 * x
    # Positive numbers stay positive, for a logarithm or a root, and probabilities stay below 1.
    yield 0.5 * x.flip(tuple(range(1, x.dim())))


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The ranks compute a loss from the same numbers in the same order, so it differs at most by rounding."""


def _is_same(numbers: Tensor, dtype: torch.dtype, scale: float = 0.0) -> bool:
    """Return whether all ``numbers`` are one, but for rounding: of ``dtype``, and of terms as large as ``scale``."""
    rtol = _TOLERANCES.get(dtype, 1e-3)
    atol = rtol * max(scale, 0.1)
    return torch.allclose(numbers, numbers[:1].expand_as(numbers), rtol=rtol, atol=atol, equal_nan=True)


def _require_number(loss: Any) -> Tensor:
    """Return what ``head_step`` has returned, or raise ValueError if it is not a single number in a tensor."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"head_step returned {what}; it must return the mean loss of its samples, one number")
    return loss


# --- ``head_step``: each pass runs backward right after its forward.
#
# This is the schedule of arXiv 1404.5997, section 4: forward and backward alternate, and the features of the next pass
# travel while the head computes the current one.


class MicroBatch(ShardedForward, SharedOnDeepcopy):
    """The samples of one pass, and the head's ``forward`` for them. Logits, and features, are ordinary tensors.

    Every rank has the same features, computes the same logits and loss from them, and so has the same gradients: the
    head's weights are the only thing in which ranks differ. For this a call of the head gathers all columns of its
    output, and in backward it sums the gradient of its input over the ranks.

    Where the head is called with the features themselves, the sum can wait: it is then part of the message with which
    the features' gradients return to their ranks (`FeatureGradients`), and no bytes are sent for it alone. That is
    right only in the pass's own backward, and only if nothing reads the gradient on its way.

    Args:
        passes: the passes, of which this is one.
        features: (N, *), the same on all ranks. They are kept, and may be changed in place.
        needs_gradient: whether to compute the features' gradient.
    """

    def __init__(self, passes: HeadPasses, features: Tensor, needs_gradient: bool, sums: ParameterGradients) -> None:
        self._passes = passes
        self._head = passes.head
        self._sums = sums
        self._leaf = features.requires_grad_(needs_gradient)
        # What head_step gets is no leaf, so that it may be changed in place as any result of a trunk.
        self.features = _WithoutLeaf.apply(features) if needs_gradient else features
        self._origin = self.features.grad_fn
        self._has_partial_gradients = False
        self._gradients_before = self._gradients_now()

    @torch.compiler.disable
    def __call__(self, input: Tensor) -> Tensor:
        """Return the logits (N, *, C) of all classes, for features (N, *) that are the same on all ranks."""
        return self._head.by_rows(self._forward_rows, input)

    def _forward_rows(self, features: Tensor) -> Tensor:
        logits = self._head.logits(self._entering(features), self._draw_seed(), self._sums)
        self._passes.warn_of_logits(logits)
        return logits

    @torch.compiler.disable
    def last_layer(self, features: Tensor) -> LastLayer | None:
        """See `ShardedForward`."""
        last = self._head.layers[-1]
        if not isinstance(last, nn.Linear) or (features.dim() > 2 and not self._head.flattens):
            return None
        x = self._head.input_of_last_layer(self._entering(features), self._draw_seed(), self._sums)
        channel, bounds = self._head.channel, self._head.output_bounds
        first = bounds[channel.rank][0]
        all_gather = partial(channel.all_gather, "loss")
        weight, bias = self._head.shard_of(last)
        return LastLayer(x, weight, bias, first, bounds[-1][1], all_gather, self._sums, is_of_pass=True)

    def backward(self, loss: Tensor) -> tuple[Tensor | None, bool]:
        """Run the pass's own backward. Return the features' gradient, and whether it is to be summed over ranks.

        If so, the sum is K times the gradient. The parameters' gradients go to ``sums``.
        """
        gradient = self._sums.collect(loss, self._leaf)
        return gradient, self._has_partial_gradients

    def require_no_backward(self) -> None:
        """Raise ValueError if ``head_step`` has run a backward.

        To the features: it ends there, before the trunk. To the head: of several passes each would count in full.
        """
        both = zip(self._gradients_now(), self._gradients_before, strict=True)
        self._gradients_before = []  # the graph may outlive them
        if any(now is not None and (now is not before or new != old) for (now, new), (before, old) in both):
            raise ValueError(
                "head_step called backward(), whose gradients cannot reach the trunk from there; return the sum of all "
                "losses, or use torch.autograd.grad for gradients that head_step needs itself"
            )

    def _gradients_now(self) -> list[tuple[Tensor | None, int]]:
        """Return what ``backward()`` in ``head_step`` would change, and how often it was changed."""
        gradients = [tensor.grad for tensor in (self._leaf, *self._head.parameters)]
        return [(gradient, -1 if gradient is None else version_of(gradient)) for gradient in gradients]

    def _entering(self, features: Tensor) -> Tensor:
        """Return ``features`` on their way into the layers of which each rank has its local shard."""
        self._passes.num_calls += 1
        if self._origin is not None and features.grad_fn is self._origin:
            return _PartialGradient.apply(features, self)
        return summed_in_backward(features, self._head.channel)

    def _draw_seed(self) -> int | None:
        # `run_passes` gives all ranks the same generator state, so this draws the same seed on all of them. It draws
        # the same once more when torch.utils.checkpoint calls the head again in backward, because that restores it.
        return int(torch.randint(2**62, ()).item()) if self._head.draws_random_numbers else None

    def part_or_sum(self, gradient: Tensor) -> Tensor:
        """Return what backward hands on to the features, given this rank's part of the gradient."""
        x = self.features
        is_read = has_tensor_hooks(x) or x.retains_grad or x.grad_fn is not self._origin
        if is_read or not self._sums.is_collecting or torch.is_grad_enabled():
            # In the features' group: there a rank without such a hook begins `FeatureGradients.send_back`, so that both
            # raise. In the head's group each would wait for a message of the other.
            return summed(gradient, self._passes.channel)
        self._has_partial_gradients = True
        # DDP divides the trunk's gradients by K, so the features' gradients, summed over the K ranks, must be K times
        # the gradient of the loss. What ``head_step`` computes from the features directly, such as a penalty on them,
        # each rank computes in full, and the sum is K times as large by itself. Of what comes through the head each
        # rank has a part, and the sum is the gradient once. This factor makes it K times as large, too.
        return gradient * self._head.channel.world_size


class _WithoutLeaf(torch.autograd.Function):
    """Identity. The result shares the memory of the leaf, and is neither a leaf nor a view of one."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _PartialGradient(torch.autograd.Function):
    """Identity. In backward the micro batch decides whether to sum the gradient over ranks at once."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, micro_batch: MicroBatch) -> Tensor:
        ctx.micro_batch = micro_batch
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.micro_batch.part_or_sum(gradients[0]), None


class _Marked(torch.autograd.Function):
    """Identity, in place. Backward also gives ``mark`` a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, mark: Tensor) -> Tensor:
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_zeros(())


# --- The head's parameters get their gradients after the trunk's.


class AfterTrunk:
    """Lets the gradients of ``parameters`` be computed when the trunk's backward has run.

    The gradients of the trunk are then being summed over the ranks, and the weights' products hide that. Of the nodes
    that are ready, autograd runs the one that was made last. So this is made before the trunk's forward, and a call of
    the head takes ``token`` as an argument, in place of the parameters.

    Attributes:
        token: a number. What gives it a gradient, of any value, must have called `let` in the same backward.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._requiring = [parameter.requires_grad for parameter in parameters]
        self._compute: list[Callable[[], Sequence[Tensor | None]]] = []
        self.token: Tensor = _AfterTrunk.apply(self._compute, *parameters)

    def receives(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether gradients reach those parameters that require them now."""
        return self.token.requires_grad and self._requiring == [p.requires_grad for p in parameters]

    def let(self, compute: Callable[[], Sequence[Tensor | None]]) -> Tensor:
        """Let ``compute`` return the parameters' gradients. Return the gradient of ``token``, which makes it run."""
        self._compute[:] = [compute]
        return torch.zeros_like(self.token)


class _AfterTrunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: list[Callable[[], Sequence[Tensor | None]]], *parameters: Tensor) -> Tensor:
        ctx.compute = compute
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compute.pop()()


@dataclass
class StepResult:
    """What the passes of one step have computed: the loss, and the gradients that backward hands out."""

    loss: Tensor
    features_gradient: Tensor | None
    sums: ParameterGradients
    loss_scale: Tensor  # the gradients are those of loss * loss_scale

    @cached_property
    def parameter_gradients(self) -> list[Tensor | None]:
        """Of the head's parameters, computed at the latest when they are asked for."""
        return self.sums.take()


def run_passes(
    passes: HeadPasses,
    features: Tensor,
    plan: list[SubPass],
    seed: int | None,
    loss_of: Callable[[SubPass, Tensor], Tensor],
    update: Update | None,
    scale: Scale,
) -> StepResult:
    """Run forward and backward of each pass. All ranks must call it; arguments are those of `HeadPasses.step`."""
    num_samples = sum(part.num_samples for part in plan)
    loss = features.real.new_zeros(())
    feature_grads = FeatureGradients(passes.exchange)
    sums = ParameterGradients(passes.head.parameters, memory=passes.gradient_memory)
    detached = features.detach()
    for number, (part, x) in enumerate(prefetch_one(lambda part: passes.exchange.assemble(detached, part), plan)):
        share = part.num_samples / num_samples if num_samples else 1.0
        micro_batch = MicroBatch(passes, x, features.requires_grad, sums)
        drawing = _drawing_alike(passes.seed_of_pass(seed, number), x.device)
        with torch.enable_grad(), drawing, passes.recorded(), passes.head.forwarding_to(micro_batch):
            loss_of_part = loss_of(part, micro_batch.features)
            micro_batch.require_no_backward()
            loss = loss + share * loss_of_part.detach()
            # With one update per step, the loss is the mean over the whole step, so a pass counts by its share of the
            # samples. With an update of the head after each pass (variable batch size), the head's loss is the mean
            # over that pass alone. The trunk still has one update per step, so only the features' gradients are
            # multiplied by the share.
            share_of_loss, share_of_x = (share, 1.0) if update is None else (1.0, share)
            with torch.autocast(x.device.type, enabled=False):
                x_grads, is_partial = micro_batch.backward(scale(loss_of_part) * share_of_loss)
        if x_grads is not None and share_of_x != 1.0:
            x_grads = x_grads * share_of_x
        feature_grads.send_back(x_grads, part, is_partial)
        if part is plan[-1]:
            sums.compute_next()  # the rest can hide other messages
        else:
            sums.compute_postponed()
        if update is not None:
            update(sums.take())
            # Autocast caches 16-bit copies of the parameters. The update has made those of the head stale.
            torch.clear_autocast_cache()
        # Free this pass's graph before the next one's is built, or two of them would be in memory at once.
        del x, micro_batch, loss_of_part, x_grads
    return StepResult(loss, feature_grads.finish(), sums, scale(torch.ones_like(loss)))


@contextmanager
def _drawing_alike(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw the same random numbers on all ranks within the context, by torch, NumPy and Python.

    All ranks run ``head_step`` with the same samples. If it drew different numbers on each, as noise on the features or
    the weight of a mixture, the sum of their gradients would be the gradient of no loss.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(None if seed is None else seed % 2**32)
        with seeded(seed, device):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class _HandOut(torch.autograd.Function):
    """The loss of a step, as a function of features and parameters, whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any,
        result: StepResult,
        check_factor: Callable[[Tensor], None],
        after_trunk: AfterTrunk | None,
        features: Tensor,
        *receivers: Tensor,
    ) -> Tensor:
        ctx.result = result
        ctx.check_factor = check_factor
        ctx.after_trunk = after_trunk
        return result.loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _require_first_derivative()
        is_kept = keeps_graph()
        result: StepResult = take_once(ctx, "result", is_kept)
        factor = gradients[0] / result.loss_scale
        ctx.check_factor(factor)
        (features_gradient,) = _multiplied([result.features_gradient], factor, is_kept)
        if ctx.after_trunk is None:
            return None, None, None, features_gradient, *_multiplied(result.parameter_gradients, factor, is_kept)
        token_gradient = ctx.after_trunk.let(lambda: _multiplied(result.parameter_gradients, factor, is_kept))
        return None, None, None, features_gradient, token_gradient


def _multiplied(gradients: Sequence[Tensor | None], factor: Tensor, is_kept: bool) -> list[Tensor | None]:
    """Return gradients times a factor, in place unless they are to be kept."""
    if is_kept:
        return [None if gradient is None else gradient * factor for gradient in gradients]
    # On a GPU, to read the factor takes longer than to multiply: the read waits for the device.
    if factor.is_cuda or factor != 1:
        return [None if gradient is None else gradient.mul_(factor) for gradient in gradients]
    return list(gradients)


# --- All passes forward, and later all passes backward: what a sharded head does where the module calls it directly.
#
# The loss is computed afterwards, outside, so no pass can run backward before all have run forward. The graphs of all
# passes stay in memory until then.


class _LocalBatch(torch.autograd.Function):
    """One call of the head: the features (n, *) of this rank's samples to their logits (n, C)."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: HeadPasses,
        plan: list[SubPass],
        seed: int | None,
        after_trunk: AfterTrunk | None,
        with_graph: bool,
        features: Tensor,
        *receivers: Tensor,
    ) -> Tensor:
        """Run all passes forward, and keep their graphs if ``with_graph``: here gradients are always off."""
        bounds = passes.head.output_bounds
        # Each rank's loss is the mean over its own samples, and the gradient of the whole is the mean over ranks. DDP
        # divides the trunk's gradients by K. The head's, which sum up the samples of all ranks, are divided here.
        sums = ParameterGradients(passes.head.parameters, 1 / passes.channel.world_size, passes.gradient_memory)
        needs_gradient = with_graph and features.requires_grad
        graphs: list[tuple[Tensor, Tensor]] = []  # features and own logits of each pass
        arriving: list[Finish] = []
        parts = prefetch_one(lambda part: passes.exchange.assemble(features, part), plan)
        for number, (part, x) in enumerate(parts):
            with torch.set_grad_enabled(with_graph), passes.recorded(), _keep_activations():
                x.requires_grad_(needs_gradient)
                own = passes.head(x, passes.seed_of_pass(seed, number), sums)
            graphs.append((x, own))
            # The logits travel to the ranks that have the samples, while the next pass is computed.
            arriving.append(passes.exchange.to_owners(own.detach(), part, bounds))
        ctx.passes, ctx.plan, ctx.after_trunk, ctx.sums = passes, plan, after_trunk, sums
        ctx.shares_graph = passes.head.has_computed_weights
        ctx.graphs = graphs if with_graph else None
        return torch.cat([finish() for finish in arriving])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Run all passes backward."""
        _require_first_derivative()
        passes, plan, sums = ctx.passes, ctx.plan, ctx.sums
        is_kept = keeps_graph()
        graphs = take_once(ctx, "graphs", is_kept)
        feature_grads = FeatureGradients(passes.exchange)
        sums.forget()  # those of an earlier backward, if nobody has asked for them
        bounds = passes.head.output_bounds
        arriving = prefetch_one(lambda part: passes.exchange.from_owners(gradients[0], part, bounds), plan)
        for (part, own_grads), (x, own) in zip(arriving, graphs, strict=True):
            with passes.recorded():
                x_grads = sums.collect(own, x, own_grads, retain_graph=is_kept or ctx.shares_graph)
            feature_grads.send_back(x_grads, part)
            if part is plan[-1]:
                sums.compute_next()  # the rest can hide other messages
            else:
                sums.compute_postponed()
        features_gradient = feature_grads.finish()
        to_head = sums.take() if ctx.after_trunk is None else [ctx.after_trunk.let(sums.take)]
        return None, None, None, None, None, features_gradient, *to_head


def _keep_activations() -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which the activations of the passes are kept, even within `torch.utils.checkpoint`.

    A checkpoint around the head would free them and run the head again in backward, and all messages of the forward
    would be sent twice.
    """
    return torch.autograd.graph.saved_tensors_hooks(saved, as_saved)


# --- Gradients on their way back to the features' ranks.


class FeatureGradients:
    """The features' gradients, K times those of the loss, pass by pass: each rank gets those of its own samples."""

    def __init__(self, exchange: FeatureExchange) -> None:
        self._exchange = exchange
        # Of each finished pass: its rows, or how many there are without gradient.
        self._arrived: list[Tensor | int] = []
        self._in_flight: Finish | None = None

    def send_back(self, gradient: Tensor | None, part: SubPass, is_partial: bool = True) -> None:
        """Start to sum one pass's gradient, (N, *), over ranks, and finish the sum of the previous pass.

        The previous sum has travelled while this pass was computed. It is finished here, and not at the end of the
        step, so that the buffers of at most one pass are in memory.

        Args:
            gradient: of the pass's features. None: they need none, or the loss of this pass does not depend on them.
            part: the pass.
            is_partial: whether the sum over ranks is K times the gradient. If not, every rank has the whole.
        """
        self._finish_previous()
        begin, end = part.place_of(self._exchange.rank)
        if gradient is None:
            self._arrived.append(end - begin)
        elif is_partial:
            self._in_flight = self._exchange.sum_back(gradient, part)
        else:
            self._arrived.append(gradient[begin:end] * self._exchange.channel.world_size)

    def finish(self) -> Tensor | None:
        """Return the gradient of this rank's own features, (n, *), or None if no pass has one."""
        self._finish_previous()
        some = next((rows for rows in self._arrived if isinstance(rows, Tensor)), None)
        if some is None:
            return None
        shape = some.shape[1:]
        return torch.cat([some.new_zeros(rows, *shape) if isinstance(rows, int) else rows for rows in self._arrived])

    def _finish_previous(self) -> None:
        if self._in_flight is not None:
            self._arrived.append(self._in_flight())
            self._in_flight = None


def take_once(ctx: Any, name: str, is_kept: bool) -> Any:
    """Return ``ctx.name``. Unless ``is_kept``, drop it, so that its memory is freed as early as possible.

    Raises:
        RuntimeError: it was dropped before, so backward runs a second time.
    """
    value = getattr(ctx, name)
    if value is None:
        raise RuntimeError("backward went through the sharded head a second time; compute the loss again before each")
    if not is_kept:
        setattr(ctx, name, None)
    return value


# --- What head_step and training_step must not do with the loss.


def _require_first_derivative() -> None:
    """Raise RuntimeError in a backward with ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the gradients of a head that is sharded over ranks cannot be differentiated twice (create_graph=True) "
            "outside of head_step; compute a penalty on gradients within head_step, from logits = self.head(features)"
        )


def _require_no_part(loss: Tensor, others: Mapping[str, Tensor]) -> None:
    """Raise ValueError if one of the ``others``, which are parameters by name, contributes to ``loss``."""
    gradients = gradients_of(loss, list(others.values()), retain_graph=True)
    for name, gradient in zip(others, gradients, strict=True):
        if gradient is not None:
            raise ValueError(
                f"head_step uses the parameter {name}, which is not in the head and would not be trained; use it in "
                "training_step, before head_step is called. If it belongs to a layer behind the head, do without "
                "head_step: call the head and that layer in training_step, and compute the loss there"
            )


def _reaches_any(output: Tensor, nodes: Collection[Any]) -> bool:
    """Return whether backward from ``output`` runs through one of these nodes of the autograd graph."""
    # Level by level: the head is near the loss, so the search seldom comes to the trunk.
    to_visit = deque([output.grad_fn])
    seen = set(to_visit)
    while to_visit:
        node = to_visit.popleft()
        if node in nodes:
            return True
        for following, _ in () if node is None else node.next_functions:
            if following not in seen:
                seen.add(following)
                to_visit.append(following)
    return False


def _require_factor(factor: Tensor, expected: float) -> None:
    """Raise ValueError if the loss was multiplied by another factor: the head was updated without it."""
    found = factor.item()
    # A loss of 16 bits is divided in 16 bits: a third in bfloat16 is 0.334.
    if not math.isclose(found, expected, rel_tol=max(1e-3, torch.finfo(factor.dtype).eps)):
        raise ValueError(
            f"the loss of head_step was multiplied by {found / expected:g} before backward. With variable_batch=True "
            "the head is updated within head_step, so the factor would reach the trunk alone; multiply inside of "
            "head_step"
        )


def require_same_factor(factors: Tensor) -> None:
    """Raise ValueError unless all ranks have multiplied each loss by the same factor, (ranks, losses). NaN: unknown.

    The gradients of the head belong to the samples of all ranks, so a rank cannot weight its own samples by multiplying
    the loss.
    """
    for of_loss in factors.T:
        known = of_loss[~of_loss.isnan()]
        if torch.allclose(known, known[:1].expand_as(known), rtol=1e-6, atol=0):
            continue
        raise ValueError(
            f"the loss of head_step was multiplied by different factors on the ranks before backward: "
            f"{known.tolist()}. It is the loss of all ranks' samples, so the factor must be the same on all ranks. "
            "To weight samples, pass the weights to head_step: self.head_step(features, target, weights)"
        )
