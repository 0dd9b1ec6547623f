"""Random training programs: what a user may do between collectives, from one seed and alike on all ranks.

A program says what each rank does. It runs under DDP, and under layered SGD with the communicator on the device.
"""

# No `from __future__ import annotations`: DDP checks the communication hook's annotations as objects.
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dp.layers import GlobalBatchNorm1d
from lightning_dp.strategies.layered_sgd.gradient_sum import GradientCommunicator
from lightning_dp.strategies.layered_sgd.reduction import LayeredReduction
from tests.ranks import SYNC_BUFFERS

MakeCommunicator = Callable[[str, nn.Module, bool], GradientCommunicator]
"""Called with the overlap, the module, and whether unused parameters are looked for."""


@dataclass(frozen=True)
class Program:
    """A training of some steps.

    Attributes:
        widths: of the layers.
        norms: what follows each layer: "none", "local" (buffers that DDP broadcasts) or "global" (an all-gather in
            forward and one in backward).
        branches: for each layer, the (step, rank) pairs that use a second layer beside it; None: there is none.
        global_steps: steps in which "global" layers are global.
        accumulate: backward passes of a step; only the last one is reduced.
        metric: when a metric is all-reduced: after "forward", "backward", the "step", or "never".
        readers: (step, rank) pairs: that rank alone reads a weight after that step.
        broadcast_buffers, overlap, bucket_bytes, adamw: options.
    """

    seed: int
    steps: int
    widths: list[int]
    norms: list[str]
    branches: list[set[tuple[int, int]] | None]
    global_steps: set[int]
    accumulate: int
    metric: str
    readers: set[tuple[int, int]]
    broadcast_buffers: bool
    overlap: str
    bucket_bytes: int
    adamw: bool

    @property
    def has_unused(self) -> bool:
        """Whether a parameter may have no gradient."""
        return any(branch is not None for branch in self.branches)

    @property
    def hangs_under_ddp(self) -> bool:
        """Whether DDP may all-reduce a bucket before an all-gather of backward on one rank, and after it on another."""
        return self.has_unused and "global" in self.norms


def make_program(seed: int, world_size: int) -> Program:
    choice = random.Random(seed)
    steps = choice.randint(2, 4)
    places = [(step, rank) for step in range(steps) for rank in range(world_size)]
    num_layers = choice.randint(1, 3)

    def branch() -> set[tuple[int, int]] | None:
        return set(choice.sample(places, choice.randrange(len(places)))) if choice.random() < 0.3 else None

    return Program(
        seed,
        steps,
        widths=[choice.randint(1, 5) for _ in range(num_layers + 1)],
        norms=[choice.choice(["none", "local", "global"]) for _ in range(num_layers)],
        branches=[branch() for _ in range(num_layers)],
        global_steps={step for step in range(steps) if choice.random() < 0.7},
        accumulate=choice.choice([1, 1, 2]),
        metric=choice.choice(["never", "forward", "backward", "step"]),
        readers={place for place in places if choice.random() < 0.2},
        broadcast_buffers=choice.random() < 0.5,
        overlap=choice.choice(["load", "step", "step"]),
        bucket_bytes=choice.choice([16, 100, 10**6]),
        adamw=choice.random() < 0.5,
    )


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        kinds = {"none": nn.Identity, "local": nn.BatchNorm1d, "global": GlobalBatchNorm1d}
        self.layers, self.norms, self.branches = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for index, (norm, used) in enumerate(zip(program.norms, program.branches, strict=True)):
            wide = program.widths[index : index + 2]
            # A norm takes the mean away. Adam would step by the rounding error that is a bias's gradient then.
            bias = norm == "none"
            self.layers.append(nn.Linear(*wide, bias=bias))
            self.norms.append(kinds[norm](wide[1]))
            self.branches.append(nn.Identity() if used is None else nn.Linear(*wide, bias=bias))
        self.double()

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        for layer, norm, branch, used in zip(
            self.layers, self.norms, self.branches, self.program.branches, strict=True
        ):
            if isinstance(norm, GlobalBatchNorm1d):
                norm.is_global = step in self.program.global_steps
            y = layer(x)
            if used is not None and (step, rank) in used:
                y = y + branch(x)
            x = torch.tanh(norm(y))
        return x


def run(program: Program, rank: int, make_communicator: MakeCommunicator | None) -> list[Tensor]:
    """Train, and return the parameters. Without a communicator it is DDP alone."""
    net = Net(program)
    model = DistributedDataParallel(
        net,
        bucket_cap_mb=program.bucket_bytes / 2**20,
        find_unused_parameters=program.has_unused,
        gradient_as_bucket_view=True,
        **{SYNC_BUFFERS: program.broadcast_buffers},
    )
    optimizer = (
        torch.optim.AdamW(net.parameters(), lr=0.01)
        if program.adamw
        else torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    )
    reduction = None
    late: list[Tensor] = []
    if make_communicator is None and program.hangs_under_ddp:
        model.register_comm_hook(late, _put_off)
    if make_communicator is not None:
        communicator = make_communicator(program.overlap, net, program.has_unused)
        reduction = LayeredReduction(communicator, dist.get_world_size(), net)
        reduction.feed_from(model)
    for step in range(program.steps):
        for pass_ in range(program.accumulate):
            with model.no_sync() if pass_ + 1 < program.accumulate else nullcontext():
                _forward_and_backward(program, model, reduction, rank, step, pass_)
        for buffer in late:
            dist.all_reduce(buffer)
        late.clear()
        _metric(program, "backward")
        if reduction is None:
            optimizer.step()
        else:
            reduction.updates.stage(optimizer)
        optimizer.zero_grad()
        _metric(program, "step")
        if (step, rank) in program.readers:
            float(net.layers[0].weight.detach().sum())
    if reduction is not None:
        reduction.updates.bring_up_to_date()
        reduction.close()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _put_off(late: list[Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook where its own all-reduce would hang."""
    late.append(bucket.buffer().div_(dist.get_world_size()))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(late[-1])
    return done


def _forward_and_backward(
    program: Program,
    model: nn.Module,
    reduction: LayeredReduction | None,
    rank: int,
    step: int,
    pass_: int,
) -> None:
    generator = torch.Generator().manual_seed(hash((program.seed, rank, step, pass_)) % 2**31)
    x = torch.randn(4, program.widths[0], dtype=torch.float64, generator=generator)
    target = torch.randn(4, program.widths[-1], dtype=torch.float64, generator=generator)
    if reduction is not None:
        reduction.before_forward()
    with nullcontext() if reduction is None else reduction.updates.running_forward(finish=False):
        loss = (model(x, step, rank) - target).square().mean()
    _metric(program, "forward")
    if reduction is not None:
        reduction.updates.begin_backward(loss)
    loss.backward()
    if reduction is not None:
        reduction.updates.end_backward()
        reduction.release()


def _metric(program: Program, now: str) -> None:
    if program.metric == now:
        dist.all_reduce(torch.ones(()))
