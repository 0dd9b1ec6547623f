"""Links, anchors and paths: what a page points to exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS, PAGES, ROOT, anchors, found_on_pages, links, prose, spans

FOLDERS = {"lightning_dp", "conf", "recipes", "tests", "benchmarks", "docs"}
MACHINE = re.compile(r"(?<![\w./-])/(?:home|root|work|tmp|Users|mnt|opt|var|usr)/|[A-Z]:\\")


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of ``text`` whose file or anchor does not exist."""
    broken = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        outside_the_site = DOCS in page.parents and DOCS not in target.resolve().parents
        if not target.exists() or outside_the_site:
            broken.append(link)
            continue
        if anchor and anchor not in anchors(target.read_text() if name else text):
            broken.append(link)
    return broken


def missing_paths(text: str) -> list[str]:
    """The paths of the repository in inline code that do not exist. What comes after a NAME is the reader's own."""
    named = [span.partition("NAME")[0] for span in spans(text) if re.fullmatch(r"[\w.-]+(?:/[\w.-]*)+", span)]
    return [path for path in named if path.split("/")[0] in FOLDERS and not (ROOT / path).exists()]


def test_every_relative_link_and_anchor_exists():
    assert found_on_pages(broken_links) == {}


def test_every_path_in_inline_code_exists():
    assert found_on_pages(lambda page, text: missing_paths(text)) == {}


def test_no_page_names_a_path_of_somebodys_machine():
    assert found_on_pages(lambda page, text: MACHINE.findall(text)) == {}


def test_broken_links_and_paths_are_seen():
    page = DOCS / "index.md"
    text = "# A b\n[x](nowhere.md) [y](#a-b) [z](#a-c) ![i](images/no.png) [g](architecture.md#map) [r](../README.md)\n"
    assert broken_links(page, text) == ["nowhere.md", "#a-c", "images/no.png", "../README.md"]
    text = "`lightning_dp/nothing.py` `lightning_dp/launch.py` `a/b` `conf/strategy/NAME.yaml` `conf/nothing/NAME.yaml`"
    assert missing_paths(text) == ["lightning_dp/nothing.py", "conf/nothing/"]
    assert MACHINE.search("see /home/someone/x")
    assert not MACHINE.search("in build/home/x or lightning_dp/tmp/")


def test_every_page_can_be_reached_from_the_readme():
    """By links alone, in any number of steps."""
    reached = {ROOT / "README.md"}
    waiting = list(reached)
    while waiting:
        page = waiting.pop()
        for link in links(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                reached.add(target)
                waiting.append(target)
    assert set(PAGES) - reached == set()


def test_the_prose_is_what_is_checked():
    assert "hidden" not in prose("a <!-- hidden --> b\n```text\nhidden\n```\n")
