"""What pages promise about themselves: short, one word for one thing, and true to the files."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, name_of, prose, spans, tables, words

PACKAGE = ROOT / "lightning_dp"
MAX_METHOD_LINES, MAX_README_LINES, MAX_CELL_WORDS, MAX_LINE = 90, 120, 15, 130

# What not to write -> what to write. Spelling is codespell's, in `make lint`.
WORDING = {
    r"\bcards?\b": "NIC, or page",
    r"\bpictures?\b": "plot",
    r"\bto the bit\b|\bbit for bit\b": "bitwise identical",
    r"\bdivided head\b": "sharded head",
    r"\bcross(?:es)? groups\b": "inter-group all-reduce",
    r"\bleast and most\b": "minimum-maximum",
    r"\bnot (?:been )?(?:run|tested|measured) on (?:a )?GPUs?\b|\bon a GPU yet\b": "docs/measurements/gpu.md",
}


def wording(name: str, text: str) -> list[tuple[str, str]]:
    """What ``text`` says that the field would say in other words, with these."""
    found = []
    for pattern, better in WORDING.items():
        if name != better:
            found += [(match[0], better) for match in re.finditer(pattern, prose(text), re.IGNORECASE)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_one_word_for_one_thing(page):
    assert wording(name_of(page), page.read_text()) == []


def test_wording_is_seen():
    text = "Its network card shows a picture of what has not been run on a GPU."
    assert [bad for bad, _ in wording("README.md", text)] == ["card", "picture", "not been run on a GPU"]
    assert wording("docs/measurements/gpu.md", "Nothing has been run on a GPU yet.") == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short_enough_to_review(page):
    long = [line for line in prose(page.read_text()).splitlines() if len(line) > MAX_LINE]
    assert [line for line in long if not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=name_of)
def test_a_method_fits_on_90_lines(page):
    assert len(page.read_text().splitlines()) <= MAX_METHOD_LINES


def test_the_readme_is_short_and_so_are_the_cells_of_its_tables():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MAX_README_LINES
    assert [cell for table in tables(text) for row in table for cell in row if words(cell) > MAX_CELL_WORDS] == []


def test_words_are_counted_as_a_reader_does():
    assert words("[two words](a/b.md) and `three`") == 4
    assert tables("| a | b |\n|---|---|\n| c <!-- d e --> | [f](g) |\n")[0][1] == ["c", "[f](g)"]


def test_the_readme_states_the_floors_of_pyproject():
    project, readme = (ROOT / "pyproject.toml").read_text(), (ROOT / "README.md").read_text()
    for package in ("torch", "pytorch-lightning"):
        floor = re.search(rf'"{package}>=([\d.]+)', project)[1]
        assert f"{package} {floor}" in re.sub(r"\s+", " ", readme), f"pyproject.toml says {package}>={floor}"
    assert f"Python {re.search(r'requires-python = .>=([0-9.]+)', project)[1]}" in readme


def mapped_files(text: str) -> list[str]:
    """The files that the map of architecture.md lists, as paths in the package."""
    found, folder, inner = [], "", ""
    for line in text.splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
            folder, inner = (heading.removeprefix("lightning_dp/") if heading.startswith("lightning_dp/") else "", "")
        elif match := re.match(r"\| \*\*(\w+/)\*\* \|", line):
            inner = match[1]
        elif match := re.match(r"\| `(?:lightning_dp/)?([\w/]+\.py)` \|", line):
            found.append(folder + inner + match[1])
    return found


def test_the_map_lists_every_file_of_the_package_and_no_other():
    text = (DOCS / "architecture.md").read_text()
    listed = mapped_files(text[text.index("## Map") : text.index("## Ranks and groups")])
    present = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(present)


def test_the_map_is_read_as_it_is_written():
    text = "### lightning_dp/a/\n| `x.py` | |\n| **b/** | |\n| `y.py` | |\n### Rest\n| `lightning_dp/z.py` | |\n"
    assert mapped_files(text) == ["a/x.py", "a/b/y.py", "z.py"]


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
