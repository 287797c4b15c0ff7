"""The host pool's memory: blocks in pinned memory, which a thread of its own prepares.

Pinning is slow, some 0.6 s a GiB, and while the driver registers memory, launches of all threads wait. So the thread
takes the pages first, which makes no other thread wait, then registers them, part by part and with pauses. Knows
nothing about what the blocks hold.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

PART_BYTES = 32 * 2**20
"""Memory that is pinned at a time. On an H100 machine, taking its pages takes 18 ms and registering it 2 ms."""
PAUSE_S = 0.02
"""Pause between two parts."""

_log = logging.getLogger(__name__)


class PinnedHostPool:
    """Blocks of host memory by number.

    A part that is needed before it is prepared is prepared next, without a pause, and waited for. Where the system pins
    no more memory, the remaining parts are ordinary memory: copies to them wait for the device, but no request fails.

    Args:
        num_blocks: Of the pool.
        shape, dtype: Of a block.
        pin: Makes a pinned tensor of so many uint8; raises RuntimeError where there is no more memory to pin.
        unpin: Gives such a tensor back.
        part_bytes: See PART_BYTES.
        pause_s: See PAUSE_S.
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
        self._shape = shape
        self._dtype = dtype
        self._block_bytes = shape.numel() * dtype.itemsize
        self._pin = pin
        self._unpin = unpin
        self._pause_s = pause_s
        self._part = max(1, part_bytes // self._block_bytes)  # blocks of a part
        self._missing = list(range(-(-num_blocks // self._part)))
        self._parts: dict[int, Tensor] = {}
        self._pinned: list[Tensor] = []
        self._condition = threading.Condition()
        self._wanted: int | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to prepare all parts, the lowest block numbers first."""
        if self._thread is None and self._missing:
            self._thread = threading.Thread(target=self._prepare, name="pin host pool", daemon=True)
            self._thread.start()

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The blocks as few tensors: numbers that follow each other in one part are one of them.

        Yields the place in `blocks` of a tensor's first block, and the tensor: [n, *shape].
        """
        first = 0
        while first < len(blocks):
            number, place = divmod(blocks[first], self._part)
            end, most = first + 1, min(len(blocks), first + self._part - place)
            while end < most and blocks[end] == blocks[end - 1] + 1:
                end += 1
            yield first, self._ready(number)[place : place + end - first]
            first = end

    def close(self) -> None:
        """Give the memory back; the device has finished all copies."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._parts.clear()
        while self._pinned:
            self._unpin(self._pinned.pop())

    def _ready(self, number: int) -> Tensor:
        """The part, prepared."""
        part = self._parts.get(number)
        if part is not None:
            return part
        with self._condition:
            self._wanted = number
            self._condition.notify_all()
            self.start()
            self._condition.wait_for(lambda: number in self._parts)
        return self._parts[number]

    def _prepare(self) -> None:
        """The thread: parts in order, but first what is waited for."""
        while (number := self._next()) is not None:
            part = self._make()
            with self._condition:
                self._parts[number] = part
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closed or self._wanted is not None, self._pause_s)

    def _next(self) -> int | None:
        """The number of the part to prepare; None when nothing is left to do."""
        with self._condition:
            if self._closed or not self._missing:
                return None
            number, self._wanted = self._wanted, None
            if number not in self._missing:
                number = self._missing[0]
            self._missing.remove(number)
            return number

    def _make(self) -> Tensor:
        """[blocks of a part, *shape]."""
        size = self._part * self._block_bytes
        if len(self._pinned) == len(self._parts):  # pinning has not failed so far
            try:
                self._pinned.append(self._pin(size))
                return self._pinned[-1].view(self._dtype).view(self._part, *self._shape)
            except RuntimeError as error:
                _log.warning("swap        no more memory could be pinned, so swapping is slower: %s", error)
        return torch.empty((self._part, *self._shape), dtype=self._dtype)
