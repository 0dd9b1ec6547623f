"""Sums on a device that is as late as it may be, within whole fits on the CPU.

A sum is computed when it is issued, and hidden: the buffer holds other numbers until somebody waits for it. So code
that reads a gradient without waiting gets these numbers, and code that changes one without waiting is found out.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_dp.strategies.layered_sgd import device_communicator
from lightning_dp.strategies.layered_sgd.device_communicator import DeviceCommunicator, DeviceSum
from lightning_dp.strategies.layered_sgd.options import CommunicatorOptions

NOT_YET = 12345.0


class LateSum(DeviceSum):
    hidden: torch.Tensor | None = None

    def issue(self, *args: Any) -> None:
        super().issue(*args)
        with torch.inference_mode(False), torch.no_grad():
            self.hidden = self.buffer.clone()
            self.buffer.fill_(NOT_YET)

    @property
    def has_arrived(self) -> bool:
        return self.hidden is None and self._is_issued

    def wait(self) -> None:
        super().wait()
        if self.hidden is not None:
            with torch.inference_mode(False), torch.no_grad():
                if not bool((self.buffer == NOT_YET).all()):
                    raise AssertionError(f"gradient bucket {self.index} was changed while it was summed")
                self.buffer.copy_(self.hidden)
            self.hidden = None


def sum_late() -> list[DeviceCommunicator]:
    """Let the strategy choose late sums on the CPU; return the communicators that it then makes."""
    device_communicator.DeviceSum = LateSum
    CommunicatorOptions.sums_on_device = lambda self, backend: True
    made: list[DeviceCommunicator] = []
    make = CommunicatorOptions.make_communicator
    CommunicatorOptions.make_communicator = lambda *args: made.append(make(*args)) or made[-1]
    return made
