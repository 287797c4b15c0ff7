"""The host pool's memory: blocks of pinned memory, which a background thread prepares.

Pinning takes about 0.6 s per GiB, and launches of all threads wait while the driver registers memory. So the thread
first takes the pages, which blocks no other thread, and then registers them part by part, with pauses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quire.planning.footprint import format_bytes

PART_BYTES = 32 * 2**20
"""Memory that is pinned at a time. On an H100 machine, taking its pages takes 18 ms and registering it 2 ms."""
PAUSE_S = 0.02
"""Pause between two parts, in seconds."""

_log = logging.getLogger(__name__)


class PinnedHostPool:
    """Blocks of host memory by number, each of the same `shape` and `dtype`.

    Callers never wait for a block: they may use only ready blocks. If the system pins no more memory, the remaining
    blocks never become ready.

    Args:
        pin: Makes a pinned tensor of the given number of uint8; raises RuntimeError if no more memory can be pinned.
        unpin: Releases such a tensor.

    Attributes:
        num_ready: Blocks 0 to num_ready - 1 may be used. The number grows while the thread runs.
    """

    def __init__(
        self,
        num_blocks: int,
        shape: torch.Size,
        dtype: torch.dtype,
        pin: Callable[[int], Tensor],
        unpin: Callable[[Tensor], None],
        part_bytes: int = PART_BYTES,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.num_ready = 0
        self._num_blocks = num_blocks
        self._shape = shape
        self._dtype = dtype
        self._block_bytes = shape.numel() * dtype.itemsize
        self._pin = pin
        self._unpin = unpin
        self._pause_s = pause_s
        self._part = max(1, part_bytes // self._block_bytes)  # blocks of a part; the last one may have fewer
        self._parts: list[Tensor] = []  # [blocks of the part, *shape]
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to prepare all blocks, lowest numbers first."""
        if self._thread is None and self._num_blocks:
            self._thread = threading.Thread(target=self._prepare, name="pin host pool", daemon=True)
            self._thread.start()

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield these ready blocks as few tensors [n, *shape], each with the index in `blocks` of its first block.
        Consecutive numbers in one part share a tensor."""
        first = 0
        while first < len(blocks):
            number, place = divmod(blocks[first], self._part)
            end, most = first + 1, min(len(blocks), first + self._part - place)
            while end < most and blocks[end] == blocks[end - 1] + 1:
                end += 1
            yield first, self._parts[number][place : place + end - first]
            first = end

    def close(self) -> None:
        """Release the memory, after the part that is being pinned is done. The device must have finished all copies."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        while self._parts:
            self._unpin(self._parts.pop())

    def _prepare(self) -> None:
        while self.num_ready < self._num_blocks and not self._closed.is_set():
            blocks = min(self._part, self._num_blocks - self.num_ready)
            try:
                memory = self._pin(blocks * self._block_bytes)
            except RuntimeError as error:
                ready, planned = (format_bytes(n * self._block_bytes) for n in (self.num_ready, self._num_blocks))
                _log.warning("host pool   only %s of %s for KV blocks is in use: %s", ready, planned, error)
                return
            self._parts.append(memory.view(self._dtype).view(blocks, *self._shape))
            self.num_ready += blocks
            self._closed.wait(self._pause_s)
