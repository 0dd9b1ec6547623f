"""Futures of tensors on emulated devices: set while the work is queued. Waiting makes the current stream wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class LazyFuture:
    """In place of ``torch.futures.Future(devices=[device])``."""

    def __init__(self, machine: Any, device: torch.device) -> None:
        self._machine = machine
        self._device = device
        self._is_set = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None
        self._computed: Any = None
        self._callbacks: list[Callable[[], None]] = []

    def set_result(self, value: Any) -> None:
        self._value = value
        self._complete()

    def set_exception(self, error: Exception) -> None:
        self._error = error
        self._complete()

    def _complete(self) -> None:
        self._computed = self._machine.record_event(self._machine.current_stream(self._device))
        self._is_set.set()
        callbacks, self._callbacks = self._callbacks, []  # which keep the value alive
        for callback in callbacks:
            callback()

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[LazyFuture], Any]) -> LazyFuture:
        """Call ``callback`` when this future is set, on a stream of its own that waits for the result."""
        following = LazyFuture(self._machine, self._device)

        def call() -> None:
            stream = self._machine.new_stream(self._device)
            stream.wait_event(self._computed)
            with self._machine.on_stream(stream):
                try:
                    following.set_result(callback(self))
                except Exception as error:
                    following.set_exception(error)

        self._callbacks.append(call)
        return following

    def wait(self) -> Any:
        assert self._is_set.wait(10), "the future is never set"
        self._machine.current_stream(self._device).wait_event(self._computed)
        return self.value()
