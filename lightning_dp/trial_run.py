"""Run a module to see what it does, and leave it as it was."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_dp._private.torch_names import preserved_version

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
"""Classes of random number generators."""


def generators_of(loader: Any) -> dict[str, Any]:
    """Return the random number generators that a loader, its samplers and its dataset keep, by owner and name.

    Also those of datasets that another one takes its samples from, as `torch.utils.data.Subset` does.
    """
    found: dict[str, Any] = {}
    parts = [loader]
    for part in parts:  # which grow
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, GENERATORS):
                owner = f"{type(part).__name__}.{name}"
                found[owner if owner not in found else f"{owner} ({len(found)})"] = value
        inner = [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
        several = getattr(part, "datasets", None)
        inner += several if isinstance(several, list | tuple) else []
        parts += [each for each in inner if not any(each is other for other in parts)]
    return found


@contextmanager
def unchanged(module: nn.Module | list[Any]) -> Iterator[None]:
    """Put back afterwards what a run of ``module`` changes: all but its parameters and their gradients.

    ``module`` may also be a list of other objects that are to be put back, such as `GENERATORS`.

    That is buffers, metrics, modes, counters, arrays, lists, dictionaries, optimizers and schedules of all its parts,
    and random number generators: those of torch, NumPy and Python, and those that it keeps. Other objects are left as
    they are.
    """
    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.enter_context(torch.random.fork_rng())
        _restore_later(module, undo, set())
        yield


def _restore_later(value: Any, undo: ExitStack, seen: set[int]) -> None:
    """Have ``undo`` give a module, optimizer, tensor, list and so on, and those in it, the content of now."""
    if id(value) in seen or isinstance(value, nn.Parameter) or is_lazy(value):
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Tensor):
        # torch lets nobody write to expanded tensors, nor to those of inference mode.
        if value.layout == torch.strided and 0 not in value.stride() and not value.is_inference():
            # Past autograd, which may need the tensor for the backward of a loss of before.
            undo.enter_context(preserved_version(value))
            undo.callback(_put_back, value, value.data, value.detach().clone())
    elif isinstance(value, nn.Module) and isinstance(value, LazyModuleMixin):
        # It becomes another class in its first run, and stays one.
        if any(is_lazy(buffer) for buffer in value.buffers(False)):
            undo.callback(_forget_statistics, value)
        inner = [*value.buffers(False), *value.children()]
    elif isinstance(value, nn.Module):
        # A scripted part keeps its buffers and parts elsewhere.
        inner = [vars(value), *value.buffers(False), *value.children()]
    elif isinstance(value, (Optimizer, LRScheduler)):
        inner = [vars(value)]
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            undo.callback(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        undo.callback(value.set_state, value.get_state())
    elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        undo.callback(value.setstate, value.getstate())
    elif isinstance(value, np.random.RandomState):
        undo.callback(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        undo.callback(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif type(value) in (list, deque):
        undo.callback(value.extend, list(value))
        undo.callback(value.clear)
    elif type(value) in (set, dict, OrderedDict, defaultdict, Counter):
        undo.callback(value.update, value.copy())
        undo.callback(value.clear)
    if isinstance(value, dict | list | deque | tuple):
        inner = list(value.values() if isinstance(value, dict) else value)
    for each in inner:
        _restore_later(each, undo, seen)


def _forget_statistics(layer: nn.Module) -> None:
    """Let a lazy layer that has become one of batch norm begin with the statistics that it would have begun with."""
    reset = getattr(layer, "reset_running_stats", None)
    if reset is not None and not any(is_lazy(buffer) for buffer in layer.buffers(False)):  # else it did not run
        reset()


def _put_back(tensor: Tensor, memory: Tensor, content: Tensor) -> None:
    """Give ``tensor`` the memory and the content that it had."""
    try:
        is_changed = not torch.equal(memory.to(content.device), content)
    except RuntimeError:  # for some dtypes, on the meta device, and for fake tensors
        is_changed = True
    if is_changed:  # otherwise the memory may be that of a file which is open for reading only
        memory.copy_(content)
    tensor.data = memory


@contextmanager
def unchanged_parameters(module: nn.Module) -> Iterator[None]:
    """Put parameters and gradients back afterwards: a forward pass may move the average of another network, say."""
    with ExitStack() as undo:
        for parameter in module.parameters():
            if not is_lazy(parameter):  # it has no memory yet
                undo.callback(setattr, parameter, "grad", parameter.grad)
                # `.data` is the memory of now, with a version of its own: what was computed from it stays valid. The
                # copy is on the host, because a trial on a GPU may need all of the GPU's memory.
                value = parameter.detach()
                undo.callback(_put_back, parameter, parameter.data, value.cpu() if value.is_cuda else value.clone())
                parameter.grad = None  # a backward within the forward pass would add to it
        yield
