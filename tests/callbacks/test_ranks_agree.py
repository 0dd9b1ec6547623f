"""The comparison of parameters between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

import lightning_dp
from lightning_dp.callbacks import RanksAgree, ranks_agree
from lightning_dp.callbacks.ranks_agree import disagreement_message
from lightning_dp.strategies import KrizhevskyHybridStrategy, LayeredSGDStrategy
from tests.ranks import RankError, run_processes
from tests.strategies.modules import Net, data, trainer

STRATEGIES = {
    "ddp": DDPStrategy,
    "ddp, static graph": lambda: DDPStrategy(static_graph=True),
    "layered sgd": lambda: LayeredSGDStrategy(1, bucket_cap_mb=0.0005),
    "layered sgd, load": lambda: LayeredSGDStrategy(1, overlap="load"),
    "hybrid": lambda: KrizhevskyHybridStrategy(head="last"),
}
TELLS_SHARDS = hasattr(KrizhevskyHybridStrategy, "sharded_parameter_names")
COMPARED = [name for name in STRATEGIES if name != "hybrid" or TELLS_SHARDS]


def fit(net: pl.LightningModule, strategy: Any, *callbacks: pl.Callback, world_size: int = 2, **options: Any) -> None:
    t = trainer(strategy, world_size, callbacks=list(callbacks), **{"max_steps": 6, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        t.fit(net, data(world_size))


def counted() -> list[int]:
    """A list to which each all-gather of the callback adds the number of bytes of a rank."""
    calls: list[int] = []
    gather = ranks_agree.small_all_gather

    def count(tensor: Tensor) -> Tensor:
        calls.append(tensor.nbytes)
        return gather(tensor)

    ranks_agree.small_all_gather = count
    return calls


def train(rank: int, strategy: str, every_n_steps: int, **options: Any) -> list[int]:
    calls = counted()
    fit(Net("adamw"), STRATEGIES[strategy](), RanksAgree(every_n_steps), **options)
    return calls


@pytest.mark.parametrize("strategy", COMPARED)
def test_ranks_that_agree_exchange_16_bytes_per_comparison(strategy):
    # At the beginning, after steps 2, 4 and 6.
    assert run_processes(2, train, strategy, 2) == [[16] * 4] * 2


@pytest.mark.parametrize(
    ("every_n_steps", "accumulate", "num_comparisons"),
    [(1, 1, 7), (4, 1, 3), (100, 1, 2), (2, 3, 4)],
)
def test_steps_of_the_optimizer_are_counted_and_the_end_is_compared(every_n_steps, accumulate, num_comparisons):
    calls = run_processes(2, train_accumulating, every_n_steps, accumulate)
    assert calls == [[16] * num_comparisons] * 2


def train_accumulating(rank: int, every_n_steps: int, accumulate: int) -> list[int]:
    return train(rank, "ddp", every_n_steps, accumulate_grad_batches=accumulate)


class Flip(pl.Callback):
    """Flips one bit of one element after the third step on one rank."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 3:
            parameter = pl_module.get_parameter(self.name)
            changed = parameter.detach().clone()
            changed.view(torch.int64).view(-1)[-1] ^= 1  # the lowest bit of the mantissa
            with torch.no_grad():
                parameter.copy_(changed)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The RuntimeError of this rank."""
    with pytest.raises(RuntimeError) as error:
        function(*args, **kwargs)
    return str(error.value)


def error_after_flip(rank: int, strategy: str, flipping: int, name: str, every_n_steps: int, world_size: int) -> str:
    callbacks = [Flip(flipping, name), RanksAgree(every_n_steps)]
    return error_of(fit, Net("sgd"), STRATEGIES[strategy](), *callbacks, world_size=world_size)


@pytest.mark.parametrize("strategy", COMPARED)
@pytest.mark.parametrize(
    ("name", "flipping", "every_n_steps", "step", "world_size"),
    [("shared.weight", 1, 1, 3, 3), ("frozen.bias", 0, 2, 4, 3), ("first.bias", 1, 100, 6, 2)],
)
def test_one_bit_on_one_rank_is_found(strategy, name, flipping, every_n_steps, step, world_size):
    errors = run_processes(world_size, error_after_flip, strategy, flipping, name, every_n_steps, world_size)
    assert errors == [errors[0]] * world_size
    assert errors[0].startswith(f"the ranks do not have the same parameters after step {step}: ")
    assert f"differs on rank {flipping} from the other ranks" in errors[0]
    if step == 3:  # later steps have changed other parameters too
        assert f"{name!r} differs" in errors[0]
        assert f"1 of {6 if strategy == 'hybrid' else 8} parameters differ" in errors[0]  # without its head


# --- a parameter that is unfrozen after the strategy was set up (Lightning issue 20340) ---


class Unfreeze(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            pl_module.frozen.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(pl_module.frozen.parameters())})


def train_unfrozen(rank: int, check: bool) -> Tensor:
    net = Net("sgd")
    fit(net, DDPStrategy(), Unfreeze(), *[RanksAgree(2)] * check)
    return net.frozen.weight.detach().clone()


def test_ddp_lets_an_unfrozen_parameter_drift_silently():
    first, second = run_processes(2, train_unfrozen, False)
    assert not torch.equal(first, second)


def error_of_unfrozen(rank: int) -> str:
    return error_of(train_unfrozen, rank, True)


def test_an_unfrozen_parameter_that_drifts_is_named():
    first, second = run_processes(2, error_of_unfrozen)
    assert first == second
    assert "after step 4: 'frozen.weight' differs on rank 1 from the other ranks; 2 of 8 parameters" in first
    assert "unfrozen after the strategy was set up (Lightning issue #20340)" in first


# --- parameters of which each rank holds a part ---


class Sharding(DDPStrategy):
    """Offers the attribute; nothing is sharded in fact."""

    sharded_parameter_names = ("last.weight",)


def train_sharded(rank: int, name: str) -> None:
    fit(Net("sgd"), Sharding(), Flip(1, name), RanksAgree(1), max_steps=3)


def test_sharded_parameters_are_not_compared():
    run_processes(2, train_sharded, "last.weight")
    with pytest.raises(RankError, match=r"after step 3: 'last\.bias' differs on rank 1"):
        run_processes(2, train_sharded, "last.bias")


class Strange:
    pass


def test_a_strategy_that_does_not_tell_what_it_shards_is_refused():
    trainer = SimpleNamespace(world_size=2, strategy=Strange())
    with pytest.raises(ValueError, match="RanksAgree does not know which parameters Strange shards; use DDPStrategy"):
        RanksAgree().setup(trainer, None, "fit")
    RanksAgree().setup(trainer, None, "validate")
    trainer.strategy.sharded_parameter_names = []
    RanksAgree().setup(trainer, None, "fit")


# --- the rest ---


class Add(pl.Callback):
    """Adds parameters on rank 1."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            pl_module.added = torch.nn.Linear(2, 2)


def error_of_another_parameter(rank: int) -> str:
    return error_of(fit, Net("sgd"), DDPStrategy(), Add(), RanksAgree(1))


def test_a_parameter_that_only_one_rank_has_is_named():
    first, second = run_processes(2, error_of_another_parameter)
    assert first == second
    found = "(missing on rank 0, torch.float32 [2, 2] on rank 1)"
    assert f"after step 1: 'added.weight' differs on rank 1 from the other ranks {found}; " in first


@pytest.mark.parametrize(
    ("checksums", "ranks"),
    [
        ([1, 1, 2], "rank 2"),
        ([2, 1, 1], "rank 0"),
        ([1, 2, 3, 1], "ranks 1, 2"),
        ([1, 2], "rank 1"),
        ([1, 2, 2, 1], "ranks 1, 2"),
    ],
)
def test_the_ranks_that_differ_from_most_others_are_named(checksums, ranks):
    by_rank = [{"same": ("float", 0), "other": ("float", value), "last": ("float", value)} for value in checksums]
    text = disagreement_message(by_rank, 7, range(len(by_rank)))
    expected = f"after step 7: 'other' differs on {ranks} from the other ranks; 2 of 3 parameters differ."
    assert expected in text
    assert "Look for code that changes parameters on some ranks only" in text


def test_a_single_process_compares_nothing():
    calls = counted()
    fit(Net("sgd"), "auto", RanksAgree(1), world_size=1)
    assert calls == []


def test_arguments_and_exports():
    assert lightning_dp.RanksAgree is RanksAgree
    assert RanksAgree().every_n_steps == 100
