"""What compressors should compute: the same arithmetic for all groups in one process, written without the package."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def sixteen_bit(contributions: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Each contribution rounded, summed in order, and the sum of more than two rounded."""
    total = contributions[0].to(dtype).float()
    for contribution in contributions[1:]:
        total = total + contribution.to(dtype).float()
    return (total.to(dtype) if len(contributions) > 2 else total).to(contributions[0].dtype)


def rounded(values: Tensor) -> Tensor:
    """``values`` to 8 bits and back: blocks from the parameter's first element on."""
    out = []
    for block in values.flatten().split(BLOCK):
        scale = (block.abs().max() / 127).float()
        scale = torch.tensor(1.0) if scale < torch.finfo(torch.float32).tiny else scale
        out.append(torch.round(block / scale.to(block.dtype)) * scale.to(block.dtype))
    return torch.cat(out)


class Int8Groups:
    """Groups that sum one parameter's gradients in 8 bits, with error feedback. Two do not round their sum.

    Args:
        first_block: blocks of the parameters before this one; block n of the model belongs to group n modulo groups.
    """

    def __init__(self, num_groups: int, numel: int, first_block: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.residuals = [torch.zeros(numel, dtype=dtype) for _ in range(num_groups)]
        block = torch.arange(numel) // BLOCK + first_block
        self.owned = [block % num_groups == group for group in range(num_groups)]

    def sum(self, gradients: list[Tensor]) -> Tensor:
        values = [g.flatten() + r for g, r in zip(gradients, self.residuals, strict=True)]
        sent = [rounded(value) for value in values]
        total = sent[0].clone()
        for each in sent[1:]:
            total = total + each
        delivered = rounded(total) if len(gradients) > 2 else total
        for group, owned in enumerate(self.owned):
            left_out_of_sum = torch.where(owned, total - delivered, 0)
            self.residuals[group] = (values[group] - sent[group]) + left_out_of_sum
        return delivered.view(gradients[0].shape)


class PowerSGDGroups:
    """Groups that sum one matrix by PowerSGD: the sum's projection on a basis that follows it (power iteration)."""

    def __init__(self, num_groups: int, start: Tensor) -> None:
        self.residuals = [torch.zeros(()) for _ in range(num_groups)]
        self.right = start

    def sum(self, gradients: list[Tensor]) -> Tensor:
        values = [g + r for g, r in zip(gradients, self.residuals, strict=True)]
        total = torch.stack(values).sum(0)
        # An orthonormal basis by the singular values: projections do not depend on which basis it is.
        basis = torch.linalg.svd(total @ torch.linalg.svd(self.right, full_matrices=False)[0], full_matrices=False)[0]
        project = basis @ basis.T
        self.residuals = [value - project @ value for value in values]
        self.right = total.T @ basis
        return project @ total
