"""Take out one call of a module at a time: a wait, an event, a stream, a device."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.emulated_device.machine import Machine

# Calls by the name of the function or method.
NAMES = {
    *("wait", "wait_event", "wait_stream", "wait_for_copy", "_wait_until_ended", "_wait_for_works"),
    *("synchronize", "query"),
    *("is_done_within", "record_event", "keep_until_done", "set_device", "on_stream", "copy_back"),
}
# Arguments that are left out.
KEYWORDS = {"blocking", "non_blocking"}


@dataclass(frozen=True)
class Mutation:
    """One change of one function.

    Attributes:
        module: where the function is.
        function: its qualified name.
        line: number of the line.
        text: the code that is taken out.
        place: number of the site within the module.
    """

    module: ModuleType
    function: str
    line: int
    text: str
    place: int

    def __str__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}:{self.line} {self.text}"


class _Mutator(ast.NodeTransformer):
    """Finds all sites, and changes the one with a given number."""

    def __init__(self, place: int | None = None) -> None:
        self.place = place
        self.found: list[tuple[str, int, str]] = []
        self._scope: list[str] = []
        self._functions = 0

    def _is_site(self, node: Any) -> bool:
        self.found.append((".".join(self._scope), node.lineno, ast.unparse(node)))
        return self.place == len(self.found) - 1

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self._functions == 0:
            self._scope.append(node.name)
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1
        if self._functions == 0:
            self._scope.pop()
        return node

    def visit_withitem(self, node: ast.withitem) -> ast.AST:
        if _name(node.context_expr) in NAMES and self._is_site(node.context_expr):
            node.context_expr = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in list(node.keywords):
            if keyword.arg in KEYWORDS and isinstance(keyword.value, ast.Constant) and self._is_site(keyword):
                node.keywords.remove(keyword)
        # Not every `x.wait_for(...)`: only the names above. What asks whether something is done is told that it is.
        if _name(node) in NAMES and self._is_site(node):
            return ast.Constant(True if _name(node) in ("query", "is_done_within") else None)
        return node


def _name(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def mutations(module: ModuleType) -> list[Mutation]:
    """Return every mutation of ``module``."""
    mutator = _Mutator()
    mutator.visit(ast.parse(inspect.getsource(module)))
    return [Mutation(module, *site, place) for place, site in enumerate(mutator.found)]


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Run with one call taken out. Only the code of the function changes: patches of its module stay in force."""
    tree = _Mutator(mutation.place).visit(ast.parse(inspect.getsource(mutation.module)))
    compiled = compile(ast.fix_missing_locations(tree), f"<{mutation}>", "exec")
    function = _function(mutation.module, mutation.function)
    original = function.__code__
    function.__code__ = next(code for code in _codes(compiled) if code.co_qualname == mutation.function)
    try:
        yield
    finally:
        function.__code__ = original


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _function(module: ModuleType, name: str) -> FunctionType:
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "fget", found)
    return inspect.unwrap(found)


def fails(scenario: Callable[[Machine, Any], None]) -> bool:
    """Return whether the scenario fails on a device that is as late as it may be."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            scenario(Machine(), patch)
        except Exception:  # whatever a wait that is missing leads to
            return True
    return False
