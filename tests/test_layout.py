"""What each part of the package may import, to be used and tested alone; and how long functions may be."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.repository
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_dp"

# Folder or module -> the parts of the package that it may import, besides itself.
ALLOWED = {
    "_private": set(),
    "collectives": {"_private"},
    "layers": {"_private", "collectives"},
    "trial_run": {"_private"},
    "recompute": {"_private", "collectives", "trial_run"},
    "optim": {"_private"},
    "planner": {"_lightning", "_private", "callbacks", "collectives", "layers", "recompute", "strategies", "trial_run"},
    "losses": {"_private"},
    "models": {"_lightning", "layers", "losses"},
    "data": {"_lightning"},
    "strategies": {"_lightning", "_private", "collectives", "layers", "losses", "recompute", "trial_run"},
    "callbacks": {"_lightning", "_private", "collectives", "layers", "recompute"},
    "launch": set(),
    "runs": {"_private", "callbacks", "data", "launch", "planner", "strategies", "trial_run"},
    "_lightning": set(),
    "__init__": {"_lightning", "strategies", "callbacks"},
}
FRAMEWORK = {"lightning", "pytorch_lightning", "lightning_fabric"}
CONFIGURATION = {"hydra", "omegaconf"}
# Formulas and simulations: to be used where there is no torch.
PURE = ("advice", "convolutions/program", "formulas", "network", "report", "simulation", "workload")
NO_TORCH = {f"planner/{name}.py" for name in PURE}
ONLY_TORCH = {"_private", "collectives", "layers", "losses", "recompute", "optim", "launch", "trial_run"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Return the dotted names that the module imports anywhere, except under ``if TYPE_CHECKING``."""
    names = set()
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def breaks_the_order(part: str, top: str, used: str, path: Path) -> bool:
    return top == "lightning_dp" and used != part and used not in ALLOWED[part]


# What the rule says -> whether an import of a part of the package breaks it.
RULES: dict[str, Callable[[str, str, str, Path], bool]] = {
    "imports go one way": breaks_the_order,
    "only runs, recipes and conf know Hydra": lambda part, top, used, path: top in CONFIGURATION and part != "runs",
    "the framework comes from lightning_dp._lightning": (
        # `runs` stands on what the files in conf/ name: pytorch_lightning.
        lambda part, top, used, path: top in FRAMEWORK and path.name != "_lightning.py" and part != "runs"
    ),
    "formulas need no torch": (
        lambda part, top, used, path: top == "torch" and path.relative_to(PACKAGE).as_posix() in NO_TORCH
    ),
    "these parts stand on torch alone": lambda part, top, used, path: top == "torchmetrics" and part in ONLY_TORCH,
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_keep_the_rule(rule):
    found = []
    for path in modules():
        for name in imports(path):
            top, _, rest = name.partition(".")
            if RULES[rule](part_of(path), top, rest.partition(".")[0], path):
                found.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert found == []


def test_every_part_says_what_it_may_import():
    assert {part_of(path) for path in modules()} - set(ALLOWED) == set(), "add it to ALLOWED"


def test_the_rules_see_imports(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "import hydra\nfrom lightning_dp.strategies import X\ndef f():\n    import pytorch_lightning.loops\n"
    )
    assert imports(source) == {"hydra", "lightning_dp.strategies.X", "pytorch_lightning.loops"}


def test_the_top_level_has_no_other_files_and_folders():
    allowed = {
        *("pyproject.toml", "constraints.txt", "Makefile", "MANIFEST.in", "LICENSE", "CITATION.cff", "mkdocs.yml"),
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
        *("lightning_dp", "conf", "recipes", "tests", "docs", "benchmarks"),
    }
    present = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")}
    assert present - allowed <= {"runs", "data", "build", "dist"}


# --- what a newcomer has to read at once ---

LONGEST_FUNCTION = 45


def python_files() -> list[Path]:
    folders = ("lightning_dp", "recipes", "benchmarks", "tests", "docs", ".ci")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def long_functions(path: Path) -> list[str]:
    """Return the functions of over `LONGEST_FUNCTION` lines, docstring left out, without a comment "Long because"."""
    lines = path.read_text().splitlines()
    found = []
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = node.body[0] if ast.get_docstring(node) is not None else None
        length = node.end_lineno - node.lineno + 1
        length -= docstring.end_lineno - docstring.lineno + 1 if docstring is not None else 0
        reason = any("# Long because" in line for line in lines[node.lineno - 2 : node.body[0].end_lineno + 1])
        if length > LONGEST_FUNCTION and not reason:
            found.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    return found


def test_no_function_is_long_without_a_reason_beside_it():
    assert [function for path in python_files() for function in long_functions(path)] == []


def test_a_long_function_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    source = tmp_path / "long.py"
    body = "\n".join(["    x = 1"] * LONGEST_FUNCTION)
    source.write_text(f"def f():\n{body}\n")
    assert long_functions(source) == ["long.py: f has 46 lines"]
    source.write_text(f"# Long because there is a reason\ndef f():\n{body}\n")
    assert long_functions(source) == []
