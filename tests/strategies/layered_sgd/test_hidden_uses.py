"""Functions that hide which parameters they use end as under DDP, or raise an error that names them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.ranks import run_cases, run_processes
from tests.strategies.layered_sgd.user_cases import Case, compare_on_a_slow_network, fit, layered, on_a_slow_network
from tests.strategies.modules import Net, assert_same, snapshot


class ScalarParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.5, 2.0))

    def training_step(self, batch, batch_idx):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of losing the gradient
            matrix = torch.tensor([[self.p, self.q], [self.q, self.p]], dtype=torch.float64)
        return self.loss(batch) * matrix.square().mean() + self.p * self.q


class CompiledMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.compile(self._encode, backend="eager")

    def _encode(self, x):
        return torch.tanh(self.shared(torch.tanh(self.first(x))))

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.frozen(self.encode(x))))))


class CompiledAfterSetup(Net):
    def on_train_start(self) -> None:
        self.shared.compile(backend="eager")


class CompiledBetweenSteps(pl.Callback):
    def __init__(self) -> None:
        self.norm = torch.compile(lambda weight: weight.detach().square().sum(), backend="eager")
        self.norms: list[float] = []

    def on_train_batch_end(self, t: Any, module: Any, *_: Any) -> None:
        module.log("norm", self.norm(module.first.weight), sync_dist=True)
        self.norms.append(self.norm(module.first.weight).item())

    def on_train_end(self, t: Any, module: Any) -> None:
        with torch.no_grad():
            module.first.bias.fill_(sum(self.norms))  # so that the comparison of parameters sees the norms


class SelectiveCheckpoint(Net):
    """Saves what the optimizer computes with, too; the update runs inside the forward, under the checkpoint's mode."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")

    def forward(self, x):
        def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        x = checkpoint(
            lambda x: torch.tanh(self.first(x)) * 2,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(keep),
        )
        return self.last(torch.tanh(self.frozen(torch.tanh(self.shared(x)))))


class FunctionalFirst(Net):
    """A functional transform captures parameters before the plain forward uses them."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        slope = torch.func.grad(lambda x: torch.tanh(x @ self.first.weight.T).sum())(x)
        jacobian = torch.func.jacrev(lambda b: self.last.weight @ b)(self.shared.bias.detach())
        return self.loss(batch) + slope.square().mean() + jacobian.square().mean()


class ThroughAView(Net):
    """A view that was made before training is used in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.flat = self.bias.view(-1)

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.first(x) + self.flat))))


class TiedThroughData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Linear(8, 8).double()
        self.copy.weight.data = self.shared.weight.data

    def forward(self, x):
        return self.last(torch.tanh(self.copy(torch.tanh(self.shared(torch.tanh(self.first(x)))))))


class TiedAfterSetup(TiedThroughData):
    def __init__(self) -> None:
        super().__init__()
        self.copy.weight.data = self.copy.weight.data.clone()

    def on_train_start(self) -> None:
        self.copy.weight.data = self.shared.weight.data


# torch splits compiled code at the buckets, and wants no small ones.
WHOLE = {"ddp": {"bucket_cap_mb": 2}}

CASES: dict[str, Case] = {
    "scalars in a nested list": (ScalarParameters, (), {}),
    "a compiled method": (CompiledMethod, (), WHOLE),
    "compiled after set-up": (CompiledAfterSetup, (), WHOLE),
    "compiled code between steps": (Net, (CompiledBetweenSteps,), WHOLE),
    "a selective checkpoint": (SelectiveCheckpoint, (), {}),
    "a functional transform": (FunctionalFirst, (), {}),
    "a view used after its bucket's update": (ThroughAView, (), {"ddp": {"bucket_cap_mb": 25}}),
    "weights tied through data": (TiedThroughData, (), {"ddp": {"find_unused_parameters": True}}),
    "weights tied after set-up": (TiedAfterSetup, (), {"ddp": {"bucket_cap_mb": 1e-6}}),
}  # fmt: skip


def compare_case(rank, name):
    compare_on_a_slow_network(CASES[name])


COMPILED_ALIKE = {"compiled after set-up", "compiled code between steps"}


@pytest.mark.ci
def test_equals_ddp():
    run_cases(2, compare_case, [name for name in CASES if name not in COMPILED_ALIKE])


@pytest.mark.slow
def test_equals_ddp_with_further_compiled_code():
    run_cases(2, compare_case, COMPILED_ALIKE)


class Scripted(Net):
    """PyTorch shows no call of a scripted function, so that its use of the bias goes unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit.[a-z]*. is deprecated")
            self.add_and_squash = torch.jit.script(add_and_squash)

    def forward(self, x):
        x = self.add_and_squash(self.first(x), self.bias)
        return self.last(torch.tanh(self.shared(x)))


def add_and_squash(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x + bias)


class ThroughAViewFirst(ThroughAView):
    """The view is used first; then a parameter of the same bucket is seen used, and the bucket updated."""

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.first(x + self.flat[:6])))))


EACH_PARAMETER = 1e-6
ALL_PARAMETERS = 25


def find_stale_use(rank, make, bucket_cap_mb):
    on_a_slow_network()
    module = make()
    expected = snapshot(module, fit(DDPStrategy(), module))
    module = make()
    assert_same(snapshot(module, fit(layered("load"), module)), expected)
    module = make()
    with pytest.raises(RuntimeError, match=r"bias was used in this forward without its last update.*overlap=.load."):
        fit(layered("step", bucket_cap_mb=bucket_cap_mb), module)
    # DDP starts with one bucket. If the use comes before any that is seen, the second step raises, else the third.
    assert module.trainer.global_step == (1 if make is ThroughAViewFirst else 2)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "bucket_cap_mb"),
    [(Scripted, EACH_PARAMETER), (ThroughAView, EACH_PARAMETER), (ThroughAViewFirst, ALL_PARAMETERS)],
)
def test_a_use_that_nobody_sees_raises_by_name_and_overlap_load_is_the_remedy(make, bucket_cap_mb):
    run_processes(2, find_stale_use, make, bucket_cap_mb)
