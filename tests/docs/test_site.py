"""The documentation site: what it lists exists, and it builds without a warning where MkDocs is installed."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

import pytest

import lightning_dp
from lightning_dp import collectives, layers, planner
from tests.docs.pages import DOCS, ROOT, name_of

API = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", API)
def test_what_the_api_page_documents_exists(name):
    assert pkgutil.resolve_name(name).__doc__


def test_the_api_page_lists_every_public_name():
    modules = (lightning_dp, layers, collectives, planner)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert public - set(API) == set()


def test_the_navigation_lists_every_page():
    listed = set(re.findall(r":\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {name_of(page).removeprefix("docs/") for page in DOCS.rglob("*.md")}


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    pages = {name_of(page).removeprefix("docs/").replace(".md", ".html") for page in DOCS.rglob("*.md")}
    assert built == pages | {"404.html"}
    loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', (site / "api.html").read_text())
    assert loaded == [], "a page must not need a server"
