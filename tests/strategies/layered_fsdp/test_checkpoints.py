"""Checkpoint files are those of DDP, whatever the optimizers hold, and training continues from them as from DDP's."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import BaseFinetuning
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torchmetrics import CatMetric

from lightning_dp import AdaptiveGlobalBatchNorm, LayeredSGDStrategy
from lightning_dp._private.torch_names import keystr, tree_leaves_with_path
from lightning_dp.runs.checkpoints import require_intact
from lightning_dp.strategies import consolidate_checkpoint
from lightning_dp.strategies.complete_files import CHECKSUMS
from lightning_dp.strategies.layered_sgd import update
from tests.ranks import ends_of_processes, run_cases, run_processes
from tests.strategies.layered_fsdp.modules import fit, layered, snapshot, whole
from tests.strategies.layered_fsdp.user_cases import Manual, Normalized, Tied
from tests.strategies.modules import Net, assert_same, data, optimizers, trainer


class OtherOrder(Net):
    """Groups of an optimizer in another order than the module's; three parameters have equal shapes."""

    def configure_optimizers(self):
        groups = [self.last, self.frozen, self.shared, self.first]
        return optimizers("adamw", [{"params": list(part.parameters())[::-1]} for part in groups])


class OthersOrder(Manual):
    """Two optimizers, each with some of the parameters, in another order than the module's."""

    def configure_optimizers(self):
        return [
            optimizers("momentum", [*self.shared.parameters(), *self.first.parameters()]),
            optimizers("adamw", self.last.parameters()),
        ]


class Compiled(Net):
    """A part is compiled, so the module's names are not those of the parameters for PyTorch's checkpoints."""

    def __init__(self):
        super().__init__("adamw")
        self.shared = torch.compile(self.shared, backend="eager")


class CountsSteps(torch.optim.Optimizer):
    """Momentum, kept in a list, and a count of steps that belongs to no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        loss = closure()
        self.state["count"] = self.state.get("count", 0) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                (momentum,) = self.state[p].setdefault("buffers", [torch.zeros_like(p)])
                p.sub_(momentum.lerp_(p.grad, 0.5), alpha=0.1 / self.state["count"])
        return loss


class OwnOptimizer(Net):
    """Its optimizer has states that PyTorch's do not have."""

    def configure_optimizers(self):
        return CountsSteps(self.parameters())


class PartlyUsed(Net):
    """A layer is never used."""

    def __init__(self):
        super().__init__("adamw")
        self.unused = nn.Linear(8, 8).double()


class Prefixed(Net):
    """Its checkpoints have names of its own."""

    def __init__(self):
        super().__init__("adamw")

    def state_dict(self, *args, **kwargs):
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict, *args, **kwargs):
        own = {name.removeprefix("net."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)


class OldNames(Net):
    """Its checkpoints have the names that PyTorch gave weight norm once. A hook of PyTorch's own knows them."""

    def __init__(self):
        super().__init__("adamw")
        self.shared = nn.utils.parametrizations.weight_norm(self.shared)

    def state_dict(self, *args, **kwargs):
        def old(name):
            name = name.replace("parametrizations.weight.original0", "weight_g")
            return name.replace("parametrizations.weight.original1", "weight_v")

        return {old(name): value for name, value in super().state_dict(*args, **kwargs).items()}


class Merged(Net):
    """Its checkpoints keep a change of a weight beside the weight, as those of LoRA do, and a hook adds it."""

    def __init__(self):
        super().__init__("adamw")
        self.register_load_state_dict_pre_hook(self.merge)

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "change": torch.full((8, 8), 2.0)}

    @staticmethod
    def merge(module, state, *args):
        state["shared.weight"] = state["shared.weight"] * state.pop("change")


class Copied(Net):
    """It copies each value to its parameter itself."""

    def __init__(self):
        super().__init__("adamw")

    def load_state_dict(self, state_dict, *args, **kwargs):
        own = self.state_dict()
        for name, value in state_dict.items():
            own[name].copy_(value)


MODULES = {
    "other order": OtherOrder,
    "others' order": OthersOrder,
    "own optimizer": OwnOptimizer,
    "tied": Tied,
    "compiled": Compiled,
    "partly used": PartlyUsed,
    "prefixed": Prefixed,
    "old names": OldNames,
    "merged": Merged,
    "copied": Copied,
}
IN_FOLDERS = ["other order", "others' order", "tied", "compiled", "partly used"]


def content(path):
    """What a file holds of the module and the optimizers, by name."""
    checkpoint = torch.load(path, weights_only=True)
    values = dict(checkpoint["state_dict"])
    for index, optimizer in enumerate(checkpoint["optimizer_states"]):
        values[f"{index}.groups"] = torch.tensor([n for group in optimizer["param_groups"] for n in group["params"]])
        states = tree_leaves_with_path(optimizer["state"])
        values |= {f"{index}.{keystr(path)}": torch.as_tensor(value) for path, value in states}
    return values


def ddp():
    return DDPStrategy(find_unused_parameters=True)


def save_and_resume(rank, case, folder):
    torch.set_num_threads(1)
    make = MODULES[case]
    warnings.filterwarnings("ignore", "The .grad attribute")  # Dynamo reads it
    wrap = None if case == "tied" else [nn.Linear]
    files = {}
    for name, strategy in (("ddp", ddp()), ("layered", layered(wrap=wrap))):
        files[name] = f"{folder}/{case}-{name}.ckpt".replace(" ", "-")
        _, trainer = fit(strategy, 4, make(), max_epochs=1, steps=2)
        trainer.save_checkpoint(files[name])
    assert_same(content(files["layered"]), content(files["ddp"]))
    expected = snapshot(*fit(ddp(), 4, make(), max_epochs=2, ckpt_path=files["ddp"], steps=2))
    assert_same(
        snapshot(*fit(layered(1, wrap=wrap), 4, make(), max_epochs=2, ckpt_path=files["ddp"], steps=2)), expected
    )
    if case in IN_FOLDERS:
        _, trainer = fit(layered(wrap=wrap, save_distributed_checkpoint=True), 4, make(), max_epochs=1, steps=2)
        trainer.save_checkpoint(f"{folder}/{case}")
        resumed = fit(layered(1, wrap=wrap), 4, make(), max_epochs=2, ckpt_path=f"{folder}/{case}", steps=2)
        assert_same(snapshot(*resumed), expected)


@pytest.mark.ci
def test_what_is_saved_is_what_ddp_saves(tmp_path):
    run_cases(4, save_and_resume, MODULES, str(tmp_path))


class Turned(nn.Linear):
    """Before version 2 its states had the weight the other way round."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *args)


class WithTurned(Net):
    def __init__(self):
        super().__init__("adamw")
        self.shared = Turned(*reversed(self.shared.weight.shape)).double()


def save_and_resume_a_version(rank, path):
    torch.set_num_threads(1)
    fitted = fit(layered(), 2, WithTurned(), max_epochs=1, steps=2)
    fitted[1].save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    loaded = WithTurned()
    loaded.load_state_dict(saved)
    assert_same(loaded.state_dict(), saved)
    # DDP loads the values as they are.
    resumed = fit(layered(), 2, WithTurned(), max_epochs=2, ckpt_path=path, steps=2)
    assert_same(snapshot(*resumed), snapshot(*fit(ddp(), 2, WithTurned(), max_epochs=2, ckpt_path=path, steps=2)))


@pytest.mark.ci
def test_a_layer_finds_its_version_in_a_checkpoint(tmp_path):
    run_processes(2, save_and_resume_a_version, str(tmp_path / "versions.ckpt"))


class ReadsInOtherOrder(Callback):
    """Odd ranks use the last parameter first after each step, which makes the states of the last unit first."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        parameters = list(pl_module.parameters())
        for parameter in reversed(parameters) if trainer.global_rank % 2 else parameters:
            parameter.to_local()


def save_states_of_different_age(rank, path):
    _, trainer = fit(DDPStrategy(), 4, Net("adamw"), max_epochs=1, steps=2)
    trainer.save_checkpoint(f"{path}.ddp")
    update.takewhile = lambda arrived, buckets: []  # no sum but the one that is waited for has arrived
    _, trainer = fit(layered(), 4, Net("adamw"), max_epochs=1, steps=2, callbacks=[ReadsInOtherOrder()])
    trainer.save_checkpoint(path)
    assert_same(content(path), content(f"{path}.ddp"))


@pytest.mark.ci
def test_ranks_may_have_made_the_states_in_different_orders(tmp_path):
    run_processes(4, save_states_of_different_age, str(tmp_path / "a.ckpt"))


class Unfreeze(BaseFinetuning):
    """Adds the frozen layer to the optimizer in the second epoch, and trains it in the third one, too."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.frozen)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.frozen, optimizer, lr=0.05)
        elif epoch == 2:
            self.make_trainable(pl_module.frozen)


def resume_finetuning(rank, folder):
    """Two epochs and one. DDP does not reduce what becomes trainable; this package's layered SGD does."""
    torch.set_num_threads(1)
    expected = None
    for name, make in (
        ("reference", lambda: LayeredSGDStrategy(1)),
        ("file", layered),
        ("folder", lambda: layered(save_distributed_checkpoint=True)),
    ):
        path = f"{folder}/{name}.ckpt"
        _, trainer = fit(make(), 4, Net("adamw"), max_epochs=2, callbacks=[Unfreeze()])
        trainer.save_checkpoint(path)
        module, trainer = fit(make(), 4, Net("adamw"), max_epochs=3, callbacks=[Unfreeze()], ckpt_path=path)
        actual = snapshot(module, trainer)
        expected = expected or actual
        assert "frozen.weight.0.exp_avg" in expected
        assert_same(actual, expected)


@pytest.mark.ci
def test_groups_that_finetuning_has_added_are_resumed(tmp_path):
    run_processes(4, resume_finetuning, str(tmp_path))


def write_folders(rank, folder):
    """Snapshots after two epochs, and the folders after one."""
    torch.set_num_threads(1)
    found = {}
    for module in (OtherOrder, OthersOrder):
        _, trainer = fit(layered(save_distributed_checkpoint=True), 2, module(), max_epochs=1)
        trainer.save_checkpoint(f"{folder}/{module.__name__}")
        found[module.__name__] = snapshot(*fit(layered(), 2, module(), max_epochs=2))
    return found


def continue_from_files(rank, folder, expected):
    torch.set_num_threads(1)
    for make in (lambda: LayeredSGDStrategy(1), DDPStrategy):
        for module in (OtherOrder, OthersOrder):
            path = f"{folder}/{module.__name__}.ckpt"
            found = snapshot(*fit(make(), 2, module(), max_epochs=2, ckpt_path=path))
            assert_same(found, expected[module.__name__])


@pytest.mark.ci
def test_any_strategy_continues_from_a_folder_that_was_made_a_file(tmp_path):
    expected, _ = run_processes(2, write_folders, str(tmp_path))
    for name in expected:
        with pytest.raises(ValueError, match="if you trust it, use weights_only=False"):
            consolidate_checkpoint(tmp_path / name, tmp_path / f"{name}.ckpt")
        consolidate_checkpoint(tmp_path / name, tmp_path / f"{name}.ckpt", weights_only=False)
        with pytest.raises(ValueError, match="exists; remove it"):
            consolidate_checkpoint(tmp_path / name, tmp_path / f"{name}.ckpt", weights_only=False)
    run_processes(2, continue_from_files, str(tmp_path), expected)
    assert {path.name for path in tmp_path.iterdir()} == {*expected, *(f"{name}.ckpt" for name in expected)}


class Average(Callback):
    """An average of the weights that is in checkpoints, as any callback of a user keeps it."""

    average = None

    def on_train_start(self, trainer, pl_module):
        self.average = self.average or {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, parameter in pl_module.named_parameters():
            self.average[name].lerp_(parameter.detach(), 0.3)

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state_dict):
        self.average = state_dict["average"]


def resume_average(rank, folder):
    files = {"ddp": DDPStrategy, "file": layered, "folder": lambda: layered(save_distributed_checkpoint=True)}
    expected = None
    for name, make in files.items():
        path = f"{folder}/{name}.ckpt"
        _, trainer = fit(make(), 4, max_epochs=1, steps=2, callbacks=[Average()])
        trainer.save_checkpoint(path)
        average = Average()
        fit(make() if name == "ddp" else layered(1), 4, max_epochs=2, steps=2, callbacks=[average], ckpt_path=path)
        actual = {key: whole(value) for key, value in average.average.items()}
        expected = expected or actual
        assert_same(actual, expected)
    found, plain = (torch.load(f"{folder}/{name}.ckpt", weights_only=True)["callbacks"] for name in ("file", "ddp"))
    assert_same(found["Average"]["average"], plain["Average"]["average"])


@pytest.mark.ci
def test_shards_that_a_callback_keeps_are_whole_in_a_checkpoint_and_shards_again(tmp_path):
    run_processes(4, resume_average, str(tmp_path))


class WithoutFrozen(Net):
    """Chooses what to save from its own ``state_dict``."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        values = self.state_dict()
        del values["frozen.weight"]
        checkpoint["state_dict"] = values


class OnRank0(WithoutFrozen):
    def on_save_checkpoint(self, checkpoint):
        if self.global_rank == 0:
            super().on_save_checkpoint(checkpoint)


def save_own_choice(rank, folder):
    saved = []
    for strategy in (DDPStrategy(), layered()):
        _, trainer = fit(strategy, 4, WithoutFrozen(), steps=2)
        path = f"{folder}/{type(strategy).__name__}.ckpt"
        trainer.save_checkpoint(path)
        saved.append(torch.load(path, weights_only=True)["state_dict"])
    assert_same(*saved)
    assert saved[0]._metadata == saved[1]._metadata
    fit(layered(), 4, WithoutFrozen(), steps=2, max_epochs=2, ckpt_path=path)
    _, trainer = fit(layered(), 4, OnRank0(), steps=2)
    with pytest.raises(
        ValueError, match=r"checkpoint\['state_dict'\]\['first.bias'\] is a shard on rank 0 or on rank 1"
    ):
        trainer.save_checkpoint(path)


@pytest.mark.ci
def test_what_the_module_itself_puts_into_a_checkpoint_is_whole(tmp_path):
    run_processes(4, save_own_choice, str(tmp_path), timeout=60)


class GivenParts(Net):
    """Keeps the parts that it is given as hyperparameters, too."""

    def __init__(self, part):
        super().__init__()
        self.save_hyperparameters()
        self.shared = part


def save_given_parts(rank, folder):
    warnings.filterwarnings("ignore", "Attribute 'part' is an instance of `nn.Module`")
    for saves_shards in (False, True):
        part = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        strategy = layered(wrap=None, save_distributed_checkpoint=saves_shards)
        module, trainer = fit(strategy, 2, GivenParts(part), steps=2)
        trainer.save_checkpoint(path := f"{folder}/{saves_shards}")
        expected = {name: whole(p) for name, p in module.named_parameters()}
        if rank == 0:
            if saves_shards:
                consolidate_checkpoint(path, path := f"{path}.ckpt", weights_only=False)
            loaded = GivenParts.load_from_checkpoint(path, weights_only=False)
            assert_same({name: p.detach() for name, p in loaded.named_parameters()}, expected)


def test_a_module_is_built_again_from_parts_that_are_hyperparameters(tmp_path):
    run_processes(2, save_given_parts, str(tmp_path), timeout=60)


class SeesBuffers(Callback):
    """Saves in the middle of an epoch, and keeps the buffers of then, or of when training begins."""

    def __init__(self, path=None):
        self.path = path

    def look(self, trainer, pl_module):
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}

    on_train_start = look

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1 and self.path is not None:
            self.look(trainer, pl_module)
            trainer.save_checkpoint(self.path)


def save_buffers(rank, path):
    saves, loads = SeesBuffers(path), SeesBuffers()
    fit(layered(save_distributed_checkpoint=True), 2, Normalized(), callbacks=[saves])
    fit(layered(), 2, Normalized(), callbacks=[loads], ckpt_path=path)
    return saves.buffers, loads.buffers


def test_a_folder_has_the_buffers_of_rank_0(tmp_path):
    (expected, loaded), (others, loaded_there) = run_processes(2, save_buffers, str(tmp_path / "a"))
    assert not torch.equal(others["norm.running_mean"], expected["norm.running_mean"])
    assert_same(loaded, expected)
    assert_same(loaded_there, expected)


class Grows(nn.Module):
    """Has an extra state of this kind, which gets a value in each step, another one on each rank."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.values = kind, []

    def get_extra_state(self):
        named = {f"step {number}": value for number, value in enumerate(self.values)}
        return {"list": {"values": self.values}, "dict": named, "tensor": torch.tensor(self.values)}[self.kind]

    def set_extra_state(self, state):
        read = {"list": lambda: state["values"], "dict": lambda: [*state.values()], "tensor": lambda: state.tolist()}
        self.values = list(read[self.kind]())


class Slow(torch.optim.SGD):
    """Has a state of each parameter from the third step on, as Lookahead has."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            if state["step"] == 3:
                state["slow"] = parameter.detach().clone()
        return loss


class Remembers(Net):
    """Has in checkpoints what a new module has not: extra states, lists of a metric, buffers, keys of an optimizer."""

    def __init__(self):
        super().__init__("adamw")
        self.parts = nn.ModuleList(map(Grows, ("list", "dict", "tensor")))
        self.seen = CatMetric()
        self.seen.persistent(True)
        self.register_buffer("grows", torch.zeros(0))
        self.state = nn.Parameter(torch.ones(4))  # as a part of an optimizer's state is named

    def configure_optimizers(self):
        return Slow(self.parameters(), lr=0.01, momentum=0.9)

    def on_load_checkpoint(self, checkpoint):
        self.grows = torch.zeros(len(checkpoint["state_dict"]["grows"]))

    def training_step(self, batch, batch_idx):
        value = float(self.global_step + 100 * self.global_rank)
        for part in self.parts:
            part.values.append(value)
        self.seen.update(value)
        self.grows = torch.cat([self.grows, torch.tensor([value])])
        group = self.optimizers().param_groups[0]
        group["last step"] = torch.tensor(self.global_step)
        group.setdefault("steps", {})[f"step {self.global_step}"] = value
        return super().training_step(batch, batch_idx) * self.state.sum()

    def memory(self):
        group = self.optimizers().param_groups[0]
        slow = [whole(self.optimizers().state[each]["slow"]) for each in group["params"]]
        values = [part.values for part in self.parts], torch.stack(self.seen.value).tolist(), self.grows.tolist()
        return *values, group["last step"].item(), group["steps"], [float(each.sum()) for each in slow]


def remember(rank, folder):
    """Continue from a folder, and from the file that is made of it."""
    module, trainer = fit(layered(save_distributed_checkpoint=True), 2, Remembers(), max_epochs=1)
    trainer.save_checkpoint(f"{folder}/a")
    if rank == 0:
        consolidate_checkpoint(f"{folder}/a", f"{folder}/a.ckpt", weights_only=False)
    trainer.strategy.barrier()
    saved, found = module.memory(), []
    for name in ("a", "a.ckpt"):
        module, _ = fit(layered(), 2, Remembers(), max_epochs=1, ckpt_path=f"{folder}/{name}")
        found.append(module.memory())
    return saved, found


def test_a_folder_has_of_rank_0_what_a_module_has_got_in_training(tmp_path):
    """PyTorch writes it as it is on any rank, and reads what a new module has."""
    (saved, found), (_, found_there) = run_processes(2, remember, str(tmp_path))
    steps = [0.0, 1.0, 2.0, 3.0]
    assert saved[:-1] == ([steps] * 3, steps, steps, 3, {f"step {step}": float(step) for step in range(4)})
    assert found == found_there == [saved] * 2


class More(Net):
    """Has a layer more."""

    def __init__(self):
        super().__init__("adamw")
        self.more = nn.Linear(4, 4)


def load_into_another(rank, folder):
    for name, module in (("net", Net("adamw")), ("more", More())):
        _, trainer = fit(layered(save_distributed_checkpoint=True), 2, module, max_epochs=1)
        trainer.save_checkpoint(f"{folder}/{name}")
    messages = []
    for name, module in (("net", More()), ("more", Net("adamw"))):
        with pytest.raises(RuntimeError) as caught:
            fit(layered(), 2, module, max_epochs=2, ckpt_path=f"{folder}/{name}")
        messages.append(str(caught.value))
    return messages


def test_a_folder_of_another_module_is_no_checkpoint_of_this_one(tmp_path):
    (lacks, has), _ = run_processes(2, load_into_another, str(tmp_path))
    assert 'Missing key(s) in state_dict: "more.weight", "more.bias"' in lacks
    assert 'Unexpected key(s) in state_dict: "more.weight", "more.bias"' in has


def save_twice(rank, folder):
    """The first checkpoint is written, and rank 1 is killed in the second one, when rank 0 has written its part."""
    _, trainer = fit(layered(save_distributed_checkpoint=True), 2, Net("adamw"), max_epochs=1)
    trainer.save_checkpoint(f"{folder}/a")
    before = {path.name: path.read_bytes() for path in Path(folder, "a").iterdir()}
    if rank == 0:
        Path(folder, "before").write_text(repr(sorted((name, zlib.crc32(part)) for name, part in before.items())))
    trainer.strategy.barrier()
    with torch.no_grad():
        for parameter in trainer.lightning_module.parameters():
            parameter.add_(1)
    with suppress(Exception), patch.object(FileSystemWriter, "write_data", write_or_die(rank, dist.group.WORLD)):
        trainer.save_checkpoint(f"{folder}/a")


def write_or_die(rank, group):
    write = FileSystemWriter.write_data

    def after_rank_0(*args):
        if rank == 0:
            written = write(*args)
            written.wait()
            dist.barrier(group)
            return written
        dist.barrier(group)
        os.kill(os.getpid(), signal.SIGKILL)

    return after_rank_0


@pytest.mark.ci
def test_a_folder_is_that_of_before_where_a_rank_is_killed_while_another_one_is_written(tmp_path):
    ends = ends_of_processes(2, save_twice, str(tmp_path), timeout=60, grace=15)
    assert "exit code -9" in str(ends[1][0])
    now = repr(sorted((path.name, zlib.crc32(path.read_bytes())) for path in (tmp_path / "a").iterdir()))
    assert now == (tmp_path / "before").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "before"]


def save_folder(rank, path):
    _, trainer = fit(layered(save_distributed_checkpoint=True), 2, Net("adamw"), max_epochs=1)
    trainer.save_checkpoint(path)


def test_each_file_of_a_folder_has_a_checksum(tmp_path):
    run_processes(2, save_folder, str(tmp_path / "a.ckpt"))
    files = sorted(path for path in (tmp_path / "a.ckpt").iterdir() if path.name != CHECKSUMS)
    require_intact(tmp_path / "a.ckpt")
    assert len(files) == 4  # of two ranks, and what they share
    for file in files:
        content = file.read_bytes()
        file.write_bytes(bytes(byte ^ (place == len(content) // 2) for place, byte in enumerate(content)))
        with pytest.raises(ValueError, match=f"{file.name} is damaged: .* the checksum it had"):
            require_intact(tmp_path / "a.ckpt")
        file.unlink()
        if file.name != "meta.pt":  # without which a folder is no checkpoint
            with pytest.raises(ValueError, match=f"is not complete: .*{file.name} is missing"):
                require_intact(tmp_path / "a.ckpt")
        file.write_bytes(content)


def save_file_over_folder(rank, path):
    for saves_shards in (True, False):
        module, trainer = fit(layered(save_distributed_checkpoint=saves_shards), 2, Net("adamw"), max_epochs=1)
        with patch("shutil.rmtree", wraps=shutil.rmtree) as remove:
            trainer.save_checkpoint(path)
    found = torch.load(path, weights_only=True)["state_dict"]
    assert_same(found, {name: whole(value) for name, value in module.state_dict().items()})
    # Not before the file is complete.
    assert all(".unfinished-" in str(call.args[0]) for call in remove.call_args_list)


def test_a_file_replaces_a_folder_when_it_is_complete(tmp_path):
    run_processes(2, save_file_over_folder, str(tmp_path / "a.ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def save_to_other_folder(rank, path):
    _, trainer = fit(layered(), 2, Net("adamw"), max_epochs=1)
    with pytest.raises(IsADirectoryError, match="is a folder, and no checkpoint"):
        trainer.save_checkpoint(path)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "notes").touch()
    run_processes(2, save_to_other_folder, str(tmp_path))
    assert (tmp_path / "notes").exists()


class SavesInSecondEpoch(SeesBuffers):
    """Keeps the buffers after saving, when the running statistics of all ranks are averaged."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 1:
            trainer.save_checkpoint(self.path)
            self.look(trainer, pl_module)


def save_averages(rank, path):
    saves, loads = SavesInSecondEpoch(path), SeesBuffers()
    for strategy, callback, options in (
        (layered(save_distributed_checkpoint=True), saves, {}),
        (layered(), loads, {"ckpt_path": path}),
    ):
        local = AdaptiveGlobalBatchNorm(convergence=lambda _: True)  # from the second epoch on
        fit(strategy, 2, Normalized(), callbacks=[local, callback], max_epochs=2, **options)
    assert_same(loads.buffers, saves.buffers)


def test_a_folder_has_the_averages_of_local_running_statistics(tmp_path):
    run_processes(2, save_averages, str(tmp_path / "folder"), timeout=60)


class Places(TorchCheckpointIO):
    """Keeps checkpoints in memory, and where they were to be."""

    def __init__(self):
        self.saved = {}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved[path] = checkpoint, storage_options

    def load_checkpoint(self, path, *_, **__):
        raise FileNotFoundError(path)


def save_to_an_address(rank):
    places, path = Places(), "s3://bucket/a.ckpt"
    _, trainer = fit(layered(), 2, plugins=[places], steps=1)
    trainer.save_checkpoint(path, storage_options="for s3")
    assert [(place, options) for place, (_, options) in places.saved.items()] == [(path, "for s3")] * (rank == 0)
    with pytest.raises(FileNotFoundError, match=path):
        fit(layered(), 2, plugins=[Places()], ckpt_path=path)


def test_an_address_is_not_taken_for_a_path():
    run_processes(2, save_to_an_address)


def load_into_nothing(rank, path):
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    _, trained = fit(layered(), 2, Net("adamw"), max_epochs=1, steps=2)
    trained.save_checkpoint(path)
    results = []
    for strategy in (ddp(), layered()):
        t = trainer(strategy, 2, max_epochs=2)
        with t.init_module(empty_init=True):
            module = Net("adamw")
        t.fit(module, data(2, 2), ckpt_path=path)
        results.append(snapshot(module, t))
    assert_same(*results)


def test_a_checkpoint_is_loaded_into_a_module_without_values(tmp_path):
    run_processes(2, load_into_nothing, str(tmp_path / "a.ckpt"))
