"""Names that are private in PyTorch."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._dynamo.callback import callback_handler
from torch._functorch import config as functorch_config
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.backends import ContextProp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    SequenceKey,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)

# Other modules import these from here, though they are defined elsewhere; mypy wants to be told.
__all__ = [
    "BatchNorm",
    "OptimizedModule",
    "SequenceKey",
    "TorchDispatchMode",
    "keystr",
    "tree_flatten",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
]


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long a collective of ``group`` on ``device`` may take before its backend gives up."""
    # Backends that are written in Python need not have options.
    options = getattr(_backend(group, device), "options", None)
    return dist.distributed_c10d.default_pg_timeout if options is None else options._timeout


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that ``group`` uses for tensors on ``device``: ``"gloo"``, ``"nccl"``, ..."""
    return _backend(group, device).name()


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    # The first name is public, and new in torch 2.14.
    return group.get_backend(device) if hasattr(group, "get_backend") else group._get_backend(device)


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the types of devices that ``group`` has a backend for."""
    return list(group._device_types)


def ddp_ignored_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that DistributedDataParallel is told to leave alone."""
    # A default, because the first call of `ignore_in_ddp` sets the attribute.
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp(module: nn.Module, names: Collection[str]) -> None:
    """Tell DistributedDataParallel to neither reduce nor broadcast these parameters and buffers.

    This takes effect when DDP wraps ``module``. It does not change a model that is wrapped already.
    """
    others = [name for name in ddp_ignored_names(module) if name not in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*others, *names])


def stop_ignoring_in_ddp(module: nn.Module, names: Collection[str]) -> None:
    """Undo `ignore_in_ddp` for these names."""
    others = [name for name in ddp_ignored_names(module) if name not in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, others)


def ignore_buffers(model: DistributedDataParallel, names: Collection[str]) -> None:
    """Tell a model that is wrapped already to leave these buffers alone. It looks for buffers before it sends them."""
    if not model.parameters_to_ignore.issuperset(names):
        model.parameters_to_ignore.update(names)
        model._assign_modules_buffers()  # if none is left, it must know that before it looks again


def time_ddp_steps(model: DistributedDataParallel, is_each: bool) -> None:
    """Make DDP time each step, or the sample that it times by default: its first ten, then one in a hundred."""
    model._set_ddp_runtime_logging_sample_rate(1 if is_each else 100)


def ddp_timing(model: DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's record of the last timed step. Times are in nanoseconds."""
    return model._get_ddp_logging_data()


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell learning-rate schedules that the optimizer has stepped. They warn when they step before it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def child_entries(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """Return all children by name, with those that are None or occur twice, which ``named_children`` leaves out."""
    return list(module._modules.items())


def check_input_dim(layer: BatchNorm, input: Tensor) -> None:
    """Raise ValueError if a batch norm layer is not made for inputs with so many dimensions."""
    layer._check_input_dim(input)


def has_compiled_forward(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` itself is compiled or scripted, which hides its operators, parts aside."""
    return isinstance(module, (OptimizedModule, torch.jit.ScriptModule)) or has_compiled_forward(module)


def is_compiled_function(function: Any) -> bool:
    """Return whether ``function`` is what `torch.compile` has returned for one."""
    is_wrapped = hasattr(function, "_torchdynamo_orig_callable")
    return is_wrapped and not getattr(function, "_torchdynamo_disable", False)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after this module's own ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after the backward of this module's own ``forward``."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether hooks of `Tensor.register_hook` may change the gradient of this tensor."""
    return bool(tensor._backward_hooks)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Return whether hooks see the gradient of this tensor."""
    return bool(has_gradient_hooks(tensor) or getattr(tensor, "_post_accumulate_grad_hooks", None))


def num_gradient_listeners(parameter: Tensor) -> int:
    """Return how many functions of `Tensor.register_post_accumulate_grad_hook` are called for ``parameter``."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def _fsdp_groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    # A single one in torch 2.11, or None.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def is_flattened(parameter: Tensor) -> bool:
    """Return whether FSDP1 has put ``parameter`` into one of one dimension, or is that one."""
    return getattr(parameter, "_fsdp_flattened", False)


def begin_passes_at(root: Any) -> None:
    """Let FSDP2 know that passes begin at ``root``. It takes the first part that runs for that, and no other later."""
    root._get_fsdp_state()._lazy_init()


def is_backward_unfinished(root: Any) -> bool:
    """Return whether FSDP2 waits for the end of a backward of ``root``: one runs, or has ended in an exception."""
    return bool(root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)


def drop_unreduced_gradients(unit: Any) -> None:
    """Drop gradients that FSDP2 has not reduced, because an exception has ended the backward."""
    for group in _fsdp_groups(unit):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (gathered := getattr(parameter, "unsharded_param", None)) is not None:  # none if it never was
                gathered.grad = None


def has_unreduced_gradients(unit: Any) -> bool:
    """Return whether a gradient of ``unit`` has come after FSDP2 had reduced its gradients: nothing reduces it.

    With ``set_requires_gradient_sync(False)`` gradients stay until a later backward reduces them.
    """
    groups = [group for group in _fsdp_groups(unit) if group.reduce_grads]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    gathered = [getattr(parameter, "unsharded_param", None) for parameter in parameters]  # none if it never was
    return any(each is not None and each.grad is not None for each in gathered)


def replace_fsdp_collectives(unit: Any, all_gather: Any, reduce_scatter: Any) -> Callable[[], None] | None:
    """Let FSDP2 use these collectives for ``unit``, and divide no gradient; return what undoes it.

    None, and nothing is changed, if somebody has given ``unit`` collectives or a divisor of their own.
    """
    groups = _fsdp_groups(unit)
    if len(groups) != 1:
        return None
    (group,) = groups
    own = group._all_gather_comm, group._reduce_scatter_comm
    is_changed = group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms
    if is_changed or [type(each).__name__ for each in own] != ["DefaultAllGather", "DefaultReduceScatter"]:
        return None
    unit.set_custom_all_gather(all_gather)
    unit.set_custom_reduce_scatter(reduce_scatter)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)

    def undo() -> None:
        group._all_gather_comm, group._reduce_scatter_comm = own
        group.gradient_divide_factor = None
        group.force_sum_reduction_for_comms = False

    return undo


def scaler_device(scaler: torch.amp.GradScaler) -> str:
    """Return the type of device that a gradient scaler works on."""
    return scaler._device


class ShardedScaler(ShardedGradScaler):
    """Skips a step on all ranks if the gradients of one overflow, also where the optimizer unscales them (``fused``).

    torch then looks at this rank's gradients alone; or, if the user has unscaled them, counts the ranks. The kernels of
    such optimizers skip a step if they are told 1, not 2.
    """

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        for is_inf in found.values():
            dist.all_reduce(is_inf, dist.ReduceOp.MAX, group=self.process_group)
        return found

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        for number in self._found_inf_per_device(optimizer).values():
            number.clamp_(max=1)


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place."""
    return tensor._version


def preserved_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context after which ``tensor`` has the version of before: autograd sees no change that was undone."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def is_memory_shared(tensor: Tensor) -> bool:
    """Return whether another tensor has the memory of ``tensor``."""
    storage = tensor.untyped_storage()  # counts as one, and the tensor as another one
    return torch._C._storage_Use_Count(storage._cdata) > 2


def without_torch_function() -> AbstractContextManager[None]:
    """Treat tensor subclasses as plain tensors: their ``__torch_function__`` is not called."""
    return torch._C.DisableTorchFunctionSubclass()


LOCAL_PART = "_local_tensor"
"""The attribute of a DTensor that holds this rank's part."""


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor itself. No gradient flows through it."""
    return tensor._local_tensor if hasattr(tensor, LOCAL_PART) else tensor  # type: ignore[attr-defined]


def assert_async(condition: Tensor) -> None:
    """Fail on the device if ``condition``, a tensor of one bool, is false. The host does not wait for the result."""
    torch._assert_async(condition)


def has_any_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run before or after ``optimizer.step``: its own, or those of all optimizers."""
    return bool(
        _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    )


_SCHEDULER_FILE = LRScheduler.__init__.__code__.co_filename


def step_function(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the function that ``optimizer.step()`` runs, below the wrapper that learning-rate schedules put on it."""
    step: Any = optimizer.step
    function: Any = getattr(step, "__func__", step)
    # The mark alone does not tell: `functools.wraps` copies it to whatever a user puts around the wrapper.
    while getattr(function, "_wrapped_by_lr_sched", False) is True and file_of(function) == _SCHEDULER_FILE:
        function = function.__wrapped__
    return function


def file_of(function: Callable[..., Any]) -> str | None:
    """Return the file with the code of ``function``, None if it has no Python code."""
    return getattr(getattr(function, "__code__", None), "co_filename", None)


def step_below_hooks(optimizer: Optimizer) -> Callable[[], Any]:
    """Return what ``optimizer.step()`` runs between its hooks: without them, and without a record for the profiler."""
    function = step_function(optimizer)
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # type: ignore[attr-defined]
    return partial(function, optimizer)


def shallow_copy_of(optimizer: Optimizer) -> Any:
    """Return an optimizer that shares groups, state and attributes with ``optimizer``, and has no step hooks.

    Nothing that is later assigned to one of the two is assigned to the other. `copy.copy` would run ``__setstate__``.
    """
    copied: Any = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.__dict__.pop("step", None)  # a schedule's wrapper, which steps the original
    copied._optimizer_step_pre_hooks = OrderedDict()
    copied._optimizer_step_post_hooks = OrderedDict()
    return copied


def has_modes() -> bool:
    """Return whether a dispatch mode or a `torch.func` transform is in force, or `torch.jit.trace` records."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


@contextmanager
def without_modes() -> Iterator[None]:
    """Run as if at the top level: under no dispatch mode, in no `torch.func` transform, unseen by `torch.jit.trace`."""
    set_tracing_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    tracing_state = torch._C._get_tracing_state()
    set_tracing_state(None)
    try:
        with _disable_current_modes(), temporarily_clear_interpreter_stack():
            yield
    finally:
        set_tracing_state(tracing_state)


def may_change_saved_tensors() -> bool:
    """Return whether `torch.autograd.graph.allow_mutation_on_saved_tensors` is in force.

    Its dispatch mode copies a tensor that backward needs before an operator changes it.
    """
    return bool(torch.autograd.graph._allow_mutation_on_saved_tensors_enabled)


def on_compile_start(callback: Callable[..., None]) -> Callable[[], None]:
    """Call ``callback`` before Dynamo traces a function; return a function that stops that.

    Further calls with the same ``callback`` have an effect only after `torch.compiler.reset`, which drops callbacks.
    """

    def stop() -> None:
        if callback in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(callback)

    if callback not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(callback)
    return stop


def is_in_backward() -> bool:
    """Return whether this code runs inside of a backward pass, in whichever thread."""
    return backward_number() != -1


def is_in_operator() -> bool:
    """Return whether the dispatcher runs an operator, below whatever mode is in force.

    For saved-tensor hooks under a `TorchDispatchMode`: an operator saves its tensors inside of itself, an
    `autograd.Function` after its forward, outside of any operator.
    """
    try:
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            return True
    except RuntimeError:
        return False


def is_in_function_forward() -> bool:
    """Return whether the forward of an `autograd.Function` runs without grad mode.

    It runs without forward-mode differentiation, too, in which it differs from `torch.no_grad`.
    """
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def declare_no_unseen_changes() -> None:
    """Make `is_in_function_forward` return False until the forward that calls this ends.

    Call it at the start of a forward in which PyTorch's operators alone change tensors: Memonger then computes again
    what this forward computes, as it does outside.
    """
    if not torch.compiler.is_compiling():
        _DECLARED.add(sys._getframe(1).f_code)
        torch._C._set_fwd_grad_enabled(True)  # PyTorch itself puts the old value back at the end of the forward


_DECLARED: set[CodeType] = set()


def is_in_declared_forward() -> bool:
    """Return whether this code runs in a forward that has called `declare_no_unseen_changes`.

    There gradients are off, as under ``torch.no_grad()``, and all the same the result may have a graph.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _DECLARED:
        frame = frame.f_back
    return frame is not None


def backward_number() -> int:
    """Return a number that only the backward pass has inside of which this code runs: not one within it. -1: none."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the backward pass inside of which this code runs was called with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass inside of which this code runs has ended, before it returns."""
    # The first name is public, and new in torch 2.15.
    queue = getattr(torch.autograd.graph, "queue_callback", None)
    queue = queue or torch.autograd.Variable._execution_engine.queue_callback
    queue(callback)


def next_sequence_number() -> int:
    """Return the number that the next node of the autograd graph will have which this thread makes."""
    return torch.autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """Return the place of a node of the autograd graph in the order in which this thread made nodes."""
    return node._sequence_nr()


def forget_used_parameters(model: DistributedDataParallel) -> None:
    """Let ``model`` forget which parameters have had gradients in backward passes without a forward of its own.

    With ``find_unused_parameters`` it would expect a gradient of each of them in its first step.
    """
    model.reducer._reset_state()


def release_reducer(model: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Make ``model`` give up its reducer, which takes its hooks off the parameters; return its user's comm hooks."""
    model._remove_autograd_hooks()
    del model.reducer
    return model._comm_hooks if model.mixed_precision is None else []  # for that, DDP registers a hook itself


def next_buckets(model: DistributedDataParallel) -> list[list[str]]:
    """Return the names of the parameters in each bucket of the next step. All ranks must call it.

    DDP makes its buckets again after its first backward, in the order in which gradients came. Where the module has
    other parameters by now, no bucket has a name.
    """
    if any(getattr(layer, "sparse", False) for layer in model.module.modules()):  # such gradients have no bucket
        return []
    model.reducer._rebuild_buckets()
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    found = [[names.get(id(parameter), "") for parameter in bucket.parameters()] for bucket in buckets]
    return found if all("" not in bucket for bucket in found) else []


@contextmanager
def wrapped_with_buckets(module: nn.Module, buckets: list[list[str]]) -> Iterator[None]:
    """Let a DistributedDataParallel that is made of ``module`` begin with these buckets, if it has their parameters."""
    named = dict(module.named_parameters())
    assign = dist._compute_bucket_assignment_by_size

    def assigned(parameters: Any, *options: Any, **more: Any) -> Any:
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        found = [[indices.get(id(named.get(name))) for name in bucket] for bucket in buckets]
        has_all = {index for bucket in found for index in bucket} == set(indices.values())
        # A bucket has one dtype, and the module may have others than when these buckets were made.
        if has_all and all(len({(named[name].dtype, named[name].device) for name in each}) == 1 for each in buckets):
            return found[::-1], [0] * len(found)  # DDP reverses both; the second, limits of sizes, only describes them
        return assign(parameters, *options, **more)

    replaced: Any = dist
    replaced._compute_bucket_assignment_by_size = assigned
    try:
        yield
    finally:
        replaced._compute_bucket_assignment_by_size = assign


@cache
def mutated_arguments(func: Any) -> tuple[int | str, ...]:
    """Return which arguments an operator changes in place: places, and names of those given by keyword alone."""
    if func.namespace == "c10d":  # the schemas of collectives do not say it
        return () if func.name().partition("::")[2] in ("send", "barrier", "monitored_barrier_") else (0,)
    if func.name().startswith("aten::rrelu_with_noise"):
        return ()  # autograd keeps the memory of the noise before the operator fills it
    arguments = enumerate(func._schema.arguments)
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def is_leaf(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a leaf of the graph, which stays as it is.

    A view of what has a graph is no leaf. PyTorch itself would make its node now if the base was changed in place:
    earlier than in training that does not ask, so that backward adds gradients in another order.
    """
    if not tensor.requires_grad:
        return True
    base = tensor._base
    return (base is None or not base.requires_grad) and tensor.is_leaf


_IN_PLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView


def detach_with_version(tensor: Tensor) -> Tensor:
    """Return a detached alias of ``tensor``, below autograd as well. It has the version of ``tensor``, also later."""
    # Below autograd, a view would have a version of its own. No dispatch mode need see it: that takes twice the time.
    with torch._C._DisableTorchDispatch(), torch._C._SetExcludeDispatchKeyGuard(_IN_PLACE_OR_VIEW, False):
        return tensor.detach()


class Nnpack:
    """The flag of NNPACK, as other backends have theirs: `torch.backends.nnpack` has functions alone."""

    enabled = ContextProp(torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled)


def flag_reader(module: Any, name: str) -> Callable[[], Any]:
    """Return what reads the flag ``name`` of a module of `torch.backends`, or of an operator there."""
    kind: Any = type(module)
    flag = vars(kind).get(name)
    return partial(kind.__getattr__, module, name) if flag is None else flag.getter


@contextmanager
def activation_memory_budget(share: float) -> Iterator[None]:
    """Let what is compiled inside keep at most this share of the activations that eager training keeps (0 to 1)."""
    with functorch_config.patch(activation_memory_budget=share):
        yield
