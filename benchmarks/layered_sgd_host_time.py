"""Host time that layered SGD adds in one process: the watch over the parameters, and applying a postponed update.

    python benchmarks/layered_sgd_host_time.py
    python benchmarks/layered_sgd_host_time.py --rounds 60

One process, one thread, nothing sent, and tensors so small that the arithmetic hardly counts: this is the time of
Python and of PyTorch's dispatch, which a GPU would wait for. It is the thread's CPU time, in which other work on the
machine does not count.

1. Forward: 440 small operations, each on a parameter of its own, over the same forward without a strategy: while
   updates of other parameters are pending; while its own are (their gradients have arrived; the time of one
   ``optimizer.step`` is subtracted, which leaves the watch); and after its own were applied. Also a frozen
   ``TransformerEncoder`` in evaluation, for which PyTorch has a fast path, while updates of other parameters are
   pending. Aim: at most 1.1.
2. A postponed update, over one plain ``optimizer.step``: applied within a forward (whose own time is subtracted), on a
   slow network, where each bucket arrives when it is waited for, and on a fast one, where all have arrived; and in one
   go by ``finish_update``. Beside them the floor of the slow network: steps of as many optimizers, each of one bucket's
   parameters, without their hooks. Momentum SGD and AdamW, with as many parameters and gradient buckets as ResNet-50
   (161/45), as BERT-large (390/170), and 1000/100. Aim: at most 1.5, but on a slow network, where the rank waits
   between these steps anyway.

All sides run in turn, round after round, forward and backward in turn; a ratio compares two sides of one round. Shown
are the median and the quartiles over the rounds. Bound: 1, which is no added time. Writes results.json, table.md,
forward.png and update.png.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import torch
from support.bars import Bar, draw_bars
from support.command_line import benchmark_parser, output_folder, parse
from support.layered_sgd_parts import PostponedUpdate, step_below_hooks
from support.report import markdown_table, write_report
from support.spread import Spread, alternate, quartiles, ratios
from torch import Tensor, nn

NUM_OPERATIONS = 440
NUM_BUCKETS = 45
FORWARD_AIM = 1.1
UPDATE_AIM = 1.5
SIZES = [(161, 45), (390, 170), (1000, 100)]  # parameters, gradient buckets
SMOKE = {"rounds": 2, "repeats": 1, "sizes": [(30, 5)]}
# Sides of a forward, and of an update.
PLAIN = "no strategy"
OTHERS = "other updates pending"
OWN = "own updates pending, less a step"
APPLIED = "own updates applied before"
STEP = "optimizer.step"
STEPS = "a step for each bucket, no strategy"
SLOW = "in a forward, slow network"
FAST = "in a forward, fast network"
FINISH = "finish_update"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def parser() -> argparse.ArgumentParser:
    options = benchmark_parser(__doc__, __file__)
    options.set_defaults(sizes=SIZES)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--repeats", type=int, default=20, help="forwards that are timed together")
    return options


class Chain(nn.Module):
    """Parameters of 8 numbers, used one after another, once each: alternately a product and a sum. x: (N, 8)."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.factors_and_terms = nn.ParameterList([torch.rand(8) for _ in range(num_parameters)])

    def forward(self, x: Tensor) -> Tensor:
        for index, parameter in enumerate(self.factors_and_terms):
            x = x + parameter if index % 2 else x * parameter
        return x


def buckets_of(parameters: Sequence[nn.Parameter], num_buckets: int) -> list[list[nn.Parameter]]:
    """Divide the parameters evenly, from the last one on, as DDP does it: backward produces its gradient first."""
    backward = list(reversed(parameters))
    bounds = [len(backward) * index // num_buckets for index in range(num_buckets + 1)]
    return [backward[begin:end] for begin, end in itertools.pairwise(bounds)]


class Postponable:
    """A `Chain` with an optimizer, whose update can be postponed again and again."""

    def __init__(self, num_parameters: int, num_buckets: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = Chain(num_parameters)
        self._parameters = list(self.model.parameters())
        buckets = buckets_of(self._parameters, num_buckets)
        self._steps = [step_below_hooks(make(bucket)) for bucket in buckets]
        self._gradients = [torch.rand_like(parameter) for parameter in self._parameters]
        # Not the one whose update is postponed: while it is, each look at its state goes through a guard.
        self.optimizer = make(self._parameters)
        self.update = PostponedUpdate(self.model, make(self._parameters), buckets)

    def set_gradients(self) -> None:
        """Give every parameter its gradient, as backward does it."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def step_s(self) -> float:
        """Return the seconds of a step that is not postponed."""
        self.set_gradients()
        return seconds(self.optimizer.step)

    def steps_s(self) -> float:
        """Return the seconds of a step for each bucket, by optimizers that have nothing but its parameters."""
        self.set_gradients()
        return seconds(lambda: [step() for step in self._steps])

    def stage(self, have_arrived: bool) -> None:
        """Postpone an update; see `PostponedUpdate.stage`."""
        self.set_gradients()
        self.update.stage(have_arrived)

    def forward_s(self, x: Tensor, have_arrived: bool) -> float:
        """Return the seconds of a forward that applies a postponed update."""
        self.stage(have_arrived)
        taken = seconds(lambda: self.model(x))
        assert not self.update.is_pending, "the forward has used every parameter"
        return taken


def seconds(action: Callable[[], Any]) -> float:
    """Return the CPU time (s) of this thread that ``action`` takes."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def with_others_pending(forward: Callable[[], Any]) -> Callable[[], float]:
    """Return a measurement of ``forward`` while updates of parameters that it does not use are pending."""
    others = Postponable(NUM_OPERATIONS, NUM_BUCKETS, OPTIMIZERS["SGD with momentum"])

    def measure() -> float:
        others.stage(have_arrived=True)
        taken = seconds(forward)
        assert others.update.is_pending, "the forward does not use these parameters"
        others.update.finish()
        return taken

    return measure


def measure_forwards(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of both forwards on each side, one value a round: the mean of some repeated in a row."""
    case = Postponable(NUM_OPERATIONS, NUM_BUCKETS, OPTIMIZERS["SGD with momentum"])
    x = torch.rand(4, 8)

    def chain() -> Tensor:
        output: Tensor = case.model(x)
        return output

    def own() -> float:
        return case.forward_s(x, have_arrived=True) - case.step_s()

    def applied() -> float:
        case.stage(have_arrived=True)
        case.update.finish()
        return seconds(chain)

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 4).eval().requires_grad_(False)
    tokens = torch.rand(4, 8, 32)

    @torch.no_grad()
    def teach() -> None:
        teacher(tokens)

    measurements = {
        f"{NUM_OPERATIONS} small operations": {
            PLAIN: lambda: seconds(chain),
            OTHERS: with_others_pending(chain),
            OWN: own,
            APPLIED: applied,
        },
        "frozen TransformerEncoder": {PLAIN: lambda: seconds(teach), OTHERS: with_others_pending(teach)},
    }
    results = {}
    for name, sides in measurements.items():
        several = {side: repeated(measure, arguments.repeats) for side, measure in sides.items()}
        results[name] = alternate(several, arguments.rounds)
    return results


def repeated(measure: Callable[[], float], repeats: int) -> Callable[[], float]:
    """Return the mean of ``repeats`` measurements as one measurement."""
    return lambda: mean(measure() for _ in range(repeats))


def measure_update(case: Postponable, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an update, applied in each of the ways, one value a round."""
    x = torch.rand(4, 8)

    def within_forward(have_arrived: bool) -> float:
        plain = seconds(lambda: case.model(x))
        return case.forward_s(x, have_arrived) - plain

    def finish() -> float:
        case.stage(have_arrived=False)
        return seconds(case.update.finish)

    sides = {
        STEP: case.step_s,
        STEPS: case.steps_s,
        SLOW: lambda: within_forward(have_arrived=False),
        FAST: lambda: within_forward(have_arrived=True),
        FINISH: finish,
    }
    return alternate(sides, rounds)


def forward_table(forwards: dict[str, dict[str, list[float]]]) -> str:
    """Return milliseconds, and ratios with quartiles."""
    header = ["forward", "side", "ms", "over no strategy (quartiles)", "bound", "aim"]
    rows = []
    for name, times in forwards.items():
        for side, values in times.items():
            over = quartiles(ratios(values, times[PLAIN])).text()
            rows.append([name, side, f"{1e3 * quartiles(values).median:.2f}", over, "1", f"{FORWARD_AIM}"])
    return markdown_table(header, rows)


def update_table(updates: dict[str, dict[str, list[float]]]) -> str:
    """Return milliseconds, and ratios with quartiles."""
    header = ["optimizer, parameters/buckets", "way", "ms", "over optimizer.step (quartiles)", "bound", "aim"]
    rows = []
    for name, times in updates.items():
        for way, values in times.items():
            spread = quartiles(ratios(values, times[STEP])).text()
            aim = f"{UPDATE_AIM}" if way in (FAST, FINISH) else ""
            rows.append([name, way, f"{1e3 * quartiles(values).median:.2f}", spread, "1", aim])
    return markdown_table(header, rows)


def over(times: dict[str, list[float]], base: str) -> list[Bar]:
    """Return a bar for each side: its time over that of ``base``."""
    spreads: dict[str, Spread] = {
        name: quartiles(ratios(values, times[base])) for name, values in times.items() if name != base
    }
    return [Bar(name, spread) for name, spread in spreads.items()]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(parser(), SMOKE, argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forwards = measure_forwards(arguments)
    updates = {
        f"{optimizer}, {num_parameters}/{num_buckets}": measure_update(
            Postponable(num_parameters, num_buckets, make), arguments.rounds
        )
        for num_parameters, num_buckets in arguments.sizes
        for optimizer, make in OPTIMIZERS.items()
    }
    folder = output_folder(arguments)
    table = f"{forward_table(forwards)}\n\n{update_table(updates)}"
    title = "Host time that layered SGD adds, one process"
    write_report(folder, arguments, title, table, {"forward_s": forwards, "update_s": updates})
    draw_bars(
        {name: over(times, PLAIN) for name, times in forwards.items()},
        folder / "forward.png",
        title="Forward under layered SGD's watch",
        axis="time over the same forward without a strategy: median, quartiles",
        digits=2,
        reference=1.0,
    )
    draw_bars(
        {name: over(times, STEP) for name, times in updates.items()},
        folder / "update.png",
        title="Applying a postponed update",
        axis="time over one optimizer.step: median, quartiles",
        digits=2,
        reference=1.0,
        max_columns=2,
    )


if __name__ == "__main__":
    main()
