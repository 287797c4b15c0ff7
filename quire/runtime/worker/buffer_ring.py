"""Buffers in pinned host memory, which kernels read and write in place, and the ring in which steps use them.

Knows nothing about what the buffers hold.
"""

from __future__ import annotations

import torch

from quire.runtime.worker.host_memory import unowned_view
from quire.runtime.worker.steps_in_flight import MAX_STEPS_IN_FLIGHT

_COPY_PROGRAMS = 8
"""Programs of the kernel `copy_inputs_from_host`."""


class BufferRing:
    """Which buffer a step uses: one that is used by no step that may still run, or whose outputs nobody has read yet.

    The host counts the steps that it stages, the device those that it runs. Both agree because each `StagedColumns` is
    copied exactly once, before the next step begins.

    Args:
        device: Where steps run.
        in_flight: See MAX_STEPS_IN_FLIGHT. There is a buffer for each of these steps, and one more.

    Attributes:
        has_device_memory: Whether the device has memory of its own. Where it has none, there is one buffer for both.
        size: Number of buffers.
        device_steps: [programs] int64, how many steps the device has begun; see the kernel `copy_inputs_from_host`.
    """

    def __init__(self, device: torch.device, in_flight: int = MAX_STEPS_IN_FLIGHT) -> None:
        self.device = device
        self.has_device_memory = _has_memory(device)
        self.size = in_flight + 1 if self.has_device_memory else 1
        self.device_steps = torch.zeros(_COPY_PROGRAMS, dtype=torch.int64, device=device)
        self._host_steps = 0

    def await_device(self) -> None:
        """Wait until the device has run all that was launched, where nobody waits for results of the steps that were
        staged: then every buffer may be written again."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def advance(self) -> int:
        """Begin a step; the index of its buffer."""
        self._host_steps += 1
        return self.current

    @property
    def current(self) -> int:
        """The buffer of the step that was begun last."""
        return (self._host_steps - 1) % self.size


class PinnedBuffers:
    """The buffers of a ring.

    Args:
        ring: Which of them a step uses.
        entries: int64 of each buffer.

    Attributes:
        host: [buffers, entries] int64, on the host.
        device_view: The same memory as a tensor of the device.
    """

    def __init__(self, ring: BufferRing, entries: int) -> None:
        on_gpu = ring.device.type != "cpu"
        self.host = torch.zeros((ring.size, entries), dtype=torch.int64, pin_memory=on_gpu)
        self.device_view = unowned_view(self.host, ring.device) if on_gpu else self.host


def _has_memory(device: torch.device) -> bool:
    """Whether a step's inputs must be copied to the device. Tests say so of a CPU."""
    return device.type != "cpu"
