"""Which layers a head that is sharded over ranks may consist of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_dp._private.torch_names import child_entries

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
        ValueError: a layer cannot be sharded over ranks, or there is no nn.Linear.
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
    return layers


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
    if not isinstance(layer.weight, nn.Parameter):
        raise ValueError(
            f"{path} computes its weight (weight_norm, spectral_norm, ...), which mixes rows of different ranks; "
            "remove the parametrization"
        )
