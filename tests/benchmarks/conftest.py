from __future__ import annotations

import pytest

# Arguments of every benchmark, and one short measurement.
QUICK = ("test_command_lines.py", "test_training_is_measured_on_the_cpu[DDP-1]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other tests of this folder to `make test-ci`."""
    for item in items:
        if "tests/benchmarks/" in item.nodeid and not any(name in item.nodeid for name in QUICK):
            item.add_marker(pytest.mark.ci)
