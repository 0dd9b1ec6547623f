"""Forward and backward through a sharded head, pass by pass, with the features of the next pass on their way meanwhile.

In arXiv 1404.5997, section 4, K forward and backward passes take turns. That needs the cost function to be known within
a pass: `HeadPasses.step`. Where only the head is known, `HeadPasses.own_batch` runs all passes forward, and all passes
backward when autograd comes to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_dp._private.torch_names import tree_flatten, tree_unflatten
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import FeatureExchange, Finish, prefetch_one
from lightning_dp.strategies.krizhevsky_hybrid.schemes import Scheme, SubPass, sub_passes
from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, require_first_derivative, seeded
from lightning_dp.strategies.krizhevsky_hybrid.sharded_logits import ShardedLogits

HeadStep = Callable[[Tensor, Any], Tensor]
Update = Callable[[Sequence[Tensor | None]], None]
Run = Callable[[int, SubPass, Tensor], Tensor]


class HeadPasses:
    """The passes of one scheme through ``head``. Every call is a collective: all ranks must make it.

    Args:
        head: in its sharded state.
        scheme: "a", "b" or "c".
        channel: for features and their gradients, over another process group than the head's own channel.
    """

    def __init__(self, head: ShardedHead, scheme: Scheme, channel: Channel) -> None:
        self.head, self.scheme, self.channel = head, scheme, channel
        self.exchange = FeatureExchange(channel)
        self._is_in_pass = False  # of `step`

    def __call__(self, features: Tensor) -> Tensor:
        """What the head's ``forward`` is replaced by.

        Inside of a pass of `step`, features are the same on all ranks, and logits stay divided over them. Elsewhere
        features are each rank's own, and so are logits.
        """
        if not self._is_in_pass:
            return self.own_batch(features)
        # What else the cost function does with the features has the same gradient on all ranks. As the gradients are
        # going to be summed over K ranks and divided by K, the head's parts are made K times larger.
        features = _ScaleGradient.apply(features, self.channel.world_size)
        # The generator is the pass's, on all ranks the same: a recomputation in backward finds it as it was.
        seed = int(torch.randint(2**62, ()).item()) if self.head.draws_random_numbers else None
        own = self.head(features, seed)
        return ShardedLogits(own, self.head.output_bounds, self.head.channel)

    def own_batch(self, features: Tensor) -> Tensor:
        """Logits (n, C) of this rank's n examples, from their features (n, *); n may differ between ranks, and be 0."""
        sizes, seed = self.exchange.exchange_batch_sizes(features, (), self.head.draws_random_numbers)
        plan = sub_passes(self.scheme, sizes)
        parameters, with_graph = self.head.parameters, torch.is_grad_enabled()
        return _OwnBatch.apply(features, self, plan, seed, with_graph, *parameters)

    def step(
        self,
        features: Tensor,
        target: Any,
        head_step: HeadStep,
        update: Update | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        others: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The mean loss over the examples of all ranks, the same on all; forward and backward of each pass, in turn.

        Backward of the returned loss hands out gradients that are there already. Those of the features are K times
        that of the loss, for the trunk's gradients are going to be averaged over ranks.

        Args:
            features: (n, *) of this rank's examples.
            target: a tensor (n, *), or tensors in tuples, lists and dicts.
            head_step: from features and target of a pass to its mean loss.
            update: called with the gradients of the head's parameters after each pass (section 4.2, variable batch
                size); they are not handed out in backward then. None: there is one batch for the whole network.
            scale: multiplies a loss before backward, and is divided out of the result (for 16-bit gradients).
            others: parameters beside the head's, by name: their gradients would be lost, so they must have none.

        Raises:
            ValueError: ``head_step`` returns something else than one number, or trains one of the ``others``.
        """
        leaves, structure = tree_flatten(target)
        sizes, seed = self.exchange.exchange_batch_sizes(features, leaves, needs_seed=True)
        targets = self.exchange.gather_targets(leaves, sizes)

        def run(number: int, part: SubPass, x: Tensor) -> Tensor:
            rows = [torch.cat([t[begin:end] for t, (begin, end) in zip(of_ranks, part.rows, strict=True)])
                    for of_ranks in targets]  # fmt: skip
            loss = head_step(x, tree_unflatten(rows, structure))
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise ValueError(f"head_step returned {what}; it must return the mean loss of its examples, one number")
            _require_no_part(loss, others or {})
            return loss

        plan = sub_passes(self.scheme, sizes)
        return _Step.apply(features, self, plan, run, seed, update, scale, *self.head.parameters)

    def seed_of_pass(self, seed: int | None, number: int) -> int | None:
        """Each pass draws a stream for all ranks, and one for each."""
        return None if seed is None else seed + number * (self.channel.world_size + 1)

    @contextmanager
    def one_pass(self, seed: int | None, device: torch.device) -> Iterator[None]:
        """Forward and backward of a pass of `step`: all ranks draw the same random numbers, and logits stay divided."""
        self._is_in_pass = True
        try:
            with seeded(seed, device), self.recorded():
                yield
        finally:
            self._is_in_pass = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """OnStage the work on one pass."""
        begin_s = time.perf_counter()
        yield
        if self.channel.on_stage is not None:
            self.channel.on_stage("head", begin_s, time.perf_counter())


class _OwnBatch(torch.autograd.Function):
    """All passes forward, with a graph of each kept; all passes backward."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        passes: HeadPasses,
        plan: list[SubPass],
        seed: int | None,
        with_graph: bool,
        *parameters: Tensor,
    ) -> Tensor:
        exchange, bounds = passes.exchange, passes.head.output_bounds
        graphs: list[tuple[Tensor, Tensor]] = []
        arriving: list[Finish] = []
        for number, (part, x) in enumerate(prefetch_one(lambda part: exchange.assemble(features, part), plan)):
            with torch.set_grad_enabled(with_graph), passes.recorded(), _nothing_recomputed():
                x.requires_grad_(with_graph and ctx.needs_input_grad[0])
                own = passes.head(x, passes.seed_of_pass(seed, number))
            graphs.append((x, own))
            arriving.append(exchange.to_owners(own.detach(), part, bounds))
        ctx.passes, ctx.plan, ctx.graphs, ctx.parameters = passes, plan, graphs if with_graph else None, parameters
        if not arriving:  # no rank has any example
            return features.new_empty(0, bounds[-1][1])
        return torch.cat([finish() for finish in arriving])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        passes, exchange = ctx.passes, ctx.passes.exchange
        graphs = _take_once(ctx, "graphs")
        total = _Total(exchange, ctx.parameters)
        bounds = passes.head.output_bounds
        arriving = prefetch_one(lambda part: exchange.from_owners(gradients[0], part, bounds), ctx.plan)
        for (part, of_own), (x, own) in zip(arriving, graphs, strict=True):
            with passes.recorded():
                of_x, *of_parameters = _gradients(own, [x, *ctx.parameters], of_own)
            # DDP averages the trunk's gradients over ranks; each rank's loss has the same part in the head's.
            total.add(of_x, part, 1.0, of_parameters, 1 / exchange.channel.world_size)
        return total.features(), None, None, None, None, *total.parameters


class _Step(torch.autograd.Function):
    """Forward and backward of each pass, in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        passes: HeadPasses,
        plan: list[SubPass],
        run: Run,
        seed: int | None,
        update: Update | None,
        scale: Callable[[Tensor], Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        exchange = passes.exchange
        num_examples = sum(part.num_examples for part in plan)
        loss = features.new_full((), 0.0 if num_examples else torch.nan)
        total = _Total(exchange, parameters)
        for number, (part, x) in enumerate(prefetch_one(lambda part: exchange.assemble(features, part), plan)):
            share = part.num_examples / num_examples
            with torch.enable_grad(), passes.one_pass(passes.seed_of_pass(seed, number), x.device):
                x.requires_grad_(ctx.needs_input_grad[0])
                loss_of_part = run(number, part, x)
                loss = loss + share * loss_of_part.detach()
                # An update of the head is by the mean over the pass, an update of all by that over the step.
                share_of_loss, share_of_x = (share, 1.0) if update is None else (1.0, share)
                with torch.autocast(x.device.type, enabled=False):
                    of_x, *of_parameters = _gradients(scale(loss_of_part) * share_of_loss, [x, *parameters])
            # The sum over K ranks is to be divided by K, and what DDP averages to be multiplied by it.
            total.add(of_x, part, share_of_x, of_parameters if update is None else (), 1.0)
            if update is not None:
                update(of_parameters)
                torch.clear_autocast_cache()  # of the parameters in 16 bits, as they were
            del x, loss_of_part, of_x, of_parameters  # the next pass is not to find them in memory
        ctx.total = total
        ctx.of_features = total.features()
        ctx.scale = scale(torch.ones_like(loss))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        total = _take_once(ctx, "total")
        factor = gradients[0] / ctx.scale
        found = (ctx.of_features, *total.parameters)
        if factor.is_cuda or factor != 1:  # on a GPU it would have to be waited for to see
            found = tuple(None if one is None else one.mul_(factor) for one in found)
        return found[0], None, None, None, None, None, None, *found[1:]


class _Total:
    """Gradients, summed over the passes."""

    def __init__(self, exchange: FeatureExchange, parameters: Sequence[Tensor]) -> None:
        self._exchange = exchange
        self._returned: list[Tensor] = []
        self._returning: Finish | None = None
        self.parameters: list[Tensor | None] = [None] * len(parameters)

    def add(
        self,
        of_x: Tensor | None,
        part: SubPass,
        share_of_x: float,
        of_parameters: Sequence[Tensor | None],
        share_of_parameters: float,
    ) -> None:
        """Start sending the features' gradients back, and add the parameters'. Those of the pass before are finished.

        They had this pass's computation to arrive, and a pass must not find two of them in memory.
        """
        self._finish()
        if of_x is not None:
            self._returning = self._exchange.sum_back(of_x if share_of_x == 1.0 else of_x * share_of_x, part)
        for index, gradient in enumerate(of_parameters):
            before = self.parameters[index]
            if gradient is not None and before is not None:
                before.add_(gradient, alpha=share_of_parameters)
            elif gradient is not None:
                self.parameters[index] = gradient if share_of_parameters == 1.0 else gradient.mul_(share_of_parameters)

    def features(self) -> Tensor | None:
        """(n, *), or None if they need none."""
        self._finish()
        return torch.cat(self._returned) if self._returned else None

    def _finish(self) -> None:
        if self._returning is not None:
            self._returned.append(self._returning())
            self._returning = None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _gradients(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None, retain_graph: bool = False
) -> list[Tensor | None]:
    """Of each input; None for those that need none, or have no part in the output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad(output, wanted, gradient, retain_graph, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _nothing_recomputed() -> torch.autograd.graph.saved_tensors_hooks:
    """Keep activations here: a checkpoint around the head would have its messages sent again, in backward."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _require_no_part(loss: Tensor, others: Mapping[str, Tensor]) -> None:
    gradients = _gradients(loss, list(others.values()), retain_graph=True) if loss.requires_grad else []
    for name, gradient in zip(others, gradients, strict=False):
        if gradient is not None:
            raise ValueError(
                f"head_step uses the parameter {name}, which is not in the head and would not be trained; use it in "
                "training_step, before head_step is called"
            )


def _take_once(ctx: Any, name: str) -> Any:
    """``ctx.name``, which is gone then: memory is free as soon as it can be."""
    value = getattr(ctx, name)
    if value is None:
        raise RuntimeError("backward went through the sharded head a second time; compute the loss anew before each")
    setattr(ctx, name, None)
    return value
