"""Global batch norm under torch.compile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dp.layers import (
    GlobalBatchNorm2d,
    apply_global_batch_norm,
    global_batch_norm_layers,
    revert_global_batch_norm,
)
from tests.layers.oracle import EXACT, SHARDS, C, batches, compare, randomize, run
from tests.ranks import run_processes


def compiled(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    torch._dynamo.config.suppress_errors = False
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated
    x = batches(SHARDS[2], (4, 3), steps=1)[0][rank]
    result: dict[str, Any] = {"breaks": {}, "same": {}}
    layers = {
        "plain": nn.BatchNorm2d(C),
        "local": GlobalBatchNorm2d(C),
        "global": GlobalBatchNorm2d(C),
        "subgroup": GlobalBatchNorm2d(C, group=group),
    }
    for name, layer in layers.items():
        randomize(layer).double()
        if name == "local":
            layer.is_global = False
        torch._dynamo.reset()
        explanation = torch._dynamo.explain(nn.Sequential(copy.deepcopy(layer), nn.ReLU()))(x)
        result["breaks"][name] = (explanation.graph_break_count, explanation.graph_count)
        eager = run(copy.deepcopy(layer), [x, x])
        compare([run(torch.compile(layer, backend="aot_eager"), [x, x])], eager, **EXACT)
    return result


@pytest.mark.slow  # the test of a network shows it for the common cases
def test_torch_compile_has_no_graph_break():
    for rank in run_processes(2, compiled):
        assert set(rank["breaks"].values()) == {(0, 1)}, rank


def compiled_block(rank: int) -> None:
    """A block with two parallel branches of the same number of channels, compiled for changing batch sizes."""
    dist.init_process_group("gloo")
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = (randomize(GlobalBatchNorm2d(C)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.left(x * 2).relu() * self.right(x.tanh())).sigmoid())

    steps = [batches(shards, (4, 3), steps=1)[0][rank] for shards in ([5, 3], [4, 6], [2, 3])]
    block = Block().double()
    eager = run(copy.deepcopy(block), steps)
    compare([run(torch.compile(copy.deepcopy(block), backend="aot_eager"), steps)], eager, **EXACT)
    empty = torch.zeros(0, C, 4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="an empty batch in a compiled model"):
        torch.compile(block, backend="aot_eager")(empty)


def compiled_widths(rank: int) -> None:
    """Layers of different widths, of which dynamo traces the function again."""
    dist.init_process_group("gloo")
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(C, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, C), nn.BatchNorm1d(C)).double()
    apply_global_batch_norm(plain)
    steps = [batches(shards, (), steps=1)[0][rank] for shards in ([5, 3], [4, 6], [2, 3])]
    for backend in ("eager", "aot_eager"):
        eager, model = copy.deepcopy(plain), copy.deepcopy(plain)
        torch._dynamo.reset()
        compare([run(torch.compile(model, backend=backend), steps)], run(eager, steps), **EXACT)
        assert not any(buffer.requires_grad for buffer in model.buffers())
        for layer in (*global_batch_norm_layers(model), *global_batch_norm_layers(eager)):
            layer.is_global = False
        compare([run(torch.compile(model, backend=backend), steps)], run(eager, steps), **EXACT)


def converted_later(rank: int) -> None:
    dist.init_process_group("gloo")
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated
    torch.manual_seed(1)
    x = torch.randn(8, C, dtype=torch.float64)
    own = x[4 * rank : 4 * rank + 4]
    for compiles in (lambda model: torch.compile(model, backend="eager"), lambda model: model.compile(backend="eager")):
        model = nn.Sequential(nn.Linear(C, 6), nn.BatchNorm1d(6)).double()
        whole = model(x)
        compiled = compiles(model) or model
        local = compiled(own)
        assert not torch.allclose(local, whole[4 * rank : 4 * rank + 4])
        apply_global_batch_norm(model)
        torch.testing.assert_close(compiled(own), whole[4 * rank : 4 * rank + 4])
        revert_global_batch_norm(model)
        torch.testing.assert_close(compiled(own), local)


@pytest.mark.ci
def test_a_network_that_was_compiled_and_has_run_follows_a_conversion():
    run_processes(2, converted_later)


@pytest.mark.slow
def test_compiled_layers_of_different_widths_leave_the_buffers_without_gradient():
    run_processes(2, compiled_widths)


@pytest.mark.slow
def test_compiled_layers_take_batches_of_changing_size_and_refuse_empty_ones():
    run_processes(2, compiled_block)


def sizes_of_graphs(rank: int) -> list[int]:
    """Return how many operations a compiled layer has: for a small batch, and one that eager code takes in parts."""
    dist.init_process_group("gloo")
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated
    sizes = []

    def counting(graph: Any, inputs: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        sizes.append(sum(len(part.graph.nodes) for part in parts))
        return graph

    for width in (4, 512):
        torch._dynamo.reset()
        torch.compile(GlobalBatchNorm2d(C), backend=counting, fullgraph=True)(torch.randn(3, C, width, width))
    return sizes


@pytest.mark.ci
def test_a_large_batch_has_as_small_a_graph_as_a_small_one():
    for small, large in run_processes(2, sizes_of_graphs):
        assert small == large


def switched(rank: int) -> list[int]:
    """Return how many graphs there are after each step of a network that is compiled whole and switched."""
    dist.init_process_group("gloo")
    import warnings

    warnings.simplefilter("ignore")  # dynamo uses functions that it has deprecated
    group = dist.new_group([0, 1])
    num_graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    shards = SHARDS[2]
    steps = batches(shards, (4, 3), steps=4)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(C, C, 1), randomize(nn.BatchNorm2d(C)), nn.ReLU(), nn.Conv2d(C, C, 1))
    plain.append(randomize(nn.BatchNorm2d(C))).double()
    expected, eager, model = plain, copy.deepcopy(plain), copy.deepcopy(plain)
    apply_global_batch_norm(eager)
    apply_global_batch_norm(model, group)
    compiled = torch.compile(model, backend=counting, fullgraph=True)  # a graph break is an error
    found = []
    for step, is_global in enumerate((True, True, False, True)):
        for layer in (*global_batch_norm_layers(eager), *global_batch_norm_layers(model)):
            layer.is_global = is_global
        compare([run(compiled, [steps[step][rank]])], run(eager, [steps[step][rank]]), **EXACT)
        if step < 2:  # as one process on the concatenated batch
            run(expected, [torch.cat(steps[step])])
            for ours, theirs in zip(model.buffers(), expected.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, **EXACT)
        found.append(num_graphs)
    return found


@pytest.mark.ci
def test_a_network_is_one_graph_for_each_kind_of_statistics():
    """The first step with local statistics compiles once, for all layers. No other switch compiles."""
    assert run_processes(2, switched) == [[1, 1, 2, 2]] * 2
