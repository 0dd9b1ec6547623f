"""Callback that verifies that all ranks hold the same parameters."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dp._lightning import Callback, DDPStrategy, LightningModule, Trainer, require_own_trainer
from lightning_dp._private.torch_names import local_part
from lightning_dp.collectives.groups import dense
from lightning_dp.collectives.small_all_gather import small_all_gather

log = logging.getLogger(__name__)

Checksums = dict[str, tuple[str, int]]
"""Name of each parameter, its dtype and shape in words, and the checksum of its bits."""


class RanksAgree(Callback):
    """Raise an error on all ranks when their parameters are no longer bitwise identical.

    Data-parallel training can drift apart without an error. For example, DistributedDataParallel does not reduce the
    gradient of a parameter that was frozen when it was built and is unfrozen later (Lightning issue #20340).

    The parameters are compared before the first step, every ``every_n_steps`` optimizer steps and at the end of
    training. Each rank computes a checksum of the bits of its parameters (see `bit_checksum`), reading every parameter
    once. The ranks then gather 16 bytes each. They exchange names only if the checksums differ.

    Works with DDPStrategy and its subclasses, and with strategies that have an attribute ``sharded_parameter_names``:
    the names (as in ``pl_module.named_parameters()``) of the sharded parameters, which are not compared. With an
    attribute ``num_parameter_shards``, as `LayeredFSDPStrategy` has, each rank's shards are compared with those of the
    ranks that have the same ones: every ``num_parameter_shards``-th. Buffers are not compared either, because running
    statistics may differ between ranks.

    Args:
        every_n_steps: optimizer steps between two comparisons, at least 1.

    Raises:
        ValueError: ``every_n_steps`` is less than 1. In ``fit``: the strategy does not tell what it shards.
        RuntimeError: in ``fit``, on all ranks: the parameters differ. The message names the step, the first parameter
            that differs, the ranks that disagree, and possible causes.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not (isinstance(every_n_steps, (int, float)) and every_n_steps >= 1):  # NaN is not
            raise ValueError(f"every_n_steps={every_n_steps!r} must be at least 1")
        self.every_n_steps = every_n_steps
        self._last_step = -1  # of the last comparison

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        require_own_trainer(self, trainer)
        if stage != "fit":
            return
        strategy = trainer.strategy
        if trainer.world_size == 1:
            log.info(f"{type(self).__name__}: there is a single rank, which has nothing to compare")
        elif getattr(strategy, "num_parameter_shards", 1) == trainer.world_size:
            log.info(
                f"{type(self).__name__}: each rank has other shards of the parameters; there is nothing to compare"
            )
        elif not isinstance(strategy, DDPStrategy) and not (
            hasattr(strategy, "sharded_parameter_names") or hasattr(strategy, "num_parameter_shards")
        ):
            raise ValueError(
                f"{type(self).__name__} does not know which parameters {type(strategy).__name__} shards; use "
                "DDPStrategy or a subclass of it, or give the strategy an attribute sharded_parameter_names or "
                "num_parameter_shards"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._compare(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A batch may have no step (gradient accumulation) or several (manual optimization).
        if trainer.global_step // self.every_n_steps > self._last_step // self.every_n_steps:
            self._compare(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._last_step:
            self._compare(trainer, pl_module)

    def _compare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise RuntimeError if the parameters differ between ranks. Every rank must call it."""
        self._last_step = trainer.global_step
        if trainer.world_size == 1:
            return
        sharded = set(getattr(trainer.strategy, "sharded_parameter_names", ()))
        parameters = {name: local_part(p) for name, p in pl_module.named_parameters() if name not in sharded}
        checksums = [bit_checksum(value).to(pl_module.device) for value in parameters.values()]
        # One number for all parameters, and one for their names and shapes: ranks may even have different parameters.
        total = bit_checksum(torch.stack(checksums)) if checksums else torch.zeros((), dtype=torch.int64)
        summary = torch.stack([total.to(pl_module.device), _digest(parameters).to(pl_module.device)])
        # All ranks see all rows, so all take the same branch.
        num_shards = getattr(trainer.strategy, "num_parameter_shards", 1)
        rows = small_all_gather(summary).view(-1, num_shards, 2)
        if (rows == rows[0]).all():
            return
        shard = int((rows != rows[0]).any(-1).any(0).nonzero()[0])  # the first one that differs
        own = {name: (_describe(parameters[name]), int(c)) for name, c in zip(parameters, checksums, strict=True)}
        by_rank: list[Checksums] = [{}] * trainer.world_size
        dist.all_gather_object(by_rank, own)
        ranks = range(shard, trainer.world_size, num_shards)
        raise RuntimeError(disagreement_message([by_rank[rank] for rank in ranks], trainer.global_step, ranks))


def disagreement_message(by_rank: list[Checksums], step: int, ranks: Sequence[int]) -> str:
    """Return the error message for parameters that differ between ranks.

    Args:
        by_rank: the parameters of each of ``ranks``. At least one differs.
        step: number of optimizer steps taken.
        ranks: that were compared.
    """
    names = dict.fromkeys(name for checksums in by_rank for name in checksums)
    differing = [name for name in names if len({checksums.get(name) for checksums in by_rank}) > 1]
    if not differing:
        return (
            f"the ranks do not have the same parameters after step {step}: they are in another order, in which "
            f"DistributedDataParallel averages them. {_CAUSES}"
        )
    name = differing[0]
    values = [checksums.get(name) for checksums in by_rank]
    # The value of most ranks. If two values are equally frequent, that of the lower rank.
    usual, _ = Counter(values).most_common(1)[0]
    deviating = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    descriptions = [value[0] if value else "missing" for value in values]
    found = [
        f"{words} on {_ranks([rank for rank, other in zip(ranks, descriptions, strict=True) if other == words])}"
        for words in dict.fromkeys(descriptions)
    ]
    details = f" ({', '.join(found)})" if len(found) > 1 else ""
    return (
        f"the ranks do not have the same parameters after step {step}: {name!r} differs on {_ranks(deviating)} "
        f"from the other ranks{details}; {len(differing)} of {len(names)} parameters differ. {_CAUSES}"
    )


_CAUSES = (
    "Look for code that changes parameters on some ranks only, or with random numbers that differ between ranks, and "
    "for gradients that are not reduced because a parameter was created, replaced, frozen or unfrozen after the "
    "strategy was set up (Lightning issue #20340)"
)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _describe(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _digest(parameters: dict[str, Tensor]) -> Tensor:
    """Return a checksum of the names, dtypes and shapes, () in int64."""
    text = "\n".join(f"{name} {_describe(value)}" for name, value in parameters.items())
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return torch.tensor(number, dtype=torch.int64)


# --- Checksum of the bits of a tensor, computed on the tensor's device.

_CHUNK_ELEMENTS = 2**18
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D  # multiplier of a 64-bit linear congruential generator (Knuth)


@torch.no_grad()
def bit_checksum(tensor: Tensor) -> Tensor:
    """Return a checksum, () in int64, of the bits of ``tensor``, (*) of any dense dtype.

    The bits of each element are read as an integer, multiplied by a fixed odd number that depends on the position, and
    summed modulo 2^64. Multiplication by an odd number is invertible modulo 2^64. Therefore a change of a single
    element, by a single bit or more, always changes the checksum. For other changes the probability that it stays the
    same is about 2^-64. A sum of floating-point numbers would round small differences away.
    """
    flat = dense(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).view(-1)
    integers = flat.view(_INTEGERS[flat.itemsize])
    weights = _weights(tensor.device)
    checksum = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # In chunks, because the products take eight bytes per element.
    for chunk in torch.split(integers, _CHUNK_ELEMENTS):
        checksum = (checksum + (chunk * weights[: chunk.numel()]).sum()) * _ODD
    return checksum


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return the odd numbers, (_CHUNK_ELEMENTS,), which are the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(20340)
    numbers = torch.randint(-(2**62), 2**62, (_CHUNK_ELEMENTS,), generator=generator)
    return (2 * numbers + 1).to(device)
