"""Switch recomputation on for a model, and off again."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import nn

from lightning_dp._private.torch_names import is_compiled
from lightning_dp.recompute.policies import Cheap, Policy, Sublinear, find_blocks, segment_ends
from lightning_dp.recompute.profile import Profiler
from lightning_dp.recompute.tape import Tape

PolicyName = Literal["cheap", "sublinear"]
POLICIES: dict[str, type[Policy]] = {"cheap": Cheap, "sublinear": Sublinear}


def apply_recompute(
    model: nn.Module, policy: PolicyName | Policy = "cheap", method: str = "forward"
) -> RecomputeHandle:
    """Keep less for backward: what is not kept is computed again when backward needs it.

    Gradients, parameters, buffers and random numbers stay bitwise the same: single operators run again, not the model's
    Python code. So running statistics move once, no collective is issued twice, and dropout's masks are kept. It works
    for any model, and only where gradients are computed.

    Args:
        model: changed in place until the handle's ``remove``. Its parameters, buffers and state_dict stay as they are.
        policy: ``"cheap"``: outputs of convolutions, matrix products and random masks are kept; normalization,
            activation, pooling and addition are recomputed. ``"sublinear"``: what passes between about sqrt(n) segments
            of n blocks is kept (arXiv 1604.06174). While backward is in a segment, that segment is kept as with
            ``"cheap"``. Or a plan that `plan_recompute` made.
        method: of ``model`` that computes what backward starts from.

    Raises:
        ValueError: ``policy`` or ``method`` is unknown; the model, or a part of it, is compiled or scripted, or
            recomputes already. In a forward pass: it calls a function that was compiled.
    """
    check_policy(policy)
    require_recomputable(model)
    function = getattr(model, method, None)
    if not callable(function) or isinstance(function, nn.Module):
        raise ValueError(f"method={method!r} is no method of {type(model).__name__}")
    chosen = POLICIES[policy]() if isinstance(policy, str) else policy
    return RecomputeHandle(model, method, chosen)


def check_policy(policy: Any, *others: str) -> None:
    """Raise ValueError if ``policy`` is neither the name of a policy, or one of ``others``, nor a `Policy`."""
    names = (*POLICIES, *others)
    if not isinstance(policy, Policy) and not (isinstance(policy, str) and policy in names):
        raise ValueError(
            f"policy={policy!r} must be one of {', '.join(map(repr, names))}, or a plan that plan_recompute made"
        )


def check_budget(budget_bytes: Any) -> int:
    """Return ``budget_bytes`` as an integer.

    Raises:
        ValueError: it is no whole number, or less than 1.
    """
    is_number = isinstance(budget_bytes, (int, float)) and not isinstance(budget_bytes, bool)
    if not is_number or not float(budget_bytes).is_integer() or budget_bytes < 1:
        raise ValueError(f"budget_bytes={budget_bytes!r} must be a whole number of bytes, at least 1: 2_000_000_000")
    return int(budget_bytes)


def require_recomputable(model: nn.Module) -> None:
    """Raise ValueError if a part of ``model`` cannot be recorded."""
    for name, module in model.named_modules():
        what = f"{name!r}, a {type(module).__name__}," if name else f"the model, a {type(module).__name__},"
        if is_compiled(module):
            raise ValueError(
                f"{what} is compiled or scripted, which hides its operators. torch.compile decides itself what it "
                "recomputes (torch._functorch.config.activation_memory_budget): use either of the two. "
                "docs/methods/memonger.md says which"
            )
        if any(isinstance(value, _Recorded) and not value.handle.is_removed for value in vars(module).values()):
            raise ValueError(f"{what} recomputes already; remove() its handle first")


class RecomputeHandle:
    """Recomputation in one model, as `apply_recompute` returns it."""

    def __init__(self, model: nn.Module, method: str, policy: Policy) -> None:
        self.policy = policy
        self.is_removed = False
        self.dropped_bytes = 0
        """What autograd asked for in the last forward pass and was not kept."""
        self.was_asked = False
        """Whether autograd has asked for anything in any forward pass."""
        self._profiler: Profiler | None = None
        self._checked: Policy | None = None  # was compared with the model
        self._model = model
        self._method = method
        self._before = vars(model).get(method)
        self._recorded = _Recorded(getattr(model, method), self)
        # `setattr` of a model that Fabric has set up assigns to the module inside, whose forward the model calls.
        vars(model)[method] = self._recorded

    def remove(self) -> None:
        """Undo `apply_recompute`. A second call does nothing."""
        self.is_removed = True  # somebody may have wrapped the method since
        attributes = vars(self._model)
        if attributes.get(self._method) is self._recorded:
            if self._before is None:
                del attributes[self._method]
            else:
                attributes[self._method] = self._before

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run one forward pass, and record it."""
        # Not earlier: another callback may replace modules after this one is set up.
        ends = segment_ends(self._model) if self.policy.has_segments else frozenset()
        policy = self.policy
        is_unchecked = policy.is_for_one_model and policy is not self._checked
        # It is for one forward pass: a closure of an optimizer may run several.
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            ends = frozenset(find_blocks(self._model))
        elif is_unchecked:
            profiler = Profiler()
        tape = Tape(policy, self._model, ends, profiler)
        with tape.recording([args, kwargs]):
            result = function(*args, **kwargs)
        if tape.met_compiled:
            raise ValueError(
                f"{self._method} of {type(self._model).__name__}, which recomputes, calls a function that torch.compile"
                " made. It would run without being compiled from now on, with other roundings: take torch.compile off "
                "that function, or apply recomputation to the other parts of the model"
            )
        self.dropped_bytes = tape.dropped_bytes
        self.was_asked |= tape.was_asked
        if is_unchecked and profiler is not None:
            self._checked = policy
            sizes = {operation.key: operation.num_bytes for operation in profiler.operations}
            policy.check(sizes, f"{type(self._model).__name__}.{self._method}")
        return result

    def start_profiling(self) -> Profiler:
        """Measure the next forward pass, and no later one."""
        self._profiler = Profiler()
        return self._profiler

    def adopt(self, plan: Policy) -> None:
        """Use a plan that was made of what `start_profiling` has measured. It need not be compared with the model."""
        self.policy = self._checked = plan


class _Recorded:
    """Stands in for a method of a module, and runs it on a tape."""

    def __init__(self, method: Any, handle: RecomputeHandle) -> None:
        if isinstance(method, _Recorded):  # was removed, and somebody who had wrapped it has put it back
            method = method.call
        functools.update_wrapper(self, method)  # Lightning looks at the signature
        self.call: Any = method
        self.handle = handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.handle.is_removed or not torch.is_grad_enabled():
            return self.call(*args, **kwargs)
        return self.handle.run(self.call, args, kwargs)

    def __reduce__(self) -> Any:
        # A copy of the model, for weight averaging say, has the plain method. So has one that is pickled.
        return _same, (self.call,)


def _same(method: Any) -> Any:
    return method
