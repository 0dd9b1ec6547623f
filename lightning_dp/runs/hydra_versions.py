"""What Hydra 1.3 and 1.4 ask for differently. Under 1.4, nothing here makes Hydra warn."""

from __future__ import annotations

from typing import Any

import hydra
import hydra.utils

# Hydra 1.4 always does what 1.3 does with this option, and deprecates the option.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}

# Hydra 1.4 wants a list of the classes and functions that a configuration may name. Recipes let users name their own
# anywhere: a configuration is as trusted as the Python code beside it. This value says so.
_ANY_TARGET: Any = getattr(hydra.utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
MAIN_OPTIONS = VERSION_BASE if _ANY_TARGET is None else {**VERSION_BASE, "execution_whitelist": _ANY_TARGET}


def instantiate(config: Any, *positional: Any, **arguments: Any) -> Any:
    """Build the object that ``config`` describes, as `hydra.utils.instantiate` does.

    A ``_partial_``, such as a schedule, gets lists and dicts of Python: torch takes no others for a list of rates.
    """
    if _ANY_TARGET is not None:
        arguments["_execution_whitelist_"] = _ANY_TARGET
    return hydra.utils.instantiate(_with_plain_partials(config), *positional, **arguments)


def _with_plain_partials(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_plain_partials(value) for value in node]
    if not isinstance(node, dict):
        return node
    inner = {key: _with_plain_partials(value) for key, value in node.items()}
    return {"_convert_": "all", **inner} if inner.get("_partial_") else inner
