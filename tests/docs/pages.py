"""The Markdown pages of the repository, taken apart for the tests of this folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Pages that people read on their own; the rest of docs/ hangs below index.md.
TOP = [path for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md") if path.exists()]
PAGES = [*TOP, *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")


def name_of(path: Path) -> str:
    """The path of a page in the repository, for the names of tests."""
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line where its text begins."""

    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in _FENCE.finditer(text)]


def prose(text: str) -> str:
    """The page without fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", text))


def spans(text: str) -> list[str]:
    """The inline code of a page; a line may end within it."""
    return [re.sub(r"\s+", " ", span) for span in _SPAN.findall(prose(text))]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, without the line under the head."""
    found: list[list[list[str]]] = [[]]
    for line in prose(text).splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def found_on_pages(rule: Callable[[Path, str], Sequence[object]]) -> dict[str, Sequence[object]]:
    """What ``rule(page, text)`` finds on each page. Pages on which it finds nothing are left out."""
    return {name_of(page): found for page in PAGES if (found := rule(page, page.read_text()))}


def links(text: str) -> list[str]:
    """The targets of the links and images of a page."""
    return re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", _SPAN.sub("", prose(text))) + re.findall(
        r"^\[[^\]]+\]:\s*(\S+)", prose(text), re.MULTILINE
    )


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, where the two programs that render it agree on them.

    GitHub turns each space into a hyphen, Python-Markdown a run of spaces and hyphens into one.
    """
    found = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        kept = re.sub(r"[^\w\s-]", "", heading.strip().lower())
        if kept.replace(" ", "-") == (slug := re.sub(r"[-\s]+", "-", kept)):
            found.add(slug)
    return found
