"""A Hydra plugin: every Hydra project finds the options of this package, such as ``callbacks=agbn``.

The project's own files come first: the groups and options of this package are added to them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningDpSearchPath(SearchPathPlugin):
    """Appends the folder ``conf`` of the installed package, or of the clone, to the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder. Called by Hydra."""
        # The package is not imported: that would make every Hydra program import PyTorch.
        spec = importlib.util.find_spec("lightning_dp")
        if spec is None or spec.origin is None:
            return
        package = Path(spec.origin).parent
        folder = package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
        search_path.append("lightning-dp", f"file://{folder}")
