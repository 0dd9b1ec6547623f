"""Which layers a head that is sharded over ranks may consist of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_dp._private.torch_names import child_entries
from lightning_dp.strategies.krizhevsky_hybrid.inner_calls import Refusal

ELEMENTWISE = (
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
)
"""Layers that may stand between linear ones. Each output depends on one input, so slices can be computed alone."""

_ALLOWED = (
    "a head may be an nn.Linear, or an nn.Sequential of nn.Linear, elementwise activations, nn.Dropout and, before the "
    "first nn.Linear, nn.Flatten()"
)


def divisible_layers(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return path and module of each layer of the head, in order.

    Raises:
        ValueError: a layer cannot be sharded over ranks, or is not what its class says, or there is no nn.Linear.
    """
    layers = list(_walk(module, name))
    before_linear = True
    for path, layer in layers:
        if type(layer) is nn.Linear:
            before_linear = False
            _require_plain(layer, path)
        elif not (type(layer) in ELEMENTWISE or (before_linear and type(layer) is nn.Flatten and layer.start_dim == 1)):
            raise ValueError(
                f"{path} is a {type(layer).__name__}, which cannot be sharded over ranks: {_ALLOWED}. "
                f"{_remedy(module, name, layer)}"
            )
    if before_linear:
        raise ValueError(f"{name} has no nn.Linear to shard over ranks; name the submodule that holds them")
    # Last, because a copy with one rank's rows has such a forward, too, and the rows have a better message.
    _require_no_own_forward(module, name)
    return layers


def parts_by_path(module: nn.Module, name: str) -> dict[str, Any]:
    """Return by path what a sharded head computes with: layers, parameters, and forwards that replace a class's.

    Not the forward of the head itself, which hybrid parallelism replaces.
    """
    forwards = {path: forward for path, forward in _own_forwards(module, name) if path != f"{name}.forward"}
    # Parameters last, so that a layer is named before its parameters.
    return {**dict(_walk(module, name)), **forwards, **dict(module.named_parameters(name, remove_duplicate=False))}


def _remedy(module: nn.Module, name: str, layer: nn.Module) -> str:
    """Return what to do about a layer that cannot be sharded: almost always to name an inner layer as the head."""
    if isinstance(layer, nn.Linear):
        return "Use nn.Linear itself; a subclass may do anything with its weight"
    linears = [(path, part) for path, part in module.named_modules(prefix=name) if type(part) is nn.Linear]
    if not linears:
        return "Name the submodule that holds the large nn.Linear"
    largest, _ = max(linears, key=lambda pair: pair[1].weight.numel())
    also = ", or leave it out and use F.cross_entropy" if isinstance(layer, (nn.Softmax, nn.LogSoftmax)) else ""
    return (
        f"Name an nn.Linear inside instead, the largest is head={largest!r}; all else is then part of the trunk{also}"
    )


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential:
        for child_name, child in child_entries(module):
            assert child is not None
            yield from _walk(child, f"{name}.{child_name}")
    else:
        yield name, module


def _own_forwards(module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules(prefix=name):
        forward = vars(part).get("forward")
        if forward is not None and not isinstance(forward, Refusal):  # the strategy's own
            yield f"{path}.forward", forward


def _require_no_own_forward(module: nn.Module, name: str) -> None:
    for path, _ in _own_forwards(module, name):
        raise ValueError(
            f"{path.removesuffix('.forward')} has a forward that was set on the instance, which a sharded head would "
            f"not call; remove it (del module.{path}), and do what it adds where the module calls the head"
        )


def require_whole_layer(layer: nn.Linear, path: str) -> None:
    """Raise ValueError if the layer holds one rank's rows, which an earlier `fit` can leave."""
    if layer.weight.shape != (layer.out_features, layer.in_features):
        raise ValueError(
            f"{path}.weight is {tuple(layer.weight.shape)}, and not {(layer.out_features, layer.in_features)}. A run "
            "that ends with an exception, or has state_dict_type='sharded', leaves one rank's rows there. Build the "
            "module anew, and load a checkpoint"
        )


def _require_plain(layer: nn.Linear, path: str) -> None:
    require_whole_layer(layer, path)
    for kind in ("weight", "bias"):
        value = getattr(layer, kind)
        if value is not None and not isinstance(value, nn.Parameter):
            raise ValueError(
                f"{path} computes its {kind} (pruning, weight_norm, spectral_norm, ...), which mixes rows of different "
                "ranks; remove the parametrization (torch.nn.utils.prune.remove, remove_weight_norm, ...)"
            )
    for name, _ in layer.named_parameters(remove_duplicate=False):
        if name not in ("weight", "bias"):
            raise ValueError(
                f"{path} has a parameter {name!r}, and each rank holds rows of weight and bias only; keep the "
                "parameter outside of the head, and use it where the module calls the head"
            )
    if layer.bias is not None and layer.bias.shape != (layer.out_features,):
        raise ValueError(
            f"{path}.bias is {tuple(layer.bias.shape)}, and not {(layer.out_features,)}: each rank holds as many rows "
            "of it as of the weight; give it a value for each output"
        )
