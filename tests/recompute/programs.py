"""Random programs: views, changes in place, aliases, threads, dead graphs, gradients within, strided inputs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp._private.torch_names import version_of
from lightning_dp.recompute import Policy, RecomputePlan, apply_recompute, tape
from lightning_dp.recompute.plan import make_plan
from lightning_dp.recompute.values import tensors_in
from tests.recompute.counting import Operators

# Not drawn: changes by `.data`, which plain autograd does not see, so that its backward reads the changed memory.

ROWS, COLUMNS = 64, 16
NUM_BYTES = ROWS * COLUMNS * 4
"""Of each value. A program also makes tensors of twice that."""


class Program(nn.Module):
    """The same seed gives the same operators; the numbers of the tensors decide nothing.

    Each step draws from a generator of its own, so that a step may be skipped: the others stay what they are.

    Attributes:
        changes: the steps of the last forward pass that changed a tensor in place, or run something that may be refused
            because of that.
    """

    def __init__(self, seed: int, skipped: frozenset[int] = frozenset()) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.skipped = skipped
        self.changes: list[int] = []
        self.weights = nn.ParameterList(torch.randn(COLUMNS, COLUMNS) / 4 for _ in range(3))
        self.norm = nn.BatchNorm1d(COLUMNS)
        self.parts = nn.ModuleList(nn.Identity() for _ in range(3))  # their ends are those of segments

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.changes.clear()
        values = [x, x @ self.weights[0], x * 1.5]
        self.extra = x.new_zeros(())
        for step in range(random.Random(self.seed).randint(4, 18)):
            draw = random.Random(f"{self.seed} {step}")
            a, b = draw.choice(values), draw.choice(values)
            (action,) = draw.choices(list(ACTIONS), list(ACTIONS.values()))
            if action is forget:
                if len(values) > 2:
                    del values[draw.randrange(len(values))]
                continue
            if action in CHANGES:
                self.changes.append(step)
                if step in self.skipped:
                    continue
            result = action(self, draw, a, b)
            if result is not None:
                values.append(result)
            del a, b, result  # whatever was forgotten must be free
        loss = sum(v.square().mean() for v in values) + self.extra + self.weights[0].mean()
        return loss, values[-1].sin().mean() + self.weights[1].square().mean()


Action = Callable[[Program, random.Random, Tensor, Tensor], Tensor | None]


def compute(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return draw.choice(
        [
            lambda: a @ draw.choice(list(program.weights)),
            lambda: draw.choice([torch.sigmoid, torch.tanh, torch.cos, torch.exp])(a.clamp(-3, 3)),
            lambda: draw.choice([torch.sigmoid, torch.tanh, torch.sin])(a),
            lambda: a * b,
            lambda: torch.where(a > b, a, 0.5 * b),
            lambda: program.norm(a),
            lambda: F.dropout(a, 0.3),
            lambda: F.layer_norm(a, (COLUMNS,)),
            lambda: torch.softmax(a, 1),
            lambda: a.clone().relu_(),
            lambda: a.mean(0, keepdim=True) + b,
            lambda: torch.cat([a, b, a], 1).square()[:, 8 : 8 + COLUMNS],
        ]
    )()


def part(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Perhaps the end of a segment."""
    return draw.choice(list(program.parts))(a + 1)


def view(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return draw.choice([lambda: a.detach(), lambda: a.view(ROWS, COLUMNS), lambda: a[:], lambda: a.view_as(a)])()


def strided(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Views with gaps, at offsets, transposed, overlapping; each shows a part of something larger."""
    return draw.choice(
        [
            lambda: torch.cat([a, b], 1)[:, ::2],
            lambda: torch.cat([a, b], 1)[:, 5 : 5 + COLUMNS],
            lambda: torch.cat([a, b], 0)[1::2],
            lambda: torch.cat([a.t(), b.t()], 0)[3 : 3 + COLUMNS].t(),
            lambda: torch.cat([a.t(), b.t()], 1)[:, 3 : 3 + ROWS].t(),
            lambda: a.t().contiguous().t(),
            lambda: a.reshape(ROWS // 2, 2 * COLUMNS).t().reshape(ROWS, COLUMNS),
            lambda: a[:1].expand(ROWS, COLUMNS),
            lambda: a[:, :1].expand(ROWS, COLUMNS),
            lambda: torch.stack([a, b], 2).unbind(2)[1],
            lambda: torch.cat([a, b], 1).chunk(2, 1)[1],
        ]
    )()


def complex_parts(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(a, b) if draw.random() < 0.5 else torch.view_as_complex(torch.stack([a, b], 2))
    if draw.random() < 0.3:
        z.mul_(0.5 - 0.5j)
    return draw.choice(
        [
            lambda: z.real,
            lambda: z.imag,
            lambda: z.conj().imag,
            lambda: (z * z.conj()).real,
            lambda: torch.view_as_real(z)[..., 1],
        ]
    )()


def change(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> None:
    draw.choice(
        [
            lambda: a.mul_(0.5),
            lambda: F.relu(a, inplace=True),
            lambda: a[:, 4:8].add_(0.25),
            lambda: a[2:].mul_(0.5),
            lambda: a[:, ::2].mul_(0.75),
            lambda: a.t()[2:9].sub_(0.5),
            lambda: a.detach().mul_(0.9),
            lambda: a.view_as(a).copy_(b.detach()),
            lambda: a.add_(b),
        ]
    )()


def change_complex(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> None:
    if a.is_contiguous():
        torch.view_as_complex(a.detach().view(ROWS, COLUMNS // 2, 2)).mul_(0.5 + 0.5j)


def change_in_thread(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> None:
    in_thread(lambda: a.detach().mul_(0.9))


def dead_graph(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> None:
    program.extra = program.extra + torch.sigmoid(a @ program.weights[1]).square().mean().item()


def slope(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> Tensor | None:
    """A backward pass within the forward, perhaps in a thread, perhaps part of the graph."""
    if not a.requires_grad:
        return None
    creates = draw.random() < 0.5
    out = (torch.tanh(a) * b).sum()

    def differentiate() -> Tensor:
        return torch.autograd.grad(out, a, create_graph=creates, retain_graph=True)[0]

    return differentiate() if draw.random() < 0.7 else in_thread(differentiate)


def forget(program: Program, draw: random.Random, a: Tensor, b: Tensor) -> None:
    """A value is no longer held by the program."""


ACTIONS: dict[Action, float] = {
    **{compute: 8, part: 2, view: 1.5, strided: 1.5, complex_parts: 1, change: 3, change_complex: 0.6},
    **{change_in_thread: 0.4, dead_graph: 0.6, slope: 0.8, forget: 3},
}
"""With their weights."""

CHANGES = (change, change_complex, change_in_thread, slope)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run ``function`` in a thread of its own, and wait; return or raise what it does."""
    return in_threads([function])[0]


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Run each function in a thread of its own, all at the same time."""
    found: list[Any] = [None] * len(functions)
    errors: list[Exception] = []

    def run(place: int) -> None:
        try:
            found[place] = functions[place]()
        except RuntimeError as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(place,)) for place in range(len(functions))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return found


# --- One training step of a program.


class Outcome(NamedTuple):
    """What a step has computed, and what it held: bytes without parameters and inputs.

    Attributes:
        tensors: losses, gradients, buffers, the input after its changes, the state of the random number generator.
        kept_bytes: between forward and backward.
        peak_bytes: at any time.
        recompute_bytes: the most that one recomputation added.
        copies_gaps: the input is a view with gaps, and was changed. Copies of it have the gaps.
    """

    tensors: list[Tensor]
    kept_bytes: int
    peak_bytes: int
    recompute_bytes: int
    copies_gaps: bool


def inputs_of(seed: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return a leaf, and a view of it or of what was computed from it: strided, at an offset, transposed, or whole."""
    draw = random.Random(f"input {seed}")
    leaf = torch.randn(2 * ROWS, 2 * ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
    leaf.requires_grad_(draw.random() < 0.3)
    base = leaf * 0.5 if leaf.requires_grad else leaf
    x = draw.choice(
        [
            lambda: base[:ROWS, :COLUMNS].contiguous(),
            lambda: base[2 : 2 + ROWS, :COLUMNS],
            lambda: base[:ROWS, : 2 * COLUMNS : 2],
            lambda: base[3 : 3 + COLUMNS, ::2].t(),
            lambda: base.view(-1)[: ROWS * COLUMNS].view(ROWS, COLUMNS),
        ]
    )()
    return leaf, x


BACKWARDS = ("once", "once", "once", "once", "thread", "two threads", "twice", "double")


def backward_of(seed: int) -> str:
    """Return how backward of a program runs."""
    return random.Random(f"backward {seed}").choice(BACKWARDS)


def differentiate(seed: int, losses: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    def gradients(loss: Tensor, **options: bool) -> list[Tensor]:
        found = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
        return [gradient for gradient in found if gradient is not None]

    kind = backward_of(seed)
    if kind == "thread":
        return in_thread(lambda: gradients(sum(losses)))
    if kind == "two threads":
        each = in_threads([lambda loss=loss: gradients(loss, retain_graph=True) for loss in losses])
        return [gradient for found in each for gradient in found]
    if kind == "twice":
        return gradients(losses[0], retain_graph=True) + gradients(sum(losses))
    if kind == "double":
        first = [g for g in gradients(sum(losses), create_graph=True) if g.requires_grad]
        return [*first, *(gradients(sum(g.square().sum() for g in first)) if first else [])]
    return gradients(sum(losses))


class Measured(Operators):
    """Counts bytes, also those that another thread has made; and tells what a recomputation holds."""

    recompute_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(tensors_in(args))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        compute = tape.compute

        def measured(*args: Any) -> Tensor:
            before, self.peak_bytes = self.peak_bytes, 0
            living_bytes = self.living_bytes()
            tensor = compute(*args)
            self.recompute_bytes = max(self.recompute_bytes, self.peak_bytes - living_bytes)
            self.peak_bytes = max(before, self.peak_bytes)
            return tensor

        with patch.object(tape, "compute", measured), self:
            yield


def step(program: Program, policy: str | Policy | None, is_measured: bool) -> Outcome | str:
    """Run one step; return the message where it is refused.

    Args:
        program: has not run yet.
        policy: of recomputation, if any.
        is_measured: whether bytes are counted, by a mode under which everything runs. It sees no other thread.
    """
    seed, device = program.seed, program.weights[0].device
    if policy is not None:
        apply_recompute(program, policy)
    leaf, x = inputs_of(seed, device)
    leaves = [*program.parameters(), *([leaf] if leaf.requires_grad else [])]
    version = version_of(x)
    torch.manual_seed(seed)
    operators = Measured([*program.parameters(), *program.buffers(), leaf, x])
    try:
        with operators.measuring() if is_measured else nullcontext():
            losses = program(x)
            kept_bytes = operators.living_bytes()
            gradients = differentiate(seed, losses, leaves)
    except RuntimeError as error:
        return str(error)
    random_state = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    tensors = [*losses, *gradients, *program.buffers(), x, random_state]
    found = [tensor.detach() for tensor in tensors]
    has_gaps = (ROWS - 1) * x.stride(0) + (COLUMNS - 1) * x.stride(1) >= ROWS * COLUMNS
    copies_gaps = has_gaps and version_of(x) > version
    return Outcome(found, kept_bytes, operators.peak_bytes, operators.recompute_bytes, copies_gaps)


def valid(seed: int, is_measured: bool, device: str = "cpu") -> tuple[frozenset[int], Outcome]:
    """Return the steps that plain training must leave out to be valid, and its outcome without them.

    PyTorch refuses a change in place of what backward needs. Changes are left out in a random order until it does not.
    """
    draw = random.Random(f"valid {seed}")
    skipped: frozenset[int] = frozenset()
    while True:
        program = Program(seed, skipped).to(device)
        outcome = step(program, None, is_measured)
        if not isinstance(outcome, str):
            return skipped, outcome
        left = [at for at in program.changes if at not in skipped]
        assert left, f"program {seed} is refused without any change: {outcome}"
        skipped |= {draw.choice(left)}


DRAWN = "drawn"
"""The solver of a plan at random, which promises nothing about memory."""


def plan_of(seed: int, skipped: frozenset[int], device: str = "cpu") -> RecomputePlan:
    """Return a plan of the program: a third of them made for a budget, the others drawn at random."""
    program = Program(seed, skipped).to(device)
    profiler = apply_recompute(program).start_profiling()
    torch.manual_seed(seed)
    program(inputs_of(seed, device)[1])
    draw = random.Random(f"plan {seed}")
    operations = profiler.operations
    for operation in operations:
        operation.time_s = draw.uniform(1, 5)  # a measured one would be another in each run
    plain_bytes = sum(operation.num_bytes for operation in operations if operation.uses)
    if plain_bytes and draw.random() < 0.4:
        with suppress(ValueError):  # less than any plan needs
            return make_plan(operations, 1.0, int(plain_bytes * draw.uniform(0.4, 1)))
    levels = {operation.key: draw.randrange(2) for operation in operations}
    return RecomputePlan(plain_bytes, DRAWN, plain_bytes, plain_bytes, 1.0, 1.0, levels, operations)
