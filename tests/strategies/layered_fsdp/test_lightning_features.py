"""What users do with Lightning ends as with DDP, whether units are given or found by size."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from lightning_dp import (
    AdaptiveGlobalBatchNorm,
    KrizhevskyHybridStrategy,
    LayeredFSDPStrategy,
    LayeredSGDStrategy,
    Memonger,
    RanksAgree,
)
from lightning_dp._private.torch_names import group_timeout, local_part, without_torch_function
from lightning_dp.strategies import PowerSGD
from lightning_dp.strategies.layered_fsdp.reduction import ShardReduction
from lightning_dp.strategies.layered_sgd import parameter_watch
from lightning_dp.strategies.layered_sgd.host_communicator import Communicator
from tests.ranks import RankError, logged, run_cases, run_processes
from tests.strategies.layered_fsdp.modules import fit, layered, snapshot, whole
from tests.strategies.layered_fsdp.user_cases import (
    CASES,
    Manual,
    ManualNamed,
    Marked,
    Named,
    Normalized,
    Teacher,
    Tie,
    Tied,
    options_of,
)
from tests.strategies.layered_sgd.late_sums import sum_late
from tests.strategies.layered_sgd.staged import is_watched
from tests.strategies.modules import CLASSES, FEATURES, Net, assert_same, data, optimizers, trainer

LAYERS = [nn.Linear, nn.Conv1d]


def shares_a_parameter(case):
    return isinstance(CASES[case][0](), Tied)


def compare_with_ddp(rank, case, wraps=(LAYERS, None)):
    make, _ = CASES[case]
    # DDP does not reduce what becomes trainable; this package's layered SGD does.
    reference = LayeredSGDStrategy(1) if case == "unfreeze" else DDPStrategy(find_unused_parameters=True)
    expected = snapshot(*fit(reference, 4, make(), **options_of(case)))
    if case in ("normalized", "channels last") and rank:  # each rank of DDP ends with running statistics of its own
        expected = {name: value for name, value in expected.items() if "running" not in name}
    for wrap in wraps:
        if wrap is None or not shares_a_parameter(case):
            actual = snapshot(*fit(layered(2, wrap=wrap), 4, make(), **options_of(case)))
            assert_same({name: value for name, value in actual.items() if name in expected}, expected)


def compare_one_wrap_with_ddp(rank, case):
    """Every second case with units by size, and what shares a parameter."""
    by_size = shares_a_parameter(case) or list(CASES).index(case) % 2
    compare_with_ddp(rank, case, [None if by_size else LAYERS])


@pytest.mark.ci
def test_equals_ddp():
    run_cases(4, compare_one_wrap_with_ddp, CASES)


@pytest.mark.slow
def test_equals_ddp_with_units_given_and_by_size():
    run_cases(4, compare_with_ddp, CASES)


def name_parts_twice(rank):
    for make, wraps in ((Named, [None, [Tie]]), (ManualNamed, [None])):
        expected = snapshot(*fit(DDPStrategy(find_unused_parameters=True), 4, make()))
        for wrap in wraps:
            assert_same(snapshot(*fit(layered(2, wrap=wrap), 4, make())), expected)


@pytest.mark.ci
def test_a_part_may_have_several_names_and_a_tie_of_its_own():
    run_processes(4, name_parts_twice)


def fit_after_validation(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, Marked()))
    module = Marked()
    trainer(layered(1), 2, use_distributed_sampler=False).validate(module, data(1, 1), verbose=False)
    assert_same(snapshot(*fit(layered(1), 2, module)), expected)


@pytest.mark.ci
def test_attributes_of_parameters_are_kept_between_runs():
    run_processes(2, fit_after_validation)


class Uses(Callback):
    """Counts the parameters that wait for their update when a batch has ended, and when the next step ends."""

    def __init__(self):
        self.after_step: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.after_step.append(sum(map(is_watched, pl_module.parameters())))


def see_that_updates_wait(rank):
    uses = Uses()
    fit(layered(), 4, Net(), callbacks=[uses])
    assert all(number == 6 for number in uses.after_step), uses.after_step  # all but the frozen layer's
    uses = Uses()
    fit(layered(), 4, Net(), callbacks=[uses], gradient_clip_val=1.0)
    assert not any(uses.after_step), uses.after_step


@pytest.mark.ci
def test_updates_wait_for_the_next_forward_but_not_with_clipping_by_the_norm():
    run_processes(4, see_that_updates_wait)


def read_without_the_watch(rank):
    parameter_watch.LOCAL_PART = "nothing"
    compare_with_ddp(rank, "dictionary")


@pytest.mark.ci
def test_differs_if_the_watch_does_not_see_that_a_unit_is_gathered():
    with pytest.raises(RankError, match="weight"):
        run_processes(4, read_without_the_watch)


class UnshardEarly(Callback):
    """Gathers a unit by hand between two steps."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if hasattr(pl_module.first, "unshard"):
            pl_module.first.unshard()
            weight = pl_module.first.weight.detach().clone()
            pl_module.first.reshard()
        else:
            weight = pl_module.first.weight.detach().clone()
        pl_module.register_buffer("seen", getattr(pl_module, "seen", torch.zeros(())) + weight)


def gather_by_hand(rank):
    expected = snapshot(*fit(DDPStrategy(), 4, Net(), callbacks=[UnshardEarly()]))
    assert_same(snapshot(*fit(layered(), 4, Net(), callbacks=[UnshardEarly()])), expected)


@pytest.mark.ci
def test_a_unit_that_the_user_gathers_is_up_to_date():
    run_processes(4, gather_by_hand)


class Middle(nn.Module):
    """A unit of three layers, of which a forward may leave out the one in the middle."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(FEATURES, 8)
        self.middle = nn.Linear(8, 8)
        self.end = nn.Linear(8, CLASSES)

    def forward(self, x, with_middle):
        x = torch.tanh(self.begin(x))
        return self.end(torch.tanh(self.middle(x)) if with_middle else x)


class LeavesOutTheMiddle(Manual):
    """One step after two backward passes."""

    def __init__(self):
        super().__init__()
        self.part = Middle().double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.part(x, True), y))
        self.manual_backward(nn.functional.cross_entropy(self.part(2 * x, False), y))
        optimizer.step()

    def configure_optimizers(self):
        return optimizers("momentum", self.part.parameters())


def leave_out_the_middle(rank):
    expected = snapshot(*fit(DDPStrategy(find_unused_parameters=True), 2, LeavesOutTheMiddle()))
    sum_late()
    assert_same(snapshot(*fit(layered(1, wrap=[Middle]), 2, LeavesOutTheMiddle())), expected)


@pytest.mark.ci
def test_a_gradient_between_others_is_not_touched_by_their_second_sum():
    run_processes(2, leave_out_the_middle)


class Checkpoints(Net):
    """Runs layers again in backward, the last one too, and between them uses a parameter that the root gathers."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.between = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.between
        x = torch.tanh(checkpoint(self.shared, x, use_reentrant=self.use_reentrant)) @ self.between.T
        return checkpoint(self.last, x, use_reentrant=self.use_reentrant)


def checkpoint_parts(rank):
    expected = snapshot(*fit(DDPStrategy(), 2, Checkpoints(False)))
    for use_reentrant in (False, True):
        assert_same(snapshot(*fit(layered(1), 2, Checkpoints(use_reentrant))), expected)


@pytest.mark.ci
def test_parts_that_are_run_again_in_backward():
    run_processes(2, checkpoint_parts)


class WritesToTeacher(Teacher):
    """Steps after every second batch. What no backward uses is written to, before and after each batch's end."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0])
        self.manual_backward((self.student(batch[0]) - target).square().mean() + self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def write(self, factor):
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(factor)

    def on_after_backward(self):
        self.write(0.9)

    def on_train_batch_end(self, *args):
        self.write(1.2)


def write_to_teacher(rank):
    expected = snapshot(*fit(DDPStrategy(find_unused_parameters=True), 4, WritesToTeacher()))
    for reshards in (False, True):
        assert_same(snapshot(*fit(layered(reshard_after_forward=reshards), 4, WritesToTeacher())), expected)


@pytest.mark.ci
def test_what_callbacks_write_to_a_part_without_backward_stays():
    run_processes(4, write_to_teacher)


def save_and_resume(rank, folder):
    """Six steps at once, and three and three with a checkpoint in between, in each direction."""
    torch.set_num_threads(1)
    net = {"optimizer": "adamw"}
    strategies = {
        "ddp": DDPStrategy,
        "layered_sgd": lambda: LayeredSGDStrategy(2),
        "layered_fsdp": layered,
        "of four": lambda: layered(1),
        "shards": lambda: layered(save_distributed_checkpoint=True),
    }
    module, t = fit(DDPStrategy(), 4, Net(**net), steps=4, max_epochs=2)
    expected = snapshot(module, t)
    for before, after in (
        ("layered_fsdp", "ddp"),
        ("ddp", "layered_fsdp"),
        ("layered_fsdp", "layered_sgd"),
        ("layered_sgd", "of four"),
        ("of four", "layered_fsdp"),
        ("shards", "shards"),
    ):
        path = f"{folder}/{before}-{after}.ckpt".replace(" ", "_")
        _, t = fit(strategies[before](), 4, Net(**net), steps=4, max_epochs=1)
        t.save_checkpoint(path)
        module, t = fit(strategies[after](), 4, Net(**net), steps=4, max_epochs=2, ckpt_path=path)
        assert_same(snapshot(module, t), expected)


@pytest.mark.ci
def test_checkpoints_go_from_and_to_other_strategies(tmp_path):
    run_processes(4, save_and_resume, str(tmp_path))


def resume_on_two(rank, path):
    _, t = fit(layered(1), 2, Net("adamw"), max_epochs=2, ckpt_path=path)
    assert t.global_step > 4


def save_on_four(rank, path):
    _, t = fit(layered(), 4, Net("adamw"), max_epochs=1)
    t.save_checkpoint(path)


@pytest.mark.ci
def test_checkpoints_are_resumed_on_another_number_of_ranks(tmp_path):
    path = str(tmp_path / "four.ckpt")
    run_processes(4, save_on_four, path)
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"]["first.weight"].shape == (8, 6)
    run_processes(2, resume_on_two, path)


def compress(rank):
    exact = snapshot(*fit(layered(), 4))
    for compression, tolerance in (("bf16", 2e-3), ("fp16", 2e-4), ("int8", 2e-2)):
        module, t = fit(layered(compression=compression), 4)
        actual = snapshot(module, t)
        for name, value in exact.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert any(not torch.equal(actual[name], exact[name]) for name in exact)


@pytest.mark.ci
def test_compression_stays_close():
    run_processes(4, compress)


class Branches(nn.Module):
    """A unit of two layers of one size. Each element of the second one's gradient is one, which 8 bits hold."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8, bias=False)
        self.second = nn.Linear(FEATURES, 8, bias=False)

    def forward(self, x, is_first):
        return self.first(x).square().mean() if is_first else self.second.weight.sum()


class UsesBranchesInTurn(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.branches = Branches().double()

    def training_step(self, batch, batch_idx):
        return self.branches(batch[0], batch_idx % 2 == 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def use_branches_in_turn(rank):
    expected = UsesBranchesInTurn().branches.second.weight - 1
    module, _ = fit(layered(1, wrap=[Branches], compression="int8"), 2, UsesBranchesInTurn(), steps=2)
    torch.testing.assert_close(whole(module.branches.second.weight), expected, rtol=0, atol=1e-6)


def test_what_is_left_out_of_one_layer_is_not_added_to_another():
    run_processes(2, use_branches_in_turn)


def resume_compressed(rank, folder):
    """Eight steps at once, and four and four with a checkpoint of each kind in between."""
    for is_folder in (False, True):
        options = {"compression": "int8", "save_distributed_checkpoint": is_folder}
        expected = snapshot(*fit(layered(**options), 4, Net("adamw"), max_epochs=2))
        path = f"{folder}/{is_folder}.ckpt"
        _, t = fit(layered(**options), 4, Net("adamw"), max_epochs=1)
        t.save_checkpoint(path)
        module, t = fit(layered(**options), 4, Net("adamw"), max_epochs=2, ckpt_path=path)
        actual = snapshot(module, t)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.ci
def test_what_compression_has_left_out_is_in_checkpoints(tmp_path):
    run_processes(4, resume_compressed, str(tmp_path))


def say_what_is_dropped(rank, path):
    """A fit with another compression drops what was left out. An evaluation drops nothing."""
    _, t = fit(layered(1, compression="int8"), 2, max_epochs=1)
    t.save_checkpoint(path)
    for compression in ("bf16", None):
        with logged() as said:
            fit(layered(1, compression=compression), 2, max_epochs=2, ckpt_path=path)
        assert sum("written with error feedback" in message for message in said) == 1, said
    for compression in ("int8", None):
        with logged() as said:
            strategy = layered(1, compression=compression)
            t = trainer(strategy, 2, use_distributed_sampler=False)
            t.validate(Net(), data(1, 1), ckpt_path=path, verbose=False)
        assert not any("is dropped" in message for message in said), said
    with logged() as said:
        fit(layered(2, compression="int8"), 2, steps=1)
    assert sum("compression='int8') has no effect: there is a single group" in message for message in said) == 1, said


def test_what_a_compression_drops_is_said_in_training_alone_and_that_it_has_no_effect(tmp_path):
    run_processes(2, say_what_is_dropped, str(tmp_path / "a.ckpt"))


class Pair(nn.Module):
    """Two layers, one of which may be a unit of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return self.right(torch.tanh(self.left(x)))


class Paired(Net):
    def __init__(self):
        super().__init__()
        self.pair = Pair().double()

    def forward(self, x):
        return super().forward(self.pair(x))


def resume_with_other_units(rank, path):
    """All units of before are there, but a layer of one is a unit of its own now."""
    loaded = []
    load = ShardReduction.load_residuals

    def note_and_load(self, residuals):
        loaded.append(set(residuals))
        load(self, residuals)

    def fit_with(wrap, epochs, checkpoint=None):
        with logged() as said:
            module = Paired()
            module.pair.left.is_unit = True
            strategy = layered(1, wrap=wrap, compression="int8")
            return fit(strategy, 2, module, max_epochs=epochs, ckpt_path=checkpoint)[1], said

    ShardReduction.load_residuals = note_and_load
    t, _ = fit_with([Pair], 1)
    t.save_checkpoint(path)
    _, said = fit_with([Pair], 2, path)
    assert not any("is dropped" in message for message in said), said
    _, said = fit_with(lambda part: isinstance(part, Pair) or hasattr(part, "is_unit"), 2, path)
    assert sum("other groups or other units" in message for message in said) == 1, said
    assert "pair" in loaded[0]
    assert loaded[1:] == [set()]


@pytest.mark.ci
def test_what_other_units_have_left_out_is_dropped(tmp_path):
    run_processes(2, resume_with_other_units, str(tmp_path / "a.ckpt"))


def resume_without_residuals(rank, folder):
    ShardReduction.load_residuals = lambda self, residuals: None
    resume_compressed(rank, folder)


@pytest.mark.ci
def test_training_differs_if_what_was_left_out_is_dropped(tmp_path):
    with pytest.raises(RankError, match="weight"):
        run_processes(4, resume_without_residuals, str(tmp_path))


class Changes(Callback):
    """Changes a parameter on one rank."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 3 and batch_idx == 1:
            with torch.no_grad():
                pl_module.last.weight.to_local().add_(1.0)


def compare_ranks(rank):
    fit(layered(), 4, callbacks=[RanksAgree(1)])
    with pytest.raises(RuntimeError, match=r"after step 2: 'last.weight' differs on rank (1|3) from the other ranks"):
        fit(layered(), 4, callbacks=[Changes(), RanksAgree(1)])
    fit(layered(4), 4, callbacks=[RanksAgree(1)])  # nothing to compare


@pytest.mark.ci
def test_ranks_with_the_same_shards_are_compared():
    run_processes(4, compare_ranks)


def assert_all_same(results):
    expected, *others = results
    for actual in others:
        assert_same(actual, expected)


def run_by_hand_and_fit_again(rank):
    """The user runs the module after a fit, which gathers it; it is sharded all the same when the next fit begins."""
    results = []
    for strategy in (DDPStrategy, lambda: layered(wrap=None), lambda: layered(4, wrap=None)):
        module, _ = fit(strategy(), 4, Tied(), steps=2)
        module(torch.ones(2, FEATURES, dtype=torch.float64))
        results.append(snapshot(*fit(strategy(), 4, module, steps=2)))
    assert_all_same(results)


@pytest.mark.ci
def test_a_module_that_was_run_by_hand_is_fitted_again():
    run_processes(4, run_by_hand_and_fit_again)


class FailsOnce(Net):
    """Raises in its third step, before backward. It has a parameter that the root gathers."""

    has_failed = False

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x * self.scale)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and not self.has_failed:
            self.has_failed = True
            raise ArithmeticError
        return loss


class FailsInBackward(FailsOnce):
    """Raises in its third step, in backward, when what comes after the first layer has gradients."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.fails:
            x.register_hook(self.fail)
        return self.scale[:CLASSES] * self.last(torch.tanh(self.shared(x)))

    def fail(self, _):
        raise ArithmeticError

    def training_step(self, batch, batch_idx):
        self.fails = batch_idx == 2 and not self.has_failed
        self.has_failed |= self.fails
        return self.loss(batch)


def fail_and_fit_again(rank, kind):
    results = []
    for strategy in (DDPStrategy, lambda: layered(wrap=None), lambda: layered(wrap=None, reshard_after_forward=False)):
        module = kind()
        with pytest.raises(ArithmeticError):
            fit(strategy(), 4, module)
        results.append(snapshot(*fit(strategy(), 4, module)))
    assert_all_same(results)


@pytest.mark.ci
@pytest.mark.parametrize("kind", [FailsOnce, FailsInBackward])
def test_a_module_whose_training_step_has_failed_is_fitted_again(kind):
    run_processes(4, fail_and_fit_again, kind)


class LastLossOfNothing(Net):
    """The loss of the last batch of each window reaches no parameter."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) if batch_idx % 2 == 0 else torch.zeros((), requires_grad=True) * 2


class ManualWindow(Manual):
    """Its last loss reaches no parameter, or there is none. One optimizer steps within the window of the other one."""

    has_last_loss = True

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        if self.has_last_loss:
            self.manual_backward(torch.zeros((), requires_grad=True) * 2)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()


class WithoutLastLoss(ManualWindow):
    has_last_loss = False


def leave_out_the_last_loss(rank):
    """With a single group nothing of this package's stands between FSDP2 and the step."""
    for make, window in ((LastLossOfNothing, 2), (ManualWindow, 1), (WithoutLastLoss, 1)):
        expected = snapshot(*fit(layered(4), 4, make(), accumulate_grad_batches=window))
        for group_size, overlap in ((1, "step"), (2, "load")):
            actual = snapshot(*fit(layered(group_size, overlap), 4, make(), accumulate_grad_batches=window))
            assert_same(actual, expected)


@pytest.mark.ci
def test_what_a_window_has_added_is_summed_though_its_last_batch_adds_nothing():
    run_processes(4, leave_out_the_last_loss)


def fail_without_a_way_back(rank):
    """As with a torch whose FSDP2 cannot start over after an exception in backward."""
    del FSDPModule.reset_iter_state
    for group_size in (1, 2):
        module = FailsInBackward()
        with pytest.raises(ArithmeticError):
            fit(layered(group_size), 2, module)
        with pytest.raises(RuntimeError, match="earlier backward of .*FailsInBackward, .* build the module again"):
            fit(layered(group_size), 2, module)
        module.fails = False
        t = trainer(layered(group_size), 2, use_distributed_sampler=False)
        t.validate(module, data(1, 1), verbose=False)  # no backward
        with pytest.raises(RuntimeError, match="earlier backward of .*GoesOn, .* build the module again"):
            fit(layered(group_size), 2, GoesOn(raises=True, retries=True))
    fit(layered(1), 2, FailsOnce(), steps=2)  # no exception, no error


@pytest.mark.ci
def test_an_error_says_that_fsdp2_cannot_go_on_after_a_backward_that_has_failed():
    run_processes(2, fail_without_a_way_back)


class GoesOn(Manual):
    """The second batch's backward raises. The step catches that, and leaves the batch out, or runs it once more.

    A layer is used in every second step only.
    """

    def __init__(self, raises, retries):
        super().__init__()
        self.raises, self.retries = raises, retries
        self.sometimes = nn.Linear(8, 8).double()

    def forward(self, x, fails=False):
        x = torch.tanh(self.first(x))
        if fails:
            x.register_hook(FailsInBackward.fail.__get__(self))
        x = self.sometimes(x) if self.is_even else x
        return self.last(torch.tanh(self.shared(x)))

    def run(self, batch, fails):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0], fails), batch[1]))
        for optimizer in self.optimizers():
            optimizer.step()

    def training_step(self, batch, batch_idx):
        self.is_even = batch_idx % 2 == 0
        if batch_idx == 1 and self.raises:
            with pytest.raises(ArithmeticError):
                self.run(batch, True)
        if batch_idx != 1 or self.retries:
            self.run(batch, False)

    def configure_optimizers(self):
        return [
            optimizers("momentum", [*self.first.parameters(), *self.shared.parameters()]),
            optimizers("adamw", [*self.sometimes.parameters(), *self.last.parameters()]),
        ]


class GoesOnByItself(GoesOn):
    """Calls the backward that raises by itself, so that the strategy does not see it end."""

    def manual_backward(self, loss, *args, **options):
        if self.fails:
            loss.backward()
        super().manual_backward(loss, *args, **options)

    def run(self, batch, fails):
        self.fails = fails
        super().run(batch, fails)


def go_on(rank):
    for retries in (False, True):
        expected = snapshot(*fit(DDPStrategy(find_unused_parameters=True), 4, GoesOn(False, retries)))
        for group_size in (1, 2, 4):
            assert_same(snapshot(*fit(layered(group_size), 4, GoesOn(True, retries))), expected)
        if retries:
            with pytest.raises(RuntimeError, match=r"earlier backward of .*; call self\.manual_backward instead"):
                fit(layered(2), 4, GoesOnByItself(True, retries))
        else:
            assert_same(snapshot(*fit(layered(2), 4, GoesOnByItself(True, retries))), expected)


@pytest.mark.ci
def test_training_goes_on_after_a_backward_that_has_raised():
    run_processes(4, go_on, timeout=60)


def fit_then_run_otherwise(rank):
    module, _ = fit(layered(1), 2)
    for make in (lambda: LayeredSGDStrategy(1), lambda: KrizhevskyHybridStrategy(head="last")):
        with pytest.raises(ValueError, match="is sharded over ranks.* build the module again"):
            fit(make(), 2, module)
        with pytest.raises(ValueError, match="is sharded over ranks.* build the module again"):
            trainer(make(), 2).validate(module, data(2, 1), verbose=False)


@pytest.mark.ci
def test_another_strategy_refuses_the_module_that_was_sharded():
    run_processes(2, fit_then_run_otherwise)


class Even(Net):
    """All sizes are multiples of the group's, so that no shard is padded."""

    def __init__(self):
        super().__init__("adamw")
        self.last = nn.Linear(8, 4).double()


class Bytes(Callback):
    """Counts the bytes of parameters, gradients and optimizer states after a step; a storage once."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        (optimizer,) = trainer.optimizers
        with without_torch_function():  # a reader gets a copy of a gradient that lies in a bucket
            gradients = [p.grad for p in parameters]
        kinds = {
            "parameters": parameters,
            "gradients": gradients,
            "states": [v for p in parameters for k, v in optimizer.state[p].items() if k != "step"],
        }
        self.found = {
            kind: sum({s.data_ptr(): s.nbytes() for s in (local_part(t).untyped_storage() for t in tensors)}.values())
            for kind, tensors in kinds.items()
        }


def count_bytes(rank):
    whole, shards = Bytes(), Bytes()
    fit(LayeredSGDStrategy(2), 4, Even(), callbacks=[whole])
    fit(layered(2), 4, Even(), callbacks=[shards])
    numel = sum(p.numel() for p in Even().parameters() if p.requires_grad)
    assert whole.found == {"parameters": 8 * numel, "gradients": 8 * numel, "states": 16 * numel}, whole.found
    assert shards.found == {kind: size // 2 for kind, size in whole.found.items()}, shards.found


@pytest.mark.ci
def test_memory_is_that_of_layered_sgd_over_the_ranks_of_a_group():
    run_processes(4, count_bytes)


def fit_again_without_global_statistics(rank):
    """FSDP2 has given a layer that is a unit of its own another class, which cannot be taken back."""
    results = []
    for make in (DDPStrategy, lambda: layered(wrap=[nn.Linear, nn.BatchNorm1d])):
        module, _ = fit(make(), 4, Normalized(), steps=2, callbacks=[AdaptiveGlobalBatchNorm()])
        results.append(snapshot(*fit(make(), 4, module, steps=2)))
    expected, actual = ({n: v for n, v in each.items() if "running" not in n} for each in results)
    assert_same(actual, expected)


@pytest.mark.ci
def test_batch_norm_that_was_global_in_an_earlier_fit_is_local_again():
    run_processes(4, fit_again_without_global_statistics)


def train_in_bfloat16(rank):
    exact = snapshot(*fit(layered(), 4, Net().float()))
    for precision in ("bf16-mixed", "bf16-true"):
        expected = snapshot(*fit(DDPStrategy(), 4, Net().float(), precision=precision))
        actual = snapshot(*fit(layered(), 4, Net().float(), precision=precision))
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=2e-2, atol=2e-2)
        assert any(not torch.equal(actual[name].float(), value) for name, value in exact.items())


@pytest.mark.ci
def test_precision():
    run_processes(4, train_in_bfloat16)


class ReadsOnOneRank(Callback):
    """Rank 1 alone looks at a parameter between two steps."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_rank == 1:
            float(pl_module.first.weight.detach().to_local().sum())


def scale_gradients(rank):
    results = []
    for callbacks in ([], [ReadsOnOneRank()]):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        results.append(snapshot(*fit(layered(2), 4, Net().float(), plugins=[plugin], callbacks=callbacks)))
    assert_same(*results)


@pytest.mark.ci
def test_one_rank_alone_may_read_a_parameter_under_a_gradient_scaler():
    run_processes(4, scale_gradients, timeout=60)


class Configured(Net):
    """Shards itself, in single precision."""

    def configure_model(self):
        if not hasattr(self.first, "unshard"):
            for part in (self.first, self.shared, self.frozen, self.last, self):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


def train_what_shards_itself(rank):
    expected = snapshot(*fit(layered(1), 2, Net().float(), precision="bf16-true"))
    assert_same(snapshot(*fit(layered(1), 2, Configured().float(), precision="bf16-true")), expected, rtol=0)


@pytest.mark.ci
def test_a_module_that_shards_itself_has_the_precision_of_the_trainer():
    run_processes(2, train_what_shards_itself)


def seed_differently(rank):
    class Random(Net):
        def __init__(self):
            super().__init__()
            torch.manual_seed(rank)
            nn.init.normal_(self.first.weight)

    module, _ = fit(layered(), 4, Random())
    rows = whole(module.first.weight)
    others = [torch.empty_like(rows) for _ in range(4)]
    torch.distributed.all_gather(others, rows)
    assert all(torch.equal(other, rows) for other in others)


@pytest.mark.ci
def test_all_ranks_begin_with_the_parameters_of_rank_0():
    run_processes(4, seed_differently)


class Evaluated(Net):
    def test_step(self, batch, batch_idx):
        self.loss(batch)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def evaluate_different_numbers(rank):
    """Of five samples rank 0 has two, and the others one. Of six the ranks of the first group have two."""
    samples = data(1, 6, 1).dataset
    with pytest.raises(ValueError, match=r"numbers of batches \(\[2\], \[1\], \[1\], \[1\]\), and each"):
        trainer(layered(), 4).predict(Evaluated(), DataLoader(Subset(samples, range(5))))
    assert len(trainer(layered(), 4).predict(Evaluated(), DataLoader(samples))) == 2 - rank // 2
    for evaluate in ("validate", "test"):
        t = trainer(layered(), 4, use_distributed_sampler=False)
        with pytest.raises(ValueError, match=r"numbers of batches \(\[1\], \[2\], \[1\], \[2\]\), and each"):
            getattr(t, evaluate)(Evaluated(), data(1, 1 + rank % 2), verbose=False)


@pytest.mark.ci
def test_ranks_of_a_group_with_different_numbers_of_batches_are_named():
    run_processes(4, evaluate_different_numbers, timeout=60)


class Scaled(Net):
    """A buffer that each rank has drawn for itself scales the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))
        self.register_buffer("scale", torch.randn(FEATURES, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x * self.scale)


class ScaledAndSharded(Scaled):
    configure_model = Configured.configure_model


def draw_buffers(rank):
    expected = snapshot(*fit(DDPStrategy(), 4, Scaled()))
    assert_same(snapshot(*fit(layered(), 4, ScaledAndSharded())), expected)


@pytest.mark.ci
def test_a_module_that_shards_itself_begins_with_the_buffers_of_rank_0():
    run_processes(4, draw_buffers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": PowerSGD(rank=2)}, "has a shard of them"),
        ({"overlap": "never"}, "overlap='never' is not known"),
        ({"compression": "int7"}, "int7"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        LayeredFSDPStrategy(**options)


class KeepsList(Net):
    def __init__(self):
        super().__init__()
        self.weights = [self.first.weight, self.last.weight]

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.weights}, {"params": self.shared.parameters()}], lr=0.1)


class Phase(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self, x):
        return x


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.part = Phase()


def refuse(rank):
    class Bare(Manual):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    class Sparse(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4, sparse=True)

    class Renormalized(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4, max_norm=1.0)

    class SharesMemory(Net):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(8, 8).double()
            self.again.weight.data = self.shared.weight.data

    validated = KeepsList()
    trainer(layered(), 4, use_distributed_sampler=False).validate(validated, data(1, 1), verbose=False)
    for strategy, module, options, message in (
        (layered(), KeepsList(), {}, "first.weight as it was before the module was sharded"),
        (layered(), validated, {}, "first.weight as it was before the module was sharded"),
        (layered(wrap=[Phase], compression="bf16"), Complex(), {}, "'bf16' cannot round part.phase, which is"),
        (layered(), Sparse(), {}, "sparse gradients of 'table'"),
        (layered(), Renormalized(), {}, r"table has max_norm=1\.0"),
        (layered(wrap=[nn.LSTM]), Net(), {}, "finds no part of Net"),
        (layered(), Tied(), {}, "shares a parameter"),
        (layered(wrap=[nn.Sequential]), Named(), {}, "finds 'left', which shares a parameter"),
        (layered(), Bare(), {}, "scale belongs to a Bare"),
        (layered(), SharesMemory(), {}, "again.weight and shared.weight are two parameters that share memory"),
        (layered(), Net(), {"callbacks": [Memonger()]}, "frees the parameters"),
        (layered(), Net(), {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging copies the module"),
        (layered(), Net(), {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging copies"),
        (layered(), Net(), {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning looks at whole parameters"),
        (layered(), Net("lbfgs"), {}, "cannot run LBFGS"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(strategy, 4, module, **options)


class Hook(Callback):
    def on_train_start(self, trainer, pl_module):
        pl_module.first.weight.register_hook(lambda gradient: gradient)


class HooksInStep(Net):
    def training_step(self, batch, batch_idx):
        self.first.weight.register_hook(lambda gradient: gradient)
        return super().training_step(batch, batch_idx)


def hook(rank):
    early = Net()
    early.first.weight.register_hook(lambda gradient: gradient)
    for group_size in (2, 4):
        for module, callbacks in ((early, []), (Net(), [Hook()]), (HooksInStep(), [])):
            with pytest.raises(ValueError, match="first.weight has a hook on its gradient"):
                fit(layered(group_size), 4, module, callbacks=callbacks)


@pytest.mark.ci
def test_hooks_that_would_not_be_called_are_refused():
    run_processes(4, hook)


class StepsInHook(Callback):
    """Steps and drops each gradient as soon as it is there."""

    def on_train_start(self, trainer, pl_module):
        def step(parameter):
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        pl_module.shared.weight.register_post_accumulate_grad_hook(step)


def take_a_gradient(rank):
    with pytest.raises(RuntimeError, match="shared has lost a gradient before it was summed"):
        fit(layered(1), 2, callbacks=[StepsInHook()])


def test_a_hook_that_takes_a_gradient_before_its_sum_is_named():
    run_processes(2, take_a_gradient)


class Differs(Net):
    """The first group uses one layer, the second another one of the same size."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8).double()
        self.other = nn.Linear(8, 8).double()

    def forward(self, x):
        part = self.one if self.global_rank < 2 else self.other
        return self.last(self.shared(part(torch.tanh(self.first(x)))))


class More(Differs):
    """The first group uses a layer more."""

    def forward(self, x):
        x = self.other(torch.tanh(self.first(x)))
        return self.last(self.shared(self.one(x) if self.global_rank < 2 else x))


class Less(Differs):
    """The second group uses a layer more."""

    def forward(self, x):
        x = self.other(torch.tanh(self.first(x)))
        return self.last(self.shared(self.one(x) if self.global_rank >= 2 else x))


def differ(rank, case):
    torch.set_num_threads(1)
    submitted = []
    Communicator.submit = lambda self, *bucket: submitted.append(bucket)
    module = {"other": Differs, "more": More, "less": Less}[case.split()[0]]()
    with pytest.raises(RuntimeError, match=r"one(, other)?: backward gave gradients to other parameters"):
        fit(layered(overlap=case.split()[1]), 4, module)
    assert not submitted, "gloo may end the process where sizes differ"


@pytest.mark.ci
@pytest.mark.parametrize("case", ["other step", "more step", "less step", "more load"])
def test_groups_that_use_other_parts_are_named(case):
    run_processes(4, differ, case, timeout=60)


class WithoutLoss(Net):
    """In the third step the loss of rank 1 reaches no parameter, as where its batch has no sample to learn from."""

    @property
    def is_left_out(self):
        return self.global_rank == 1 and self.global_step == 2

    def training_step(self, batch, batch_idx):
        return torch.zeros((), requires_grad=True) * 2 if self.is_left_out else self.loss(batch)


class ManualWithoutLoss(WithoutLoss, Manual):
    """Runs no backward then."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if not self.is_left_out:
            self.manual_backward(self.loss(batch))
        optimizer.step()

    configure_optimizers = Net.configure_optimizers


def leave_out_a_loss(rank, make):
    with pytest.raises(RuntimeError, match="first, shared, last: backward gave gradients to other parameters"):
        fit(layered(1), 2, make())


@pytest.mark.ci
@pytest.mark.parametrize("make", [WithoutLoss, ManualWithoutLoss])
def test_a_rank_whose_loss_reaches_nothing_does_not_give_its_next_gradients_in_its_place(make):
    run_processes(2, leave_out_a_loss, make, timeout=60)


class Penalized(Manual):
    """A critic with a gradient penalty: some gradients come when FSDP2 has reduced those of their unit."""

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def loss(self, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return self(2 * batch[0]).mean() + (slope.norm(dim=1) - 1).square().mean()


def penalize(rank):
    for group_size in (1, 2):
        module = Penalized()
        before = [whole(parameter) for parameter in module.parameters()]
        with pytest.raises(RuntimeError, match="last got a gradient after FSDP2 had reduced its gradients"):
            fit(layered(group_size), 2, module)
        assert all(torch.equal(whole(p), value) for p, value in zip(module.parameters(), before, strict=True))


@pytest.mark.ci
def test_a_gradient_that_fsdp2_would_lose_is_named_before_anything_is_updated():
    run_processes(2, penalize)


def change_in_load(rank, path):
    class Changes(Net):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["first.weight"] *= 0.5

    _, t = fit(layered(), 4)
    t.save_checkpoint(path)
    expected = snapshot(*fit(DDPStrategy(), 4, Changes(), max_epochs=2, ckpt_path=path))
    assert_same(snapshot(*fit(layered(), 4, Changes(), max_epochs=2, ckpt_path=path)), expected)


@pytest.mark.ci
def test_what_on_load_checkpoint_changes_is_loaded(tmp_path):
    run_processes(4, change_in_load, str(tmp_path / "a.ckpt"))


@pytest.mark.ci
def test_what_cannot_be_sharded_is_refused():
    run_processes(4, refuse)


def test_groups_must_be_equal():
    with pytest.raises(ValueError, match="group_size=3"):
        trainer(layered(3), 4)


def test_batch_norm_that_lightning_would_leave_local_is_refused():
    with pytest.raises(ValueError, match="sync_batchnorm=True has no effect"):
        trainer(layered(2), 4, sync_batchnorm=True)


def find_units(rank):
    module, _ = fit(layered(1, wrap=None), 2)
    units = [name for name, part in module.named_modules() if hasattr(part, "unshard")]
    assert {"first", "shared", "last"} <= set(units)


@pytest.mark.ci
def test_units_are_found_by_size():
    run_processes(2, find_units)


def timeouts_of_groups(rank):
    strategy = layered(2, timeout=timedelta(seconds=45))
    timeouts = {}

    class Reader(Callback):
        def on_train_start(self, trainer, module):
            for name in module.device_mesh.mesh_dim_names:
                timeouts[name] = group_timeout(module.device_mesh[name].get_group(), torch.device("cpu"))

    fit(strategy, 4, callbacks=[Reader()], steps=1)
    return timeouts


@pytest.mark.ci
def test_the_timeout_is_that_of_the_groups_too():
    # Those of `init_device_mesh` would have PyTorch's half an hour.
    for timeouts in run_processes(4, timeouts_of_groups):
        assert timeouts == dict.fromkeys(["replicate", "data_parallel"], timedelta(seconds=45))
