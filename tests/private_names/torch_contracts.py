"""What `lightning_dp._private.torch_names` relies on."""

from __future__ import annotations

import importlib
import warnings
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.modules.batchnorm
import torch.utils._python_dispatch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dp._private import torch_names
from tests.private_names.contract import contract
from tests.ranks import thread_group

CPU = torch.device("cpu")


@contract("torch._dynamo", "_dynamo")
def check_compiled_modules_are_recognized() -> None:
    optimized_module = importlib.import_module("torch._dynamo").OptimizedModule
    assert optimized_module is torch_names.OptimizedModule
    assert isinstance(torch.compile(nn.Linear(1, 1), backend="eager"), optimized_module)


@contract("torch.utils._pytree", "_pytree")
def check_trees_are_taken_apart_and_put_together() -> None:
    pytree = importlib.import_module("torch.utils._pytree")
    tree = {"a": [1, 2.0], "b": (3,)}
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2.0, 3]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_map_only(int, str, tree) == {"a": ["1", 2.0], "b": ("3",)}
    places = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(tree)}
    assert places == {"['a'][0]": 1, "['a'][1]": 2.0, "['b'][0]": 3}
    assert pytree.tree_map_with_path(lambda path, _: places[pytree.keystr(path)], tree) == tree


@contract(torch.nn.modules.batchnorm, "_BatchNorm")
def check_batch_norms_have_one_base() -> None:
    base = torch.nn.modules.batchnorm._BatchNorm
    assert base is torch_names.BatchNorm
    assert all(issubclass(kind, base) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


@contract(nn.BatchNorm2d, "_check_input_dim")
def check_batch_norm_refuses_the_wrong_number_of_dimensions() -> None:
    torch_names.check_input_dim(nn.BatchNorm2d(3), torch.ones(2, 3, 4, 4))
    with pytest.raises(ValueError, match="expected 4D input"):
        torch_names.check_input_dim(nn.BatchNorm2d(3), torch.ones(2, 3))


@contract(dist.ProcessGroup, "_get_backend", successor=(dist.ProcessGroup, "get_backend"))
@contract(dist.ProcessGroupGloo._Options, "_timeout")
def check_a_group_tells_its_backend_and_timeout() -> None:
    group = thread_group(dist.HashStore(), 0, 1, 77.0)
    assert torch_names.group_timeout(group, CPU) == timedelta(seconds=77)
    assert torch_names.backend_name(group, CPU) == "gloo"


@contract(dist.ProcessGroup, "_device_types")
def check_a_group_tells_its_devices() -> None:
    assert torch_names.device_types(thread_group(dist.HashStore(), 0, 1, 77.0)) == [CPU]


def in_one_process(check: Callable[[], None]) -> None:
    """Run ``check`` with a default process group of one rank, which DistributedDataParallel needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check()
    finally:
        dist.destroy_process_group()


@contract(nn.Module, "_ddp_params_and_buffers_to_ignore")
@contract(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model")
def check_ddp_ignores_what_it_is_told_to() -> None:
    def check() -> None:
        module = nn.Linear(2, 2)
        torch_names.ignore_in_ddp(module, ["bias"])
        assert torch_names.ddp_ignored_names(module) == ["bias"]
        assert set(DistributedDataParallel(module).parameters_to_ignore) == {"bias"}
        torch_names.stop_ignoring_in_ddp(module, ["bias"])
        assert torch_names.ddp_ignored_names(module) == []

    in_one_process(check)


@contract(DistributedDataParallel, "_assign_modules_buffers")
def check_ddp_that_has_wrapped_a_module_ignores_buffers() -> None:
    def check() -> None:
        model = DistributedDataParallel(nn.BatchNorm1d(2))
        model.module.register_buffer("later", torch.ones(3))
        torch_names.ignore_buffers(model, ["later"])
        assert model.will_sync_module_buffers()
        model(torch.ones(2, 2))
        assert "later" not in model.named_module_buffers
        torch_names.ignore_buffers(model, [name for name, _ in model.module.named_buffers()])
        assert not model.will_sync_module_buffers()
        model(torch.ones(2, 2))

    in_one_process(check)


@contract(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate")
@contract(DistributedDataParallel, "_get_ddp_logging_data")
def check_ddp_times_every_step() -> None:
    def check() -> None:
        model = DistributedDataParallel(nn.Linear(2, 2))
        torch_names.time_ddp_steps(model, is_each=True)
        iterations = []
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            timing = torch_names.ddp_timing(model)
            iterations.append(timing["iteration"])
        assert iterations[2:] == [iterations[1] + 1, iterations[1] + 2], "each step is timed"
        assert timing["backward_comm_time"] > 0
        assert timing["backward_compute_comm_overlap_time"] >= 0

    in_one_process(check)


def counted(calls, bucket):  # DDP compares annotations with types, and would find strings
    """Communication hook that counts its calls in its state."""
    calls.append(None)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contract(DistributedDataParallel, "_remove_autograd_hooks")
def check_a_released_reducer_reduces_nothing() -> None:
    def check() -> None:
        for releases in (False, True):
            calls: list[None] = []
            module = nn.Linear(2, 2)
            model = DistributedDataParallel(module)
            model.register_comm_hook(calls, counted)
            model(torch.ones(1, 2)).sum().backward()
            if releases:
                torch_names.release_reducer(model)
                module(torch.ones(1, 2)).sum().backward()
            assert len(calls) == 1

    in_one_process(check)


@contract(dist.Reducer, "_rebuild_buckets")
@contract(dist.Reducer, "_get_zeros_like_grad_buckets")
@contract(dist, "_compute_bucket_assignment_by_size")
def check_ddp_begins_with_the_buckets_that_it_is_given() -> None:
    def check() -> None:
        module = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.Linear(3, 2)))
        module.forward = lambda x: module.a(module.b(x))  # type: ignore[method-assign]
        model = DistributedDataParallel(module)
        first = torch_names.next_buckets(model)
        model(torch.ones(1, 3)).sum().backward()
        again = torch_names.next_buckets(model)
        assert sorted(*first) == sorted(*again) == sorted(name for name, _ in module.named_parameters())
        assert first != again, "gradients come in another order than the parameters"
        for buckets in (again, [["b.weight", "a.bias"], ["a.weight", "b.bias"]]):
            with torch_names.wrapped_with_buckets(module, buckets):
                assert torch_names.next_buckets(DistributedDataParallel(module)) == buckets
        module.b.double()
        with torch_names.wrapped_with_buckets(module, again):
            assert len(torch_names.next_buckets(DistributedDataParallel(module))) == 2, "a bucket has one dtype"
        module.b.requires_grad_(False)
        with torch_names.wrapped_with_buckets(module, again):
            assert torch_names.next_buckets(DistributedDataParallel(module)) == [["a.weight", "a.bias"]]
        module.a = nn.Linear(2, 3)
        assert torch_names.next_buckets(model) == [], "DDP does not know the new layer"
        assert torch_names.next_buckets(DistributedDataParallel(nn.Embedding(2, 2, sparse=True))) == []

    in_one_process(check)


@contract(dist.Reducer, "_reset_state")
def check_a_reducer_does_not_expect_gradients_of_what_was_used_without_it() -> None:
    def check() -> None:
        module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        module.forward = lambda x: module[0](x)  # type: ignore[method-assign]
        model = DistributedDataParallel(module, find_unused_parameters=True)
        module[1](torch.ones(1, 2)).sum().backward()
        module.zero_grad()
        torch_names.forget_used_parameters(model)
        model(torch.ones(1, 2)).sum().backward()

    in_one_process(check)


@contract(DistributedDataParallel, "_comm_hooks")
def check_a_released_reducer_hands_over_its_communication_hook() -> None:
    def check() -> None:
        calls: list[None] = []
        model = DistributedDataParallel(nn.Linear(2, 2))
        model.register_comm_hook(calls, counted)
        assert torch_names.release_reducer(model) == [(counted, calls)]
        model = DistributedDataParallel(nn.Linear(2, 2))
        model.register_comm_hook(calls, counted)
        model.mixed_precision = object()  # DDP would have registered the hook, and would do so again
        assert torch_names.release_reducer(model) == []

    in_one_process(check)


@contract(Optimizer, "_opt_called")
def check_a_schedule_believes_that_the_optimizer_has_stepped() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = StepLR(optimizer, 1)
    torch_names.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


@contract(SGD, "_optimizer_step_pre_hooks")
@contract(SGD, "_optimizer_step_post_hooks")
def check_a_shallow_copy_of_an_optimizer_steps_without_hooks_and_leaves_the_original() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = SGD([parameter], lr=0.5, momentum=0.9)
    StepLR(optimizer, 1)  # replaces `step`
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    copied = torch_names.shallow_copy_of(optimizer)
    copied.param_groups = [{**optimizer.param_groups[0], "lr": 0.25}]
    copied.step()
    assert parameter.item() == 0.75
    assert not calls
    assert list(optimizer.state) == [parameter]
    assert optimizer.param_groups[0]["lr"] == 0.5


@contract(nn.Module, "_modules")
def check_children_are_listed_with_repetitions_and_none() -> None:
    module, child = nn.Module(), nn.ReLU()
    module.add_module("a", child)
    module.add_module("b", child)
    module.add_module("c", None)
    assert torch_names.child_entries(module) == [("a", child), ("b", child), ("c", None)]


@contract(nn.Module, "_compiled_call_impl")
def check_a_module_compiled_in_place_is_recognized() -> None:
    module = nn.Linear(1, 1)
    assert not torch_names.has_compiled_forward(module)
    module.compile(backend="eager")
    assert torch_names.has_compiled_forward(module)


def _without(attribute: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what takes an attribute from all functions that torch compiles, or keeps from being compiled."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        for owner, name in ((torch, "compile"), (torch.compiler, "disable")):
            patch.setattr(owner, name, partial(renamed, getattr(owner, name)))

    def renamed(make: Any, *args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        vars(made).pop(attribute, None)
        return made

    return remove


@contract("torch", "_torchdynamo_orig_callable", remove=_without("_torchdynamo_orig_callable"))
def check_a_compiled_function_is_recognized() -> None:
    assert torch_names.is_compiled_function(torch.compile(len, backend="eager"))
    assert not torch_names.is_compiled_function(len)


@contract("torch", "_torchdynamo_disable", remove=_without("_torchdynamo_disable"))
def check_a_function_that_is_not_to_be_compiled_is_recognized() -> None:
    assert not torch_names.is_compiled_function(torch.compiler.disable(lambda: None))


@contract(torch.amp.GradScaler, "_device")
def check_a_scaler_tells_its_device() -> None:
    assert torch_names.scaler_device(torch.amp.GradScaler("cpu")) == "cpu"


def _scaled_gradient() -> tuple[nn.Parameter, SGD, torch_names.ShardedScaler]:
    weight = nn.Parameter(torch.ones(1))
    scaler = torch_names.ShardedScaler("cpu")
    scaler.scale(weight.sum()).backward()
    return weight, SGD([weight], lr=1.0, fused=True), scaler


@contract(torch.amp.GradScaler, "_check_inf_per_device")
def check_a_scaler_asks_all_ranks_where_the_optimizer_unscales() -> None:
    weight, optimizer, scaler = _scaled_gradient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda found, *_, **__: found.fill_(1))  # another rank has found an overflow
        scaler.step(optimizer)
    assert weight.item() == 1


@contract(torch.amp.GradScaler, "_found_inf_per_device")
def check_a_scaler_tells_an_optimizer_whether_not_how_many() -> None:
    weight, optimizer, scaler = _scaled_gradient()

    def all_reduce(found: torch.Tensor, **_: Any) -> Any:
        found.fill_(2)  # so many ranks have found an overflow
        return SimpleNamespace(wait=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert weight.item() == 1


class Labeled(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@contract(torch._C, "DisableTorchFunctionSubclass")
@contract(torch, "_C")
def check_a_subclass_is_called_as_a_plain_tensor() -> None:
    tensor = torch.ones(2).as_subclass(Labeled)
    Labeled.calls = 0
    with torch_names.without_torch_function():
        tensor + tensor
    assert Labeled.calls == 0
    tensor + tensor
    assert Labeled.calls > 0


@contract(torch.Tensor, "_version")
def check_changes_in_place_are_counted() -> None:
    tensor = torch.zeros(1)
    before = torch_names.version_of(tensor)
    tensor.add_(1)
    assert torch_names.version_of(tensor) == before + 1


@contract(torch.Tensor, "_base")
def check_a_look_at_a_view_makes_no_node() -> None:
    made = [torch.ones(2, requires_grad=True) * 2 for _ in range(2)]
    views = [tensor[:1] for tensor in made]
    nodes = [view.grad_fn for view in views]
    for tensor, view in zip(made, views, strict=True):
        tensor.mul_(2)
        assert not torch_names.is_leaf(view)
    # Each gets its node now, in the order in which they are asked.
    second, first = (torch_names.sequence_number(view.grad_fn) for view in reversed(views))
    assert second < first
    assert [view.grad_fn for view in views] != nodes
    assert torch_names.is_leaf(torch.ones(2)[:1].requires_grad_())
    assert torch_names.is_leaf(torch.ones(2, requires_grad=True))
    assert torch_names.is_leaf(torch.ones(2)[:1])


@contract(torch.autograd, "_unsafe_preserve_version_counter")
def check_autograd_sees_no_change_that_was_undone() -> None:
    tensor = torch.ones(1)
    x = torch.ones(1, requires_grad=True)
    product = x * tensor
    with torch_names.preserved_version(tensor):
        tensor.add_(1)
        tensor.sub_(1)
    product.backward()
    assert x.grad.item() == 1


@contract(torch.UntypedStorage, "_cdata")
@contract(torch._C, "_storage_Use_Count")
def check_other_tensors_of_a_memory_are_seen() -> None:
    tensor = torch.zeros(4, requires_grad=True)
    assert not torch_names.is_memory_shared(tensor)
    others = [tensor.detach(), tensor.detach()[1:], torch.tensor([])]
    others[2].set_(tensor.detach().untyped_storage())
    while others:
        assert torch_names.is_memory_shared(tensor)
        del others[0]
    assert not torch_names.is_memory_shared(tensor)
    squared = tensor.detach().requires_grad_().square()  # autograd keeps the tensor that it needs
    assert torch_names.is_memory_shared(tensor)
    del squared
    assert not torch_names.is_memory_shared(tensor)
    gradient = torch.ones(4)
    handed_out = gradient.detach()
    tensor.grad = handed_out
    del handed_out
    assert torch_names.is_memory_shared(gradient)
    tensor.grad = None
    assert not torch_names.is_memory_shared(gradient)


@contract(torch, "_assert_async")
def check_a_condition_on_the_device_can_fail() -> None:
    torch_names.assert_async(torch.tensor(True))
    with pytest.raises(RuntimeError):
        torch_names.assert_async(torch.tensor(False))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


@contract(torch.autograd.function.BackwardCFunction, "_sequence_nr")
def check_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(1, requires_grad=True)
    numbers = [torch_names.sequence_number(y.grad_fn) for y in (x + 1, Doubled.apply(x), x * 3)]
    assert sorted(numbers) == numbers
    assert len(set(numbers)) == 3


@contract(torch.autograd, "_get_sequence_nr")
def check_the_next_number_lies_between_nodes_before_and_after() -> None:
    x = torch.ones(1, requires_grad=True)
    before = torch_names.sequence_number((x + 1).grad_fn)
    following = torch_names.next_sequence_number()
    assert before < following <= torch_names.sequence_number((x + 1).grad_fn)


@contract(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled")
def check_a_step_knows_whether_saved_tensors_may_change() -> None:
    assert torch_names.may_change_saved_tensors() is False
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert torch_names.may_change_saved_tensors() is True


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contract("torch.utils._python_dispatch", "_python_dispatch")
@contract("torch._functorch.pyfunctorch", "_functorch")
@contract(torch._C, "_functorch")
@contract(torch._C, "_len_torch_dispatch_stack")
@contract(torch._C, "_get_tracing_state")
@contract(torch._C, "_set_tracing_state")
@contract(torch.utils._python_dispatch, "_disable_current_modes")
def check_modes_and_transforms_are_seen_and_left() -> None:
    disable = importlib.import_module("torch.utils._python_dispatch")._disable_current_modes
    clear = importlib.import_module("torch._functorch.pyfunctorch").temporarily_clear_interpreter_stack
    assert (disable, clear) == (torch_names._disable_current_modes, torch_names.temporarily_clear_interpreter_stack)
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_names.has_modes())
        with torch_names.without_modes():
            seen.append(torch_names.has_modes())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    with Passing():
        look(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated
        torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert seen == [False, False, True, False, True, False, True, False]


@contract("torch.distributed.tensor", "_local_tensor", lambda patch: patch.setattr(torch_names, "LOCAL_PART", "gone"))
def check_a_local_part_is_read_in_python_when_fsdp_gathers_it() -> None:
    fsdp, tensor = (importlib.import_module(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))

    def check() -> None:
        layer = nn.Linear(2, 2)
        fsdp.fully_shard(
            layer, mesh=importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
        )
        slot, reads = getattr(tensor.DTensor, torch_names.LOCAL_PART), []

        def get(parameter: Any) -> torch.Tensor:
            reads.append(parameter)
            return slot.__get__(parameter)

        watched = type("Watched", (tensor.DTensor,), {torch_names.LOCAL_PART: property(get, slot.__set__)})
        layer.weight.__class__ = watched
        assert torch_names.local_part(layer.weight).shape == (2, 2)
        reads.clear()
        weight = layer.weight
        layer.unshard()
        assert any(each is weight for each in reads)

    in_one_process(check)


FSDP = importlib.import_module("torch.distributed.fsdp")


@contract(nn.Parameter, "_fsdp_flattened")
def check_parameters_that_fsdp_1_has_flattened_are_known() -> None:
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        for is_original in (False, True):
            options = {"device_id": torch.device("cpu"), "use_orig_params": is_original}
            parameters = list(FSDP.FullyShardedDataParallel(nn.Linear(2, 2), **options).parameters())
            assert all(torch_names.is_flattened(parameter) and parameter.ndim == 1 for parameter in parameters)
    finally:
        dist.destroy_process_group()
    assert not torch_names.is_flattened(nn.Linear(2, 2).weight)


PARTS = "torch.distributed.fsdp._fully_shard."
STATE = importlib.import_module(PARTS + "_fsdp_state").FSDPState
PARAM_GROUP = importlib.import_module(PARTS + "_fsdp_param_group").FSDPParamGroup
# Not in torch 2.8, where `LayeredFSDPStrategy` raises an error.
TAKES_COLLECTIVES = hasattr(FSDP.FSDPModule, "set_custom_reduce_scatter")


class Collective:
    """Counts its calls in place of a collective."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self._name = name
        self._calls = calls

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, *, op: Any = None, **options: Any) -> None:
        self._calls.append((self._name, op))


@contract(FSDP.FSDPModule, "_get_fsdp_state", is_needed=TAKES_COLLECTIVES)
@contract(STATE, "_fsdp_param_group", successor=(STATE, "_fsdp_param_groups"), is_needed=TAKES_COLLECTIVES)
@contract(STATE, "_fsdp_param_groups", successor=(STATE, "_fsdp_param_group"), is_needed=TAKES_COLLECTIVES)
@contract(PARAM_GROUP, "_all_gather_comm", is_needed=TAKES_COLLECTIVES)
@contract(PARAM_GROUP, "_reduce_scatter_comm", is_needed=TAKES_COLLECTIVES)
def check_fsdp_calls_collectives_in_place_of_its_own() -> None:
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
        layer, calls = nn.Linear(2, 2), []
        FSDP.fully_shard(layer, mesh=mesh)
        own = Collective("gather", calls), Collective("reduce", calls)
        undo = torch_names.replace_fsdp_collectives(layer, *own)
        assert undo is not None
        assert torch_names.replace_fsdp_collectives(layer, *own) is None
        layer(torch.ones(1, 2)).sum().backward()
        assert calls == [("gather", None), ("reduce", dist.ReduceOp.SUM)]
        undo()
        layer(torch.ones(1, 2)).sum().backward()
        assert len(calls) == 2
    finally:
        dist.destroy_process_group()


@contract(STATE, "_lazy_init", is_needed=TAKES_COLLECTIVES)
def check_a_part_may_run_before_the_root_of_fsdp() -> None:
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
        root = nn.Sequential(nn.Linear(2, 2))
        for part in (root[0], root):
            FSDP.fully_shard(part, mesh=mesh)
        torch_names.begin_passes_at(root)
        root[0](torch.ones(1, 2))
        root(torch.ones(1, 2))  # else an error says that a part has been the root
    finally:
        dist.destroy_process_group()


@contract(STATE, "_state_ctx", is_needed=TAKES_COLLECTIVES)
def check_fsdp_tells_whether_a_backward_has_ended() -> None:
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
        layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        FSDP.fully_shard(layer, mesh=mesh)
        assert not torch_names.is_backward_unfinished(layer)
        layer(x).sum().backward()
        assert not torch_names.is_backward_unfinished(layer)
        x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x).sum().backward()
        assert torch_names.is_backward_unfinished(layer)
    finally:
        dist.destroy_process_group()
