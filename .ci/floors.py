"""Print the lower bound of each requirement in pyproject.toml as an exact version: what `make test-oldest` installs."""

import re
import tomllib
from pathlib import Path


def floors(pyproject: Path) -> list[str]:
    """Return ``name==version`` for what the package, the recipes and the tests require.

    Raises:
        ValueError: a requirement has no lower bound.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    found = []
    for requirement in [*project["dependencies"], *extras["recipes"], *extras["imagenet"], *extras["test"]]:
        if requirement.startswith(f"{project['name']}["):  # another of our extras
            continue
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9][0-9.]*)(,!=[0-9.]+)*", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in {pyproject} has no lower bound; write it as name>=version")
        found.append(f"{match[1]}=={match[2]}")
    return found


if __name__ == "__main__":
    print("\n".join(floors(Path(__file__).parents[1] / "pyproject.toml")))
