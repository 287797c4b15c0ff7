"""Where draws leave their tokens and faults, and their way back to the host.

Knows nothing about plans or how tokens are drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes that tensors begin at multiples of, as those of torch do at least."""


class DrawOutputs:
    """One column of tokens and one of faults, side by side: both come back in one copy. They stay where they are, so
    that recorded steps leave them at the same addresses each time.

    Args:
        reads: Most reads of a step.
        device: Where tokens are drawn; on a CPU nothing is copied.
        turns: Steps whose copies on the host may be under way or not looked at yet, and one more.

    Attributes:
        tokens: [reads] int64.
        faults: [reads] int8; see the op `draw`.
    """

    def __init__(self, reads: int, device: torch.device, turns: int = 3) -> None:
        on_gpu = device.type != "cpu"
        first = -(-8 * reads // _ALIGNED) * _ALIGNED
        self._whole = torch.zeros(first + reads, dtype=torch.uint8, device=device)
        self.tokens: Tensor = self._whole[: 8 * reads].view(torch.int64)
        self.faults: Tensor = self._whole[first:].view(torch.int8)
        self._hosts = [self._whole] if not on_gpu else [_pinned_like(self._whole) for _ in range(turns)]
        arrays = [host.numpy() for host in self._hosts]
        self._views = [(a[: 8 * reads].view(np.int64), a[first:].view(np.int8)) for a in arrays]
        self._turn = 0

    def to_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Both columns on the host; their values are there when the stream has come so far."""
        self._turn = (self._turn + 1) % len(self._hosts)
        host = self._hosts[self._turn]
        if host is not self._whole:
            host.copy_(self._whole, non_blocking=True)
        return self._views[self._turn]


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
