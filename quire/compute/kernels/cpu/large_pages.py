"""Fresh memory for packed weights in pages of 2 MB, which are read faster.

What a process allocates after it has freed other tensors is often memory that it has touched before, which stays in
small pages whatever is asked for.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from quire.compute.kernels.cpu.linear import PackedWeight

_PAGE = 1 << 21
_ALIGNMENT = 64


class LargePages:
    """Memory of its own for weights of at most so many bytes in all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._bytes: Tensor | None = None
        self._next = 0

    def moved(self, packed: Tensor | PackedWeight) -> Tensor | PackedWeight:
        """Return the weight in this memory; a weight in another layout than Quire's stays where it is."""
        if not isinstance(packed, PackedWeight):
            return packed
        data = packed.data
        if self._bytes is None:
            self._bytes = self._mapped(data.nbytes)
        end = self._next + data.nbytes
        if end > len(self._bytes):
            return packed
        place = self._bytes[self._next : end].view(data.dtype).view(data.shape)
        place.copy_(data)
        self._next = -(-end // _ALIGNMENT) * _ALIGNMENT
        return packed._replace(data=place)

    def _mapped(self, first: int) -> Tensor:
        mapping = mmap.mmap(-1, max(self._size, first) + 2 * _PAGE)
        with suppress(AttributeError, OSError):  # of systems without such pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        return whole[-whole.data_ptr() % _PAGE :]
