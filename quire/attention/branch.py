"""A branch of a recorded step: kernels on it run beside those that follow, as far as the card has room for both.

A step that is launched kernel by kernel has none: events and a second stream cost the host more than a device gains.
Kernels that start while the one before ends (dependent launch) do so on a branch too; where it ends, the next kernel
waits for both. What is written on a branch must be read or written by nobody else until it is joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """Made where steps of one device are launched.

    Args:
        device: On a processor it is never left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside may run at the same time as what is launched until `join`."""
        if self._stream is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on comes after both."""
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
