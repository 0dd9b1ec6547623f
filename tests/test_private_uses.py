"""Private names of torch and Lightning are used in `lightning_dp._private` only, where each has a contract."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

import lightning_dp
from tests.private_names.uses import PACKAGE, ROOT, inherited_private_names, own_private_names, private_names

pytestmark = pytest.mark.repository
FOLDERS = ("lightning_dp", "recipes", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Private methods of Lightning and torch that our classes override, each with a contract in tests/test_private_names.py.
OVERRIDES = {
    "LayeredFSDPStrategy": {"_configure_launcher"},
    "LayeredSGDStrategy": {"_configure_launcher", "_setup_model"},
    "ShardedScaler": {"_check_inf_per_device", "_found_inf_per_device"},
}


def test_no_private_name_of_upstream_is_used():
    own = own_private_names(FILES)
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        if path.parent != PACKAGE / "_private"
        for line, name in private_names(path, own)
    ]
    assert not found, f"wrap these in lightning_dp/_private, each with a contract: {found}"


def classes() -> list[type]:
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(lightning_dp.__path__, "lightning_dp.")]
    return [
        cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__
    ]


def test_no_class_uses_or_hides_a_private_name_that_it_inherits():
    found = {cls.__name__: names for cls in classes() if (names := inherited_private_names(cls))}
    assert found == OVERRIDES


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["_dynamo"]),
        ("from torch.nn.modules.batchnorm import _BatchNorm as Base", ["_BatchNorm"]),
        ("def f():\n    from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from lightning_dp._lightning import Trainer", []),
        ("tensor._version", ["_version"]),
        ("self._layer_sync.apply(model)", ["_layer_sync"]),
        ("torch._C.Generator()", ["_C"]),
        ("model._ignored = []", ["_ignored"]),
        ("getattr(model, '_ignored', ())", ["_ignored"]),
        ("operator.attrgetter('_ignored')", ["_ignored"]),
        ("self._own + other.__dict__", []),
        ("run._asdict()", []),
    ],
)
def test_uses_are_found(tmp_path, source, expected):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [name for _, name in private_names(path, frozenset({"_own"}))] == expected


class Hiding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._buffers = {}
        self._mine = self._get_name()


def test_inherited_names_are_found():
    assert inherited_private_names(Hiding) == {"_buffers", "_get_name"}


def test_own_names_are_those_that_are_defined(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text("_a = 1\ndef _b(): ...\nclass C:\n    _c: int = 0\n    def d(self):\n        self._d = x._e = 1\n")
    assert own_private_names([path]) == {"_a", "_b", "_c", "_d"}
