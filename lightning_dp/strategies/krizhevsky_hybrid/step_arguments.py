"""The arguments of ``head_step`` beside the features: from this rank's samples to those of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dp._private.torch_names import tree_flatten, tree_unflatten
from lightning_dp.strategies.krizhevsky_hybrid.feature_exchange import FeatureExchange
from lightning_dp.strategies.krizhevsky_hybrid.schemes import SubPass

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
