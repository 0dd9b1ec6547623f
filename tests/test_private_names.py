"""Each private name of torch and Lightning that `lightning_dp._private` uses still does what it is used for.

A contract checks one name by its effect. Where it fails, upstream has changed: the message names the name and the
installed version. `test_a_contract_sees_that_its_name_is_gone` removes each name in turn and expects that message.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from lightning_dp._lightning import FRAMEWORK
from tests.private_names import (  # noqa: F401  they fill CONTRACTS
    dispatch_contracts,
    hook_contracts,
    lightning_contracts,
    torch_contracts,
)
from tests.private_names.contract import CONTRACTS
from tests.private_names.uses import PACKAGE, is_private, private_names

EACH = pytest.mark.parametrize(
    "contract", [each for each in CONTRACTS if each.is_needed], ids=lambda c: f"{c.library} {c.name}"
)


@EACH
def test_a_private_name_does_what_it_is_used_for(contract):
    contract.hold()


class Gone:
    """A descriptor in place of an attribute: it cannot be read, and what is written goes elsewhere."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("renamed upstream")

    def __set__(self, instance: object, value: object) -> None:
        pass


def remove(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    if isinstance(owner, str):
        patch.setitem(sys.modules, owner, None)
    elif isinstance(owner, ModuleType):
        patch.delattr(owner, name, raising=False)  # a successor need not exist yet
    else:
        patch.setattr(owner, name, Gone(), raising=False)


@EACH
def test_a_contract_sees_that_its_name_is_gone(contract):
    version = importlib.import_module(contract.library).__version__
    with pytest.MonkeyPatch.context() as patch:
        if contract.remove is not None:
            contract.remove(patch)
        else:
            remove(patch, contract.owner, contract.name)
        if contract.successor is not None:
            remove(patch, *contract.successor)
        with pytest.raises(AssertionError) as caught:
            contract.hold()
    assert f"{contract.name} of {contract.library} {version} does not do what" in str(caught.value)


def test_each_private_name_has_a_contract_and_no_contract_is_left_over():
    """``_configure_launcher`` is overridden, not called; see `lightning_names`."""
    lightning = FRAMEWORK.partition(".")[0]
    used = {("torch", name) for _, name in private_names(PACKAGE / "_private" / "torch_names.py")}
    used |= {(lightning, name) for _, name in private_names(PACKAGE / "_private" / "lightning_names.py")}
    used |= {(lightning, "_configure_launcher")}
    held = {(contract.library, contract.name) for contract in CONTRACTS if is_private(contract.name)}
    assert used - held == set(), "write a contract for each of these in tests/private_names/"
    assert held - used == set(), "remove these contracts: lightning_dp/_private no longer uses the names"
