"""Find uses of private names of torch and Lightning in source files."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_dp"
UPSTREAM = ("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning")
# Python's own: documented, though they begin with an underscore.
DOCUMENTED = {"_asdict", "_replace", "_fields", "_make", "_field_defaults", "_getframe"}
ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in DOCUMENTED


def private_names(path: Path, own: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name that the file takes from elsewhere; ``own`` are not reported.

    It sees imports from upstream packages, attributes, and ``getattr`` and the like with a literal name.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                parts = (f"{module}.{alias.name}" if module else alias.name).split(".")
                if parts[0] in UPSTREAM:
                    yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ATTRIBUTE_FUNCTIONS:
            literals = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, x) for x in literals if isinstance(x, str) and is_private(x) and x not in own)


def own_private_names(paths: list[Path]) -> frozenset[str]:
    """Return the private names that these files define: functions, classes, variables and attributes of ``self``."""
    own = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return frozenset(filter(is_private, own))


def inherited_private_names(cls: type) -> set[str]:
    """Return the private names of upstream's that ``cls`` uses, overrides or hides through ``self``."""
    upstream: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in UPSTREAM:
            upstream |= set(filter(is_private, vars(base))) | names_in_class(base)
    return names_in_class(cls) & upstream


def names_in_class(cls: type) -> set[str]:
    """Return the private names that the body of a class defines, and the private attributes of ``self`` in it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # written in C
        return set()
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }
    for statement in tree.body[0].body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return set(filter(is_private, names))
