"""`CopyStream` of `quire.models.weights.gpu_loader`, on a CUDA stream of its own."""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class CudaCopyStream:
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
            self._clear_cuda_error()

    def _clear_cuda_error(self) -> None:
        """CUDA reports the failed call at the next kernel launch: launch one here and drop the error."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def unpin(self, buffer: Tensor) -> None:
        """Give the pages back."""
        if buffer.data_ptr() in self._pinned:
            self._pinned.remove(buffer.data_ptr())
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]

    def scratch(self, size: int) -> Tensor:
        """uint8 [size], allocated on the stream that uses it."""
        with torch.cuda.stream(self._stream):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def wait_for_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def make_caller_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def copy(self, out: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            out.copy_(source, non_blocking=True)

    def record_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event
