"""Convolution algorithms that PyTorch can be made to use, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from lightning_dp._private.torch_names import declare_no_unseen_changes, is_compiled

# What torch uses by itself: oneDNN in the memory format of the input, or cuDNN with the algorithm of its heuristics.
BACKEND = "backend"
# "benchmark" is the fastest algorithm that cuDNN finds, with its workspace; "channels_last" the backend's, with input
# and filters converted to that format; "im2col" torch's own unfolding and matrix product, without oneDNN or cuDNN;
# "fft" the product of the spectra of input and filters (torch.fft).
ALGORITHMS = {
    "cpu": (BACKEND, "channels_last", "im2col", "fft"),
    "cuda": (BACKEND, "benchmark", "channels_last", "im2col", "fft"),
}


def algorithms_for(module: nn.Conv2d, device: torch.device | str | None = None) -> tuple[str, ...]:
    """Return the algorithms that can compute ``module``: those of `ALGORITHMS` for its device.

    FFT computes convolutions with one group, and without dilation. Padding that is no number of zeros (``"same"``,
    ``"reflect"``, ...) is left to the backend. So are subclasses of Conv2d, which may compute something else, and
    layers whose weight a hook computes (``torch.nn.utils.weight_norm``, ``torch.nn.utils.prune``).
    """
    if type_before_parametrizations(module) is not nn.Conv2d:
        return (BACKEND,)
    # A parametrized weight is computed each time that it is read, and spectral norm takes a step of its iteration then.
    if not is_parametrized(module, "weight") and not isinstance(module.weight, nn.Parameter):
        return (BACKEND,)
    device = next(module.parameters()).device if device is None else torch.device(device)
    if isinstance(module.padding, str) or module.padding_mode != "zeros" or device.type not in ALGORITHMS:
        return (BACKEND,)
    has_fft = module.groups == 1 and set(module.dilation) == {1}
    return tuple(name for name in ALGORITHMS[device.type] if name != "fft" or has_fft)


# torch.compile cannot trace the switch of a backend. It compiles what is before and after the layer.
@torch.compiler.disable
def convolve(module: nn.Conv2d, input: Tensor, algorithm: str) -> Tensor:
    """Return ``module(input)`` for images (N, C, H, W) or (C, H, W), computed with this algorithm, also in backward.

    Raises:
        ValueError: the algorithm cannot compute it.
    """
    known = algorithms_for(module, input.device)
    if algorithm not in known:
        raise ValueError(f"algorithm={algorithm!r} cannot compute {module}; use one of {', '.join(map(repr, known))}")
    if algorithm == BACKEND or input.numel() == 0:
        return type(module).forward(module, input)
    if input.dim() == 3:
        # Of one image with the strides of channels_last, torch's backward computes a wrong gradient for a weight of
        # several groups (float64, torch 2.13).
        return convolve(module, input.contiguous().unsqueeze(0), algorithm).squeeze(0)
    assert not isinstance(module.padding, str)
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    if torch.is_autocast_enabled(input.device.type):
        # As autocast does for the backend's convolution. It would not do so in the backward of `_Convolution`.
        input, weight = _as_in_autocast(input), _as_in_autocast(weight)
        bias = None if bias is None else _as_in_autocast(bias)
    if algorithm == "fft":
        return fft_convolution(input, weight, bias, module.stride, module.padding)
    # As torch's operators take them; False and [0, 0] are those of a transposed convolution.
    options = (list(module.stride), list(module.padding), list(module.dilation), False, [0, 0], module.groups)
    return _Convolution.apply(input, weight, bias, options, algorithm)


def _as_in_autocast(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float64:  # autocast leaves it as it is
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def fft_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """Return the convolution of ``x`` (N, C, H, W) and ``weight`` (O, C, h, w), by spectra (Mathieu et al. 2013).

    Filters are padded to the size of the padded input. The product of spectra is a convolution on a torus; the outputs
    whose windows do not wrap around are those wanted, at each stride-th place.
    """
    if x.dtype in (torch.float16, torch.bfloat16):  # there are no spectra of 16 bits
        wide = None if bias is None else bias.float()
        return fft_convolution(x.float(), weight.float(), wide, stride, padding).to(x.dtype)
    x = nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    size = x.shape[-2:]
    if any(kernel > length for kernel, length in zip(weight.shape[-2:], size, strict=True)):
        raise RuntimeError(
            f"a kernel of size {tuple(weight.shape[-2:])} does not fit into the padded input of size {tuple(size)}; "
            "use larger images, or more padding"
        )
    # Networks correlate: the filter is not mirrored, so its spectrum is conjugated.
    spectrum = torch.fft.rfft2(weight, s=size).conj()
    product = torch.einsum("nchw,ochw->nohw", torch.fft.rfft2(x), spectrum)
    last = [length - kernel + 1 for length, kernel in zip(size, weight.shape[-2:], strict=True)]
    out = torch.fft.irfft2(product, s=size)[:, :, : last[0] : stride[0], : last[1] : stride[1]]
    return out.contiguous() if bias is None else out + bias.view(1, -1, 1, 1)


class _Convolution(torch.autograd.Function):
    """A convolution whose backward uses the same algorithm.

    torch chooses again in backward, from the switches at that time. Without this class a switch that is set around the
    forward of one layer would have no effect on its backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...], algorithm: str
    ) -> Tensor:
        declare_no_unseen_changes()
        x, weight = _laid_out(x, algorithm), _laid_out(weight, algorithm)
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.algorithm = options, algorithm
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        with _switched(x.device, algorithm):
            return torch.ops.aten.convolution(x, weight, bias, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed = [bool(need) for need in ctx.needs_input_grad[:3]]
        grad = _laid_out(grad, ctx.algorithm)
        with _switched(x.device, ctx.algorithm):
            grads = torch.ops.aten.convolution_backward(grad, x, weight, ctx.bias_sizes, *ctx.options, needed)
        return (*grads, None, None)


def _laid_out(tensor: Tensor, algorithm: str) -> Tensor:
    layout = torch.channels_last if algorithm == "channels_last" else torch.contiguous_format
    return tensor.contiguous(memory_format=layout)


@contextmanager
def _switched(device: torch.device, algorithm: str) -> Iterator[None]:
    """Set torch's switches for one algorithm."""
    library = torch.backends.cudnn if device.type == "cuda" else torch.backends.mkldnn
    values = {"enabled": algorithm != "im2col"}
    if device.type == "cuda":
        values["benchmark"] = algorithm == "benchmark"
    with ExitStack() as undo:
        for name, value in values.items():
            undo.callback(setattr, library, name, getattr(library, name))
            setattr(library, name, value)
        yield


class AlgorithmsHandle:
    """Algorithms in one model, as `apply_algorithms` returns it."""

    def __init__(self, modules: Mapping[str, nn.Conv2d], algorithms: Mapping[str, str]) -> None:
        self.algorithms = dict(algorithms)
        # The backend's needs no other forward, and that of a subclass may take other arguments.
        self._chosen = [
            (module, partial(convolve, module, algorithm=algorithms[name]))
            for name, module in modules.items()
            if algorithms[name] != BACKEND
        ]
        for module, chosen in self._chosen:
            module.forward = chosen  # type: ignore[method-assign]

    def remove(self) -> None:
        """Undo `apply_algorithms`. A second call does nothing."""
        for module, chosen in self._chosen:
            if vars(module).get("forward") is chosen:
                del module.forward


def require_not_compiled(model: nn.Module) -> None:
    """Raise ValueError if a part of ``model`` is compiled or scripted."""
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f"{name or 'the model'}, a {type(module).__name__}, is compiled or scripted: torch.compile chooses "
                "algorithms itself; use the model without it"
            )


def apply_algorithms(model: nn.Module, algorithms: Mapping[str, str]) -> AlgorithmsHandle:
    """Make convolution layers use the algorithms of a plan: names of layers in ``model``, and their algorithms.

    Parameters and state_dict stay as they are. Results differ from the backend's by rounding.

    Raises:
        ValueError: a layer is unknown or no Conv2d, or has a ``forward`` of its own; an algorithm cannot compute it;
            or the model is compiled.
    """
    require_not_compiled(model)
    modules: dict[str, nn.Conv2d] = {}
    found = dict(model.named_modules())
    for name, algorithm in algorithms.items():
        module = found.get(name)
        if not isinstance(module, nn.Conv2d):
            what = "no layer" if module is None else f"a {type(module).__name__}"
            raise ValueError(f"{name!r} is {what} of this model; algorithms are chosen for Conv2d layers")
        if "forward" in vars(module):
            raise ValueError(f"the forward of {name!r} is replaced already; remove() the handle that did it")
        known = algorithms_for(module)
        if algorithm not in known:
            raise ValueError(f"{algorithm!r} cannot compute {name!r}; use one of {', '.join(map(repr, known))}")
        modules[name] = module
    return AlgorithmsHandle(modules, algorithms)
