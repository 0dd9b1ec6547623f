from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of this folder to `make docs`."""
    for item in items:
        if "tests/docs/" in item.nodeid:
            item.add_marker(pytest.mark.docs)
