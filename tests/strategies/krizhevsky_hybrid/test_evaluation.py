"""The head outside of training steps: any rank may call it alone, as under DDP, where its rows have been gathered."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import KrizhevskyHybridStrategy
from lightning_dp.collectives.all_to_all import Channel
from lightning_dp.losses import Margin, sharded_binary_cross_entropy, sharded_cross_entropy
from tests.ranks import run_processes
from tests.strategies.krizhevsky_hybrid.modules import HybridNet, StepNet, all_batches, batches
from tests.strategies.modules import CLASSES, FEATURES, trainer

X = torch.randn(4, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
STEPS = 4
PLACES = ["on_fit_start", "on_train_start", "on_validation_start", "on_validation_epoch_end", "on_train_epoch_end"]
PLACES += ["on_validation_end", "on_train_end"]


class Sample(pl.Callback):
    """Calls the model on one rank alone, in each place, and counts the exchanges that go on meanwhile."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.seen: dict[str, list[Tensor]] = {place: [] for place in PLACES}

    def look(self, place: str, trainer: Any, module: HybridNet) -> None:
        if trainer.global_rank == self.rank:
            before = num_exchanges(trainer)
            with torch.no_grad():
                self.seen[place].append(module(X))
            assert num_exchanges(trainer) == before


def num_exchanges(trainer: Any) -> int:
    fitting = getattr(trainer.strategy, "_fitting", None)
    return 0 if fitting is None else sum(c.num_exchanges for c in (*fitting.passes.channels, fitting.head.control))


for name in PLACES:
    setattr(Sample, name, lambda self, trainer, module, place=name: self.look(place, trainer, module))


class Validated(StepNet):
    """Validation keeps what it has seen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self(batch[0]))


def _sampled(rank: int, world_size: int, sampling: int) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    sample, module = Sample(sampling), Validated()
    runner = trainer(
        KrizhevskyHybridStrategy(), world_size, use_distributed_sampler=False, max_epochs=2, callbacks=[sample]
    )
    dataset = all_batches(1).dataset
    num_batches = rank + 1
    runner.fit(module, batches(rank, world_size, steps=STEPS), DataLoader(Subset(dataset, range(2 * num_batches)), 2))
    return sample.seen, module.validated


def single(world_size: int) -> dict[str, list[Tensor]]:
    sample = Sample()
    runner = trainer("auto", 1, max_epochs=2, callbacks=[sample])
    runner.fit(Validated(), all_batches(world_size, steps=STEPS), DataLoader(all_batches(1).dataset, 2))
    return sample.seen


@pytest.mark.ci
@pytest.mark.parametrize("sampling", [0, 2])
def test_one_rank_alone_can_call_the_model(sampling):
    expected = single(3)
    of_ranks = run_processes(3, _sampled, 3, sampling)
    for rank, (seen, _) in enumerate(of_ranks):
        for place in PLACES:
            if rank == sampling:
                assert len(seen[place]) == len(expected[place]) > 0
                torch.testing.assert_close(seen[place], expected[place], rtol=1e-10, atol=1e-12)
            else:
                assert not seen[place]
    # Each rank has validated its own number of batches: two at most in the sanity check, all in two epochs.
    assert [len(validated) for _, validated in of_ranks] == [1 + 2 * 1, 2 + 2 * 2, 2 + 2 * 3]


class Misplaced(pl.Callback):
    """Calls the model on rank 0 where the rows have just changed."""

    def __init__(self, gathers: bool) -> None:
        self.gathers = gathers
        self.errors: list[str] = []
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: HybridNet, *_: Any) -> None:
        if self.gathers:
            trainer.strategy.gather_head()
        if trainer.global_rank == 0 and self.gathers:
            self.seen.append(module(X).detach())
        elif trainer.global_rank == 0:
            with pytest.raises(RuntimeError) as error:
                module(X)
            self.errors.append(str(error.value))


def _misplaced(rank: int, gathers: bool) -> tuple[list[str], list[Tensor]]:
    callback = Misplaced(gathers)
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[callback])
    runner.fit(StepNet(), batches(rank, 2, steps=STEPS))
    return callback.errors, callback.seen


@pytest.mark.ci
def test_where_the_rows_are_not_known_a_call_raises_at_once():
    (errors, _), (none, _) = run_processes(2, _misplaced, False)
    assert len(errors) == STEPS
    assert not none
    assert all("'head' was called on rank 0 outside of a training step" in error for error in errors)
    assert all("trainer.strategy.gather_head()" in error for error in errors)


class After(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: HybridNet, *_: Any) -> None:
        self.seen.append(module(X).detach())


@pytest.mark.ci
def test_all_ranks_can_gather_it_anywhere():
    after = After()
    trainer("auto", 1, callbacks=[after]).fit(StepNet(), all_batches(2, steps=STEPS))
    (_, seen), _ = run_processes(2, _misplaced, True)
    torch.testing.assert_close(seen, after.seen, rtol=1e-10, atol=1e-12)


def _stale(rank: int) -> str:
    class Change(pl.Callback):
        def on_train_start(self, trainer: Any, module: HybridNet) -> None:
            with torch.no_grad():
                module.head[-1].weight.zero_()
            with pytest.raises(RuntimeError, match="were changed on rank . after they had been gathered"):
                module(X)
            trainer.strategy.gather_head()
            assert torch.equal(module(X), module.head(torch.zeros_like(module.trunk(X))))  # biases alone are left

    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[Change()], max_steps=1)
    runner.fit(StepNet(), batches(rank, 2, steps=STEPS))
    with pytest.raises(RuntimeError, match="outside of fit"):
        runner.strategy.gather_head()


def test_rows_that_were_changed_since_are_not_believed():
    run_processes(2, _stale)


class Saliency(Validated):
    """Looks at gradients in validation, where Lightning switches them off."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            self(x).square().sum().backward()
        self.validated += [x.grad, self.head[1].weight.grad.clone()]
        self.zero_grad()


def _saliency(rank: int) -> list[Tensor]:
    module = Saliency()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, inference_mode=False)
    runner.fit(module, batches(rank, 2, steps=STEPS), DataLoader(all_batches(1).dataset, 2))
    return module.validated


@pytest.mark.ci
def test_gradients_in_validation_are_those_of_the_whole_head():
    module = Saliency()
    runner = trainer("auto", 1, inference_mode=False)
    runner.fit(module, all_batches(2, steps=STEPS), DataLoader(all_batches(1).dataset, 2))
    of_x, of_weight = module.validated[::2], module.validated[1::2]
    first, second = run_processes(2, _saliency)
    for of_rank in (first, second):
        torch.testing.assert_close(of_rank[::2], of_x, rtol=1e-9, atol=1e-12)
    rows = [torch.cat(pair) for pair in zip(first[1::2], second[1::2], strict=True)]
    torch.testing.assert_close(rows, of_weight, rtol=1e-9, atol=1e-12)


class Attributed(pl.Callback):
    """Looks at gradients after each epoch, of a head that was gathered in inference mode."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        x = X.clone().requires_grad_()
        if isinstance(trainer.strategy, KrizhevskyHybridStrategy):
            with torch.inference_mode():
                trainer.strategy.gather_head()
        pl_module(x).square().sum().backward()
        self.of_x = x.grad
        pl_module.zero_grad()


def _attributed(rank: int) -> Tensor:
    look = Attributed()
    trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[look], max_epochs=2).fit(
        StepNet(), batches(rank, 2, steps=2)
    )
    return look.of_x


def test_a_head_that_was_gathered_in_inference_mode_is_as_any_other():
    look = Attributed()
    trainer("auto", 1, callbacks=[look], max_epochs=2).fit(StepNet(), all_batches(2, steps=2))
    for of_x in run_processes(2, _attributed):
        torch.testing.assert_close(of_x, look.of_x, rtol=1e-9, atol=1e-12)


class Margins(Validated):
    """A loss by name in training and in validation, with an option that needs the weights; and one of whole logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES, bias=False)).double()

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return sharded_cross_entropy(self.head, features, target, margin=Margin(4, 0.3), chunk_bytes=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features = self.trunk(batch[0])
        sequence = sharded_binary_cross_entropy(self.head, features[:, None], self(batch[0])[:, None].sigmoid())
        self.validated += [self.head_step(features, batch[1]), sequence]


def _margins(rank: int) -> list[Tensor]:
    module = Margins()
    common = DataLoader(all_batches(1).dataset, 2)
    trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False).fit(module, batches(rank, 2), common)
    return module.validated


@pytest.mark.ci
def test_a_loss_by_name_in_validation():
    module = Margins()
    trainer("auto", 1).fit(module, all_batches(2), DataLoader(all_batches(1).dataset, 2))
    for validated in run_processes(2, _margins):
        torch.testing.assert_close(validated, module.validated, rtol=1e-9, atol=1e-12)


def _sharded(rank: int) -> tuple[list[Tensor], str]:
    module = Validated()
    sample, message = Sample(), []
    strategy = KrizhevskyHybridStrategy(evaluation="sharded")
    runner = trainer(strategy, 2, use_distributed_sampler=False)
    runner.fit(module, batches(rank, 2, steps=STEPS), batches(rank, 2, steps=2))
    again = trainer(
        KrizhevskyHybridStrategy(evaluation="sharded"), 2, use_distributed_sampler=False, callbacks=[sample]
    )
    with pytest.raises(RuntimeError) as error:
        again.fit(StepNet(), batches(rank, 2, steps=STEPS))
    message.append(str(error.value))
    return module.validated, message[0]


@pytest.mark.ci
def test_a_head_that_is_never_whole_is_evaluated_by_all_ranks_together():
    module = Validated()
    runner = trainer("auto", 1)
    runner.fit(module, all_batches(2, steps=STEPS), batches(0, 2, steps=2))
    (first, message), (_, _) = run_processes(2, _sharded)
    torch.testing.assert_close(first, module.validated, rtol=1e-9, atol=1e-12)
    assert "evaluation='gathered'" in message


def _lone(rank: int) -> int:
    """Gathering is a message from each rank to each: no forward of a validation adds to it."""
    module = Validated()
    counts: list[int] = []
    start = Channel.all_to_all

    def counting(self: Channel, what: str, *messages: Any) -> Any:
        if module.trainer.validating or module.trainer.sanity_checking:
            counts.append(1)
            assert what in ("parameters", "is changed", "between training steps")
        return start(self, what, *messages)

    Channel.all_to_all = counting
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False)
    runner.fit(module, batches(rank, 2, steps=STEPS), batches(rank, 2, steps=5))
    Channel.all_to_all = start
    return len(counts)


@pytest.mark.ci
def test_an_evaluation_sends_the_parameters_once_and_nothing_else():
    num_parameters = len(list(HybridNet().head.parameters()))
    # In the epoch: the sanity check has the rows of set-up. Each of the two asks three times whether training or a
    # callback has changed the rows, and each of these begins with a check of the place.
    assert run_processes(2, _lone) == [num_parameters + 2 * (3 + 3)] * 2


class Summarized(StepNet):
    """Lightning calls it for its summary, on all ranks, before training."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, FEATURES, dtype=torch.float64)


class Summary(pl.callbacks.ModelSummary):
    seen: tuple[int, int, dict[str, Any]]

    @staticmethod
    def summarize(data: Any, total: int, trainable: int, *_: Any, **__: Any) -> None:
        Summary.seen = total, trainable, dict(data)


def _summarized(rank: int, evaluation: Any) -> Any:
    Summary.seen = ()
    summary = Summary(max_depth=2)
    strategy: Any = "auto" if evaluation is None else KrizhevskyHybridStrategy(evaluation=evaluation)
    world_size = 1 if evaluation is None else 2
    runner = trainer(strategy, world_size, use_distributed_sampler=False, callbacks=[summary], max_steps=2)
    module = Summarized()
    runner.fit(module, batches(rank, 2, steps=2))
    assert "on_fit_start" not in vars(summary)
    return Summary.seen, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("evaluation", ["gathered", "sharded"])
def test_the_summary_counts_the_whole_head_and_knows_its_sizes(evaluation):
    (total, trainable, plain), _ = _summarized(0, None)
    assert total == trainable == sum(p.numel() for p in StepNet().parameters())
    (seen, first), (nothing, second) = run_processes(2, _summarized, evaluation)
    assert not nothing  # Lightning prints on rank 0
    assert seen[:2] == (total, trainable)
    head = plain["Name"].index("head")
    # Sharded, the layers within the head are not called one by one.
    rows = range(len(plain["Name"])) if evaluation == "gathered" else [head]
    for column in ("Name", "Params", "In sizes", "Out sizes"):
        assert [seen[2][column][row] for row in rows] == [plain[column][row] for row in rows]
    for name, value in first.items():
        torch.testing.assert_close(value, second[name])  # and training went on with the values of before


class AveragedForValidation(pl.Callback):
    """Validates other weights, as callbacks of averaged weights do, past the counter of changes."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept = [parameter.data.clone() for parameter in pl_module.parameters()]
        for parameter in pl_module.parameters():
            parameter.data.mul_(0.5)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter, kept in zip(pl_module.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


def _averaged(rank: int) -> list[Tensor]:
    module = Validated()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[AveragedForValidation()])
    runner.fit(module, batches(rank, 2, steps=STEPS), batches(0, 2, steps=2))
    return module.validated


@pytest.mark.ci
def test_weights_that_a_callback_puts_in_for_validation_are_validated():
    module = Validated()
    runner = trainer("auto", 1, callbacks=[AveragedForValidation()])
    runner.fit(module, all_batches(2, steps=STEPS), batches(0, 2, steps=2))
    for validated in run_processes(2, _averaged):
        torch.testing.assert_close(validated, module.validated, rtol=1e-9, atol=1e-12)


class OneLayer(Validated):
    """A head that is a single layer: its own forward is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES).double()


def _one_layer(rank: int) -> dict[str, list[Tensor]]:
    sample = Sample()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, callbacks=[sample])
    runner.fit(OneLayer(), batches(rank, 2, steps=STEPS), batches(rank, 2, steps=1))
    return sample.seen


@pytest.mark.ci
def test_a_head_of_one_layer():
    sample = Sample()
    trainer("auto", 1, callbacks=[sample]).fit(OneLayer(), all_batches(2, steps=STEPS), batches(0, 2, steps=1))
    seen, _ = run_processes(2, _one_layer)
    for place in PLACES:
        torch.testing.assert_close(seen[place], sample.seen[place], rtol=1e-10, atol=1e-12)


class RepeatedLayer(Validated):
    """Its head applies one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(6, 6)
        self.head = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, CLASSES)).double()


def _repeated(rank: int) -> list[Tensor]:
    module = RepeatedLayer()
    runner = trainer(KrizhevskyHybridStrategy(), 2, use_distributed_sampler=False, max_epochs=2)
    runner.fit(module, batches(rank, 2, STEPS), all_batches(1))
    return module.validated


@pytest.mark.ci
def test_a_head_that_applies_a_layer_twice():
    expected = RepeatedLayer()
    trainer("auto", 1, max_epochs=2).fit(expected, all_batches(2, STEPS), all_batches(1))
    for validated in run_processes(2, _repeated):
        torch.testing.assert_close(validated, expected.validated, rtol=1e-9, atol=1e-12)


class Keyword(Validated):
    """Passes the head its argument by the name that nn.Linear and nn.Sequential give it."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = X  # a summary of the model calls it, too

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=self.trunk(x))

    def head_step(self, features: Tensor, target: Tensor) -> Tensor:
        return self.cost(self.head(input=features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else self.cost(self(batch[0]), batch[1])


def _keyword(rank: int) -> list[list[Tensor]]:
    seen = []
    for evaluation in ("gathered", "sharded"):
        module = Keyword()
        strategy = KrizhevskyHybridStrategy(evaluation=evaluation)
        runner = trainer(strategy, 2, use_distributed_sampler=False, enable_model_summary=True)
        runner.fit(module, batches(rank, 2, steps=STEPS), all_batches(1))
        seen.append(module.validated)
    return seen


@pytest.mark.ci
def test_a_head_that_is_called_with_its_argument_by_name():
    expected = Keyword()
    trainer("auto", 1).fit(expected, all_batches(2, steps=STEPS), all_batches(1))
    for of_rank in run_processes(2, _keyword):
        for validated in of_rank:
            torch.testing.assert_close(validated, expected.validated, rtol=1e-9, atol=1e-12)
