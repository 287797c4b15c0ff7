"""Where draws leave their tokens and faults, and their way back to the host.

Knows nothing about plans or how tokens are drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.dispatch import kernel
from quire.worker.buffer_ring import BufferRing, PinnedBufferRing

_ALIGNED = 16
"""Bytes that tensors begin at multiples of, as those of torch do at least."""


class SampledOutputs:
    """One column of tokens and one of faults, side by side: both come back together. They stay where they are, so that
    recorded steps leave them at the same addresses each time.

    Args:
        reads: Most reads of a step.
        turns: Of the host's buffers; on a CPU there is one, and tokens are drawn into it.

    Attributes:
        tokens: [reads] int64.
        faults: [reads] int8; see the op `sample`.
    """

    def __init__(self, reads: int, turns: BufferRing) -> None:
        self._turns = turns
        first = -(-8 * reads // _ALIGNED) * _ALIGNED
        self._hosts = PinnedBufferRing(turns, -(-(first + reads) // 8))
        self._words = self._hosts.host[0]
        if turns.apart:
            self._words = torch.zeros(self._words.shape, dtype=torch.int64, device=turns.device)
            self._send = kernel("copy_outputs_to_host", turns.device.type)
        whole = self._words.view(torch.uint8)
        self.tokens: Tensor = whole[: 8 * reads].view(torch.int64)
        self.faults: Tensor = whole[first : first + reads].view(torch.int8)
        arrays = [host.view(torch.uint8).numpy() for host in self._hosts.host]
        self._views = [(a[: 8 * reads].view(np.int64), a[first : first + reads].view(np.int8)) for a in arrays]

    def send(self) -> None:
        """Both columns to the host; what is sent later in the same step takes the place of what was sent before."""
        if self._turns.apart:
            self._send(self._words, self._hosts.seen, self._turns.on_device)

    def on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Both columns of the step that was laid last; their values are there when the stream has come so far, and
        until the step's turn comes again.
        """
        return self._views[self._turns.current]
