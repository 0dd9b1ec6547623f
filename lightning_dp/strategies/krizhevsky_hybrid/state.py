"""Checkpoints of a sharded head with whole tensors: rows are gathered to save one, and cut out when one is loaded.

Such a checkpoint is like one of a single process and can be loaded anywhere. Only rank 0 writes it, so only rank 0
gathers, one tensor after the other, in host memory. `sharded_checkpoint` is for heads that are too large for that.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import tree_leaves, tree_map_only, version_of
from lightning_dp.collectives.ring import chunk_bounds
from lightning_dp.strategies.krizhevsky_hybrid.head import ShardedHead, SharedByCopies, refused_inner_calls, seeded

State = dict[str, Any]
Convert = Callable[[Any, Tensor], Any]


def gather_parameters(module: LightningModule, head: ShardedHead) -> State:
    """Return the head's parameters by their names in ``module``: whole on rank 0, rows elsewhere.

    All ranks must call it.
    """
    whole = {p: whole_on_rank_0(head, p.data, p) for p in head.parameters}
    return {name: whole[p] for name, p in head.names_in(module).items()}


def gather_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return ``state``, a state_dict of ``optimizer``, in which the head's part is whole on rank 0, rows elsewhere.

    All ranks must call it.
    """

    def gather(value: Any, p: Tensor) -> Any:
        return whole_on_rank_0(head, value, p) if _is_like(value, p.shape) else value

    return convert_head(optimizer, state, head, gather)


def own_optimizer_state(optimizer: Optimizer, state: State, head: ShardedHead) -> State:
    """Return a copy of ``state``, a state_dict of ``optimizer``, in which the head's part is cut to this rank's rows.

    Everything is copied, because ``state`` may be mapped from a file that is replaced while the copy is in use.
    """
    whole_shapes = {p: head.whole_shape(p) for p in head.parameters}

    def slice_rows(value: Any, p: Tensor) -> Any:
        return head.own_rows(value, p) if _is_like(value, whole_shapes[p]) else value

    own = convert_head(optimizer, state, head, slice_rows)
    is_copied = {id(value) for value in tree_leaves(own)} - {id(value) for value in tree_leaves(state)}
    return tree_map_only(Tensor, lambda tensor: tensor if id(tensor) in is_copied else tensor.clone(), own)


def shard_state(optimizer: Optimizer, head: ShardedHead) -> None:
    """Cut the state of ``optimizer`` to this rank's rows, in place, where it is that of the whole head.

    An optimizer that the module has built before `fit`, or has kept from an earlier one, has such a state.
    """
    for p, of_p in optimizer.state.items():
        if head.owns(p):
            for name, value in of_p.items():
                if _is_like(value, head.whole_shape(p)) and not _is_like(value, p.shape):
                    of_p[name] = head.own_rows(value, p)


def make_whole(optimizer: Optimizer, head: ShardedHead) -> None:
    """Gather the state of ``optimizer`` in place, in host memory. All ranks must call it while the head is sharded."""
    for p, of_p in optimizer.state.items():
        if head.owns(p):
            for name, value in of_p.items():
                if _is_like(value, p.shape):
                    of_p[name] = whole_on_all_ranks(head, value, p, torch.device("cpu"))


def convert_head(optimizer: Optimizer, state: State, head: ShardedHead, convert: Convert) -> State:
    """Return ``state``, a state_dict of ``optimizer``, with ``convert(value, parameter)`` for the head's values."""
    if "state" not in state:  # Lightning's stand-in for the optimizer of a module that has none
        return state
    of_parameters = dict(state["state"])
    # A state_dict numbers the parameters of all groups in order.
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if head.owns(p) and index in of_parameters:
            of_parameters[index] = {name: convert(value, p) for name, value in of_parameters[index].items()}
    return state | {"state": of_parameters}


def require_all_ranks(module: LightningModule) -> None:
    """Raise RuntimeError after an exception: other ranks may be gone, and a gather would wait for them."""
    if module.trainer.interrupted:
        raise RuntimeError(
            "cannot save a checkpoint after an exception: the head's parameters are spread over all ranks, and the "
            "others may be gone. Save every few steps instead: ModelCheckpoint(every_n_train_steps=...)"
        )


def require_one_trunk(module: LightningModule, head: ShardedHead) -> None:
    """Raise RuntimeError if the trunk's parameters differ between ranks. All ranks must call it."""
    # Sums differ in their last bits between kinds of processors, so they are compared with a tolerance.
    trunk = [p.detach().double().abs().sum() for p in module.parameters() if not head.owns(p)]
    sums = head.control.all_gather("checksums", torch.stack(trunk)) if trunk else torch.zeros(1)
    if not torch.allclose(sums, sums[:1].expand_as(sums), rtol=1e-6, equal_nan=True):
        raise RuntimeError(
            "the trunk's parameters are not the same on all ranks. Something in the module changes or skips their "
            "gradients depending on this rank's part of the head, as torch.nn.utils.clip_grad_norm_ does; use "
            "self.clip_gradients(optimizer, gradient_clip_val=...), or Trainer(gradient_clip_val=...)"
        )


def warn_of_rows(checkpoint: State, module: LightningModule, head: ShardedHead) -> None:
    """Warn of rows that a callback or the module has put into ``checkpoint``, an average of the weights for example.

    Only rank 0's would be saved: the strategy gathers parameters and optimizer states, and knows of nothing else.
    """
    if head.channel.rank != 0:
        return
    # Of weights only: the length of a bias may be that of anything.
    rows = {p.shape: name for name, p in head.names_in(module).items() if p.ndim > 1 and p.shape != head.whole_shape(p)}
    gathered = ("state_dict", "optimizer_states")
    for path, tensor in _tensors({key: value for key, value in checkpoint.items() if key not in gathered}):
        if tensor.shape in rows:
            warnings.warn(
                f"checkpoint{path} has the shape {tuple(tensor.shape)} of this rank's rows of {rows[tensor.shape]!r}. "
                "If it is a copy of them, such as an average of the weights, the other ranks' rows are not saved. Let "
                "each rank save its copy to a file of its own",
                stacklevel=2,
            )


def warn_of_other_shapes(optimizer: Optimizer, head: ShardedHead) -> None:
    """Warn of states of the head's parameters that are neither single numbers nor of the parameter's shape.

    How the ranks' states would make a whole one is not known, so a checkpoint holds those of rank 0.
    """
    if head.channel.rank != 0:
        return
    for p, of_p in optimizer.state.items():
        for name, value in of_p.items() if head.owns(p) else ():
            if isinstance(value, Tensor) and value.numel() > 1 and not _is_like(value, p.shape):
                warnings.warn(
                    f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} for this rank's rows of "
                    f"the head, of shape {tuple(p.shape)}. A checkpoint holds rank 0's, so on other ranks a resumed "
                    "training differs from one that was not interrupted; use an optimizer of torch.optim",
                    stacklevel=2,
                )


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor within dicts and sequences, and where it is."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}[{key!r}]")


def write_to_disk(checkpoint: State, path: str | os.PathLike[str]) -> None:
    """Save to a local file without a copy in memory. The file appears when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def is_plain_file(checkpoint_io: Any, path: Any) -> bool:
    """Return whether Lightning would write the checkpoint as an ordinary local file, so that we may do it instead."""
    return type(checkpoint_io).__name__ == "TorchCheckpointIO" and "://" not in str(path)


def map_from_disk(path: str | os.PathLike[str], weights_only: bool | None = None) -> State:
    """Load a checkpoint from a local file, and map parameters and optimizer states into memory instead of reading them.

    Only the rows that are used are then read, and the ranks of a host share them. They must be copied before they are
    changed or kept, because the file may be replaced.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    try:
        checkpoint: State = torch.load(str(path), map_location="cpu", mmap=True, weights_only=weights_only)
    except RuntimeError:  # files of old versions of torch cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    mapped = ("state_dict", "optimizer_states")
    return {
        key: value if key in mapped else tree_map_only(Tensor, Tensor.clone, value) for key, value in checkpoint.items()
    }


def _is_like(value: Any, shape: torch.Size) -> bool:
    """Return whether a state has one number for each of the parameter's. Momentum has; a count of steps has not."""
    return isinstance(value, Tensor) and value.shape == shape


# --- Checkpoints in which each rank writes its own rows of the head, so that no rank ever holds all of it.
#
# A checkpoint is a folder with ``checkpoint.ckpt``, which holds everything but the head and is written by rank 0, and a
# file of rows from each rank. It can be loaded on any number of ranks. `consolidate` converts it to an ordinary file.

MAIN_FILE = "checkpoint.ckpt"


def save_sharded(
    checkpoint: State,
    folder: Path,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    head: ShardedHead,
    barrier: Callable[[], None],
) -> None:
    """Write a checkpoint to which each rank contributes its rows of the head.

    All ranks must call it, and all must see the same file system.

    Args:
        checkpoint: this rank's checkpoint, as Lightning makes it.
        folder: path of the checkpoint. What is there is replaced once all ranks have written.
        module: the module that the head belongs to.
        optimizers: in the order of the checkpoint's ``optimizer_states``.
        head: in its sharded state.
        barrier: returns when all ranks have called it.
    """
    rank, world_size = head.channel.rank, head.channel.world_size
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()
    rest, rows = _split(checkpoint, module, optimizers, head)
    write_to_disk(rows, unfinished / f"rows-{rank:05}-of-{world_size:05}.pt")
    if rank == 0:
        write_to_disk(rest, unfinished / MAIN_FILE)
    barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)


def is_sharded(path: Any) -> bool:
    """Return whether there is a checkpoint of this kind at ``path``."""
    return "://" not in str(path) and Path(path, MAIN_FILE).is_file()


def load_sharded(folder: Path, rank: int = 0, world_size: int = 1, weights_only: bool | None = None) -> State:
    """Return the checkpoint with those rows of the head that ``rank`` of ``world_size`` ranks holds; by default, all.

    The number of ranks may differ from when it was saved. Files are mapped, not read, so that memory is needed for
    these rows only.

    Raises:
        ValueError: the files of some ranks are missing.
    """
    checkpoint: State = torch.load(folder / MAIN_FILE, map_location="cpu", weights_only=weights_only)
    files = sorted(folder.glob("rows-*-of-*.pt"))
    count = int(files[0].stem.rpartition("-")[2]) if files else 1
    if len(files) != count:
        raise ValueError(f"{folder} holds the rows of {len(files)} ranks of {count}; copy the files of all ranks there")
    parts = [torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in files]

    def join(blocks: list[Tensor]) -> Tensor:
        begin, end = chunk_bounds(sum(len(block) for block in blocks), world_size)[rank]
        return _rows(blocks, begin, end)

    for name in parts[0]["parameters"]:
        checkpoint["state_dict"][name] = join([part["parameters"][name] for part in parts])
    for number, of_parameters in enumerate(parts[0]["optimizer_states"]):
        state = checkpoint["optimizer_states"][number]["state"]
        for index, values in of_parameters.items():
            of_index = [part["optimizer_states"][number][index] for part in parts]
            state.setdefault(index, {}).update({key: join([part[key] for part in of_index]) for key in values})
    return checkpoint


def consolidate(folder: str | Path, file: str | Path, weights_only: bool = True) -> None:
    """Convert a sharded checkpoint to one ordinary file with whole tensors, which any Trainer can load.

    Args:
        folder: the sharded checkpoint, with the files of all ranks.
        file: path of the file to write. It must not exist.
        weights_only: see `torch.load`. False also reads objects of other classes, as hyperparameters may be. That runs
            code which the file chooses, so use it only if you trust the file.

    Raises:
        ValueError: there is no sharded checkpoint at ``folder``, it holds such objects, or ``file`` exists.
    """
    if not is_sharded(folder):
        raise ValueError(f"{folder} is not a sharded checkpoint: it has no {MAIN_FILE}; give the folder that has one")
    if Path(file).exists():
        raise ValueError(f"{file} exists; remove it, or give another name")
    try:
        checkpoint = load_sharded(Path(folder), weights_only=weights_only)
    except UnpicklingError as error:
        raise ValueError(
            f"{folder} holds more than weights, numbers and text, and reading it would run code that the file chooses; "
            "if you trust it, use weights_only=False"
        ) from error
    write_to_disk(checkpoint, file)


def _split(
    checkpoint: State, module: LightningModule, optimizers: Sequence[Optimizer], head: ShardedHead
) -> tuple[State, State]:
    """Return the checkpoint without the head's rows, and the rows."""
    names = head.names_in(module)
    state_dict = checkpoint["state_dict"]
    rows: State = {"parameters": {name: state_dict[name] for name in names if name in state_dict}}
    rest = checkpoint | {"state_dict": {name: value for name, value in state_dict.items() if name not in names}}
    rows["optimizer_states"] = []
    rest_of_optimizers = []
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        own: dict[int, State] = {}
        converted = convert_head(optimizer, state, head, lambda value, p: None if _is_rows(value, p) else value)
        for index, values in converted.get("state", {}).items():
            kept = {key: value for key, value in values.items() if value is not None}
            taken = {key: value for key, value in state["state"][index].items() if key not in kept}
            converted["state"][index] = kept
            if taken:
                own[index] = taken
        rows["optimizer_states"].append(own)
        rest_of_optimizers.append(converted)
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = rest_of_optimizers
    return rest, rows


def _is_rows(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _rows(blocks: Sequence[Tensor], begin: int, end: int) -> Tensor:
    """Return rows ``begin`` to ``end`` of the concatenated blocks, without concatenating the others."""
    found = []
    first = 0
    for block in blocks:
        found.append(block[max(0, begin - first) : max(0, end - first)])
        first += len(block)
    return torch.cat(found)


# --- How a sharded head's parameters become rows, and whole tensors again. All ranks must make the same calls.
#
# On a device nothing here needs more memory than a rank's own rows and one slice that is being sent, unless the caller
# wants the whole tensor on that device.

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


# --- The whole head on every rank, for uses outside of training steps: evaluation, sample images, a logger's graph.
#
# Under DDP any rank may call the model at any time: rank 0 logs sample images, traces the model for a graph, or
# validates more batches than the others. The forward of a sharded head needs all ranks, so such a call would wait for
# ranks that never come. Therefore all ranks gather the head's rows at points that all of them reach (`GatherHead`), and
# keep them until the next training step changes them. In between, each rank computes the head alone and sends nothing.


class GatheredHead(SharedByCopies):
    """The whole values of the head's parameters, as they are at construction.

    The constructor is a collective: all ranks must call it. The methods need no other rank.

    Raises:
        torch.OutOfMemoryError: the whole head does not fit on the device. The message names the option that avoids it.
    """

    def __init__(self, head: ShardedHead) -> None:
        self._head = head
        self._caller = _Caller(head.head)
        # torch counts the changes of a tensor in place. They show whether an optimizer or a user has changed the rows.
        self._versions = {p: version_of(p) for p in head.parameters}
        # They do not show a change of ``p.data``, as some callbacks of averaged weights make it. It changes all values.
        self._samples = {p: sample_of(p) for p in head.parameters}
        try:
            self._whole = {p: whole_on_all_ranks(head, p.data, p, p.device) for p in head.parameters}
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"evaluation gathers the whole head {head.name!r}, which does not fit on the device beside this rank's "
                f"rows; use KrizhevskyHybridStrategy(evaluation='sharded'). torch says: {error}"
            ) from error

    @property
    def is_current(self) -> bool:
        """Whether this rank's rows are still those that were gathered."""
        if any(version_of(p) != version for p, version in self._versions.items()):
            return False
        # `torch.jit.trace` would record the comparison, and warn of it.
        return torch.jit.is_tracing() or all(
            torch.allclose(sample_of(p), sample, rtol=0, atol=0, equal_nan=True) for p, sample in self._samples.items()
        )

    @property
    def has_same_rows(self) -> bool:
        """Whether this rank's rows are bitwise those that were gathered. This reads all values, `is_current` a few."""
        rank = self._head.channel.rank
        bounds = {p: self._head.bounds_of(p)[rank] for p in self._head.parameters}
        return all(torch.equal(self._whole[p][begin:end], p.data) for p, (begin, end) in bounds.items())

    def value_of(self, parameter: Tensor) -> Tensor:
        """Return the whole value of one of the head's parameters."""
        return self._whole[parameter]

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output for x, (N, *) to (N, C), computed on this rank alone as before `fit`."""
        if torch.jit.is_tracing():
            return self._trace(x)
        with_gradient = torch.is_grad_enabled()
        named = self._caller.named_parameters(remove_duplicate=False)
        values = {name: self._in_graph(p) if with_gradient else self._whole[p] for name, p in named}
        # This calls the head's own forward with other values for its parameters. The parameters themselves keep their
        # rows, and hooks within the head see whole activations.
        return functional_call(self._caller, values, (x,))

    def _trace(self, x: Tensor) -> Tensor:
        """Return the head's output layer by layer, because `torch.jit.trace` cannot record a functional_call."""
        for layer in self._head.layers:
            if isinstance(layer, nn.Linear):
                x = F.linear(x, self._whole[layer.weight], None if layer.bias is None else self._whole[layer.bias])
            else:
                x = layer(x)
        return x

    def _in_graph(self, parameter: Tensor) -> Tensor:
        """Return the whole value as a function of the rows, so that ``backward()`` leaves gradients in ``.grad``."""
        begin, end = self._head.bounds_of(parameter)[self._head.channel.rank]
        return _WholeValue.apply(parameter, self._whole[parameter], begin, end)


def sample_of(parameter: Tensor, size: int = 1024) -> Tensor:
    """Return a copy of about ``size`` values, spread over ``parameter``."""
    values = parameter.data.reshape(-1)
    return values[:: max(1, len(values) // size)].clone()


class _Caller(nn.Module):
    """Calls the ``forward`` of the head's class, and not the one that replaces it on the instance during ``fit``."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return type(self.head).forward(self.head, x)


class _WholeValue(torch.autograd.Function):
    """Rows to the whole value, which is known already. Backward returns the rows' part of this rank's own gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, begin: int, end: int) -> Tensor:
        ctx.bounds = begin, end
        return whole.view_as(whole)  # a view, because autograd would mark ``whole`` itself as part of the graph

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        begin, end = ctx.bounds
        return gradients[0][begin:end].clone(), None, None, None


# --- ``state_dict``, ``load_state_dict`` and ``copy.deepcopy`` of a head of which each rank holds rows.

log = logging.getLogger(__name__)


class StateDictHooks(SharedByCopies):
    """Converts between rows and whole tensors where the module's state is read, loaded or copied.

    Users save ``module.state_dict()`` on one rank and expect whole tensors, as under DDP. No other rank takes part in
    that call, so nothing can be gathered in it. While the head is gathered, the whole tensors are at hand; otherwise
    the result holds this rank's rows, and a warning says so.

    Args:
        head: in its sharded state.
        gathered: returns the gathered head, or None if there is none.

    Attributes:
        has_loaded: whether ``load_state_dict`` has given values to the head.
    """

    def __init__(self, head: ShardedHead, gathered: Callable[[], GatheredHead | None]) -> None:
        self._head = head
        self._gathered = gathered
        self._leaves_rows = False  # set by `leaving_rows`
        self._has_warned = False
        self.has_loaded = False
        self._registered = ExitStack()  # hooks of the layers, to be removed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the hooks in place within the context."""
        attributes = vars(self._head.head)
        self._register()
        attributes["__deepcopy__"] = self._deepcopy  # copy.deepcopy looks it up on the instance
        try:
            yield
        finally:
            attributes.pop("__deepcopy__", None)
            self._registered.close()

    def _register(self) -> None:
        for layer in self._head.linears:
            # torch sets an attribute on the hook. A partial object takes it, a bound method does not.
            self._registered.callback(layer.register_state_dict_post_hook(partial(self._on_state_dict)).remove)
            self._registered.callback(layer.register_load_state_dict_pre_hook(self._on_load).remove)
        self._registered.enter_context(refused_inner_calls(self._head))  # here, so that copies of the head are without

    @contextmanager
    def leaving_rows(self) -> Iterator[None]:
        """Within the context ``state_dict`` returns this rank's rows, without a warning. Checkpoints gather them."""
        self._leaves_rows = True
        try:
            yield
        finally:
            self._leaves_rows = False

    def _known(self) -> GatheredHead | None:
        gathered = self._gathered()
        return gathered if gathered is not None and gathered.is_current else None

    def _on_state_dict(self, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        gathered = self._known()
        for name, parameter in layer.named_parameters(recurse=False):
            value = state.get(prefix + name)
            # With keep_vars=True the caller wants the parameters themselves. A copy of a single layer has inherited
            # this hook, but its parameters are not the head's.
            if value is None or isinstance(value, nn.Parameter) or not self._head.owns(parameter) or self._leaves_rows:
                continue
            if gathered is not None:
                state[prefix + name] = gathered.value_of(parameter)
            else:
                self._warn_of_rows()

    def _on_load(self, layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            value = state.get(prefix + name)
            if not self._head.owns(parameter) or not isinstance(value, Tensor):
                continue
            self.has_loaded = True
            if value.shape == self._head.whole_shape(parameter):
                state[prefix + name] = self._head.own_rows(value, parameter)

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the head as an ordinary module with whole tensors, or, if it is not gathered, as one that has rows."""
        head, gathered = self._head.head, self._known()
        if gathered is not None:
            for parameter in self._head.parameters:
                memo[id(parameter)] = nn.Parameter(gathered.value_of(parameter).clone(), parameter.requires_grad)
        # deepcopy would find this method again, and copy the replaced forward with all that it refers to. Therefore a
        # shallow copy comes first, without either.
        duplicate = copy.copy(head)
        for name in ("forward", "__deepcopy__"):
            vars(duplicate).pop(name, None)
        self._registered.close()  # otherwise the copy's layers would have the hooks, too
        try:
            duplicate = copy.deepcopy(duplicate, memo)
        finally:
            self._register()
        if gathered is None:
            vars(duplicate)["forward"] = _RowsOnly(self._head.name)
        return duplicate

    def _warn_of_rows(self) -> None:
        if not self._has_warned:
            log.warning(
                f"state_dict() holds only rank {self._head.channel.rank}'s rows of {self._head.name!r}, because each "
                "rank has its own during fit. Use trainer.save_checkpoint(...) on all ranks, or let all ranks call "
                "trainer.strategy.gather_head() first"
            )
            self._has_warned = True


class _RowsOnly:
    """The ``forward`` of a copy that holds one rank's rows. Without it, the copy would return logits of few classes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> Tensor:
        raise RuntimeError(
            f"this copy of {self._name!r} was made during fit, when the rank held only its own rows of it. Copy it "
            "before fit, in validation, or after all ranks have called trainer.strategy.gather_head()"
        )
