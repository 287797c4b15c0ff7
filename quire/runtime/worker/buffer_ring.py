"""Pinned host buffers, which kernels read and write in place, and the ring in which steps use them."""

from __future__ import annotations

import torch

from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.host_memory import unowned_view

_COPY_PROGRAMS = 8
"""Number of programs of the kernel `copy_inputs_from_host`."""


class BufferRing:
    """Chooses each step's buffer. A buffer is reused only after its step has run and the host has read its outputs.

    The host counts the steps that it stages, and the device counts the steps that it runs. Both agree, because each
    `StagedColumns` is copied exactly once before the next step begins.

    Attributes:
        has_device_memory: Whether the device has its own memory. If not, host and device share a single buffer.
        size: Number of buffers: one more than steps may be in flight.
        device_steps: [programs] int64, the steps that the device has begun, as each program of `copy_inputs_from_host`
            counts them.
    """

    def __init__(self, device: torch.device, in_flight: int = MAX_STEPS_IN_FLIGHT) -> None:
        self.device = device
        self.has_device_memory = _has_memory(device)
        self.size = in_flight + 1 if self.has_device_memory else 1
        self.device_steps = torch.zeros(_COPY_PROGRAMS, dtype=torch.int64, device=device)
        self._host_steps = 0

    def await_device(self) -> None:
        """Wait until the device has run everything launched, so that every buffer may be overwritten. This is for steps
        whose results nobody takes."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def advance(self) -> int:
        """Begin a step, and return the index of its buffer."""
        self._host_steps += 1
        return self.current

    @property
    def current(self) -> int:
        """The index of the buffer of the step that began last."""
        return (self._host_steps - 1) % self.size


class PinnedBuffers:
    """The buffers of a ring: `host` [buffers, entries] int64 on the host, and `device_view`, the same memory for the
    device."""

    def __init__(self, ring: BufferRing, entries: int) -> None:
        on_gpu = ring.device.type != "cpu"
        self.host = torch.zeros((ring.size, entries), dtype=torch.int64, pin_memory=on_gpu)
        self.device_view = unowned_view(self.host, ring.device) if on_gpu else self.host


def _has_memory(device: torch.device) -> bool:
    """Whether a step's inputs must be copied to the device. Tests replace this to pretend that a CPU needs copies."""
    return device.type != "cpu"
