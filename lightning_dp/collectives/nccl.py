"""Settings of NCCL for several communicators that are in flight on one device at a time.

NCCL's kernels wait for their peers while they occupy the device. If two ranks run the kernels of two communicators in
different orders, each can wait for the other. From version 2.26 on NCCL keeps the order in which the host has issued
them, if ``NCCL_LAUNCH_ORDER_IMPLICIT`` is set.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
FIRST_VERSION_WITH_ORDER = (2, 26)


def request_launch_order() -> bool:
    """Set ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` for this process and those that it starts, unless the user has set it.

    Return whether NCCL will see the variable. It reads it when the process creates its first communicator.
    """
    is_early = LAUNCH_ORDER in os.environ or not (dist.is_available() and dist.is_initialized())
    os.environ.setdefault(LAUNCH_ORDER, "1")
    return is_early


def why_order_may_differ() -> str | None:
    """Say why NCCL need not run kernels in the order in which the host issues them, with the remedy; None if it does.

    Call it on ranks that use NCCL.
    """
    version = torch.cuda.nccl.version()
    if version[:2] < FIRST_VERSION_WITH_ORDER:
        wanted = ".".join(map(str, FIRST_VERSION_WITH_ORDER))
        return (
            f"NCCL {'.'.join(map(str, version))} does not order the kernels of several communicators; install a "
            f"PyTorch with NCCL {wanted} or newer"
        )
    if os.environ.get(LAUNCH_ORDER, "0") == "0":
        return f"{LAUNCH_ORDER} is 0; set it to 1"
    return None


def limited_options(max_ctas: int) -> Any:
    """Return options of an NCCL group whose kernels occupy at most ``max_ctas`` blocks of the device."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    return options
