"""The memory of a training step: equations 2 to 5 of arXiv 1709.06622, in bytes, read from a model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dp.planner.convolutions.measure import Layer, LayerKind, num_bytes, tensors_of, trace_layers
from lightning_dp.planner.formulas import require_count

# Parameters, and gradients "twice as the size of the model parameters" (section 3.1.3).
COPIES = 3


@dataclass(frozen=True)
class MemoryModel:
    """What a training step of a model holds, by the paper's equations.

    They count each layer's output, and each parameter three times, for a chain of convolution, pooling and
    fully-connected layers. Layers of other kinds are counted in the same way, from what the trace saw of them, and
    `unmodeled` names them. Results of functions that a forward calls itself are not counted.

    Equation 4 is used in a corrected form: the paper counts the fully-connected layers' outputs for one image instead
    of the batch, and one bias per layer instead of one per neuron.

    Attributes:
        layers: as traced.
        input_bytes: of the traced batch.
        traced_batch_size: number of images in it.
    """

    layers: tuple[Layer, ...]
    input_bytes: int
    traced_batch_size: int

    @classmethod
    def from_module(cls, model: nn.Module, batch: Any) -> MemoryModel:
        """Trace one forward pass of ``model``; see `trace_layers`. The first dimension of ``batch`` is the images'."""
        layers = trace_layers(model, batch)
        tensors = tensors_of(batch)
        return cls(tuple(layers), sum(map(num_bytes, tensors)), len(tensors[0]))

    def feature_map_bytes(self, batch_size: int) -> int:
        """Return M_FM, equation 2: the input, and the outputs of convolution and pooling layers."""
        outputs = self._output_bytes(batch_size, LayerKind.CONVOLUTION, LayerKind.POOLING)
        return self._scaled(self.input_bytes, batch_size) + outputs

    def parameter_bytes(self) -> int:
        """Return M_MP, equation 3: weights and biases of convolution layers, and their gradients."""
        return self._parameter_bytes(LayerKind.CONVOLUTION)

    def classifier_bytes(self, batch_size: int) -> int:
        """Return M_C, equation 4: outputs, weights and biases of fully-connected layers, and gradients."""
        return self._output_bytes(batch_size, LayerKind.LINEAR) + self._parameter_bytes(LayerKind.LINEAR)

    def other_bytes(self, batch_size: int) -> int:
        """Return what the layers of other kinds hold: outputs, and parameters with gradients."""
        return self._output_bytes(batch_size, LayerKind.OTHER) + self._parameter_bytes(LayerKind.OTHER)

    def step_bytes(self, batch_size: int) -> int:
        """Return the sum of the four: all but the workspace of algorithms."""
        fixed = self.parameter_bytes() + self.classifier_bytes(batch_size)
        return fixed + self.feature_map_bytes(batch_size) + self.other_bytes(batch_size)

    def bound_bytes(self, memory_bytes: int, batch_size: int) -> int:
        """Return M_bound, equation 5: what is left of ``memory_bytes`` for the workspace of algorithms.

        Raises:
            ValueError: nothing is left.
        """
        require_count("memory_bytes", memory_bytes)
        left = memory_bytes - self.step_bytes(batch_size)
        if left < 0:
            raise ValueError(
                f"a batch of {batch_size} needs {self.step_bytes(batch_size)} bytes without any workspace, and "
                f"memory_bytes={memory_bytes}; use a batch of at most {self.max_batch_size(memory_bytes)}"
            )
        return left

    def max_batch_size(self, memory_bytes: int) -> int:
        """Return the largest batch that fits into ``memory_bytes`` without any workspace.

        Raises:
            ValueError: not even one image fits.
        """
        require_count("memory_bytes", memory_bytes)
        too_large = 1
        while self.step_bytes(too_large) <= memory_bytes:
            too_large *= 2
        largest = bisect_right(range(too_large), memory_bytes, lo=1, key=self.step_bytes) - 1
        if largest == 0:
            raise ValueError(
                f"memory_bytes={memory_bytes} holds no batch: one image needs {self.step_bytes(1)} bytes; use a device "
                "with more memory, a smaller model, or a sharded one"
            )
        return largest

    @property
    def unmodeled(self) -> tuple[str, ...]:
        """A line for each class of layers that the equations do not have, and that holds memory."""
        found: dict[str, list[int]] = {}
        for layer in self.layers:
            held = layer.output_bytes + COPIES * (layer.weight_bytes + layer.bias_bytes)
            if layer.kind is LayerKind.OTHER and held:
                found.setdefault(layer.type_name, []).append(held)
        return tuple(
            f"{type_name} is not in equations 2 to 4; {len(sizes)} layers hold {sum(sizes)} bytes at batch size "
            f"{self.traced_batch_size}, as traced"
            for type_name, sizes in found.items()
        )

    def table(self, batch_size: int) -> str:
        """Return the terms as a Markdown table, with the lines of `unmodeled` below."""
        rows = {
            "feature maps (equation 2)": self.feature_map_bytes(batch_size),
            "convolution parameters (equation 3)": self.parameter_bytes(),
            "fully-connected layers (equation 4)": self.classifier_bytes(batch_size),
            "layers of other kinds (traced)": self.other_bytes(batch_size),
            "sum": self.step_bytes(batch_size),
        }
        lines = [f"| batch size {batch_size} | MB |", "|---|---|"]
        lines += [f"| {name} | {held / 1e6:.3f} |" for name, held in rows.items()]
        return "\n".join([*lines, *(["", *self.unmodeled] if self.unmodeled else [])])

    def _scaled(self, traced_bytes: int, batch_size: int) -> int:
        require_count("batch_size", batch_size)
        return traced_bytes * batch_size // self.traced_batch_size

    def _output_bytes(self, batch_size: int, *kinds: LayerKind) -> int:
        return self._scaled(sum(layer.output_bytes for layer in self.layers if layer.kind in kinds), batch_size)

    def _parameter_bytes(self, *kinds: LayerKind) -> int:
        return COPIES * sum(layer.weight_bytes + layer.bias_bytes for layer in self.layers if layer.kind in kinds)


# The memory of one convolution, by algorithm (arXiv 1709.06622, section 3.1.2 and Table 2). Pure functions.

ALGORITHMS = ("gemm", "im2col", "fft")


@dataclass(frozen=True)
class ConvShape:
    """The sizes of a two-dimensional convolution with square images and filters.

    Attributes:
        in_channels: D_i, depth of the input.
        out_channels: D_{i+1}, number of filters.
        in_size: B_i = H_i, height and width of the input in pixels.
        out_size: B_{i+1} = H_{i+1}, height and width of the output.
        kernel_size: F, height and width of a filter.
        groups: number of groups into which the channels are divided.

    Raises:
        ValueError: a size is less than 1, or ``groups`` does not divide both numbers of channels.
    """

    in_channels: int
    out_channels: int
    in_size: int
    out_size: int
    kernel_size: int
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_count(name, value)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(
                f"groups={self.groups} must divide in_channels={self.in_channels} and out_channels={self.out_channels}"
            )

    @property
    def num_filters(self) -> int:
        """Number of two-dimensional filters: one for each pair of channels that are connected."""
        return self.in_channels // self.groups * self.out_channels


def convolution_memory_bytes(
    shape: ConvShape, algorithm: str = "gemm", batch_size: int = 1, element_bytes: int = 4
) -> int:
    """Return the bytes of inputs, filters and outputs of a convolution, as the algorithm holds them.

    - ``"gemm"``: a matrix product that reads its operands in place, as in cuDNN. Three plain arrays.
    - ``"im2col"``: the same with the unfolded input in memory, in which each pixel stands up to F x F times.
    - ``"fft"``: filters are padded to the size of the input, and inputs, filters and outputs are held as spectra. The
      spectrum of a real image of n x n pixels has n x (n // 2 + 1) complex numbers; the other half follows from it.

    The ratio of ``"fft"`` to ``"gemm"`` for AlexNet's layers is that of the paper's Table 2, up to 8 %.

    Args:
        shape: sizes of the layer.
        algorithm: one of the three.
        batch_size: X_mini, number of images.
        element_bytes: bytes of a real number; a complex one has two.

    Raises:
        ValueError: the algorithm is unknown, or a size is less than 1.
    """
    require_count("batch_size", batch_size)
    require_count("element_bytes", element_bytes)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(map(repr, ALGORITHMS))}")
    num_images = batch_size * shape.in_channels, batch_size * shape.out_channels
    if algorithm == "fft":
        spectrum = 2 * shape.in_size * (shape.in_size // 2 + 1)
        return element_bytes * spectrum * (sum(num_images) + shape.num_filters)
    window = shape.kernel_size**2
    elements = num_images[0] * shape.in_size**2 + shape.num_filters * window + num_images[1] * shape.out_size**2
    if algorithm == "im2col":
        elements += num_images[0] * window * shape.out_size**2
    return element_bytes * elements
