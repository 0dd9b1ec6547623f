"""What pages promise about themselves: lines to review, one word for one thing, and true to the files."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.docs.pages import DOCS, ROOT, found_on_pages, name_of, prose, spans, tables

PACKAGE = ROOT / "lightning_dp"
MAX_LINE = 130

# What not to write -> what to write. Spelling is codespell's, in `make lint`.
WORDING = {
    r"\bcards?\b": "NIC, or page",
    r"\bpictures?\b": "plot",
    r"\bto the bit\b|\bbit for bit\b": "bitwise identical",
    r"\bdivided head\b": "sharded head",
    r"\bcross(?:es)? groups\b": "inter-group all-reduce",
    r"\bleast and most\b": "minimum-maximum",
    r"\brefuse[sd] by name\b": "raises ValueError",
    r"\banew\b": "again",
    r"\bwhoever\b": "say who",
    r"\bnot (?:been )?(?:run|tested|measured) on (?:a )?GPUs?\b|\bon a GPU yet\b": "docs/measurements/gpu.md",
}


def wording(name: str, text: str) -> list[tuple[str, str]]:
    """What ``text`` says that the field would say in other words, with these."""
    found = []
    for pattern, better in WORDING.items():
        if name != better:
            found += [(match[0], better) for match in re.finditer(pattern, prose(text), re.IGNORECASE)]
    return found


def test_one_word_for_one_thing():
    assert found_on_pages(lambda page, text: wording(name_of(page), text)) == {}


def test_wording_is_seen():
    text = "Its network card shows a picture of what has not been run on a GPU."
    assert [bad for bad, _ in wording("README.md", text)] == ["card", "picture", "not been run on a GPU"]
    assert wording("docs/measurements/gpu.md", "Nothing has been run on a GPU yet.") == []


def long_lines(text: str) -> list[str]:
    return [line for line in prose(text).splitlines() if len(line) > MAX_LINE and not line.startswith(("|", "!["))]


def test_lines_are_short_enough_to_review():
    assert found_on_pages(lambda page, text: long_lines(text)) == {}


def test_the_readme_states_the_floors_of_pyproject():
    project, readme = (ROOT / "pyproject.toml").read_text(), (ROOT / "README.md").read_text()
    for package in ("torch", "pytorch-lightning"):
        floor = re.search(rf'"{package}>=([\d.]+)', project)[1]
        assert f"{package} {floor}" in re.sub(r"\s+", " ", readme), f"pyproject.toml says {package}>={floor}"
    assert f"Python {re.search(r'requires-python = .>=([0-9.]+)', project)[1]}" in readme


def test_the_glossary_names_what_is_in_the_code():
    text = (DOCS / "glossary.md").read_text()
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    files = {path.name for path in PACKAGE.rglob("*.py")}
    named = {span.strip('"') for table in tables(text) for row in table[1:] for span in spans(row[2])}
    # torchrun sets the local rank; the package reads it from torch.
    missing = {name for name in named if not re.search(rf"\b{name}\b", code) and name not in files}
    assert missing <= {"LOCAL_RANK"}


def test_the_plot_of_ranks_and_groups_is_drawn_by_its_script(tmp_path):
    path = tmp_path / "plot.svg"
    subprocess.run([sys.executable, str(DOCS / "draw_ranks.py"), str(path)], check=True, timeout=120)
    drawn, kept = (
        re.findall(r">([^<>]*\w[^<>]*)<", file.read_text()) for file in (path, DOCS / "images" / "ranks_and_groups.svg")
    )
    assert drawn == kept
