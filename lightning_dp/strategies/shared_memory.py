"""Parameters that are different objects and share memory, for example after ``p.data = q.data``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_dp._private.torch_names import without_torch_function


def overlapping_parameters(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of each two parameters that share memory.

    A flat buffer that holds one parameter after the other, as cuDNN's for an LSTM, is no such case.
    """
    with without_torch_function():  # layered SGD watches some parameters, and an address is no use
        places = sorted(
            (parameter.data_ptr(), parameter.data_ptr() + _span_bytes(parameter), name)
            for name, parameter in module.named_parameters()
            if parameter.device.type != "meta" and parameter.numel()
        )
    still_open: list[tuple[int, str]] = []  # end and name of those that reach beyond the begin of the present one
    for begin, end, name in places:
        still_open = [(last, other) for last, other in still_open if last > begin]
        yield from ((other, name) for _, other in still_open)
        still_open.append((end, name))


def _span_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
