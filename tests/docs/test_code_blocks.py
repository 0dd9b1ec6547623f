"""Python in the pages: every block runs, with the small objects that it takes for granted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.docs.pages import PAGES, blocks, name_of

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page.read_text()))]


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What a reader has when he comes to a block: a model, a tensor, a process group (of one rank)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {
        "model": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        "ddp_model": DistributedDataParallel(nn.Linear(2, 2)),
        "tensor": torch.ones(6),
        "group": dist.group.WORLD,
    }
    dist.destroy_process_group()


def run(text: str, names: dict[str, Any]) -> None:
    """Run the Python blocks of a page one after the other, as a reader who types them would."""
    for block in blocks(text):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, "page", "exec"), names)


@pytest.mark.filterwarnings("ignore:.*tensorboardX")  # the Trainer's default logger says what it would rather be
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run(page, names):
    run(page.read_text(), names)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = (", SyntaxError),
        ("from lightning_dp import Nothing", ImportError),
        ("undefined_name", NameError),
        ("from lightning_dp import Plateau\nPlateau(patients=3)", TypeError),
    ],
)
def test_a_block_that_cannot_run_is_seen(code, error, names):
    with pytest.raises(error):
        run(f"```python\n{code}\n```\n", names)


def test_the_methods_pages_and_the_readme_have_examples():
    named = {name_of(page) for page in WITH_PYTHON}
    methods = {"layered_sgd", "krizhevsky_hybrid", "adaptive_global_batch_norm", "memonger", "ring_all_reduce"}
    assert named >= {"README.md", *(f"docs/methods/{method}.md" for method in methods)}
