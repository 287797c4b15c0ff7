"""Memory of the host that kernels read and write where it is, and whose turn it is to use it.

Knows nothing about what stands there.
"""

from __future__ import annotations

import torch

from quire.worker.pinned_memory import unowned_view
from quire.worker.pipeline_depth import MAX_STEPS_IN_FLIGHT

_FETCHERS = 8
"""Programs that fetch a step's columns."""


class BufferRing:
    """Which of several buffers a step uses: one that no step uses which may still be under way, or not looked at.

    The host counts the steps that it lays, the device those that it runs: every step that is laid must fetch, once, in
    the same order.

    Args:
        device: Where steps run.
        in_flight: See MAX_STEPS_IN_FLIGHT. There is a buffer for each of these steps, and one more.

    Attributes:
        apart: Whether the device has memory of its own. Where it has none, there is one buffer, which is the device's.
        number: Of buffers.
        on_device: How many steps the device has begun; see the kernel `copy_inputs_from_host`.
    """

    def __init__(self, device: torch.device, in_flight: int = MAX_STEPS_IN_FLIGHT) -> None:
        self.device = device
        self.apart = _is_apart(device)
        self.number = in_flight + 1 if self.apart else 1
        self.on_device = torch.zeros(_FETCHERS, dtype=torch.int64, device=device)
        self._laid = 0

    def lay(self) -> int:
        """The buffer of a step that begins."""
        self._laid += 1
        return self.current

    @property
    def current(self) -> int:
        """The buffer of the step that was laid last."""
        return (self._laid - 1) % self.number


class PinnedBufferRing:
    """A buffer for each turn.

    Args:
        turns: Whose.
        entries: int64 of each.

    Attributes:
        host: [turns, entries] int64, on the host.
        seen: The same memory, as the device sees it.
    """

    def __init__(self, turns: BufferRing, entries: int) -> None:
        on_gpu = turns.device.type != "cpu"
        self.host = torch.zeros((turns.number, entries), dtype=torch.int64, pin_memory=on_gpu)
        self.seen = unowned_view(self.host, turns.device) if on_gpu else self.host


def _is_apart(device: torch.device) -> bool:
    """Whether a step's columns must come to it. Tests say so of a CPU."""
    return device.type != "cpu"
