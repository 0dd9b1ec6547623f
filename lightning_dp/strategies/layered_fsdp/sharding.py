"""Which modules FSDP2 shards as units, and what all ranks must have in common before it does."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from lightning_dp._lightning import LightningModule
from lightning_dp._private.torch_names import (
    SequenceKey,
    drop_unreduced_gradients,
    has_gradient_hooks,
    has_tensor_hooks,
    has_unreduced_gradients,
    is_backward_unfinished,
    is_in_backward,
    keystr,
    local_part,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    without_torch_function,
)
from lightning_dp.strategies.base import overlapping_parameters
from lightning_dp.strategies.consolidate import OUTLINE, by_number

Wrap = Sequence[type[nn.Module]] | Callable[[nn.Module], bool]

# Of `wrap=None`. A unit is what is gathered at once, reduced at once and updated at once: about as many as layered
# SGD's buckets are enough to fill the time of forward and backward.
NUM_UNITS = 16
# A unit this much smaller than the average one is left to its parent: each costs a message and a gather.
SMALLEST_PART = 8

# These use parameters of their parts without a call of the part's forward, so nothing would gather them.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

COMPILED = "_orig_mod."  # is in the names of a compiled module's parameters, and not in those of a folder

STEPS = ("training_step", "validation_step", "test_step", "predict_step")

SHARDED = "layered_fsdp_sharded"
"""In a checkpoint: the places of what callbacks have put into it as shards, each with the dimension that is sharded."""

# Names and parameters of a module before it was sharded. Those that nobody has kept are gone.
_whole: WeakKeyDictionary[nn.Module, list[tuple[str, ref[Tensor]]]] = WeakKeyDictionary()
# What users have set on parameters before that, by name.
_attributes: WeakKeyDictionary[nn.Module, dict[str, dict[str, Any]]] = WeakKeyDictionary()


def check_wrap(wrap: Any) -> None:
    """Raise ValueError for a ``wrap`` that could find no unit, such as the name of a class."""
    if wrap is None:
        return
    # A class can be called, too, but makes a module instead of saying whether one is a unit.
    is_classes = isinstance(wrap, Sequence) and all(isinstance(each, type) for each in wrap)
    if not (is_classes and wrap) and (isinstance(wrap, type) or not callable(wrap)):
        raise ValueError(
            f"wrap={wrap!r} must be classes of modules in a list, a function, or None: by size; Hydra makes a class of "
            "{_target_: hydra.utils.get_class, path: MODULE.CLASS}"
        )


def shard(
    module: LightningModule,
    mesh: DeviceMesh,
    wrap: Wrap | None,
    reshard_after_forward: bool,
    precision: MixedPrecisionPolicy,
) -> None:
    """Shard ``module`` over ``mesh``. All ranks call it, with equal parameters.

    Args:
        module: changed in place: its parameters become DTensors.
        mesh: of one dimension: the ranks of a group.
        wrap: the units: classes, a function that says whether a module is one, or None: by size.
        reshard_after_forward: free the gathered parameters after forward, and gather them again in backward.
        precision: of the gathered parameters and of the sums.

    Raises:
        ValueError: ``wrap`` finds no module, one that FSDP2 refuses (a container without a ``forward``), or one that
            shares a parameter; sums in another dtype than the parameters'; a parameter has a hook; two share memory.
    """
    check_hooks(module, is_sharded=False)
    for name, other in overlapping_parameters(module):
        raise ValueError(
            f"{name} and {other} are two parameters that share memory, as after p.data = q.data, and FSDP2 would give "
            "each its own; let both names have one parameter, or use LayeredSGDStrategy"
        )
    sum_dtype = precision.reduce_dtype or precision.param_dtype
    for name, parameter in module.named_parameters():
        if sum_dtype not in (None, parameter.dtype) and parameter.requires_grad:
            raise ValueError(
                f"mixed_precision={precision} sums in {sum_dtype}, and {name} is {parameter.dtype}: sums arrive in the "
                f"memory of the gradients; give MixedPrecisionPolicy reduce_dtype={parameter.dtype}, and the strategy "
                'compression="bf16" for 16 bits between groups'
            )
    units = list(_units(module, wrap))
    _whole[module] = [(name, ref(parameter)) for name, parameter in module.named_parameters()]
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no channels_last weights; inputs may be
    for _, unit in reversed(units):  # inner ones first: what a unit has inside of another one is its own
        if any(True for _ in unit.parameters()):
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    # What is left are few parameters. A training step uses them throughout, and ends with backward, which frees them. A
    # part of a module that steps by itself may run without backward, and must not keep what it has gathered.
    frees = reshard_after_forward and not module.automatic_optimization
    for root in _roots(module):
        if not isinstance(root, FSDPModule):
            fully_shard(root, mesh=mesh, mp_policy=precision, reshard_after_forward=frees)
    if isinstance(module, FSDPModule):
        for step in STEPS:
            register_fsdp_forward_method(module, step)


def attributes_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what users have set on parameters of ``module`` (``p.no_weight_decay = True``), by name.

    Once they are sharded, what was set before: `torch.nn.Module.to`, with which a fit ends, drops attributes of shards.
    """
    if whole := {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}:
        _attributes[module] = {name: vars(p).copy() for name, p in whole.items() if vars(p)}
    return _attributes.get(module, {})


def give_attributes(module: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    """Give them to the present parameters of ``module``: FSDP2 makes others of those that it shards."""
    for name, own in attributes.items():
        vars(module.get_parameter(name)).update(own)


@contextmanager
def with_own_classes(module: nn.Module) -> Iterator[None]:
    """Let the parts that `shard` has made units have their own classes within the context.

    FSDP2 makes others of them. Users choose parameters by ``type(part)``, and would silently get other groups.
    """
    with ExitStack() as undo:
        for part in module.modules() if module in _whole else ():
            if isinstance(part, FSDPModule):
                undo.callback(setattr, part, "__class__", type(part))
                part.__class__ = type(part).__bases__[1]
        yield


def check_parameters(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Raise ValueError for an optimizer of a parameter that `shard` has taken out of ``module``: nothing trains it."""
    whole = {parameter: name for name, kept in _whole.get(module, ()) if (parameter := kept()) is not None}
    for optimizer in optimizers:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in whole:
                raise ValueError(
                    f"configure_optimizers has given {type(optimizer).__name__} the parameter {whole[parameter]} as it "
                    "was before the module was sharded, which trains nothing; take parameters from the module there, "
                    "and not from lists that are made in __init__"
                )


def check_hooks(module: nn.Module, is_sharded: bool = True) -> None:
    """Raise ValueError for a parameter with a hook on its gradient.

    FSDP2 never calls those of `Tensor.register_hook`, and drops all of a parameter that it shards. What it has gathered
    may have some, such as the root's parameters in a step.
    """
    with without_torch_function():  # this is no use of a parameter
        for name, parameter in module.named_parameters():
            is_shard = isinstance(parameter, DTensor)
            if has_gradient_hooks(parameter) if is_shard else not is_sharded and has_tensor_hooks(parameter):
                raise ValueError(
                    f"{name} has a hook on its gradient, which FSDP2 never calls; change gradients in "
                    "on_after_backward instead"
                )


def check_embeddings(module: nn.Module) -> None:
    """Raise ValueError for an embedding that is trained, and whose forward changes its weight."""
    for name, part in module.named_modules():
        if (
            isinstance(part, (nn.Embedding, nn.EmbeddingBag))
            and part.max_norm is not None
            and part.weight.requires_grad
        ):
            raise ValueError(
                f"{name} has max_norm={part.max_norm}, so its forward changes rows of its weight; FSDP2 frees what it "
                "has gathered, and the change would be lost: build it with max_norm=None, and scale the rows in "
                "on_train_batch_start"
            )


def _roots(module: LightningModule) -> list[nn.Module]:
    """Return the modules whose forward begins and ends a pass of FSDP2.

    That is the step of ``module``. One that steps its optimizers itself runs backward, and the next forward, within its
    step, so there each of its parts begins and ends its own.
    """
    if module.automatic_optimization:
        return [module]
    return _outermost(_outermost_with_forward(module, "", _sharing(_outermost(module.children()))))


def _outermost_with_forward(module: nn.Module, name: str, shares: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for own_name, _ in module.named_parameters(prefix=name, recurse=False):
        raise ValueError(
            f"{own_name} belongs to a {type(module).__name__} that has no forward which runs within its training_step, "
            "or that shares a part with another module, and the optimizers are stepped by hand, so nothing tells when "
            "to gather it; put it into a module with a forward, which shares nothing"
        )
    for child_name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue  # nothing to gather
        if has_own_forward(child) and not shares(child):
            yield child
        else:
            yield from _outermost_with_forward(child, f"{name}.{child_name}" if name else child_name, shares)


def sharded_units(module: nn.Module) -> list[tuple[str, Any]]:
    """Return name and module of each unit, in the order of the module's parts: about that of the forward.

    The modules are `FSDPModule`, too, for which Python has no type.
    """
    units: list[tuple[str, Any]] = [each for each in module.named_modules() if isinstance(each[1], FSDPModule)]
    return [(name or type(module).__name__, unit) for name, unit in units if own_parameters(unit)]


def outermost_units(module: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 has sharded and that lie in no other such module: the roots of its passes."""
    if isinstance(module, FSDPModule):  # each step asks
        return [module]
    return _outermost(part for part in module.modules() if isinstance(part, FSDPModule))


def _outermost(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return each of ``parts`` that lies in no other one, once. An attribute may name a part that lies deeper, too."""
    by_id = {id(part): part for part in parts}
    inner = {id(each) for part in by_id.values() for each in part.modules() if each is not part}
    return [part for number, part in by_id.items() if number not in inner]


def forget_failed_step(module: nn.Module) -> None:
    """Let FSDP2 start over where an exception has ended the last step.

    After a forward, parts that it had gathered would stay so. After a backward, it would reduce no gradients any more:
    `check_last_backward` finds that where torch is a version that cannot start over.
    """
    for root in outermost_units(module):
        with suppress(AttributeError):  # it has not run yet, or torch is a version that has no such method
            root.reset_iter_state()
        for _, unit in sharded_units(root):
            drop_unreduced_gradients(unit)


def forget_failed_backward(module: nn.Module) -> None:
    """Do `forget_failed_step` between two steps if a backward has raised that the step has called by itself."""
    if _has_failed_backward(module):
        forget_failed_step(module)


def check_last_backward(module: nn.Module) -> None:
    """Raise RuntimeError if an exception has ended the last backward, so that FSDP2 still waits for its end.

    It would reduce no gradients, and so train nothing without an error.
    """
    if not _has_failed_backward(module):
        return
    remedy = (
        "call self.manual_backward instead of loss.backward()"
        if hasattr(FSDPModule, "reset_iter_state")
        else "build the module again and load a checkpoint, or install a torch whose FSDPModule has reset_iter_state"
    )
    raise RuntimeError(
        f"an exception has ended an earlier backward of {type(module).__name__}, after which FSDP2 of torch "
        f"{torch.__version__} reduces no gradients; {remedy}"
    )


def check_all_reduced(module: nn.Module) -> None:
    """Raise RuntimeError, when backward has ended, for a gradient that FSDP2 has not reduced, and so would lose.

    It reduces a unit when the gradient of its input is there. Through gradients of gradients others come later.
    """
    for name, unit in sharded_units(module):
        if has_unreduced_gradients(unit):
            raise RuntimeError(
                f"{name} got a gradient after FSDP2 had reduced its gradients, which would be lost, as with "
                "create_graph=True: a gradient penalty, say; use LayeredSGDStrategy"
            )


def _has_failed_backward(module: nn.Module) -> bool:
    return not is_in_backward() and any(map(is_backward_unfinished, outermost_units(module)))


def own_parameters(unit: nn.Module) -> list[Tensor]:
    """Return the parameters that FSDP2 gathers and reduces with ``unit``: those that no unit inside of it has."""
    inner = [part for part in unit.modules() if part is not unit and isinstance(part, FSDPModule)]
    others = {parameter for part in inner for parameter in part.parameters()}
    return [parameter for parameter in unit.parameters() if parameter not in others]


def parameter_names(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each unit, in its order. Two modules with equal ones have equal units."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {unit_name: [names[each] for each in own_parameters(unit)] for unit_name, unit in sharded_units(module)}


def padded_numel(parameter: Tensor) -> int:
    """Return the number of elements that a shard of ``parameter`` takes in a buffer of FSDP2: the same on all ranks."""
    assert isinstance(parameter, DTensor)
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    rows = parameter.shape[placement.dim]
    num_ranks = parameter.device_mesh.size()
    return 0 if rows == 0 else -(-rows // num_ranks) * (parameter.numel() // rows)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether calls of ``module`` can gather it. A list or dictionary of modules cannot be called.

    A metric is also used without a call. FSDP2 looks for its state of a module by the hash, which changes when a metric
    is updated. The networks in it can be gathered.
    """
    has_forward = getattr(module.forward, "__func__", module.forward) is not nn.Module.forward
    return has_forward and type(module).__hash__ is nn.Module.__hash__


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give memory and first values to the parts that ``configure_model`` has made on the meta device.

    Raises:
        TypeError: a part has no ``reset_parameters``.
    """
    for name, part in module.named_modules():
        if any(tensor.is_meta for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]):
            reset = getattr(part, "reset_parameters", None)
            if reset is None:
                raise TypeError(
                    f"{name or 'the module'}, a {type(part).__name__}, is on the meta device and has no "
                    "reset_parameters to give it values; add one, or do not make it on the meta device"
                )
            part.to_empty(device=device, recurse=False)
            reset()


def _units(module: nn.Module, wrap: Wrap | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units but the roots, outer ones first."""
    shares = _sharing([module])
    if wrap is None:
        by_size = _by_size(module, "", _numel(module.parameters()) / NUM_UNITS, shares)
        yield from {id(part): (name, part) for name, part in by_size}.values()  # once, if it has several names
        return
    classes = tuple(wrap) if isinstance(wrap, Sequence) else ()
    wholes = [part for part in module.modules() if isinstance(part, _WHOLE)]
    inside = {part for whole in wholes for part in whole.modules() if part is not whole}
    found = [
        (name, part)
        for name, part in module.named_modules()
        if name and part not in inside and (isinstance(part, classes) if isinstance(wrap, Sequence) else wrap(part))
    ]
    if not found:
        raise ValueError(
            f"wrap={wrap!r} finds no part of {type(module).__name__}; give classes of its parts, a function that is "
            "true for some of them, or None: by size"
        )
    for name, part in found:
        if shares(part):
            raise ValueError(
                f"wrap={wrap!r} finds {name!r}, which shares a parameter with another part; give a part that "
                "contains both"
            )
    yield from found


def _by_size(
    module: nn.Module, name: str, target: float, shares: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts of ``module`` that have at most ``target`` elements, and single layers that have more."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        numel = _numel(child.parameters())
        # What a function of torch makes (parametrizations), or a loss keeps, is used by its parent: without a forward
        # of its own a part cannot be gathered.
        if has_own_forward(child) and not shares(child):
            if numel <= target:
                if numel >= target / SMALLEST_PART:
                    yield path, child
                continue
            if isinstance(child, _WHOLE) or not any(True for _ in child.children()):
                yield path, child
                continue
        yield from _by_size(child, path, target, shares)


def _sharing(wholes: Sequence[nn.Module]) -> Callable[[nn.Module], bool]:
    """Return a function that says whether a part of ``wholes`` has a parameter that others have, too.

    FSDP2 needs all uses of a parameter in one unit. Others may have the parameter itself, or a module that has it. The
    part itself may have several names.
    """
    num_names = Counter(id(part) for whole in wholes for _, part in whole.named_modules(remove_duplicate=False))
    num_uses = sum(map(_uses, wholes), Counter[Tensor]())

    def shares(part: nn.Module) -> bool:
        return any(num_uses[parameter] > num_names[id(part)] * number for parameter, number in _uses(part).items())

    return shares


def _uses(module: nn.Module) -> Counter[Tensor]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _numel(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def broadcast_from_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks of ``group`` the values that its first rank has. FSDP2 does not, unlike DDP.

    Ranks that were seeded in different ways would train a model whose shards do not belong together.
    """
    with torch.no_grad():
        for tensor in tensors:
            local = local_part(tensor)
            if local.numel() and local.device.type != "meta":
                whole = local.contiguous()
                dist.broadcast(whole, group=group, group_src=0)
                if whole is not local:
                    local.copy_(whole)


# --- Whole values of a checkpoint, as any strategy writes it.


def shard_like(parameter: Tensor | None, value: Any) -> Any:
    """Return the part of ``value`` that this rank has of ``parameter``; other values as they are. Nothing is sent."""
    if isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        value = value.to(parameter.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


@contextmanager
def loading_whole_values(module: nn.Module) -> Iterator[None]:
    """Let ``load_state_dict`` of ``module`` take whole values within the context. Each part keeps its shards of them.

    The part itself, because a hook or a ``load_state_dict`` of the user's may give the values their names, or compute
    with several of them. What these copy to a parameter themselves is whole, too.
    """

    def shard_own(part: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in part.named_parameters(prefix.removesuffix("."), recurse=False, remove_duplicate=False):
            if name in state:
                state[name] = shard_like(parameter, state[name])

    with ExitStack() as undo:
        undo.enter_context(implicit_replication())
        for part in module.modules():
            undo.callback(part.register_load_state_dict_pre_hook(shard_own).remove)
        yield


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a whole state into an optimizer of sharded parameters.

    A state names its parameters by numbers; their order in the groups says which they are.
    """
    saved = [number for group in state["param_groups"] for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_number = dict(zip(saved, own, strict=False))  # `load_state_dict` says what is wrong with other numbers
    # A state that is not of a parameter has a name in place of a number, and may be any value.
    sharded = {
        number: tree_map(partial(shard_like, of_number.get(number)), values)
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})


def whole_values(values: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Return sharded tensors as whole ones, on the host, or ``{}`` where not to keep them. All ranks call it."""
    whole = copy.copy(values)  # not a new dictionary, which would lose the versions of the layers
    whole.clear()
    for name, value in values.items():
        gathered = tree_map_only(Tensor, lambda each: _whole_value(each, keep), value)
        if keep:
            whole[name] = gathered
    return whole


def _whole_value(value: Tensor, keep: bool) -> Tensor | None:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if keep else None  # dropped before the next one is gathered


def whole_optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with whole tensors, or ``{}`` where not to keep it. All ranks call it.

    Lightning's own sorts a group's parameters by their order in the module. A file is loaded by their order in the
    optimizer: where the two differ, into other parameters.
    """
    state = optimizer.state_dict()
    # In one order on all ranks: they update units as sums arrive, so states were made in different orders.
    ordered = dict(sorted(state["state"].items(), key=lambda item: str(item[0])))
    whole = whole_values(ordered, keep)
    return {**state, "state": whole} if keep else {}


def gather_added(checkpoint: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Return ``checkpoint`` with whole tensors in place of shards, such as an average that a callback keeps.

    A file would hold the shards of one rank, and torch could not read it. All ranks call it.

    Args:
        checkpoint: as Lightning makes it.
        keep: whether to keep the whole tensors. If not, ``checkpoint`` is returned as it is.

    Raises:
        ValueError: on all ranks, if some have put in other shards than others.
    """
    sharded = {keystr(path): each for path, each in tree_leaves_with_path(checkpoint) if isinstance(each, DTensor)}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sorted(sharded))
    for rank, places in enumerate(of_ranks):
        if differing := set(places) ^ set(of_ranks[0]):
            raise ValueError(
                f"checkpoint{min(differing)} is a shard on rank 0 or on rank {rank} alone, and the ranks of a group "
                "gather it together; let all ranks put it into the checkpoint"
            )
    whole: dict[str, Tensor] = {}
    for place in of_ranks[0]:
        value = sharded[place].full_tensor()
        if keep:  # else it is dropped before the next one is gathered
            whole[place] = value.detach().cpu()
    if not whole:
        return checkpoint
    gathered: dict[str, Any] = tree_map_with_path(lambda path, each: whole.get(keystr(path), each), checkpoint)
    if "state_dict" in checkpoint:
        values = copy.copy(checkpoint["state_dict"])  # with the versions of the layers
        values.update(gathered["state_dict"])
        gathered["state_dict"] = values
    dims = {place: each.placements[0].dim for place, each in sharded.items() if isinstance(each.placements[0], Shard)}
    return gathered | {SHARDED: dims}


def with_parts_as_given(checkpoint: dict[str, Any], module: LightningModule) -> dict[str, Any]:
    """Return ``checkpoint`` with the parts of ``module`` that `save_hyperparameters` keeps as they were then: whole.

    Python cannot write a part that is sharded. The values of its parameters are in the checkpoint's ``state_dict``.
    """
    key = module.CHECKPOINT_HYPER_PARAMS_KEY
    present = checkpoint.get(key)
    if not isinstance(present, dict):
        return checkpoint
    sharded = [name for name, value in present.items() if any(map(_is_sharded, tree_leaves(value)))]
    given = module.hparams_initial if sharded else {}
    return checkpoint | {key: present | {name: given[name] for name in sharded if name in given}}


def _is_sharded(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(isinstance(parameter, DTensor) for parameter in value.parameters())


def shard_added(checkpoint: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Return ``checkpoint`` with this rank's shards of what `gather_added` has gathered. Nothing is sent."""
    dims = checkpoint.pop(SHARDED, None)
    if not dims:
        return checkpoint

    def shard_again(path: Any, value: Any) -> Any:
        if (dim := dims.get(keystr(path))) is None:
            return value
        return distribute_tensor(value.to(mesh.device_type), mesh, [Shard(dim)], src_data_rank=None)

    others = {key: value for key, value in checkpoint.items() if key != "state_dict"}  # which is loaded as a whole
    return checkpoint | tree_map_with_path(shard_again, others)


def with_outline(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return what is written to a folder: ``checkpoint`` with `OUTLINE`, by which `read_shards` reads it.

    PyTorch writes values that are no tensors as they are on any one rank, and reads no more of them than a new module
    or optimizer has, not what they have got in training. So the outline has all values of this rank, with a tensor on
    the device ``meta`` in the place of each that is sharded.
    """
    by_rank = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    outline = tree_map_only(Tensor, _outline_of, by_rank)
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {name.replace(COMPILED, "") for name, _ in own}
    values = checkpoint["state_dict"].items()
    tensors = {name: value for name, value in values if isinstance(value, DTensor) or name in names}
    return checkpoint | {"state_dict": tensors, OUTLINE: outline}


def _outline_of(value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.detach().cpu()


def read_shards(folder: Path, outline: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return the state of ``module`` and those of its optimizers, with this rank's shards. All ranks call it.

    What the module does not have, or has in another shape, is a whole tensor: ``load_state_dict`` says what is wrong.
    """
    names = {name.replace(COMPILED, ""): name for name in module.state_dict()}
    own = {name.replace(COMPILED, ""): value for name, value in module.named_parameters(remove_duplicate=False)}
    wanted: dict[str, Tensor] = {}

    def fill(part: str, values: Any) -> Any:
        def room(path: Any, value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_meta):
                return value
            keys = [str(each.idx if isinstance(each, SequenceKey) else each.key) for each in path]
            like = own.get(keys[0] if part == "state_dict" else keys[1])  # an optimizer's is state, name, ...
            if isinstance(like, DTensor) and like.shape == value.shape:
                empty = torch.empty_like(like, dtype=value.dtype)
            else:
                empty = torch.empty_like(value, device="cpu")
            return wanted.setdefault(".".join([part, *keys]), empty)

        return tree_map_with_path(room, values)

    state = fill("state_dict", outline["state_dict"])
    optimizers = [fill(f"optimizer_{index}", each) for index, each in enumerate(outline.get("optimizer_states", []))]
    load(wanted, checkpoint_id=folder)
    return {
        "state_dict": {names.get(name, name): value for name, value in state.items()},
        "optimizer_states": [by_number(each) for each in optimizers],
    }
