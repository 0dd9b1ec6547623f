"""Checks of what `KrizhevskyHybridStrategy` works with. They keep no state, and their messages name the remedy."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from types import MethodType
from typing import Any, Literal, TypeGuard

from torch import nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MultilabelAccuracy
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_dp._lightning import LightningModule
from lightning_dp._private.lightning_names import pruned_layers, validates_by_clock
from lightning_dp._private.torch_names import (
    has_backward_hooks,
    has_forward_hooks,
    has_tensor_hooks,
    is_compiled_function,
)
from lightning_dp.strategies.base import (
    AVERAGING,
    ELEMENTWISE_OPTIMIZERS,
    compiled_parts_around,
    is_a,
    is_elementwise,
    is_layerwise,
    overlapping_parameters,
)
from lightning_dp.strategies.krizhevsky_hybrid.exchange import SCHEMES, Scheme
from lightning_dp.strategies.krizhevsky_hybrid.head import (
    ShardedHead,
    divisible_layers,
    layers_of,
    replaced,
    require_whole_layer,
)
from lightning_dp.trial_run import unchanged

log = logging.getLogger(__name__)

STRATEGY = "KrizhevskyHybridStrategy"

_ALLOW_NO_BATCHES = "allow_zero_length_dataloader_with_multiple_devices"

LIKELY_REASONS = (
    "Ranks whose loaders have different numbers of batches do so, too: give each rank as many batches as the others. "
    "So do hooks on the features in head_step, or on the head, that one rank alone has. A rank without samples for the "
    "head calls it with none (features[:0])"
)
"""Why one rank most likely begins a step while another gathers the head, or sends what another does not expect."""

HEAD_STEP_EXAMPLE = """
    def head_step(self, features, target):  # -> the mean loss of these samples
        logits = self.{head}(features)
        return F.cross_entropy(logits, target)

    def training_step(self, batch, batch_idx):
        x, target = batch
        return self.head_step(self.trunk(x), target)
"""


@dataclass(frozen=True)
class Options:
    """The user's arguments of `KrizhevskyHybridStrategy`, which explains them."""

    head: str
    scheme: Scheme
    num_passes: int | None
    variable_batch: bool
    evaluation: Literal["gathered", "sharded"]
    state_dict_type: Literal["full", "sharded"]


def check_options(options: Options, ddp_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of the strategy that are unknown or do not go together."""
    scheme, num_passes = options.scheme, options.num_passes
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not known; use one of {', '.join(map(repr, SCHEMES))}")
    if num_passes is not None and (type(num_passes) is not int or num_passes < 2):
        raise ValueError(f"num_passes={num_passes!r} must be an integer of at least 2; scheme='a' has one pass")
    if num_passes is not None and scheme == "a":
        raise ValueError(
            f"num_passes={num_passes} is for schemes b and c, and scheme='a' has one pass; remove one of the two"
        )
    if options.variable_batch and scheme == "a":
        raise ValueError("variable_batch=True needs several passes, and scheme='a' has one; use scheme 'b' or 'c'")
    if options.evaluation not in ("gathered", "sharded"):
        raise ValueError(f"evaluation={options.evaluation!r} is not known; use 'gathered' or 'sharded'")
    if options.state_dict_type not in ("full", "sharded"):
        raise ValueError(f"state_dict_type={options.state_dict_type!r} is not known; use 'full' or 'sharded'")
    start_method = ddp_kwargs.get("start_method", "popen")
    if options.state_dict_type == "sharded" and start_method != "popen":
        raise ValueError(
            f"start_method={start_method!r} returns the weights of rank 0 to the process that calls fit, and "
            "state_dict_type='sharded' leaves rank 0 with its local shard; run a script with start_method='popen', or "
            "use state_dict_type='full'"
        )
    if ddp_kwargs.get("model_averaging_period") is not None:
        raise ValueError(
            "model_averaging_period cannot be used, because ranks hold different parts of the head; remove it"
        )


def find_head(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule called ``name``.

    Raises:
        ValueError: there is no such submodule, or ``name`` is empty.
    """
    with suppress(AttributeError):
        if name:
            return module.get_submodule(name)
    there_are = [child for child, part in module.named_modules() if child and any(True for _ in part.parameters())]
    raise ValueError(
        f"head={name!r} names no submodule of {type(module).__name__}; use one of "
        f"{', '.join(there_are) or 'another module: this one has no parameters'}"
    )


def check_head(module: nn.Module, head_name: str) -> nn.Module:
    """Return the head. Raise ValueError if there is none, or it cannot be sharded, or not within ``module``."""
    head = find_head(module, head_name)
    # First, because in a compiled module the head's parameters have other names, which would confuse the other checks.
    compiled = compiled_parts_around(module, head)
    if compiled:
        raise ValueError(
            f"{compiled[0]} is compiled or scripted, and contains or belongs to the head {head_name!r}, in which "
            f"{STRATEGY} exchanges activations; compile the trunk alone"
        )
    divisible_layers(head, head_name)
    _check_ties(module, head, head_name)
    _check_shared_memory(module, head, head_name)
    return head


def check_module(module: LightningModule, trainer: Any, head_name: str, variable_batch: bool) -> None:
    """Raise ValueError if the module or the Trainer has something that does not work with a sharded head."""
    head = check_head(module, head_name)
    if is_compiled_function(getattr(module, "head_step", None)):
        raise ValueError(
            f"head_step is compiled, and calls the head {head_name!r}, in which {STRATEGY} exchanges activations; "
            "compile the trunk, or the loss of the logits, alone"
        )
    if variable_batch:
        _check_variable_batch(module, trainer.precision_plugin, head_name)
    if any(getattr(each, _ALLOW_NO_BATCHES, False) for each in (module, trainer.datamodule)):
        raise ValueError(
            f"{_ALLOW_NO_BATCHES}=True lets ranks without batches skip a validation, at the start of which all ranks "
            f"gather the head {head_name!r}; give each rank a batch, even an empty one, and set it to False"
        )
    if validates_by_clock(trainer) and trainer.world_size > 1:
        raise ValueError(
            "val_check_interval is a duration, which each rank measures by its own clock. So one begins a validation, "
            f"at the start of which all ranks gather the head {head_name!r}, while another begins a step; use a number "
            "of batches, such as val_check_interval=1000, check_val_every_n_epoch=None"
        )
    for callback in trainer.callbacks:
        if is_a(callback, *AVERAGING):
            raise ValueError(
                f"{type(callback).__name__} keeps copies of the parameters, and each rank holds only a part of the "
                f"head's; remove it, or use another strategy than {STRATEGY}"
            )
        if is_a(callback, "ModelPruning") and set(pruned_layers(callback)).intersection(head.modules()):
            raise ValueError(
                f"{type(callback).__name__} compares the parameters of the head {head_name!r}, of which each rank "
                "holds a part, so that ranks would prune by different thresholds; pass it parameters_to_prune=[...] "
                "without the head"
            )


def _check_ties(module: nn.Module, head: nn.Module, head_name: str) -> None:
    """Raise ValueError for parameters that the trunk shares with the head, or that have no values yet."""
    # By layers, not by names: the head, or a layer of it, may be an attribute of the module under a second name.
    inside = set(head.modules())
    owned = {id(parameter) for parameter in head.parameters()}
    for path, layer in module.named_modules():
        own = () if layer in inside else layer.named_parameters(path, recurse=False, remove_duplicate=False)
        for name, parameter in own:
            if id(parameter) in owned:
                raise ValueError(
                    f"{name} shares a parameter with the head {head_name!r}, which is sharded over ranks; untie them"
                )
            if parameter.is_meta:
                raise ValueError(
                    f"{name} is on the meta device; {STRATEGY} initializes the head {head_name!r} only. Build the rest "
                    "on the CPU"
                )


def _check_shared_memory(module: nn.Module, head: nn.Module, head_name: str) -> None:
    """Raise ValueError for memory that the head shares: local shards are copies, which would be untied."""
    named, owned = dict(module.named_parameters()), set(head.parameters())
    for pair in overlapping_parameters(module):
        is_of_head = any(named[name] in owned for name in pair)
        if is_of_head and any(named[name].requires_grad for name in pair):  # frozen, both keep their values
            raise ValueError(
                f"{pair[0]} and {pair[1]} share memory, and the head {head_name!r}, which is sharded over ranks, would "
                "have values of its own; untie them, or, within the head, let two layers have the same nn.Parameter"
            )


def _check_variable_batch(module: LightningModule, precision: Any, head_name: str) -> None:
    if not callable(getattr(module, "head_step", None)):
        lines = HEAD_STEP_EXAMPLE.format(head=head_name)
        raise ValueError(
            f"variable_batch=True needs to know where the head begins; give {type(module).__name__} this method, and "
            f"call it in training_step (it stays an ordinary module for every other strategy):\n{lines}"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} sets automatic_optimization=False, so that it decides itself when to step. With "
            "variable_batch=True the head is updated within head_step, without a call of step(); use "
            "variable_batch=False or automatic optimization"
        )
    if getattr(module.optimizer_step, "__func__", None) is not LightningModule.optimizer_step:
        raise ValueError(
            f"{type(module).__name__} overrides optimizer_step, which Lightning calls once a step. With "
            "variable_batch=True the head is updated several times in it, without that method; use a learning-rate "
            "schedule, or on_before_optimizer_step, which runs before every update"
        )
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"variable_batch=True cannot run with precision={precision.precision!r}: the gradient scaler decides once "
            f"a step, and {STRATEGY} updates the head several times in it; use precision='bf16-mixed'"
        )


def require_unchanged(module: nn.Module, head: ShardedHead) -> None:
    """Raise RuntimeError if the head is not the one of set-up: the strategy would go on with the old layers."""
    now: nn.Module | None = None
    with suppress(AttributeError):
        now = module.get_submodule(head.name)
    layers = [layer for _, layer in layers_of(head.head, head.name)]
    is_other = now is not head.head or layers != head.layers
    if is_other or any(p is not before for p, before in zip_longest(head.head.parameters(), head.parameters)):
        raise RuntimeError(
            f"{head.name} was changed after set-up, and the sharded head would not notice; change its layers and "
            "parameters in __init__, setup or configure_model, or between two runs of fit. The p of a dropout may "
            "change at any time"
        )


def check_hooks(head: ShardedHead) -> None:
    """Raise ValueError for hooks that would see slices of activations or of gradients. Called in each step."""
    for name, layer in head.head.named_modules(prefix=head.name):
        # A forward hook of the head as a whole sees whole features and logits.
        if (layer is not head.head and has_forward_hooks(layer)) or has_backward_hooks(layer):
            raise ValueError(
                f"{name} has hooks, and within the head {head.name!r} they would see only this rank's slices; remove "
                "them, or register a forward hook on the head as a whole. Trainer(profiler='pytorch') registers some: "
                "use PyTorchProfiler(record_module_names=False)"
            )
    for name, parameter in head.head.named_parameters(prefix=head.name):
        if has_tensor_hooks(parameter):
            raise ValueError(
                f"{name} has hooks on its gradient, and they would see only this rank's local shard; remove them, and "
                "change gradients row by row in on_after_backward"
            )


def require_whole(module: nn.Module, head_name: str) -> None:
    """Raise ValueError if an earlier `fit` has left this rank's local shard in the head, or it has no values yet."""
    try:
        head = module.get_submodule(head_name)
    except AttributeError:
        return  # a module without this head, evaluated with this strategy, is whole
    for path, layer in head.named_modules(prefix=head_name):
        if type(layer) is nn.Linear:
            if layer.weight.is_meta:
                raise ValueError(
                    f"{path} is on the meta device, and validate, test and predict need the whole head on each rank; "
                    "build it on the CPU, or validate within fit"
                )
            require_whole_layer(layer, path)


def check_optimizer(optimizer: Optimizer, head: ShardedHead) -> None:
    """Refuse an optimizer that is known to compute with whole parameters, and warn of an unknown one.

    Raises:
        ValueError: it computes something else from a part of a parameter than from the whole.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kind = type(optimizer)
    if is_elementwise(kind) or not any(head.owns(p) and p.requires_grad for p in parameters):
        return
    if is_layerwise(kind) or kind.__module__.startswith("torch."):
        known = ", ".join(each.__name__ for each in ELEMENTWISE_OPTIMIZERS)
        raise ValueError(
            f"{kind.__name__} computes with whole parameters, and each rank holds only a part of the head's; use one "
            f"of {known}"
        )
    log.warning(
        f"{kind.__name__} updates a shard of the head's weights on each rank, so it must be elementwise. If it takes "
        "norms of whole layers, as LARS and LAMB do, the result is wrong. States of another shape than the "
        "parameter's, as 8-bit optimizers have, and those that its state_dict has outside of 'state', as wrappers may "
        "have, are saved of rank 0 only"
    )


# --- What counts samples must not be in ``head_step``, which every rank runs with the samples of all ranks ---

_EVERY_SAMPLE = "within head_step, where every rank sees the samples of all ranks"
_OF_EACH_MODULE = frozenset(vars(LightningModule()))  # its parts, a dozen kinds of hooks, and the Trainer
_MOST_ENTRIES = 1000
"""Of a container, looked at in each step. One with more holds data, as the labels of all images, and no metrics."""
_MEANS = (MeanMetric, BinaryAccuracy, MulticlassAccuracy, MultilabelAccuracy)  # and no subclass: it may count


@contextmanager
def no_counting(module: LightningModule, world_size: int) -> Iterator[None]:
    """Raise ValueError if samples are counted within: they would count K times as much, for K ranks.

    The factor K cancels in means and ratios. It cannot be seen whether a metric is one, so all but torchmetrics' mean
    and accuracy must declare it: with the attribute ``same_if_repeated = True``, of the class or the metric itself.
    """
    if world_size == 1:
        yield
        return
    with ExitStack() as undo:
        if "log" not in vars(module):  # otherwise the user has replaced it
            # A method, because torch.compile would take a new function for new code.
            undo.enter_context(replaced(module, "log", MethodType(_log_no_sum, module)))
        undo.enter_context(replaced(module, "all_gather", MethodType(_all_gather_nothing, module)))
        found = {id(metric): (name, metric) for name, metric in _metrics(module)}  # one made within: next time
        for name, metric in found.values():
            # Asked at the update, and not afterwards: it may be reset by then.
            update = partial(_update, name, metric, metric.update, world_size)
            undo.enter_context(replaced(metric, "update", update))
        yield


def _update(
    name: str, counting: Metric | MetricCollection, update: Any, world_size: int, /, *args: Any, **kwargs: Any
) -> None:
    # All of a collection: those that have the same states are updated through one of them.
    for path, metric in counting.named_modules(prefix=name):
        is_mean = type(metric) in _MEANS and getattr(metric, "multidim_average", "global") == "global"
        is_declared = getattr(metric, "same_if_repeated", False)
        if isinstance(metric, Metric) and _counts(metric) and not (is_mean or is_declared):
            raise ValueError(
                f"the {type(metric).__name__} {path} is updated {_EVERY_SAMPLE}, so each would be counted "
                f"{world_size} times. Update it in training_step or in validation. If its value is the same when every "
                "update is repeated, as a mean or a ratio is, set same_if_repeated = True on it or in its class"
            )
    update(*args, **kwargs)


@contextmanager
def nothing_recorded(module: LightningModule) -> Iterator[None]:
    """Log nothing, and leave what ``module`` keeps as it is, whatever ``head_step`` does within."""
    with unchanged(module), replaced(module, "log", lambda *_, **__: None):
        yield


def _metrics(module: nn.Module) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """Yield what counts in ``module``, by name: also in its containers, and in objects of other classes."""
    for path, part in module.named_modules():
        if _counts(part):
            yield path, part
        # The tuples of numbers of torch's layers would take milliseconds each step. Parametrized ones are elsewhere.
        if type(part).__module__.startswith("torch.nn.modules."):
            continue
        seen: set[int] = set()
        for name in vars(part).keys() - _OF_EACH_MODULE:
            for each in _modules_in(vars(part)[name], seen):
                yield from ((name, metric) for metric in each.modules() if _counts(metric))


def _counts(part: nn.Module) -> TypeGuard[Metric | MetricCollection]:
    return isinstance(part, (Metric, MetricCollection)) and not isinstance(part, WrapperMetric)  # it updates a part


def _modules_in(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    """Yield the modules in ``value``. ``seen`` has the containers before: one may contain itself."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict | list | tuple | set | deque):
        if id(value) not in seen:
            seen.add(id(value))
            entries = value.values() if isinstance(value, dict) else value
            for each in islice(entries, _MOST_ENTRIES):
                yield from _modules_in(each, seen)
    elif hasattr(value, "__dict__"):  # such as a dataclass; no deeper, because everything may be behind it
        yield from (each for each in vars(value).values() if isinstance(each, nn.Module))


def _all_gather_nothing(module: LightningModule, *_: Any, **__: Any) -> Any:
    """Take the place of ``module.all_gather``, and raise ValueError: a loss would have each negative K times."""
    raise ValueError(
        f"self.all_gather(...) is called {_EVERY_SAMPLE}, so each would be there {module.trainer.world_size} times. "
        "Leave it out there, or do without head_step: call the head and self.all_gather in training_step"
    )


def _log_no_sum(module: LightningModule, *args: Any, **kwargs: Any) -> None:
    """Take the place of ``module.log``, and raise ValueError for a sum."""
    # The module's own method may take other arguments than Lightning's.
    given = inspect.signature(type(module).log).bind(module, *args, **kwargs).arguments | kwargs
    reduce_fx = given.get("reduce_fx", "mean")
    # Lightning takes "sum" in any case, sum and torch.sum.
    if getattr(reduce_fx, "__name__", str(reduce_fx)).lower() == "sum":
        raise ValueError(
            f"self.log({given.get('name')!r}, ..., reduce_fx={reduce_fx!r}) is called {_EVERY_SAMPLE}, so each would "
            f"be counted {module.trainer.world_size} times. Log it in training_step, or use reduce_fx='mean'"
        )
    type(module).log(module, *args, **kwargs)
