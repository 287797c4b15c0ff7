"""What host blocks hold, written into memory that outlives the engine's process, so that its successor finds it.

An entry is taken out before its block is overwritten, and written once the block is known to be whole: whenever the
process dies, what is entered is there. A checksum tells an entry that was half written.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from quire.scheduling.kvcache.block_pool import BlockKey

_ENTRY = struct.Struct("<QI32sI")  # when it was entered, from 1; group, hash, checksum
_EMPTY = bytes(_ENTRY.size)
_HEADER = 32


def index_bytes(num_blocks: int) -> int:
    """Return the bytes of an index of so many blocks."""
    return _HEADER + num_blocks * _ENTRY.size


class HostIndex:
    """Keys of host blocks in `memory` of `index_bytes`. `contents` are 32 bytes that say which model the keys are of:
    entries of another are forgotten."""

    def __init__(self, memory: memoryview, contents: bytes) -> None:
        assert len(contents) == _HEADER, "a digest"
        self._memory = memory
        self._most = (len(memory) - _HEADER) // _ENTRY.size
        if bytes(memory[:_HEADER]) != contents:
            memory[:_HEADER] = bytes(_HEADER)
            self.forget(range(self._most))
            memory[:_HEADER] = contents
        self._clock = max((entered for entered, _, _ in self._read()), default=0)

    def entries(self) -> list[tuple[int, BlockKey]]:
        """Return (block, key) of all entries, the oldest first."""
        return [(block, key) for _, block, key in sorted(self._read())]

    def enter(self, block: int, key: BlockKey) -> None:
        """Note that the block holds what has this key, all of it."""
        self._clock += 1
        group, block_hash = key
        checksum = zlib.crc32(block_hash, (self._clock ^ group) & 0xFFFFFFFF)
        _ENTRY.pack_into(self._memory, _HEADER + block * _ENTRY.size, self._clock, group, block_hash, checksum)

    def forget(self, blocks: Iterable[int]) -> None:
        """Note that blocks may hold anything from now on."""
        for block in blocks:
            start = _HEADER + block * _ENTRY.size
            self._memory[start : start + _ENTRY.size] = _EMPTY

    def _read(self) -> list[tuple[int, int, BlockKey]]:
        found = []
        for block in range(self._most):
            entered, group, block_hash, checksum = _ENTRY.unpack_from(self._memory, _HEADER + block * _ENTRY.size)
            if entered and checksum == zlib.crc32(block_hash, (entered ^ group) & 0xFFFFFFFF):
                found.append((entered, block, (group, block_hash)))
        return found
