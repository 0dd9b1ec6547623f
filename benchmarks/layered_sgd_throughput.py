"""Layered SGD against DDP on hosts whose links are limited to a rate: step time against rate, and the bound.

    python benchmarks/two_hosts.py                                   # all rates, emulated compute
    python benchmarks/two_hosts.py --rates 1gbit none --compute real

The hosts are network namespaces of this machine; benchmarks/hosts.py says what that needs. Gradients of about 25 MB,
loading 100 ms a batch. Emulated compute: the rank sleeps 50 ms in forward and 100 ms in backward, as one whose device
is at work; two cores can carry four ranks that way. Real compute: a convolutional network on the cores.

All methods run in turn in the same processes, round after round. Post-local SGD is there as context: it averages
parameters every fourth step and computes something else. Bound: the larger of compute + loading and the bytes that
cross a host's link (gradients x 2 (G - 1) / G for G hosts) over its rate. Writes a table, results.json and
step_time.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from support.emulated_hosts import Hosts, bytes_per_s, worker_or_hosts
from support.report import describe_machine, output_folder
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from lightning_dp.strategies import LayeredSGDStrategy

LOAD_S, FORWARD_S, BACKWARD_S = 0.1, 0.05, 0.1
RATES = ("200mbit", "500mbit", "1gbit", "10gbit", "none")  # of each host, in each direction
WARM_UP = 3


class PostLocalSGD(DDPStrategy):
    """Gradients averaged inside a host only, parameters over all ranks every fourth step."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        per_host = self.num_processes
        made = [dist.new_group(list(range(first, first + per_host))) for first in range(0, self.world_size, per_host)]
        state = post_local.PostLocalSGDState(None, made[self.global_rank // per_host], start_localSGD_iter=0)
        self.model.register_comm_hook(state, post_local.post_localSGD_hook)
        self._model_averager = PeriodicModelAverager(period=4, warmup_steps=0)


def methods() -> dict[str, Callable[[], Any]]:
    """Name to strategy; the first is what the others are compared with."""
    return {
        "DDP": DDPStrategy,
        "post-local SGD": PostLocalSGD,
        "LSGD load": lambda: LayeredSGDStrategy(overlap="load"),
        "LSGD step": lambda: LayeredSGDStrategy(overlap="step"),
        "LSGD load sharded": lambda: LayeredSGDStrategy(overlap="load", communicator="sharded"),
        "LSGD step sharded": lambda: LayeredSGDStrategy(overlap="step", communicator="sharded"),
    }


class Busy(torch.autograd.Function):
    """The identity, with a device at work meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Emulated(nn.Module):
    """6.4 million parameters in eight equal layers that take no time but the emulated one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [64, *[1024] * 7, 10]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Busy.apply(x, FORWARD_S / len(self.layers), BACKWARD_S / len(self.layers))
            x = F.relu(layer(x))
        return x


class Real(nn.Sequential):
    """6.4 million parameters, most of the time in the first layers and most of the bytes in the last, as in AlexNet."""

    def __init__(self) -> None:
        def conv(a: int, b: int) -> list[nn.Module]:
            return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

        super().__init__(
            *conv(3, 32), nn.MaxPool2d(2), *conv(32, 64), nn.MaxPool2d(2), *conv(64, 128), nn.MaxPool2d(2),
            *conv(128, 256), nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, 10),
        )  # fmt: skip


class Module(pl.LightningModule):
    def __init__(self, compute: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Emulated() if compute == "emulated" else Real()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


class Batches(torch.utils.data.Dataset):
    """Batches that take `LOAD_S` to load, of 16 images or of 8 feature vectors."""

    def __init__(self, count: int, compute: str) -> None:
        self.count, self.shape = count, (8, 64) if compute == "emulated" else (16, 3, 32, 32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(LOAD_S)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=generator), torch.randint(10, self.shape[:1], generator=generator)


class Clock(pl.Callback):
    """Seconds a step in the steady state: from the end of one step to the end of another.

    Where the method postpones updates, one is pending at both.
    """

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        return (self.ends_s[-1] - self.ends_s[WARM_UP - 1]) / (len(self.ends_s) - WARM_UP)


def quiet() -> None:
    """One thread, and none of Lightning's advice."""
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning_dp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def worker(arguments: argparse.Namespace) -> None:
    """One rank, started by torchrun on one of the hosts: every method in turn, ``rounds`` times."""
    quiet()
    results: dict[str, list[float]] = {}
    for turn in range(arguments.rounds):
        for name, make in methods().items():
            clock = Clock()
            trainer = pl.Trainer(
                strategy=make(), accelerator="cpu", devices=arguments.per_host, num_nodes=arguments.hosts,
                max_steps=arguments.steps + WARM_UP, callbacks=[clock], logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            count = (arguments.steps + WARM_UP) * trainer.world_size
            module = Module(arguments.compute)
            trainer.fit(module, torch.utils.data.DataLoader(Batches(count, arguments.compute), batch_size=None))
            results.setdefault(name, []).append(clock.step_s)
            if trainer.is_global_zero:
                print(f"  {arguments.rate:>8}  round {turn + 1}  {name:18} {clock.step_s * 1e3:7.1f} ms", flush=True)
    if int(trainer.global_rank) == 0:
        Path(arguments.worker).write_text(
            json.dumps({"step_s": results, "bytes": 4 * sum(p.numel() for p in module.parameters())})
        )


def measure(arguments: argparse.Namespace, rate: str, folder: Path) -> dict[str, Any]:
    """Run `worker` on hosts of the given rate; return what it wrote."""
    out = folder / f"rate-{rate}.json"
    with Hosts(arguments.hosts, None if rate == "none" else rate) as hosts:
        script = [__file__, "--worker", str(out), "--rate", rate, "--compute", arguments.compute]
        script += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
        script += ["--hosts", str(arguments.hosts), "--per-host", str(arguments.per_host)]
        hosts.torchrun(arguments.per_host, script, timeout_s=3600, logs=folder)
    return json.loads(out.read_text())


def bound_s(arguments: argparse.Namespace, rate: str, num_bytes: int) -> float:
    """The least a step can take: compute and loading, or the bytes over one host's link."""
    busy = LOAD_S + (FORWARD_S + BACKWARD_S if arguments.compute == "emulated" else 0.0)
    crossing = 0.0 if rate == "none" else num_bytes * 2 * (arguments.hosts - 1) / arguments.hosts / bytes_per_s(rate)
    return max(busy, crossing)


def table(results: dict[str, Any], bounds: dict[str, float]) -> str:
    """Median ms a step, and throughput over DDP's (median, least and most of the rounds)."""
    lines = [f"| method | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for name in methods():
        cells = []
        for rate in results:
            ours, ddp = results[rate]["step_s"][name], results[rate]["step_s"]["DDP"]
            ratios = sorted(d / o for d, o in zip(ddp, ours, strict=True))
            cells.append(f"{median(ours) * 1e3:.0f} ms, {median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| bound | {' | '.join(f'{bounds[rate] * 1e3:.0f} ms' for rate in results)} |")
    return "\n".join(lines)


def picture(results: dict[str, Any], bounds: dict[str, float], path: Path, title: str) -> None:
    """Step time against rate, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    places = range(len(results))
    for name in methods():
        step_ms = [[1e3 * s for s in results[rate]["step_s"][name]] for rate in results]
        middle = [median(s) for s in step_ms]
        pairs = list(zip(middle, step_ms, strict=True))
        spread = [[m - min(s) for m, s in pairs], [max(s) - m for m, s in pairs]]
        axes.errorbar(places, middle, yerr=spread, marker="o", capsize=3, label=name)
    axes.plot(places, [1e3 * bounds[rate] for rate in results], "k--", label="bound")
    axes.set_xticks(list(places), ["unlimited" if rate == "none" else rate for rate in results])
    axes.set(xlabel="rate of each host's link", ylabel="ms a step", yscale="log", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def measure_and_report(arguments: argparse.Namespace) -> None:
    """Measure on the hosts, and write tables and pictures."""
    folder = output_folder("two_hosts", arguments.compute)
    results = {rate: measure(arguments, rate, folder) for rate in arguments.rates}
    bounds = {rate: bound_s(arguments, rate, results[rate]["bytes"]) for rate in results}
    text = table(results, bounds)
    title = f"{arguments.hosts} hosts x {arguments.per_host} ranks, {arguments.compute} compute"
    print(f"{title}; {describe_machine()}\n{text}")
    (folder / "results.json").write_text(
        json.dumps(
            {"machine": describe_machine(), "arguments": vars(arguments), "results": results, "bound_s": bounds},
            indent=1,
        )
    )
    (folder / "table.md").write_text(text + "\n")
    picture(results, bounds, folder / "step_time.png", title)
    print(f"written to {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--compute", choices=["emulated", "real"], default="emulated")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker_or_hosts(arguments, worker, measure_and_report)


if __name__ == "__main__":
    main()
