"""Fetches by a CUDA device, on a stream of their own; see `quire.weights.staging`."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class CudaFetches:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: set[int] = set()

    def pin(self, buffer: Tensor) -> None:
        """Register its pages with the driver, where the system lets us; without, copies are slower but right."""
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            self._pinned.add(buffer.data_ptr())
        else:
            _log.info("weights     a buffer could not be pinned (CUDA error %d): reading is slower", int(code))
            self._hear_of_it()

    def _hear_of_it(self) -> None:
        """A call that failed is told to whoever launches a kernel next, as the error of that kernel."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def unpin(self, buffer: Tensor) -> None:
        """Give the pages back."""
        if buffer.data_ptr() in self._pinned:
            self._pinned.remove(buffer.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]

    def scratch(self, size: int) -> Tensor:
        """See Fetches; allocated on the stream that uses it."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def after_the_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def before_the_caller(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def copy(self, out: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        mark: torch.cuda.Event = self._stream.record_event()
        return mark
