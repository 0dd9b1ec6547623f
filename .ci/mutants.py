"""Put one small fault at a time into the package, and see whether a test fails: `make mutants`.

A mutant is an operator exchanged, a constant or a flag changed, or a `not`, an argument, a result or a statement taken
out. It is drawn from a line that occurs once, so it can be put into another version of the repository as well, where
that has the line. Each room, a folder of the package, gives the same number. Tests run in a copy of the repository
until one fails: files named like the module first, then the module's folder, then the tests of what imports it.
A mutant that survives needs a test, unless it does what the original does.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

# Folders with few lines, and the room to which they belong.
ROOMS = {"models": "layers", "optim": "layers", "convolutions": "planner", "hydra_plugins": "runs"}
ROOMS |= {"lightning_dp": "_private", "strategies": "_private", "recipes": "runs"}
# Folders of the package whose tests are in a folder of another name.
TESTS = {"runs": "recipes", "hydra_plugins": "recipes"}
EXCHANGED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and"},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="},
}
MESSAGES = re.compile(r"\w*(warn|warning|info|debug|deprecation)|print")


class Mutant(NamedTuple):
    """A fault in one line, which is given without its indentation; ``file`` and ``line`` say where it was drawn."""

    room: str
    file: str
    line: int
    kind: str
    before: str
    after: str


def modules(tree: Path) -> list[Path]:
    """Return the files into which faults are put."""
    return [path for folder in ("lightning_dp", "recipes") for path in sorted((tree / folder).rglob("*.py"))]


def code_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something: no annotations, decorators, messages, exports or imports for types."""
    called = node.value if isinstance(node, ast.Expr) else node
    match called:
        case ast.Raise() | ast.JoinedStr() | ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Assign([ast.Name("__all__")]):
            return
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if MESSAGES.fullmatch(name):
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from code_in(child)


def faults(source: bytes) -> Iterator[tuple[str, int, int, str]]:
    """Yield the kind of each fault, the place of the bytes that it replaces, and by what."""
    lines = [0]
    for text in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(text))

    def start(node: Any) -> int:
        return lines[node.lineno - 1] + node.col_offset

    def end(node: Any) -> int:
        return lines[node.end_lineno - 1] + node.end_col_offset

    def exchange(kind: str, operands: list[Any]) -> Iterator[tuple[str, int, int, str]]:
        for left, right in pairwise(operands):
            old = source[end(left) : start(right)].strip(b"() \n").decode()
            if old in EXCHANGED:
                place = source.find(old.encode(), end(left))
                yield kind, place, place + len(old), EXCHANGED[old]

    for node in code_in(ast.parse(source)):
        match node:
            case ast.Compare(left, _, others):
                yield from exchange("comparison", [left, *others])
            case ast.BinOp(left, _, right) | ast.AugAssign(left, _, right):
                yield from exchange("arithmetic", [left, right])
            case ast.BoolOp(_, values):
                yield from exchange("and, or", values)
            case ast.UnaryOp(ast.Not()):
                yield "not", start(node), start(node) + len("not "), ""
            case ast.Constant(bool(value)):
                yield "flag", start(node), end(node), str(not value)
            case ast.Constant(int(value) | float(value)):
                yield "constant", start(node), end(node), repr(value + 1)
            case ast.Return(ast.expr() as value):
                yield "result", start(value), end(value), "None"
            case ast.keyword(str()):
                comma = re.compile(rb", *").match(source, end(node))
                before = re.compile(rb", *$").search(source, 0, start(node)) if comma is None else None
                yield "argument", before.start() if before else start(node), comma.end() if comma else end(node), ""
        match node:
            case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute()]) | ast.AugAssign(ast.Attribute()):
                yield "statement", start(node), end(node), "pass"


def mutants_of(tree: Path, other: Path) -> Iterator[Mutant]:
    """Yield what can be drawn: faults within one line, which each of the two trees has once."""
    counts = [
        Counter(line.strip() for path in modules(at) for line in path.read_text().splitlines()) for at in (tree, other)
    ]
    for path in modules(tree):
        source = path.read_bytes()
        lines = source.decode().splitlines()
        for kind, start, end, new in faults(source):
            number = source.count(b"\n", 0, start)
            before = lines[number].strip()
            after = (source[:start] + new.encode() + source[end:]).decode().splitlines()[number].strip()
            if b"\n" not in source[start:end] and before != after and all(count[before] == 1 for count in counts):
                room = ROOMS.get(path.parent.name, path.parent.name)
                yield Mutant(room, str(path.relative_to(tree)), number + 1, kind, before, after)


def draw(found: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """Draw from each room in turn, and from a line once. What changes in other lines does not change the draw."""
    order = sorted(found, key=lambda mutant: sha256(f"{seed} {mutant.before} {mutant.after}".encode()).digest())
    rooms: dict[str, list[Mutant]] = {room: [] for room in sorted({mutant.room for mutant in found})}
    for mutant in {mutant.before: mutant for mutant in order}.values():
        rooms[mutant.room].append(mutant)
    return [mutant for turn in zip_longest(*rooms.values()) for mutant in turn if mutant is not None][:number]


def put(mutant: Mutant, tree: Path) -> tuple[Path, str, str]:
    """Return the file that has the mutant's line, and its text before and after."""
    line = re.compile(rf"^([ ]*){re.escape(mutant.before)}[ ]*$", re.MULTILINE)
    (path,) = [path for path in modules(tree) if line.search(path.read_text())]
    text = path.read_text()
    return path, text, line.sub(lambda match: match[1] + mutant.after, text)


def stages(tree: Path, module: Path) -> Iterator[list[str]]:
    """Yield the files with tests of a module, those that most likely see a fault first."""
    files = sorted((tree / "tests").rglob("test_*.py"))

    def tests_of(path: Path) -> set[Path]:
        first, *inner = path.relative_to(tree).parts[1:-1] or [""]
        folder = tree / "tests" / Path(TESTS.get(first, first), *inner)
        folder = folder if folder.is_dir() else folder.parent
        return {file for file in files if folder != tree / "tests" and folder in file.parents}

    words = set(module.stem.split("_"))
    own = tests_of(module)
    alike = {file for file in own or files if words & set(file.stem.split("_")[1:])}
    dotted = re.compile(rf"\b{re.escape('.'.join(module.relative_to(tree).with_suffix('').parts))}\b")
    importers = [path for path in (*modules(tree), *files) if dotted.search(path.read_text())]
    others = {file for path in importers for file in ({path} if path in files else tests_of(path))}
    for stage in (alike, own - alike, others - own - alike):
        yield [str(file.relative_to(tree)) for file in sorted(stage)]


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[int | None, str]:
    """Run the tests until one fails; return pytest's status, None at the limit, and its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120"]
    command += ["-m", "not slow and not repository and not docs", *tests]
    with tempfile.TemporaryFile("w+") as output:
        files = {"stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **files)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
            process.wait()
        output.seek(0)
        return status, output.read()


def outcome(tree: Path, mutant: Mutant, limit_s: float) -> str:
    """Put the mutant into the tree, run tests, and take it out."""
    path, before, after = put(mutant, tree)
    deadline = time.monotonic() + limit_s
    path.write_text(after)
    try:
        for tests in filter(None, stages(tree, path)):
            status, output = run_tests(tree, tests, deadline - time.monotonic())
            if status is None:
                return "survived until the limit"
            if status not in (0, 1, 2, 5):
                raise RuntimeError(f"pytest ended with status {status}:\n{output}")
            if status in (1, 2):  # 2: a file could not be imported
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return f"killed by {failed[1] if failed else tests}"
        return "survived"
    finally:
        path.write_text(before)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # Python tells versions of a file apart by size and second


def main() -> None:
    """Draw, run, and print what became of each mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=70, help="of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=20261123)
    parser.add_argument("--lines-also-in", type=Path, metavar="TREE", help="draw from lines that TREE has as well")
    parser.add_argument("--tests-of", type=Path, metavar="TREE", help="put them into TREE, and run its tests")
    parser.add_argument("--only", type=int, nargs="*", metavar="N", help="run these; none: only list all")
    parser.add_argument("--limit", type=float, default=580, help="seconds for a mutant (%(default)s)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; what it has already is not run again")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    found = list(mutants_of(here, (options.lines_also_in or here).resolve()))
    mutants = draw(found, options.number, options.seed)
    print(f"{len(mutants)} of {len(found)} mutants, of {len({mutant.before for mutant in found})} lines", flush=True)
    results = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(options.tests_of or here, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"))
        for number, mutant in enumerate(mutants):
            fault = f"- {mutant.before}\n    + {mutant.after}"
            if fault not in results and (options.only is None or number in options.only):
                results[fault] = outcome(tree, mutant, options.limit)
                if options.results:
                    options.results.write_text(json.dumps(results, indent=1))
            found_by = results.get(fault, "not run")
            print(f"{number} {mutant.file}:{mutant.line} {mutant.kind}: {found_by}\n    {fault}", flush=True)


if __name__ == "__main__":
    main()
