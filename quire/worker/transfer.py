"""Moving whole KV blocks: copies on the device, and swaps with the host pool. All within the step's own stream.

Knows nothing about whose blocks they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.messages import Plan


class BlockTransfer:
    """Over the tensors that hold the blocks.

    Args:
        device_blocks: Each [blocks, …], the blocks along the first dimension.
        host_blocks: Their counterparts in host memory, in the same order.
    """

    def __init__(self, device_blocks: Sequence[Tensor], host_blocks: Sequence[Tensor]) -> None:
        self._device = device_blocks
        self._host = host_blocks

    def apply(self, plan: Plan) -> None:
        """Swap out, copy, swap in."""
        if plan.swap_out:
            _move(self._device, self._host, plan.swap_out)
        if plan.copies:
            _move(self._device, self._device, plan.copies)
        if plan.swap_in:
            _move(self._host, self._device, plan.swap_in)


def _move(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, (from, to); a target is never also a source."""
    origin, goal = torch.tensor(pairs).unbind(1)
    for source, target in zip(sources, targets, strict=True):
        moved = source.index_select(0, origin.to(source.device))
        target.index_copy_(0, goal.to(target.device), moved.to(target.device))
