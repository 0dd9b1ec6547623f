"""Adaptive global batch norm (AGBN) on one page: batch norm over the batches of all ranks, which switches itself off.

Liu et al., "Training Deep Nets with larger batch size on multi-GPUs" (2018), Algorithms 1 to 5 and section 4.3. In data
parallelism each rank normalizes with the mean and variance of its own few samples, so the model is not the one that a
single device would train. Global statistics make it the same, for two small collectives per layer and step. When the
batch is large, or training has converged, local statistics are as good and cost nothing.

    torchrun --nproc-per-node=4 docs/minimal/adaptive_global_batch_norm.py
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it would keep it, and gloo's threads, to the end
import torch.nn.functional as F
from torch import Tensor, nn


class GlobalNormalize(torch.autograd.Function):
    """Normalize x, (N, C, *), with the mean and variance of each channel over the batches of all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Algorithms 1 to 3: each rank sends 3 numbers for each channel."""
        ctx.dims = [dim for dim in range(x.dim()) if dim != 1]
        count = torch.tensor(x.numel() / x.shape[1], dtype=x.dtype)
        mean = x.mean(ctx.dims, keepdim=True)  # equation 1
        # Equation 2 has the mean of x^2, and equation 5 the variance E[x^2] - E[x]^2, which cancels in float32 if the
        # mean is large. Sums of squared deviations do not (Chan, Golub & LeVeque, 1979).
        squares = (x - mean).square().sum(ctx.dims, keepdim=True)
        moments = torch.stack([count.expand_as(mean), mean, squares])
        gathered = [torch.empty_like(moments) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, moments)  # Algorithm 2
        counts, means, squares = torch.stack(gathered, dim=1)  # each (ranks, 1, C, 1, ...)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total  # equation 3
        deviations = (squares + counts * (means - mean).square()).sum(0)  # of x from the global mean
        scale = (deviations / total + eps).rsqrt()
        normalized = (x - mean) * scale  # equation 6
        ctx.save_for_backward(normalized, scale, total)
        unbiased_var = deviations / (total - 1)
        ctx.mark_non_differentiable(mean, unbiased_var)
        return normalized, mean, unbiased_var

    @staticmethod
    def backward(ctx, dy: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        """Algorithms 4 and 5, with the normalized x where equation 9 has x: 2 numbers for each channel."""
        normalized, scale, total = ctx.saved_tensors
        sums = torch.stack([each.sum(ctx.dims, keepdim=True) for each in (dy, dy * normalized)])
        dist.all_reduce(sums)
        psi, phi = sums / total  # equations 10 and 11
        return scale * (dy - psi - normalized * phi), None


class AdaptiveBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with a switch, ``is_global``. All ranks must set it alike."""

    is_global = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and update the running statistics, as PyTorch's layer does on the concatenated batch."""
        if not (self.training and self.is_global):
            return super().forward(x)
        normalized, mean, unbiased_var = GlobalNormalize.apply(x, self.eps)
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.flatten(), self.momentum)
        self.running_var.lerp_(unbiased_var.flatten(), self.momentum)
        return self.weight[:, None, None] * normalized + self.bias[:, None, None]  # equation 7


def average(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over the ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: Sequence[Sequence[tuple[Tensor, Tensor]]],
    max_batch_size: float = float("inf"),
    min_delta: float = 0.0,
) -> list[bool]:
    """Train ``model`` in place on this rank's batches of each epoch; return in which steps statistics were global.

    They are, until training has converged, in steps whose batch of all ranks together is smaller than
    ``max_batch_size`` (section 4.3: BZ_max). Converged (IsConverged): an epoch's loss has not fallen by more than
    ``min_delta``. All ranks must have the same model and as many batches, of any size. Ranks count equally.
    """
    layers = [module for module in model.modules() if isinstance(module, AdaptiveBatchNorm2d)]
    best, converged, history = float("inf"), False, []
    for batches in epochs:
        epoch_loss = torch.zeros(())
        for x, y in batches:
            batch_size = torch.tensor(len(x))
            dist.all_reduce(batch_size)
            is_global = not converged and batch_size.item() < max_batch_size  # the same on all ranks
            for layer in layers:
                layer.is_global = is_global
            history.append(is_global)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            epoch_loss += loss.detach() / len(batches)
        average([epoch_loss])  # the same number on all ranks, so that they switch at the same step
        converged = converged or epoch_loss.item() >= best - min_delta
        best = min(best, epoch_loss.item())
        # With local statistics each rank has running statistics of its own.
        average([buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)])
    return history


def main() -> None:
    """Train with global and with local statistics, and compare with one process that has the batches of all ranks."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world_size, steps = dist.get_rank(), dist.get_world_size(), 10
    torch.manual_seed(0)  # the same data on all ranks: x[t, r] is the mini-batch of rank r in step t
    x, y = torch.randn(steps, world_size, 2, 3, 6, 6), torch.randint(4, (steps, world_size, 2))
    epochs = [list(zip(x[:, rank], y[:, rank], strict=True))] * 3

    def start(norm: type[nn.Module] = AdaptiveBatchNorm2d) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = (nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4), nn.Flatten(), nn.Linear(16, 4))
        model = nn.Sequential(*layers)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    expected, optimizer = start(nn.BatchNorm2d)
    for t in [*range(steps)] * 3:
        optimizer.zero_grad()
        F.cross_entropy(expected(x[t].flatten(0, 1)), y[t].flatten()).backward()
        optimizer.step()

    for options in ({}, {"min_delta": 0.5}, {"max_batch_size": 8}):  # no switch, by convergence, by batch size
        model, optimizer = start()
        history = train(model, optimizer, epochs, **options)
        pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
        difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
        if rank == 0:
            print(f"{options}: global statistics in {sum(history)} of {len(history)} steps")
            print(f"   maximum difference to batch norm on the concatenated batch {difference:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
