"""What `lightning_dp._private.torch_names` relies on to find hooks, and the step below what others put around it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_dp._private import torch_names
from tests.private_names.contract import contract

OPTIMIZERS = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the attribute of this name


def optimizer() -> SGD:
    return SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@contract(Optimizer, "_optimizer_step_pre_hooks")
@contract(Optimizer, "_optimizer_step_post_hooks")
def check_hooks_of_an_optimizer_are_seen() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        hooked = optimizer()
        assert not torch_names.has_any_step_hooks(hooked)
        getattr(hooked, register)(lambda *_: None)
        assert torch_names.has_any_step_hooks(hooked)


@contract(OPTIMIZERS, "_global_optimizer_pre_hooks")
@contract(OPTIMIZERS, "_global_optimizer_post_hooks")
def check_hooks_of_all_optimizers_are_seen() -> None:
    for when in ("pre", "post"):
        name = f"_global_optimizer_{when}_hooks"
        assert getattr(OPTIMIZERS, name) is getattr(torch_names, name)
        handle = getattr(OPTIMIZERS, f"register_optimizer_step_{when}_hook")(lambda *_: None)
        assert torch_names.has_any_step_hooks(optimizer())
        handle.remove()
        assert not torch_names.has_any_step_hooks(optimizer())


def remove_mark_of_schedules(patch: pytest.MonkeyPatch) -> None:
    """The mark is an attribute of a function that a schedule makes."""
    construct = StepLR.__init__

    def without_mark(self: StepLR, stepped: Optimizer, *args: Any) -> None:
        construct(self, stepped, *args)
        vars(stepped.step).pop("_wrapped_by_lr_sched", None)

    patch.setattr(StepLR, "__init__", without_mark)


@contract(StepLR, "_wrapped_by_lr_sched", remove_mark_of_schedules)
def check_the_step_below_that_of_a_schedule_is_found() -> None:
    scheduled = optimizer()
    assert torch_names.step_function(scheduled) is SGD.step
    StepLR(scheduled, 1)
    assert getattr(scheduled.step, "__func__", None) is not SGD.step
    assert torch_names.step_function(scheduled) is SGD.step


def remove_mark_of_hooks(patch: pytest.MonkeyPatch) -> None:
    """The mark is an attribute of the wrapper that the first optimizer of its class puts around `step`."""
    optimizer()
    patch.delattr(SGD.step, "hooked")
    patch.setattr(Optimizer, "_patch_step_function", lambda self: None)


@contract(Optimizer, "hooked", remove_mark_of_hooks)
def check_the_step_below_its_hooks_is_found() -> None:
    hooked = optimizer()
    (parameter,) = hooked.param_groups[0]["params"]
    parameter.grad = torch.ones(1)
    called: list[None] = []
    hooked.register_step_post_hook(lambda *_: called.append(None))
    StepLR(hooked, 1)
    torch_names.step_below_hooks(hooked)()
    assert not called
    assert parameter.item() == pytest.approx(0.9)


@contract(nn.Module, "_forward_hooks")
@contract(nn.Module, "_forward_pre_hooks")
def check_forward_hooks_of_a_module_are_seen() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module = nn.Linear(1, 1)
        assert not torch_names.has_forward_hooks(module)
        getattr(module, register)(lambda *_: None)
        assert torch_names.has_forward_hooks(module)


@contract(nn.Module, "_backward_hooks")
@contract(nn.Module, "_backward_pre_hooks")
def check_backward_hooks_of_a_module_are_seen() -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Linear(1, 1)
        assert not torch_names.has_backward_hooks(module)
        getattr(module, register)(lambda *_: None)
        assert torch_names.has_backward_hooks(module)


@contract(torch.Tensor, "_backward_hooks")
@contract(torch.Tensor, "_post_accumulate_grad_hooks")
def check_hooks_of_a_tensor_are_seen() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        tensor = torch.ones(1, requires_grad=True)
        assert not torch_names.has_tensor_hooks(tensor)
        getattr(tensor, register)(lambda *_: None)
        assert torch_names.has_tensor_hooks(tensor)
        assert torch_names.has_gradient_hooks(tensor) == (register == "register_hook")
