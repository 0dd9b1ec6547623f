"""The memory of one convolution, by algorithm (arXiv 1709.06622, section 3.1.2 and Table 2). Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.planner.checks import require_count

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
