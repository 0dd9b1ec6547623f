"""What `lightning_dp._private.torch_names` relies on in dispatch modes, operators and the compiler's options."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from lightning_dp._private import torch_names
from tests.private_names.contract import contract


@contract("torch.utils._python_dispatch", "_python_dispatch")
def check_a_dispatch_mode_sees_operators_below_autograd() -> None:
    seen = []

    class Mode(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    assert issubclass(Mode, torch_names.TorchDispatchMode)
    with Mode():
        torch.ones(1, requires_grad=True) * 2
    assert seen == ["aten::ones", "aten::mul.Tensor"]


@contract(torch.ops.aten.relu_.default, "_schema")
def check_an_operator_tells_which_arguments_it_changes() -> None:
    aten = torch.ops.aten
    assert torch_names.mutated_arguments.__wrapped__(aten.relu_.default) == (0,)
    assert torch_names.mutated_arguments.__wrapped__(aten.relu.default) == ()
    assert torch_names.mutated_arguments.__wrapped__(aten.add.out) == ("out",)
    assert torch_names.mutated_arguments.__wrapped__(torch.ops.c10d.allreduce_.default) == (0,)
    assert torch_names.mutated_arguments.__wrapped__(aten.rrelu_with_noise.default) == ()


class Doubled(torch.autograd.Function):
    """Tells where it runs, and saves its input."""

    declares = False
    found: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        Doubled.found.append(torch_names.is_in_function_forward())
        if Doubled.declares:
            torch_names.declare_no_unseen_changes()
            Doubled.found.append(torch_names.is_in_function_forward())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


@contract(torch._C, "_RestorePythonTLSSnapshot")
def check_an_operator_saves_its_tensors_inside_of_itself_and_a_function_does_not() -> None:
    found = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(torch_names.is_in_operator())
        return tensor

    class Passing(torch_names.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Passing(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.layer_norm(x.exp(), (2,))
        assert set(found) == {True}
        found.clear()
        Doubled.apply(x)
    assert found == [False]


@contract(torch._C, "_is_fwd_grad_enabled")
@contract(torch._C, "_set_fwd_grad_enabled")
def check_the_forward_of_a_function_is_seen_from_inside() -> None:
    x = torch.ones(1, requires_grad=True)
    for Doubled.declares, expected in ((False, [True]), (True, [True, False])):
        Doubled.found.clear()
        Doubled.apply(x)
        assert Doubled.found == expected
    with torch.no_grad():
        assert not torch_names.is_in_function_forward()
    with torch.inference_mode():
        assert not torch_names.is_in_function_forward()
    assert torch._C._is_fwd_grad_enabled()  # type: ignore[attr-defined]


@contract(torch._C, "_current_graph_task_id")
def check_backward_is_seen_from_inside() -> None:
    found = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda gradient: found.append(torch_names.is_in_backward()))
    tensor.sum().backward()
    assert [*found, torch_names.is_in_backward()] == [True, False]


@contract(torch._C, "_current_graph_task_id")
def check_a_backward_within_another_has_a_number_of_its_own() -> None:
    found = []
    inner = torch.ones(1, requires_grad=True) * 2
    inner.register_hook(lambda gradient: found.append(torch_names.backward_number()))

    def run_inner(gradient: torch.Tensor) -> None:
        found.append(torch_names.backward_number())
        inner.backward()
        found.append(torch_names.backward_number())

    outer = torch.ones(1, requires_grad=True) * 2
    outer.register_hook(run_inner)
    outer.backward()
    before, within, after = found
    assert before == after != within
    assert torch_names.backward_number() == -1


@contract(torch._C._autograd, "_get_current_graph_task_keep_graph")
@contract(torch._C, "_autograd")
def check_a_graph_that_is_kept_is_seen_from_inside() -> None:
    found = []
    total = torch.ones(1, requires_grad=True).sum()
    total.register_hook(lambda gradient: found.append(torch_names.keeps_graph()))
    total.backward(retain_graph=True)
    total.backward()
    assert found == [True, False]


@contract(torch.autograd.Variable, "_execution_engine", successor=(torch.autograd.graph, "queue_callback"))
def check_a_callback_runs_when_all_of_backward_has_run_and_before_it_returns() -> None:
    calls = []
    first = torch.ones(1, requires_grad=True)
    first.register_hook(lambda gradient: calls.append("first"))
    second = first * 2
    second.register_hook(lambda gradient: torch_names.call_after_backward(lambda: calls.append("callback")))
    second.sum().backward()
    assert calls == ["first", "callback"]


@contract(torch._C, "_SetExcludeDispatchKeyGuard")
def check_an_alias_below_autograd_has_the_version_of_its_tensor() -> None:
    aliases = []

    class Mode(torch_names.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            aliases.append(torch_names.detach_with_version(result))
            return result

    with Mode():
        tensor = torch.ones(1) * 2
    tensor.add_(1)
    assert torch_names.version_of(aliases[-1]) == torch_names.version_of(tensor) == 1


@contract(torch._C, "_DisableTorchDispatch")
def check_a_mode_does_not_see_that_an_alias_is_made() -> None:
    seen = []

    class Mode(torch_names.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(1)
    with Mode():
        torch_names.detach_with_version(tensor)
        assert not seen
        tensor.detach()
    assert len(seen) == 1


@contract(type(vars(type(torch.backends.mkldnn))["enabled"]), "getter")
def check_a_flag_of_a_backend_is_read() -> None:
    read = torch_names.flag_reader(torch.backends.mkldnn, "deterministic")
    before = torch.backends.mkldnn.deterministic
    try:
        for value in (not before, before):
            torch.backends.mkldnn.deterministic = value
            assert read() is value
    finally:
        torch.backends.mkldnn.deterministic = before
    if not hasattr(torch.backends.cudnn, "conv"):  # before torch 2.9
        return
    for operator in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul):
        assert torch_names.flag_reader(operator, "fp32_precision")() == operator.fp32_precision


@contract(torch._C, "_get_nnpack_enabled")
@contract(torch._C, "_set_nnpack_enabled")
def check_the_flag_of_nnpack_is_read_and_set() -> None:
    flag = torch_names.Nnpack()
    with torch.backends.nnpack.flags(enabled=False):
        assert not torch_names.flag_reader(flag, "enabled")()
        flag.enabled = True
        assert torch.backends.nnpack.set_flags(False) == (True,)


@contract("torch._functorch.config", "_functorch")
def check_a_share_of_activations_can_be_asked_of_the_compiler() -> None:
    config = importlib.import_module("torch._functorch.config")
    before = config.activation_memory_budget
    with torch_names.activation_memory_budget(0.25):
        assert config.activation_memory_budget == 0.25
    assert config.activation_memory_budget == before
