from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a case a folder whose path is short enough for global batch norm's sockets. It does not exist yet."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary, "case")
