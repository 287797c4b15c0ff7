"""Applies bitmasks of the tokens that a step's masked rows may sample to their logits.

A step's bitmasks come when the tokens before its rows are there. In a pipeline, a step of other rows may be in flight
and still read its own bitmasks, so each step in flight has a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.foundation.messages.workers import Bits
from quire.runtime.worker.async_scheduling import MAX_STEPS_IN_FLIGHT
from quire.runtime.worker.host_memory import unowned_view


class BitmaskBuffer:
    """Bitmasks in pinned memory, which a GPU's kernel reads in place: 256 masks of 131,072 tokens are 4 MB. There is
    room for `most` bitmasks per step, and for `steps` steps at the same time."""

    def __init__(self, most: int, vocab_size: int, device: torch.device, steps: int = MAX_STEPS_IN_FLIGHT) -> None:
        on_gpu = device.type != "cpu"
        self._host = torch.zeros((steps, most, -(-vocab_size // 32)), dtype=torch.int32, pin_memory=on_gpu)
        self._bytes = self._host.view(torch.uint8).numpy()  # [steps, most, words · 4]
        self._on_device = unowned_view(self._host, device) if on_gpu else self._host
        self._next = 0
        self._apply = kernel("apply_token_bitmask", device.type)

    def apply(self, logits: Tensor, rows: Tensor, bits: Sequence[Bits]) -> None:
        """Set the logits [sampled, vocab] of forbidden tokens to -inf, in place.

        Args:
            rows: [n] int64 on the device, distinct rows of the logits.
            bits: One bitmask per entry of `rows`, in the format of TokenBitmasks.
        """
        for own, mask in zip(self._bytes[self._next], bits, strict=False):
            own[:] = np.frombuffer(mask, dtype=np.uint8)
        self._apply(logits, rows, self._on_device[self._next, : len(bits)])
        self._next = (self._next + 1) % len(self._host)

    def warm_up(self, logits: Tensor) -> None:
        rows = torch.arange(len(logits), device=logits.device)
        self._apply(logits.index_select(0, rows), rows, self._on_device[0, : len(logits)])
