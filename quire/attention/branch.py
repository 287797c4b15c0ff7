"""A branch of a recorded step: kernels on it run beside those that follow, as far as the card has room for both.

A step that is launched kernel by kernel has none: events and a second stream cost the host more than a device gains.
Kernels that start while the one before ends (dependent launch) do so on a branch too; where it ends, the next kernel
waits for both. What is written on a branch must be read or written by nobody else until it is joined.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

IN_USE = False
"""Whether there are any."""


class Branch:
    """Made where steps of one device are launched.

    Args:
        device: On a processor it is never left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside may run at the same time as what is launched until `join`."""
        if not self._is_open:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on comes after both."""
        if self._is_open:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @property
    def _is_open(self) -> bool:
        return IN_USE and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
