"""Setuptools as the build backend, with a README whose links are absolute, because a package page has no files.

pyproject.toml names this module. It writes the README of the package before setuptools reads it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import build_meta

PACKAGE_README = Path("build", "README.md")


def absolute_links(text: str, source: str) -> str:
    """Replace the relative links and images of a Markdown page by those of the repository at ``source``."""

    def absolute(match: re.Match[str]) -> str:
        before, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        folder = "raw" if before.startswith("!") else "blob"
        return f"{before}({source}/{folder}/main/{target})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", absolute, text)


def with_package_readme(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Write the README of the package, and then call a hook of setuptools."""

    def call(*args: Any, **kwargs: Any) -> Any:
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        PACKAGE_README.parent.mkdir(exist_ok=True)
        PACKAGE_README.write_text(absolute_links(Path("README.md").read_text(), project["urls"]["Source"]))
        return hook(*args, **kwargs)

    return call


get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_wheel = with_package_readme(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = with_package_readme(build_meta.prepare_metadata_for_build_editable)
build_wheel = with_package_readme(build_meta.build_wheel)
build_sdist = with_package_readme(build_meta.build_sdist)
build_editable = with_package_readme(build_meta.build_editable)
