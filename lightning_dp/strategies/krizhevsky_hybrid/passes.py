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
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp._private.torch_names import tree_flatten, tree_unflatten
from lightning_dp.collectives import streams
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.checks import require_unchanged
from lightning_dp.strategies.krizhevsky_hybrid.exchange import (
    FeatureExchange,
    Finish,
    Scheme,
    SubPass,
    prefetch_one,
    sub_passes,
)
from lightning_dp.strategies.krizhevsky_hybrid.head import (
    ParameterGradients,
    ShardedHead,
    SharedByCopies,
    require_first_derivative,
    seeded,
)
from lightning_dp.strategies.krizhevsky_hybrid.logits import ShardedLogits

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


# --- The arguments of ``head_step`` beside the features: from this rank's samples to those of a pass.

CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def require_features(value: Any, receiver: str) -> None:
    """Raise ValueError if ``value`` cannot be features: ``receiver`` got something else, or in another order."""
    if isinstance(value, Tensor) and value.dim() and (value.is_floating_point() or value.is_complex()):
        return
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
    raise ValueError(
        f"{receiver} is {what}; it must be the features, one floating-point tensor with a row for each sample. Put "
        "targets behind the features, and join several tensors of features with torch.cat(..., dim=1)"
    )


class StepArguments:
    """The arguments of one call of ``head_step``, by name.

    A tensor, which may stand in tuples, lists and dicts, has a row for each of this rank's samples. Each pass gets the
    rows of its own samples, which come from all ranks. Numbers and text must be the same on all ranks.

    Args:
        arguments: the arguments of ``head_step``, without the features.
        num_samples: number of samples in this rank's batch.

    Raises:
        ValueError: a tensor has another number of rows, or requires a gradient, or an object is neither a tensor nor a
            number nor text.
    """

    def __init__(self, arguments: Mapping[str, Any], num_samples: int) -> None:
        flat = {name: tree_flatten(value) for name, value in arguments.items()}
        self._leaves: dict[str, list[Any]] = {name: leaves for name, (leaves, _) in flat.items()}
        self._structures = {name: structure for name, (_, structure) in flat.items()}
        for name, leaves in self._leaves.items():
            for leaf in leaves:
                _require_rows_or_constant(name, leaf, num_samples)
        self._of_ranks: list[list[Tensor]] = []  # for each tensor, those of all ranks

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, (n, *), in order."""
        return [leaf for leaves in self._leaves.values() for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def constants(self) -> list[tuple[str, Any]]:
        """Everything that is not a tensor, with the name of its argument."""
        pairs = [(name, leaf) for name, leaves in self._leaves.items() for leaf in leaves]
        return [(name, leaf) for name, leaf in pairs if not isinstance(leaf, Tensor)]

    def gather(self, exchange: FeatureExchange, batch_sizes: list[int]) -> None:
        """Receive the rows of all ranks. All ranks must call it."""
        self._of_ranks = exchange.gather_targets(self.tensors, batch_sizes)

    def of_pass(self, part: SubPass) -> dict[str, Any]:
        """Return the arguments for one pass, in the structure in which the module has passed them."""
        rows = iter(part.rows_of(of_ranks) for of_ranks in self._of_ranks)
        arguments = {}
        for name, leaves in self._leaves.items():
            of_part = [next(rows) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            arguments[name] = tree_unflatten(of_part, self._structures[name])
        return arguments


def _require_rows_or_constant(name: str, leaf: Any, num_samples: int) -> None:
    if isinstance(leaf, CONSTANTS):
        return
    if not isinstance(leaf, Tensor):
        raise ValueError(
            f"head_step's argument {name!r} contains an object of type {type(leaf).__name__}, which cannot be sent to "
            "other ranks; pass tensors with a row for each sample, numbers, or text"
        )
    if leaf.dim() == 0 or len(leaf) != num_samples:
        raise ValueError(
            f"head_step's argument {name!r} has shape {tuple(leaf.shape)} beside {num_samples} features; pass tensors "
            "with a row for each sample, and single numbers as Python numbers (.item())"
        )
    if leaf.requires_grad:
        # Its rows go to other ranks, which return gradients of the features only.
        raise ValueError(
            f"head_step's argument {name!r} requires a gradient, which would be lost: only the features' gradient "
            "comes back from other ranks. Concatenate it with the features, or use it in training_step, or detach it"
        )


# --- All passes forward, and later all passes backward: what a sharded head does where the module calls it directly.
#
# The loss is computed afterwards, outside, so no pass can run backward before all have run forward. The graphs of all
# passes stay in memory until then.


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


# --- Each pass forward and backward at once: what a sharded head does where the loss of a pass is known (`head_step`).
#
# This is the schedule of arXiv 1404.5997, section 4: forward and backward alternate, and the features of the next pass
# travel while the head computes the current one. Only one pass's activations are in memory.

LossOfPass = Callable[[SubPass, Tensor], Tensor]
Update = Callable[[Sequence[Tensor | None]], None]
Scale = Callable[[Tensor], Tensor]
Check = Callable[[Tensor, Tensor], None]


@dataclass
class StepResult:
    """What the passes of one step have computed: the loss, and the gradients that backward hands out."""

    loss: Tensor
    features_gradient: Tensor | None
    parameter_gradients: list[Tensor | None]
    loss_scale: Tensor  # the gradients are those of loss * loss_scale


def run_passes(
    passes: HeadPasses,
    features: Tensor,
    plan: list[SubPass],
    seed: int | None,
    loss_of: LossOfPass,
    update: Update | None,
    scale: Scale,
) -> StepResult:
    """Run forward and backward of each pass. All ranks must call it; arguments are those of `HeadPasses.step`."""
    num_samples = sum(part.num_samples for part in plan)
    loss = features.new_full((), 0.0 if num_samples else torch.nan)
    of_features = FeatureGradients(passes.exchange)
    sums = ParameterGradients(passes.head.parameters)
    detached = features.detach()
    for number, (part, x) in enumerate(prefetch_one(lambda part: passes.exchange.assemble(detached, part), plan)):
        share = part.num_samples / num_samples
        with torch.enable_grad(), passes.one_pass(passes.seed_of_pass(seed, number), x.device, sums):
            x.requires_grad_(features.requires_grad)
            loss_of_part = loss_of(part, x)
            loss = loss + share * loss_of_part.detach()
            # With one update per step, the loss is the mean over the whole step, so a pass counts by its share of the
            # samples. With an update of the head after each pass (variable batch size), the head's loss is the mean
            # over that pass alone. The trunk still has one update per step, so only the features' gradients are
            # multiplied by the share.
            share_of_loss, share_of_x = (share, 1.0) if update is None else (1.0, share)
            with torch.autocast(x.device.type, enabled=False):
                of_x, *of_parameters = gradients_of(scale(loss_of_part) * share_of_loss, [x, *passes.head.parameters])
        of_features.send_back(of_x if of_x is None or share_of_x == 1.0 else of_x * share_of_x, part)
        sums.add(of_parameters)
        if update is not None:
            update(sums.take(reuse_memory=True))
            # Autocast caches 16-bit copies of the parameters. The update has made those of the head stale.
            torch.clear_autocast_cache()
        # Free this pass's graph before the next one's is built, or two of them would be in memory at once.
        del x, loss_of_part, of_x, of_parameters
    return StepResult(loss, of_features.finish(), sums.take(), scale(torch.ones_like(loss)))


def hand_out(result: StepResult, features: Tensor, parameters: Sequence[Tensor], check: Check) -> Tensor:
    """Return the loss as a function of ``features`` and ``parameters``. Its gradients are those of `run_passes`.

    Args:
        result: what `run_passes` has returned.
        features: the features that `run_passes` was given.
        parameters: the head's.
        check: called in backward with the loss and the factor by which it was multiplied. May raise.
    """
    return _HandOut.apply(result, check, features, *parameters)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        result: StepResult,
        check: Check,
        features: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.result = result
        ctx.check = check
        return result.loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        result: StepResult = take_once(ctx, "result")
        found = [result.features_gradient, *result.parameter_gradients]
        factor = gradients[0] / result.loss_scale
        ctx.check(result.loss.detach(), factor)
        # On a GPU, to read the factor takes longer than to multiply: the read waits for the device.
        if factor.is_cuda or factor != 1:
            found = [None if gradient is None else gradient.mul_(factor) for gradient in found]
        return None, None, *found


def require_factor(factor: float, expected: float) -> None:
    """Raise ValueError if the loss was multiplied by another factor: the head was updated without it."""
    if not math.isclose(factor, expected, rel_tol=1e-3):
        raise ValueError(
            f"the loss of head_step was multiplied by {factor / expected:g} before backward. With variable_batch=True "
            "the head is updated within head_step, so the factor would reach the trunk alone; multiply inside of "
            "head_step"
        )


# --- Gradients of the passes through a sharded head: computed, scaled, and sent back to the features' ranks.


def gradients_of(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None, retain_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradient of each input, or None if the input needs none or does not contribute to the output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(output, wanted, gradient, retain_graph, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


class FeatureGradients:
    """The gradients of the features, summed over ranks, pass by pass.

    Each rank computes the part that comes through its own slices of the head. The rank that a sample came from
    receives the sum of the parts.
    """

    def __init__(self, exchange: FeatureExchange) -> None:
        self._exchange = exchange
        self._arrived: list[Tensor] = []  # one block of rows for each finished pass
        self._in_flight: Finish | None = None

    def send_back(self, gradient: Tensor | None, part: SubPass) -> None:
        """Start to sum one pass's gradient, (N, *), over ranks, and finish the sum of the previous pass.

        The previous sum has travelled while this pass was computed. It is finished here, and not at the end of the
        step, so that the buffers of at most one pass are in memory.
        """
        self._finish()
        if gradient is not None:
            self._in_flight = self._exchange.sum_back(gradient, part)

    def finish(self) -> Tensor | None:
        """Return the gradient of this rank's own features, (n, *), or None if they need none."""
        self._finish()
        return torch.cat(self._arrived) if self._arrived else None

    def _finish(self) -> None:
        if self._in_flight is not None:
            self._arrived.append(self._in_flight())
            self._in_flight = None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``; its gradient is multiplied by ``factor`` in backward."""
    return _ScaleGradient.apply(x, factor)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def require_no_part(loss: Tensor, others: Mapping[str, Tensor]) -> None:
    """Raise ValueError if one of the ``others``, which are parameters by name, contributes to ``loss``."""
    gradients = gradients_of(loss, list(others.values()), retain_graph=True) if loss.requires_grad else []
    for name, gradient in zip(others, gradients, strict=False):
        if gradient is not None:
            raise ValueError(
                f"head_step uses the parameter {name}, which is not in the head and would not be trained; use it in "
                "training_step, before head_step is called. If it belongs to a layer behind the head, do without "
                "head_step: call the head and that layer in training_step, and compute the loss there"
            )


def reaches_any(output: Tensor, nodes: Collection[Any]) -> bool:
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


def take_once(ctx: Any, name: str) -> Any:
    """Return ``ctx.name`` and drop it, so that its memory is freed as early as possible.

    Raises:
        RuntimeError: it was taken before, so backward runs a second time.
    """
    value = getattr(ctx, name)
    if value is None:
        raise RuntimeError("backward went through the sharded head a second time; compute the loss anew before each")
    setattr(ctx, name, None)
    return value


# --- Checks of numbers that a GPU computes, without a wait for the GPU in each step.

DeferredCheck = Callable[[Tensor], None]


class DeferredChecks:
    """Calls checks with numbers on the host: at once for numbers on the CPU, one step later for those on a GPU.

    To read a number from a GPU, the host waits for all kernels that were launched before, and launches none meanwhile.
    One step later the number has long arrived. An error is then raised one step late, after an update with the wrong
    gradients; `finish`, called before a checkpoint and at the end of training, keeps them out of both.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, streams.Event, DeferredCheck]] = []

    def add(self, numbers: Tensor, check: DeferredCheck) -> None:
        """Call ``check`` with ``numbers`` on the CPU: now, or in `finish` if they are on a GPU."""
        if not streams.has_streams(numbers.device):
            check(numbers)
            return
        on_host = streams.pinned_like(numbers)
        on_host.copy_(numbers, non_blocking=True)
        arrived = streams.record_event(streams.current_stream(numbers.device), blocking=True)
        self._pending.append((on_host, arrived, check))

    def finish(self) -> None:
        """Call the checks that wait, in their order. The first that raises is the last that is called."""
        pending = self._pending
        self._pending = []
        for numbers, arrived, check in pending:
            arrived.synchronize()
            check(numbers)
