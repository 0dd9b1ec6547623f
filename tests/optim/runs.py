"""Short runs of optimizers and schedules, for several tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def rates_of(schedule_of: Callable[..., object], total_steps: int, lr: float = 1.0, **options: object) -> list[float]:
    """Return the learning rate of each step."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=lr)
    schedule = schedule_of(optimizer, total_steps, **options)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def whole_and_resumed(make: Callable[..., Optimizer], shape: Sequence[int], folder: Path) -> tuple[Tensor, Tensor]:
    """Return a parameter after four steps, and after the same steps with a checkpoint between the second and third."""
    whole = nn.Parameter(torch.ones(*shape))
    _steps(whole, make([whole], lr=0.1), [1.0, 2.0, 3.0, 4.0])
    first = nn.Parameter(torch.ones(*shape))
    optimizer = make([first], lr=0.1)
    _steps(first, optimizer, [1.0, 2.0])
    torch.save(optimizer.state_dict(), folder / "state.pt")
    second = nn.Parameter(first.detach().clone())
    resumed = make([second], lr=0.5)  # the checkpoint has another rate
    resumed.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    _steps(second, resumed, [3.0, 4.0])
    return whole, second


def _steps(parameter: nn.Parameter, optimizer: Optimizer, gradients: list[float]) -> None:
    for gradient in gradients:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
