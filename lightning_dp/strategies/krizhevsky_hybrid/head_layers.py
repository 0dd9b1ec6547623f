"""Which layers a head that is sharded over ranks may consist of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_dp._private.torch_names import child_entries

ELEMENTWISE = (
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
)
"""Layers that may stand between linear ones: what they do to a feature depends on that feature alone."""


def divisible_layers(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Path and layer of each layer of the head, in order.

    Raises:
        ValueError: one of them cannot be divided over ranks, or there is no nn.Linear.
    """
    layers = list(_walk(module, name))
    before_linear = True
    for path, layer in layers:
        if type(layer) is nn.Linear:
            before_linear = False
            _require_plain(layer, path)
        elif not (type(layer) in ELEMENTWISE or (before_linear and type(layer) is nn.Flatten and layer.start_dim == 1)):
            raise ValueError(
                f"{path} is a {type(layer).__name__}, which cannot be divided over ranks; allowed in the head are "
                "nn.Linear, nn.Sequential, elementwise activations, nn.Dropout and, before the first nn.Linear, "
                "nn.Flatten(). Move other layers into the trunk"
            )
    if before_linear:
        raise ValueError(f"{name} has no nn.Linear to divide over ranks; name the submodule that holds them")
    return layers


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if type(module) is nn.Sequential:
        for child_name, child in child_entries(module):
            assert child is not None
            yield from _walk(child, f"{name}.{child_name}")
    else:
        yield name, module


def _require_plain(layer: nn.Linear, path: str) -> None:
    if layer.weight.shape != (layer.out_features, layer.in_features):
        raise ValueError(
            f"{path}.weight is {tuple(layer.weight.shape)}, and not {(layer.out_features, layer.in_features)}: is it a "
            "part that a run left there which ended with an exception? Load a checkpoint, or build the module anew"
        )
    if not isinstance(layer.weight, nn.Parameter):
        raise ValueError(f"{path} computes its weight (weight_norm, spectral_norm, ...), which mixes rows; remove that")
