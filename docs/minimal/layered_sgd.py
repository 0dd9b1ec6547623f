"""Layered SGD on one page: synchronous SGD whose slow all-reduce runs while ranks load data and begin the next forward.

Yu et al., "Layered SGD" (arXiv 1906.05936), Algorithm 3. Ranks form groups, for example the GPUs of one node. Gradients
are summed in two levels: within each group onto its leader, over fast links; then between the leaders, over the slow
network. Nobody reads the sum before the next forward, so the optimizer's step is postponed until then, and the slow
level has that long to finish. The weights are those of synchronous SGD at every use.

    torchrun --nproc-per-node=4 docs/minimal/layered_sgd.py
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it would keep it, and gloo's threads, to the end
import torch.nn.functional as F
from torch import Tensor, nn


class LayeredSGD:
    """The step of an optimizer, reduced in two levels and postponed.

    Every parameter must be used by the forward of the module that owns it and nowhere else, because that is where its
    update is applied. The optimizer's hyperparameters must not change. All ranks must run the same layers.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, group_size: int) -> None:
        self.optimizer = optimizer
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.group, _ = dist.new_subgroups(group_size)  # ranks 0 ... group_size - 1, and so on
        self.leader = dist.get_process_group_ranks(self.group)[0]
        self.leaders = dist.new_group(list(range(0, dist.get_world_size(), group_size)))
        # Parameter -> its gradient and the last collective that was started on it.
        self.pending: dict[Tensor, tuple[Tensor, dist.Work]] = {}
        self.events: list[str] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.reduce_within_group)
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(partial(self.update_before_use, name))

    def reduce_within_group(self, parameter: Tensor) -> None:
        """Start to sum a gradient onto the leader, while backward goes on (Algorithm 3, line 6)."""
        gradient, parameter.grad = parameter.grad, None
        self.pending[parameter] = gradient, dist.reduce(gradient, self.leader, group=self.group, async_op=True)

    def step(self) -> None:
        """Take the place of ``optimizer.step()``: start the all-reduce between groups, and do not wait (line 8)."""
        # In the order of the model, because the next forward needs the first layer first.
        for parameter in self.parameters:
            if parameter not in self.pending:
                continue  # it got no gradient in this step
            gradient, reduce = self.pending[parameter]
            reduce.wait()
            if dist.get_rank() == self.leader:
                gradient /= dist.get_world_size()  # line 6: "divide by N"
                all_reduce = dist.all_reduce(gradient, group=self.leaders, async_op=True)
                self.pending[parameter] = gradient, all_reduce
        self.events.append("start all-reduce")

    def update(self, parameters: Iterable[Tensor]) -> None:
        """Finish what is pending for these parameters: broadcast within the group (line 9), update (line 10)."""
        due = [parameter for parameter in parameters if parameter in self.pending]
        for parameter in due:
            gradient, work = self.pending.pop(parameter)
            work.wait()  # on leaders for the all-reduce
            dist.broadcast(gradient, self.leader, group=self.group)
            parameter.grad = gradient
        if due:
            self.optimizer.step()  # of `due` only: the other parameters have no gradient at this moment
            self.events.append(f"update {len(due)} tensors")
        for parameter in due:
            parameter.grad = None

    def update_before_use(self, name: str, module: nn.Module, _: object) -> None:
        """Update a module's parameters just before its forward: the all-reduce of later layers still has time."""
        self.update(module.parameters(recurse=False))
        self.events.append(f"forward {name}")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    group_size: int,
    overlap: str = "step",
) -> list[str]:
    """Train ``model`` in place on this rank's batches, and return what happened in which order.

    Args:
        model: the same on all ranks.
        optimizer: any of PyTorch's that skips parameters without a gradient.
        batches: as many on each rank. Ranks count equally, as in Algorithm 2, whatever the size of their batches.
        group_size: ranks in a group; divides the number of ranks.
        overlap: "load" hides the all-reduce behind loading, as published. "step" also hides it behind the next forward.
    """
    sgd = LayeredSGD(model, optimizer, group_size)
    for x, y in batches:  # while the all-reduce runs, the next mini-batch is drawn (line 8)
        sgd.events.append("load")
        if overlap == "load":
            sgd.update(sgd.parameters)
        loss = F.cross_entropy(model(x), y)
        sgd.update(sgd.parameters)  # those of layers that this forward has left out
        loss.backward()
        sgd.events.append("backward")
        sgd.step()
    sgd.update(sgd.parameters)
    return sgd.events


def main() -> None:
    """Train with both overlaps, and compare with one process that has the batches of all ranks."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 20
    torch.manual_seed(0)  # the same data on all ranks: x[t, r] is the mini-batch of rank r in step t
    x, y = torch.randn(steps, world_size, 3, 8), torch.randint(4, (steps, world_size, 3))

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    expected, optimizer = start()
    for t in range(steps):  # Algorithm 1: SGD on the concatenated batch
        optimizer.zero_grad()
        F.cross_entropy(expected(x[t].flatten(0, 1)), y[t].flatten()).backward()
        optimizer.step()

    for overlap in ("load", "step"):
        model, optimizer = start()
        events = train(model, optimizer, zip(x[:, rank], y[:, rank], strict=True), world_size // 2, overlap)
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        if rank == 0:
            begin = events.index("start all-reduce")
            end = events.index("start all-reduce", begin + 1)
            print(f"overlap={overlap!r}: maximum difference to SGD on the concatenated batch {difference:.0e}")
            print("   one step:", ", ".join(events[begin:end]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
