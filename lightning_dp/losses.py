"""Losses of a classifier's head that never hold all of its logits: asked for by name, exact in any training.

``sharded_cross_entropy(head, features, target)`` is ``F.cross_entropy(head(features), target)``. It computes the logits
a block of classes after the other, in forward and again in backward, so that no block needs more than ``chunk_bytes``.
Within a ``head_step`` under `KrizhevskyHybridStrategy` each rank does this with the classes that it holds, and the
ranks exchange a few numbers for each sample instead of logits (arXiv 1404.5997, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp._private.torch_names import assert_async, has_forward_hooks, keeps_graph

CHUNK_BYTES = 64 * 2**20

_CPU_BLOCK_BYTES = 16 * 2**20
"""The most that a block takes on a CPU: larger memory goes back to the system, and its pages are cleared each time."""

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Margin:
    """A margin on the angle between features and weights: the logit of the target's class is made smaller.

    With features and rows of the weight normalized, the logits are ``scale * cos(a)``, and at the target
    ``scale * (cos(a + angle) - cosine)``. ``Margin(angle=0.5)`` is ArcFace (arXiv 1801.07698), and
    ``Margin(cosine=0.35)`` is CosFace (arXiv 1801.09414).
    """

    scale: float = 64.0
    angle: float = 0.0
    cosine: float = 0.0

    def at_target(self, cos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's logits for ``cos`` (N,), without the scale, and their derivatives."""
        if not self.angle:
            return cos - self.cosine, torch.ones_like(cos)
        # The derivative of the angle is infinite at 1 and -1.
        near_1 = 1 - 1e-7
        a = cos.clamp(-near_1, near_1).acos()
        return (a + self.angle).cos() - self.cosine, (a + self.angle).sin() / a.sin()


def sharded_cross_entropy(
    head: nn.Module,
    features: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    margin: Margin | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    sample_rate: float = 1.0,
) -> Tensor:
    """Return ``F.cross_entropy(head(features), target)`` without holding all logits, on any number of ranks.

    Logits of 16 bits have a loss of at least 32. Under `KrizhevskyHybridStrategy` the mean over no target is 0, so that
    a pass whose targets are all ignored adds nothing to the loss; elsewhere it is NaN, as in torch.

    Args:
        head: an nn.Linear, or an nn.Sequential that ends with one. Any other head computes all its logits.
        features: (N, *), the input of ``head``.
        target: (N,), class indices.
        label_smoothing: see `torch.nn.functional.cross_entropy`.
        weight: (C,), of each class, without a gradient. See `torch.nn.functional.cross_entropy`.
        ignore_index: see `torch.nn.functional.cross_entropy`.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        margin: on the angle between features and weights. The last layer must have no bias.
        chunk_bytes: bytes of logits, and of what is computed from them, that this rank holds at once.
        sample_rate: below 1 the loss is inexact: a softmax over the classes of the targets, and over each other class
            with this probability (Partial-FC, arXiv 2010.05222). Each call draws anew from torch's generator. Without
            gradients, as in validation, all classes count.

    Raises:
        IndexError: a target is no class. On a GPU the device finds it, as in torch.
        ValueError: an option is unknown, or the last layer is none that can have a ``margin`` or be sampled, or
            ``weight`` requires a gradient or has another shape, or samples and targets are not as many.
        RuntimeError: the gradient is to be differentiated (``create_graph=True``), which this loss cannot.
    """
    _require_known(reduction, "mean", "sum", "none")
    _require_sampling(sample_rate, label_smoothing)
    _require_constant(weight)
    is_sampled = sample_rate < 1 and torch.is_grad_enabled()
    last, x = _until_last(head, features)
    needs_layer = is_sampled or margin is not None
    layer = None if target.is_floating_point() or target.dim() != 1 else _last_layer(last, x, chunk_bytes, needs_layer)
    if layer is None:
        if needs_layer:
            raise _no_layer_for("sample_rate" if margin is None else f"margin={margin}")
        options: Any = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        logits = _at_least_32_bits(last(x))
        return F.cross_entropy(logits, target, None if weight is None else weight.to(logits.dtype), **options)
    if margin is not None:
        layer = _of_unit_features(layer)
    weight = _fitting_weight(layer, target, weight)
    counts = target.long() != ignore_index  # in 8 bits without a sign, class 156 would be -100
    _require_classes(target, counts, layer.num_classes)
    target = torch.where(counts, target.long(), 0)
    columns = _sampled_columns(layer, target[counts], sample_rate) if is_sampled else None
    settings = _Softmax(label_smoothing, weight, margin, chunk_bytes, columns)
    # Gradients of a sample are not in the rows in which its logits would be.
    lent = None if is_sampled else _borrow(layer)
    losses = _CrossEntropy.apply(layer.x, layer.weight, layer.bias, target, layer, settings, lent)
    losses = torch.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    share = counts.to(losses.dtype) if weight is None else torch.where(counts, weight[target], 0.0)
    num = share.sum()
    # Of a pass without a target the mean is 0, or it would make the sum over all passes NaN.
    return losses.sum() / (torch.where(num == 0, 1.0, num) if layer.is_of_pass else num)


def sharded_binary_cross_entropy(
    head: nn.Module,
    features: Tensor,
    target: Tensor,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return ``F.binary_cross_entropy_with_logits(head(features), target)`` without holding all logits.

    These are the logistic units of arXiv 1404.5997, section 5: one for each class, whose cross-entropies are summed.
    See `sharded_cross_entropy`, also for what is raised.

    Args:
        head: see `sharded_cross_entropy`.
        features: (N, *), the input of ``head``.
        target: (N, C), probabilities; or (N,), class indices, which stand for a 1 at that class and 0 elsewhere.
        reduction: ``"mean"``, over samples and classes, or ``"sum"``.
        chunk_bytes: see `sharded_cross_entropy`.
    """
    _require_known(reduction, "mean", "sum")
    last, x = _until_last(head, features)
    layer = None if target.requires_grad else _last_layer(last, x, chunk_bytes)
    if target.dim() == 1 and target.is_floating_point():
        raise ValueError(
            f"target has shape {tuple(target.shape)} and {target.dtype}. With one dimension it holds class indices, "
            "which are integers; pass probabilities with a column for each class, (N, C)"
        )
    if layer is None:
        logits = _at_least_32_bits(last(x))
        if target.dim() == 1:
            target = F.one_hot(target.long(), logits.shape[1])
        return F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction=reduction)
    _require_one_dtype(layer)
    shape = (len(layer.x), layer.num_classes)
    if target.dim() == 1:
        _require_a_row_each(target, layer)
        target = target.long()
        _require_classes(target, torch.ones_like(target, dtype=torch.bool), layer.num_classes)
    elif target.shape != shape:
        raise ValueError(f"target has shape {tuple(target.shape)}, and the logits have {shape}; they must be the same")
    total = _LogisticUnits.apply(layer.x, layer.weight, layer.bias, target, layer, chunk_bytes, _borrow(layer))
    return total / math.prod(shape) if reduction == "mean" else total


# --- Which layer computes the logits, and which of its columns.


class GradientSums(Protocol):
    """Receives gradients of weights, as `ParameterGradients` of the hybrid does."""

    def receives(self, weight: Tensor) -> bool:
        """Return whether the gradient of ``weight`` is to be added to its total now. If not, autograd takes it."""

    def lend(self, weight: Tensor) -> Tensor | None:
        """Return the memory of a weight's total for other use until the gradient comes. None: it is in use."""

    def lends(self, weight: Tensor, memory: Tensor) -> bool:
        """Return whether lent memory still has the content that the borrower has written."""

    def total_of(self, weight: Tensor) -> tuple[Tensor, float]:
        """Return the memory of a weight's total, and the factor of its content. Ends a loan of that memory."""


@dataclass(frozen=True)
class LastLayer:
    """The layer that computes the logits, or this rank's columns of them, and its input.

    Args:
        x: (N, D), the same on all ranks. Its gradient is the part that comes through this rank's columns.
        weight: (own columns, D).
        bias: (own columns,) or None.
        begin: the first of this rank's columns.
        num_classes: number of columns on all ranks.
        all_gather: returns a tensor of every rank, stacked.
        sums: where the weight's gradient goes while it receives it. None: to autograd.
        is_of_pass: whether these are samples of a pass, whose loss is one of several that are added.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    begin: int
    num_classes: int
    all_gather: Callable[[Tensor], Tensor]
    sums: GradientSums | None = None
    is_of_pass: bool = False


@runtime_checkable
class ShardedForward(Protocol):
    """What stands for the ``forward`` of a head whose classes are sharded over ranks."""

    def last_layer(self, features: Tensor) -> LastLayer | None:
        """Compute up to the last layer. None, and nothing is computed, if the head does not end with an nn.Linear."""


def _until_last(head: nn.Module, features: Tensor) -> tuple[nn.Module, Tensor]:
    """Return the module that computes the logits, and its input: ``head(features)`` is that module of that input."""
    x = features
    # A Sequential with hooks, or with a forward of its own (a sharded one), is not the sequence of its layers.
    while type(head) is nn.Sequential and len(head) and not has_forward_hooks(head) and "forward" not in vars(head):
        *before, head = head
        for layer in before:
            x = layer(x)
    return head, x


def _last_layer(last: nn.Module, x: Tensor, chunk_bytes: int, is_needed: bool = False) -> LastLayer | None:
    """Return what to compute block by block; None if all logits are to be computed by ``last(x)``.

    That is so if they are few and the layer ``is_needed`` for nothing else, or if the layer is of another kind.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes} must be at least 1")
    if has_forward_hooks(last):  # they see the logits
        return None
    forward = vars(last).get("forward")
    if isinstance(forward, ShardedForward):
        return forward.last_layer(x)
    if forward is not None or type(last) is not nn.Linear or x.dim() != 2:
        return None
    num_bytes = len(x) * last.out_features * x.element_size()
    if not is_needed and num_bytes <= chunk_bytes:
        return None
    return LastLayer(x, last.weight, last.bias, 0, last.out_features, lambda tensor: tensor[None])


def _sampled_columns(layer: LastLayer, targets: Tensor, rate: float) -> Tensor:
    """Return which of this rank's columns are among the sampled classes, in order. ``targets`` always are.

    All ranks draw the same numbers, one for each class, so that the sample does not depend on the number of ranks.
    """
    is_kept = _draw(layer.num_classes, rate, layer.x.device)
    is_kept[targets] = True
    return is_kept[layer.begin : layer.begin + len(layer.weight)].nonzero()[:, 0]


def _draw(num_classes: int, rate: float, device: torch.device) -> Tensor:
    # In bfloat16, the default dtype of a step with "bf16-true", the numbers are multiples of 1/256.
    return torch.rand(num_classes, device=device, dtype=torch.float32) < rate


def _borrow(layer: LastLayer) -> Tensor | None:
    """Return memory like the weight's, in which its gradient will be written, or None.

    Until then it may hold logits. A row has room for those of as many samples as there are features, so that backward
    needs no second computation of them, and no memory that the gradient does not need anyway.
    """
    weight = layer.weight
    if not torch.is_grad_enabled() or not weight.requires_grad or not weight.is_contiguous():
        return None
    if layer.sums is not None:
        return layer.sums.lend(weight)
    # While there is a gradient of an earlier step, which may be freed before backward, this would be a second one. What
    # is computed has none; torch warns of the question.
    return torch.empty_like(weight) if not weight.is_leaf or weight.grad is None else None


def _require_known(reduction: str, *known: str) -> None:
    if reduction not in known:
        names = [repr(name) for name in known]
        raise ValueError(f"reduction={reduction!r} is not known; use {', '.join(names[:-1])} or {names[-1]}")


def _require_constant(weight: Tensor | None) -> None:
    if weight is not None and weight.requires_grad:
        raise ValueError(
            "weight requires a gradient, and cross-entropy has none for the weights of classes, nor has torch's; pass "
            "weight.detach()"
        )


def _require_a_row_each(target: Tensor, layer: LastLayer) -> None:
    """Raise ValueError unless each sample has a target. `Tensor.gather` would take fewer, and leave samples out."""
    if len(target) != len(layer.x):
        raise ValueError(f"target has {len(target)} rows, and there are {len(layer.x)} samples; pass a target for each")


def _require_one_dtype(layer: LastLayer) -> None:
    """Raise ValueError if nn.Linear could not multiply. Blocks of logits would be computed in the weight's dtype."""
    x, weight = layer.x, layer.weight
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"the features are {x.dtype}, and the last layer's weight is {weight.dtype}; convert one")


def _fitting_weight(layer: LastLayer, target: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return ``weight`` in the loss's dtype.

    Raises:
        ValueError: there is not a target for each sample, a weight for each class, and one dtype of the layer.
    """
    _require_one_dtype(layer)
    _require_a_row_each(target, layer)
    num_classes = layer.num_classes
    if weight is not None and weight.shape != (num_classes,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; pass one of shape ({num_classes},), for each class")
    # NumPy's are of 64 bits, and gradients cannot be scattered into those of another dtype.
    return None if weight is None else weight.to(torch.promote_types(_product_dtype(layer.weight), torch.float32))


def _require_sampling(sample_rate: float, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and at most 1")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate={sample_rate} must be above 0 and at most 1")
    if sample_rate < 1 and label_smoothing:
        raise ValueError(
            "label_smoothing counts all classes, and a sample_rate below 1 leaves some out; use one of them"
        )


def _no_layer_for(option: str) -> ValueError:
    return ValueError(
        f"{option} needs class indices, and a head that ends with an nn.Linear. While a head is sharded "
        "(KrizhevskyHybridStrategy), call this in head_step and not under torch.no_grad(), or in a validation step "
        "that has the whole head (evaluation='gathered')"
    )


def _of_unit_features(layer: LastLayer) -> LastLayer:
    if layer.bias is not None:
        raise ValueError("a margin is one of an angle, and a bias has none; use nn.Linear(..., bias=False)")
    return replace(layer, x=F.normalize(layer.x))


def _require_classes(target: Tensor, counts: Tensor, num_classes: int) -> None:
    """Raise IndexError, as torch does, for a target that is no class. On a GPU the check runs asynchronously."""
    wrong = counts & ((target < 0) | (target >= num_classes))
    if target.is_cuda:
        assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds; classes are 0 to {num_classes - 1}")


def _at_least_32_bits(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# --- Logits block by block, and gradients from those of the blocks.


class _Blocks:
    """Logits of this rank's classes, a block of columns at a time: it and what is computed from it fit in a limit.

    Products are computed in the dtype of autocast, if that is on, and everything else in at least 32 bits.

    Args:
        x: (N, D).
        weight: (own columns, D).
        bias: (own columns,) or None.
        dtype: of the products.
        chunk_bytes: the limit.
        scale: None; or that of the cosines of x, whose rows have the norm 1, and the rows of ``weight``.
        columns: which of the own columns to compute, in ascending order. None: all.

    Attributes:
        kept: memory (own columns, *) for what `compute` has computed, if `backward` is to find it there. The rows of a
            block's classes hold its products, and the gradient of these rows of the weight may take their place.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        chunk_bytes: int,
        scale: float | None = None,
        columns: Tensor | None = None,
    ) -> None:
        self.x = x.to(dtype)
        self.wide = torch.promote_types(dtype, torch.float32)
        self._weight, self._bias, self._dtype, self._scale = weight, bias, dtype, scale
        self._columns = columns
        self._num_columns = len(weight) if columns is None else len(columns)
        self.kept: Tensor | None = None
        # Of each column: two numbers per sample, one more if products are narrower, and then also a row of the weight.
        column_bytes = 2 * len(x) * self.wide.itemsize
        if dtype != self.wide or dtype != weight.dtype or columns is not None:
            column_bytes += (len(x) + 2 * weight.shape[1]) * dtype.itemsize
        if x.device.type == "cpu":
            chunk_bytes = min(chunk_bytes, _CPU_BLOCK_BYTES)
        step = max(1, chunk_bytes // max(1, column_bytes))
        begins = range(0, self._num_columns, step)
        self.bounds = [(begin, min(begin + step, self._num_columns)) for begin in begins]

    def _of(self, values: Tensor, begin: int, end: int) -> Tensor:
        """Return the values, (own columns, *), of the columns of a block."""
        return values[begin:end] if self._columns is None else values[self._columns[begin:end]]

    def _rows(self, begin: int, end: int) -> Tensor:
        """Return rows of the weight, in the dtype of products."""
        return self._of(self._weight, begin, end).to(self._dtype)

    def _inverse_norms(self, begin: int, end: int) -> Tensor:
        """Return 1 / |row| of the weight's rows."""
        norms = torch.linalg.vector_norm(self._of(self._weight, begin, end), dim=1, dtype=self.wide)
        return 1 / norms.clamp(min=1e-12)

    def memory(self, lent: Tensor | None, chunk_bytes: int) -> Tensor | None:
        """Return what may be `kept`: lent memory with enough room, or new one within the limit; None if neither is."""
        num_bytes = len(self.x) * self._dtype.itemsize  # of a column
        if lent is not None and num_bytes <= lent.shape[1] * lent.itemsize:
            return lent
        if 2 * self._num_columns * num_bytes <= chunk_bytes:
            return self.x.new_empty(self._num_columns, len(self.x))
        return None

    def _place(self, begin: int, end: int) -> Tensor | None:
        """Return where the products of a block are kept, (N, end - begin)."""
        if self.kept is None:
            return None
        num = len(self.x) * (end - begin)
        return self.kept[begin:end].view(-1).view(self._dtype)[:num].view(len(self.x), end - begin)

    def compute(self, begin: int, end: int) -> Tensor:
        """Return columns of the logits, (N, end - begin); with a scale, the cosines times it. They may be `kept`."""
        rows, place = self._rows(begin, end).T, self._place(begin, end)
        if self._bias is None:
            products = torch.mm(self.x, rows, out=place)
        else:
            products = torch.addmm(self._of(self._bias, begin, end).to(self._dtype), self.x, rows, out=place)
        return self._from_products(products, begin, end)

    def _from_products(self, products: Tensor, begin: int, end: int) -> Tensor:
        z = products.to(self.wide)
        return z if self._scale is None else (z * self._inverse_norms(begin, end)).mul_(self._scale)

    def backward(
        self, gradient_of: Callable[[Tensor, int, int], Tensor], total: Tensor | None, beta: float
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the bias, and add that of the weight to ``total``, if there is one.

        Args:
            gradient_of: maps columns of the logits, which it leaves as they are, to their gradient.
            total: (own columns, D).
            beta: 0 if the content of ``total`` is not to be read, else 1.
        """
        x_grads = torch.zeros(self.x.shape, dtype=self.wide, device=self.x.device)
        bias_grads = torch.zeros(len(self._weight), dtype=self.wide, device=self.x.device)
        if total is not None and not beta and self._columns is not None:
            total.zero_()  # what is not sampled
        for begin, end in self.bounds:
            products = self._place(begin, end)
            z = self.compute(begin, end) if products is None else self._from_products(products, begin, end)
            z_grads = gradient_of(z, begin, end)
            if self._scale is not None:
                inverse = self._inverse_norms(begin, end)
                along_rows = (z * z_grads).sum(0) * inverse.square()
                z_grads.mul_(inverse).mul_(self._scale)
            del z, products
            here: Any = slice(begin, end) if self._columns is None else self._columns[begin:end]
            bias_grads[here] = z_grads.sum(0)
            z_grads = z_grads.to(self._dtype)
            if self._dtype == self.wide:
                x_grads.addmm_(z_grads, self._rows(begin, end))
            else:
                x_grads += z_grads @ self._rows(begin, end)
            if total is None:
                continue
            part = total[here] if self._columns is None else total.new_empty(end - begin, total.shape[1])
            add_product(part, 0.0 if self._columns is not None else beta, z_grads, self.x)
            if self._scale is not None:
                # A logit is scale * x w / |w|. It does not change with the length of w, nor does the gradient.
                part.addcmul_(self._of(self._weight, begin, end), along_rows[:, None].to(total.dtype), value=-1)
            if self._columns is not None:
                total.index_add_(0, here, part)
        return x_grads, bias_grads


def add_product(total: Tensor, beta: float, output_grads: Tensor, x: Tensor, alpha: float = 1.0) -> None:
    """Write to (rows of) ``total`` beta times itself plus alpha times a weight's gradient. beta is 0 or 1.

    The gradient is that of the layer's output (N, out), transposed, times the layer's input x (N, in).
    """
    if output_grads.dtype == total.dtype:
        # With beta=0 torch ignores what is in the memory.
        torch.addmm(total, output_grads.T, x.conj(), beta=beta, alpha=alpha, out=total)
    elif beta:  # a product of 16 bits
        total.add_(output_grads.T @ x, alpha=alpha)
    else:
        total.copy_(output_grads.T @ x)
        if alpha != 1.0:
            total.mul_(alpha)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which nn.Linear would compute with ``weight``."""
    device = weight.device.type
    is_cast = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_cast else weight.dtype


def _at_class(z: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return which targets (N,) are among the columns of z (N, c), the first of which is class ``first``; and where."""
    is_here = (target >= first) & (target < first + z.shape[1])
    return is_here, torch.where(is_here, target - first, 0)[:, None]


def _keep(ctx: Any, blocks: _Blocks, lent: Tensor | None, chunk_bytes: int) -> None:
    """Let ``blocks`` keep its products in ``ctx.kept``, which is ``ctx.lent`` or new memory.

    It is not among the saved tensors, for two reasons. What is lent will be changed, which would be an error there. And
    `torch.utils.checkpoint` requires the same number of them when it runs forward again, when memory may not be lent.
    """
    blocks.kept = ctx.kept = blocks.memory(lent, chunk_bytes)
    ctx.lent = lent if ctx.kept is lent else None


def _gradients(
    ctx: Any, blocks: _Blocks, gradient_of: Callable[[Tensor, int, int], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias, each None if it is not needed or went to ``ctx.layer.sums``.

    Args:
        ctx: of the loss, after `_keep`.
        blocks: of its logits.
        gradient_of: see `_Blocks.backward`.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss cannot be differentiated twice (create_graph=True), because it does not keep the logits; use "
            "logits = head(features) and a loss of torch"
        )
    x, weight = ctx.layer.x, ctx.layer.weight
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    sums = ctx.layer.sums
    lent, blocks.kept = ctx.lent, ctx.kept
    if not keeps_graph():
        ctx.kept = None  # as autograd frees what is saved
    if lent is not None and sums is not None and not sums.lends(weight, lent):
        blocks.kept = None  # another gradient is there
    total, beta, weight_grads = None, 0.0, None
    if needs_weight and sums is not None and sums.receives(weight):
        total, beta = sums.total_of(weight)
    elif needs_weight and sums is None and lent is not None:
        total = weight_grads = lent
        ctx.lent = ctx.kept = None  # a second backward computes the logits again
    elif needs_weight:
        total = weight_grads = torch.empty_like(weight)
    with torch.autocast(x.device.type, enabled=False):
        x_grads, bias_grads = blocks.backward(gradient_of, total, beta)
    return x_grads.to(x.dtype) if needs_x else None, weight_grads, bias_grads.to(weight.dtype) if needs_bias else None


# --- Softmax.


@dataclass(frozen=True)
class _Softmax:
    """Options of `_CrossEntropy`. See `sharded_cross_entropy`."""

    smoothing: float
    weight: Tensor | None
    margin: Margin | None
    chunk_bytes: int
    columns: Tensor | None  # of those of this rank, the sampled ones; None: all

    def with_margin(self, at_target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the targets (N,) with the margin, and their derivatives."""
        if self.margin is None:
            return at_target, torch.ones_like(at_target)
        cos, slope = self.margin.at_target(at_target / self.margin.scale)
        return cos * self.margin.scale, slope

    def class_weights(self, z: Tensor, first: int) -> Tensor:
        """Return the weights of the classes of columns z (N, c), the first of which is class ``first``."""
        if self.weight is None:
            return z.new_ones(z.shape[1])  # not like z[0]: a batch may be empty
        return self.weight[first : first + z.shape[1]].to(z.dtype)

    def blocks(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> _Blocks:
        scale = None if self.margin is None else self.margin.scale
        return _Blocks(x, weight, bias, dtype, self.chunk_bytes, scale, self.columns)

    def places(self, target: Tensor, layer: LastLayer) -> Tensor:
        """Return the place (N,) of each target among the columns that this rank computes; any other if it has none."""
        own = target - layer.begin
        if self.columns is None:
            return own
        place = torch.searchsorted(self.columns, own)
        is_here = (own >= 0) & (own < len(layer.weight))  # every target of this rank is sampled
        return torch.where(is_here, place, -1)


class _CrossEntropy(torch.autograd.Function):
    """Per sample: (1 - e) w_t (lse - z_t) + e/C sum_c w_c (lse - z_c).

    With lse = log sum exp z, label smoothing e, C classes of weights w_c, and the target t.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        layer: LastLayer,
        options: _Softmax,
        lent: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.options, ctx.dtype = layer, options, _product_dtype(weight)
        with torch.autocast(x.device.type, enabled=False):
            blocks = options.blocks(x, weight, bias, ctx.dtype)
            _keep(ctx, blocks, lent, options.chunk_bytes)
            largest, *sums = _softmax_sums(blocks, options.places(target, layer), layer.begin, options)
        # Each rank's sum of exponentials is relative to its largest logit, or it would overflow.
        largest_of_all = layer.all_gather(largest).amax(0)
        sums[0] *= (largest - largest_of_all).exp()
        exp_sum, at_target, total = layer.all_gather(torch.stack(sums)).sum(dim=0)
        lse = largest_of_all + exp_sum.log()
        ctx.save_for_backward(x, weight, bias, target, lse)
        losses: Tensor = (1 - options.smoothing) * (lse - at_target)
        if options.weight is not None:
            losses = losses * options.weight[target]
        if options.smoothing:
            num = layer.num_classes if options.weight is None else options.weight.sum()
            losses = losses + options.smoothing / layer.num_classes * (num * lse - total)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target, lse = ctx.saved_tensors
        layer, options = ctx.layer, ctx.options
        loss_grads = gradients[0]
        of_target = loss_grads * (1 - options.smoothing)
        if options.weight is not None:
            of_target = of_target * options.weight[target]
        num = layer.num_classes if options.weight is None else options.weight.sum()
        of_lse = of_target + loss_grads * (options.smoothing / layer.num_classes * num)

        places = options.places(target, layer)

        def gradient_of(z: Tensor, begin: int, end: int) -> Tensor:
            softmax = (z - lse[:, None]).exp_()
            is_here, column = _at_class(z, places, begin)
            at_target, slope = options.with_margin(z.gather(1, column)[:, 0])
            if options.margin is not None:
                at_target = torch.where(is_here, (at_target - lse).exp(), softmax.gather(1, column)[:, 0])
                softmax.scatter_(1, column, at_target[:, None])
            z_grads = softmax.mul_(of_lse[:, None])
            if options.smoothing:
                of_class = options.class_weights(z, layer.begin + begin)
                z_grads.addr_(loss_grads, of_class, alpha=-options.smoothing / layer.num_classes)
            z_grads.scatter_add_(1, column, -torch.where(is_here, of_target, 0.0)[:, None])
            if options.margin is not None:
                slope = torch.where(is_here, slope, 1.0)
                z_grads.scatter_(1, column, (z_grads.gather(1, column)[:, 0] * slope)[:, None])
            return z_grads

        blocks = options.blocks(x, weight, bias, ctx.dtype)
        return *_gradients(ctx, blocks, gradient_of), None, None, None, None


def _softmax_sums(blocks: _Blocks, places: Tensor, first: int, options: _Softmax) -> list[Tensor]:
    """Return four numbers for each sample, (N,), of this rank's logits z, the first of which is of class ``first``.

    They are the largest z, sum exp(z - the largest), z at the target or 0, and the sum of z times the class's weight,
    which is computed for label smoothing only.
    """
    largest = blocks.x.new_full((len(places),), torch.finfo(blocks.wide).min, dtype=blocks.wide)
    exp_sum, at_target, total = (torch.zeros_like(largest) for _ in range(3))
    for begin, end in blocks.bounds:
        z = blocks.compute(begin, end)
        is_here, column = _at_class(z, places, begin)
        plain = z.gather(1, column)[:, 0]
        here = torch.where(is_here, options.with_margin(plain)[0], plain)
        at_target += torch.where(is_here, here, 0.0)
        if options.smoothing:
            of_class = options.class_weights(z, first + begin)
            total += z @ of_class + (here - plain) * of_class[column[:, 0]]
        before, largest = largest, torch.maximum(largest, z.amax(1))
        exps = (z - largest[:, None]).exp_()
        if options.margin is not None:
            exps.scatter_(1, column, (here - largest).exp()[:, None])
        exp_sum = exp_sum * (before - largest).exp() + exps.sum(1)
        del z, exps  # before there are those of the next block
    return [largest, exp_sum, at_target, total]


# --- Logistic units.


class _LogisticUnits(torch.autograd.Function):
    """The sum over samples and classes of log(1 + exp z) - z y, with y the probability of the class."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        layer: LastLayer,
        chunk_bytes: int,
        lent: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.dtype, ctx.chunk_bytes = layer, _product_dtype(weight), chunk_bytes
        with torch.autocast(x.device.type, enabled=False):
            blocks = _Blocks(x, weight, bias, ctx.dtype, chunk_bytes)
            _keep(ctx, blocks, lent, chunk_bytes)
            total = x.new_zeros((), dtype=blocks.wide)
            for begin, end in blocks.bounds:
                z = blocks.compute(begin, end)
                # log(1 + exp z) = max(z, 0) + log(1 + exp -|z|), which does not overflow
                part = z.abs().neg_().exp_().log1p_()
                total += part.sum() + torch.clamp(z, min=0, out=part).sum()
                total -= _at_targets(z, target, layer.begin + begin, part)
                del z, part
        ctx.save_for_backward(x, weight, bias, target)
        return layer.all_gather(total).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target = ctx.saved_tensors
        layer = ctx.layer

        def gradient_of(z: Tensor, begin: int, end: int) -> Tensor:
            z_grads = z.sigmoid()
            if target.dim() == 2:
                z_grads -= target[:, layer.begin + begin : layer.begin + end].to(z.dtype)
            else:
                is_here, column = _at_class(z, target, layer.begin + begin)
                z_grads.scatter_add_(1, column, -is_here[:, None].to(z.dtype))
            return z_grads.mul_(gradients[0])

        blocks = _Blocks(x, weight, bias, ctx.dtype, ctx.chunk_bytes)
        return *_gradients(ctx, blocks, gradient_of), None, None, None, None


def _at_targets(z: Tensor, target: Tensor, first: int, buffer: Tensor) -> Tensor:
    """Return the sum of z y, for columns z (N, c) of which the first is class ``first``. ``buffer`` (N, c) is used."""
    if target.dim() == 2:
        return buffer.copy_(z).mul_(target[:, first : first + z.shape[1]]).sum()
    is_here, column = _at_class(z, target, first)
    return torch.where(is_here, z.gather(1, column)[:, 0], 0.0).sum()
