"""What compressors keep between steps, by parameter and group of ranks, whatever the buckets are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dp.collectives.compression.parameters import ParameterInfo
from lightning_dp.collectives.compression.stages import CompressedAllReduce

State = dict[str, dict[str, Any]]
"""``"residuals"``: name of a parameter -> (number of groups, \\*shape of the parameter), zero where nothing was left
out. ``"others"``: name -> what else the compressor keeps of the parameter, the same in all groups."""


def gather_state(all_reduce: CompressedAllReduce, residuals: bool = True) -> State:
    """Gather residuals and factors on rank 0. The other ranks get the factors only.

    Every rank of the job must call it, while no bucket is under way. Each parameter's residuals travel alone, so that
    other ranks need memory for one of them only.

    Args:
        all_reduce: what keeps them.
        residuals: False: return the factors only. Nothing is sent, so one rank may call it alone.
    """
    compressor = all_reduce.compressor
    state: State = {"residuals": {}, "others": {}}
    for info in all_reduce.parameters.all():
        residual = all_reduce.residual_to_sum(info) if residuals else None
        if residual is not None and compressor.keeps_residual(info):
            sums = all_reduce.collective.gather_group_sums(residual)
            if sums is not None:
                state["residuals"][info.name] = torch.stack([info.as_parameter(flat) for flat in sums])
        if others := compressor.state_of(info):
            state["others"][info.name] = others
    return state


def load_state(all_reduce: CompressedAllReduce, state: State) -> None:
    """Put a gathered state in place of the present one. Every rank must call it, while no bucket is under way.

    If there were as many groups, each group gets its own residuals. Else all groups get equal parts of the residuals'
    sum. In both cases the sum over the groups, which is what the parameters lack, stays what it was.

    Raises:
        ValueError: a residual does not have the shape of its parameter.
    """
    all_reduce.clear()
    topology = all_reduce.collective.topology
    group = topology.group_of(all_reduce.collective.rank)
    for info in all_reduce.parameters.all():
        if info.name in state["residuals"] and all_reduce.compressor.keeps_residual(info):
            own = _of_group(info, state["residuals"][info.name], group, topology.num_groups)
            all_reduce.load_residual(info, info.as_flat(own))
        if info.name in state["others"]:
            all_reduce.compressor.load_state_of(info, state["others"][info.name])


def _of_group(info: ParameterInfo, residuals: Tensor, group: int, num_groups: int) -> Tensor:
    if tuple(residuals.shape[1:]) != info.shape:
        raise ValueError(
            f"the residual of {info.name} in the checkpoint has the shape {tuple(residuals.shape[1:])}, and the "
            f"parameter {info.shape}; load the checkpoint into the same model"
        )
    if len(residuals) == num_groups:
        return residuals[group]
    return residuals.sum(0).div_(num_groups)
