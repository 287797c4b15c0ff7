"""A file of KV blocks, which outlives the server: each slot has a block, its key, and checksums of both.

Whatever happens to the file, a block that is read is the one that was written under its key, or it is refused: nothing
depends on the order in which bytes reach the disk, so nothing waits for it. The file is this user's alone, and one
server's at a time.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from quire.errors import ConfigError

Key = tuple[int, bytes]
"""A block's KV group and hash."""
Pieces = Sequence[memoryview]
"""Memory of a block, bytes in one dimension each."""
READERS = 16
"""Threads that read blocks, or the headers of all slots."""
WRITERS = 4
"""Threads that write blocks."""

_log = logging.getLogger(__name__)
_FILE = struct.Struct("<8sQQ32sI")  # magic, bytes of a block, of the canary; digest, checksum of all that
_SLOT = struct.Struct("<QI32sII")  # when it was written, from 1; group, hash, checksum of the block, and of all that
_MAGIC = b"quireKV1"
_ALIGNED = 64
_MOST_PIECES = 512  # of one system call


class DiskStore:
    """Slots for blocks of `block_bytes` in the file `kv_blocks` of a directory, which is made if need be.

    A file of other contents, as `digest` (32 bytes) and `canary` tell, is begun anew. `same_canary` says whether what
    is there is near enough to the canary.

    Raises:
        ConfigError: The directory or the file cannot be used.
    """

    def __init__(self, directory: str, block_bytes: int, most_bytes: int, digest: bytes, canary: bytes) -> None:
        self.block_bytes = block_bytes
        self._canary = canary
        self._stride = _aligned(_SLOT.size + block_bytes)
        self._start = _aligned(_FILE.size + len(canary))
        self._digest = digest
        self.num_slots = max(0, most_bytes - self._start) // self._stride
        if not self.num_slots:
            raise _refused(f"has no room for a block of {block_bytes:,} bytes", "raise --kv-disk-size", "kv_disk_size")
        self._path = Path(directory) / "kv_blocks"
        self._file = self._open()
        self._clock = itertools.count(1)  # of writes, in any thread

    def _open(self) -> int:
        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _refused(
                f"{path} cannot be opened: {error.strerror}", "give a directory that can be written"
            ) from None
        for found in (os.stat(path.parent), os.fstat(file)):
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                os.close(file)
                raise _refused(f"{path.parent} is open to other users", "give a directory of mode 0700 that is yours")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise _refused(f"another server uses {path}", "give each server a directory of its own") from None
        return file

    def begin(self, is_same: bool) -> list[tuple[int, Key]]:
        """Return (slot, key) of what is there, the oldest first; nothing if the canary is not the same, or the file
        holds other contents. Then it is emptied."""
        entries = sorted(self._entries()) if is_same else []
        if not entries:
            self._empty()
        self._clock = itertools.count(1 + max((written for written, _, _ in entries), default=0))
        return [(slot, key) for _, slot, key in entries]

    def stored_canary(self) -> bytes | None:
        """Return the canary of the file; None if the file is of other contents, or broken."""
        header = os.pread(self._file, _FILE.size, 0)
        if header != self._header():
            return None
        canary = os.pread(self._file, len(self._canary), _FILE.size)
        return canary if len(canary) == len(self._canary) else None

    def read(self, slot: int, key: Key, pieces: Pieces) -> bool:
        """Read the block in a slot; False if it is not the one with this key, or not as it was written. Then `pieces`
        may hold anything."""
        header = bytearray(_SLOT.size)
        try:
            got = self._vectored(os.preadv, slot, [memoryview(header), *pieces])
        except OSError as error:
            _log.warning("disk tier   a block cannot be read: %s", error)
            return False
        found = _parse(header)
        return got and found is not None and found[1] == key and found[2] == _checksum(pieces)

    def write(self, slot: int, key: Key, pieces: Pieces) -> bool:
        """Write a block to a slot; False if it cannot be written. Then the slot may hold anything."""
        header = _SLOT.pack(next(self._clock), *key, _checksum(pieces), 0)[:-4]
        header += struct.pack("<I", zlib.crc32(header))
        try:
            return self._vectored(os.pwritev, slot, [memoryview(header), *pieces])
        except OSError as error:
            _log.warning("disk tier   a block cannot be written: %s", error)
            self.erase(slot)
            return False

    def erase(self, slot: int) -> None:
        """Let nobody find the block in a slot."""
        with suppress(OSError):  # what cannot be written at all was not written before
            if self._start + slot * self._stride < os.fstat(self._file).st_size:
                os.pwrite(self._file, bytes(_SLOT.size), self._start + slot * self._stride)

    def close(self) -> None:
        """Close the file. What was written stays."""
        os.close(self._file)

    def _header(self) -> bytes:
        header = _FILE.pack(_MAGIC, self.block_bytes, len(self._canary), self._digest, 0)[:-4]
        return header + struct.pack("<I", zlib.crc32(header))

    def _empty(self) -> None:
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, self._header() + self._canary, 0)
        except OSError as error:
            raise _refused(f"{self._path} cannot be written: {error.strerror}", "give another directory") from None

    def _entries(self) -> Iterator[tuple[int, int, Key]]:
        """Yield when each whole slot was written, its number and its key; of equal keys the newest."""
        size = os.fstat(self._file).st_size
        slots = range(min(self.num_slots, max(0, size - self._start) // self._stride + 1))
        newest: dict[Key, tuple[int, int, Key]] = {}
        with ThreadPoolExecutor(READERS, "disk tier") as readers:
            for slot, found in enumerate(readers.map(self._read_header, slots, chunksize=256)):
                if found is not None and found[0] > newest.get(found[1], (0,))[0]:
                    newest[found[1]] = found[0], slot, found[1]
        yield from newest.values()

    def _read_header(self, slot: int) -> tuple[int, Key, int] | None:
        return _parse(os.pread(self._file, _SLOT.size, self._start + slot * self._stride))

    def _vectored(self, call: object, slot: int, pieces: list[memoryview]) -> bool:
        """Read or write pieces one after the other; False if fewer bytes than asked for came or went."""
        at = self._start + slot * self._stride
        for first in range(0, len(pieces), _MOST_PIECES):
            some = pieces[first : first + _MOST_PIECES]
            size = sum(piece.nbytes for piece in some)
            if call(self._file, some, at) != size:  # type: ignore[operator]
                return False
            at += size
        return True


def _parse(header: bytes | bytearray) -> tuple[int, Key, int] | None:
    """Return when a slot was written, its key and its block's checksum; None if it is empty or broken."""
    if len(header) < _SLOT.size:
        return None
    written, group, block_hash, checksum, own = _SLOT.unpack(header)
    if not written or own != zlib.crc32(header[:-4]):
        return None
    return written, (group, block_hash), checksum


def _checksum(pieces: Pieces) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _refused(why: str, action: str, name: str = "kv_disk_path") -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')}: {why}: {action}.", param=name)
