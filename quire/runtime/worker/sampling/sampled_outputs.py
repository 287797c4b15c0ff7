"""Where sampling leaves tokens and faults, and their way to the host.

Knows nothing about plans or how tokens are sampled.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.kernels.dispatch import kernel
from quire.runtime.worker.buffer_ring import BufferRing, PinnedBuffers

_ALIGNED = 16
"""Bytes to a multiple of which columns are aligned, as tensors of torch are at least."""


class SampledOutputs:
    """A column of tokens and one of faults, side by side, so that one copy takes both to the host. They keep their
    addresses, so that captured graphs can write them.

    Args:
        most: Sampled positions of a step, at most.
        ring: Of the host's buffers; on a CPU there is one, into which tokens are sampled.

    Attributes:
        tokens: [most] int64.
        faults: [most] int8; see the op `sample`.
    """

    def __init__(self, most: int, ring: BufferRing) -> None:
        self._ring = ring
        faults_at = -(-8 * most // _ALIGNED) * _ALIGNED  # bytes
        self._buffers = PinnedBuffers(ring, -(-(faults_at + most) // 8))
        self._words = self._buffers.host[0]
        if ring.has_device_memory:
            self._words = torch.zeros(self._words.shape, dtype=torch.int64, device=ring.device)
            self._copy = kernel("copy_outputs_to_host", ring.device.type)
        whole = self._words.view(torch.uint8)
        self.tokens: Tensor = whole[: 8 * most].view(torch.int64)
        self.faults: Tensor = whole[faults_at : faults_at + most].view(torch.int8)
        arrays = [host.view(torch.uint8).numpy() for host in self._buffers.host]
        self._on_host = [(a[: 8 * most].view(np.int64), a[faults_at : faults_at + most].view(np.int8)) for a in arrays]

    def send(self) -> None:
        """Launch the copy to the host; a later one in the same step replaces it."""
        if self._ring.has_device_memory:
            self._copy(self._words, self._buffers.device_view, self._ring.device_steps)

    def on_host(self) -> tuple[IntArray, npt.NDArray[np.int8]]:
        """Tokens and faults of the step that was staged last. Their values are there once the stream has come so far,
        and until the ring comes back to the step's buffer.
        """
        return self._on_host[self._ring.current]
