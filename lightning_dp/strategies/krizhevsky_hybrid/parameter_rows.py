"""How a sharded head's parameters become rows, and whole tensors again. All ranks must make the same calls.

On a device nothing here needs more memory than a rank's own rows and one slice that is being sent, unless the caller
wants the whole tensor on that device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dp.strategies.krizhevsky_hybrid.sharded_head import ShardedHead, SharedByCopies, seeded

CPU = torch.device("cpu")


class ShardedParameters(SharedByCopies):
    """The head's parameters. They hold rows from `shard` to `restore` or `unshard`."""

    def __init__(self, head: ShardedHead) -> None:
        self._head = head
        self._before: dict[Tensor, Tensor] = {}  # this rank's values before `shard`; dropped by `keep`

    def shard(self, device: torch.device) -> None:
        """Leave this rank's rows in the parameters, on ``device``. All ranks must call it.

        All ranks start from rank 0's values, as under DDP. Rank 0 sends them from where the module was built, usually
        host memory, so no device ever holds the whole. Layers on the meta device have no values yet: each rank
        initializes its rows with the layer's ``reset_parameters``.
        """
        head = self._head
        is_meta = self._agree_on_meta(device)
        seed = self._common_seed(device) if any(is_meta.values()) else None
        head.is_sharded = True
        for index, layer in enumerate(head.linears):
            for parameter in layer.parameters():
                if parameter not in self._before:  # two layers may share one
                    self._before[parameter] = parameter.data
                    _set_data(parameter, self._rows_of_rank_0(parameter, device, is_meta[layer]))
            if is_meta[layer]:
                assert seed is not None
                # Other rows need other numbers, so each rank and layer has a seed of its own.
                with seeded(seed + index * head.channel.world_size + head.channel.rank, device):
                    layer.reset_parameters()

    def keep(self) -> None:
        """Free the values of before `shard`. Set-up has succeeded, so they are not needed any more."""
        self._before = {}

    def restore(self) -> bool:
        """Put back what the parameters held before `shard`. Set-up has failed, and other ranks may be gone.

        Returns:
            False if `keep` has freed those values, so that the parameters still hold rows.
        """
        for parameter, before in self._before.items():
            _set_data(parameter, before)
        is_whole = bool(self._before) or not self._head.is_sharded
        self._head.is_sharded = not is_whole
        self._before = {}
        return is_whole

    def unshard(self) -> None:
        """Gather the whole values, in host memory, where Lightning leaves a module after ``fit``."""
        for parameter in self._head.parameters:
            parameter.grad = None
            _set_data(parameter, whole_on_all_ranks(self._head, parameter.data, parameter, CPU))
        self._head.is_sharded = False

    def _agree_on_meta(self, device: torch.device) -> dict[nn.Linear, bool]:
        """Return for each layer whether it is on the meta device on rank 0, whose values all ranks take."""
        head = self._head
        flags = torch.tensor([any(p.is_meta for p in layer.parameters()) for layer in head.linears], device=device)
        of_rank_0 = head.control.all_gather("meta", flags)[0].tolist()
        return dict(zip(head.linears, of_rank_0, strict=True))

    def _common_seed(self, device: torch.device) -> int:
        return int(self._head.control.all_gather("seed", torch.randint(2**62, (1,)).to(device))[0].item())

    def _rows_of_rank_0(self, parameter: Tensor, device: torch.device, is_meta: bool) -> Tensor:
        head, rank = self._head, self._head.channel.rank
        begin, end = head.bounds_of(parameter)[rank]
        rows = torch.empty(end - begin, *parameter.shape[1:], dtype=parameter.dtype, device=device)
        if is_meta:
            return rows
        nothing = rows.new_empty(0)
        for peer, (first, last) in enumerate(head.bounds_of(parameter)):
            if peer == 0:
                continue
            # One peer after the other, so that the GPU of rank 0 holds one slice beside its own, and not all of them.
            sends = [nothing] * head.channel.world_size
            receives = list(sends)
            if rank == 0:
                sends[peer] = parameter.data[first:last].to(device)
            elif rank == peer:
                receives[0] = rows
            head.control.all_to_all("parameters", sends, receives).wait()
        if rank == 0:
            rows.copy_(parameter.data[begin:end])
        return rows


def _set_data(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data and no gradient. It stays the same object, which optimizers may refer to."""
    parameter.grad = None
    if parameter.is_meta != data.is_meta:  # torch refuses to assign ``.data`` from and to the meta device
        torch.utils.swap_tensors(parameter, nn.Parameter(data, parameter.requires_grad))
    else:
        parameter.data = data


def whole_on_all_ranks(head: ShardedHead, rows: Tensor, parameter: Tensor, device: torch.device) -> Tensor:
    """Gather ``rows``, of ``parameter`` or of an optimizer state like it, on every rank, on ``device``."""
    return _gather(head, rows, parameter, device, range(head.channel.world_size))


def whole_on_rank_0(head: ShardedHead, rows: Tensor, parameter: Tensor) -> Tensor:
    """Gather ``rows`` as `whole_on_all_ranks` does, in the host memory of rank 0. Other ranks get their rows back."""
    return _gather(head, rows, parameter, CPU, [0])


def _gather(
    head: ShardedHead, rows: Tensor, parameter: Tensor, device: torch.device, receivers: Sequence[int]
) -> Tensor:
    channel, bounds = head.control, head.bounds_of(parameter)
    rank, world_size = channel.rank, channel.world_size
    rows = rows.detach()
    is_receiver = rank in receivers
    whole = torch.empty(head.whole_shape(parameter) if is_receiver else 0, dtype=rows.dtype, device=device)
    blocks = [whole[begin:end] for begin, end in bounds] if is_receiver else [whole] * world_size
    if rows.device == whole.device:
        sends = [rows if peer in receivers else rows[:0] for peer in range(world_size)]
        channel.all_to_all("parameters", sends, blocks).wait()
    else:
        # Slices arrive on the GPU and are copied to host memory, one after the other, so that no GPU holds the whole.
        for source in range(world_size):
            begin, end = bounds[source]
            arriving = rows.new_empty(end - begin if is_receiver else 0, *rows.shape[1:])
            is_source = rank == source
            sends = [rows if is_source and peer in receivers else rows[:0] for peer in range(world_size)]
            receives = [arriving if peer == source else rows[:0] for peer in range(world_size)]
            channel.all_to_all("parameters", sends, receives).wait()
            if is_receiver and not is_source:
                blocks[source].copy_(arriving)
    if not is_receiver:
        return rows
    blocks[rank].copy_(rows)
    return whole
