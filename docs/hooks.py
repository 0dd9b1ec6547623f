"""A hook of mkdocs: lists the files of the package on the architecture page, each with its docstring's first line."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the list in the place of ``<!-- files -->``. Called by mkdocs for each page."""
    return markdown.replace("<!-- files -->", list_of_files()) if "<!-- files -->" in markdown else markdown


def list_of_files() -> str:
    """Return a table for each folder of the package, in Markdown."""
    parts = []
    for folder in sorted({path.parent for path in (ROOT / "lightning_dp").rglob("*.py")}):
        parts.append(f"### {folder.relative_to(ROOT)}/\n\n| file | what it is about |\n|---|---|")
        for path in sorted(folder.glob("*.py")):
            line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("|", "\\|")
            if path.name != "__init__.py":
                parts.append(f"| `{path.name}` | {line} |")
        parts.append("")
    return "\n".join(parts)
