"""A second stream within a recorded step: kernels on it run beside those that follow, as far as the device has room.

A step that is launched kernel by kernel does not use it: events and a second stream cost the host more than the device
gains. Kernels on it may start while the one before ends (dependent launch); where the streams join, the next kernel
waits for both. Nobody else may read or write what is written on it until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class AuxStream:
    """Made where steps of one device are launched.

    Args:
        device: On a CPU there is no second stream, and everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[None]:
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
