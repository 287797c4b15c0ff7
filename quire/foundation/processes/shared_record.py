"""A record that one process writes and others read. The last whole version stays when its writer is killed.

A file of the private directory with two places, written in turns: a version that was cut off does not count. Nothing is
synchronized to a disk. Knows nothing about what is written.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

_HEAD = struct.Struct("<QII")  # version, bytes, checksum
_PLACES = (0, 1 << 30)
"""Far from each other: what lies between them takes no room."""
_TRIES = 3


class SharedRecord:
    """One record.

    Args:
        path: Its file, which is made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: int | None = None  # that was written last

    def write(self, data: bytes) -> None:
        """The next version. One process at a time writes."""
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            last = max(_versions(file))[0] if self._version is None else self._version
            self._version = last + 1
            head = _HEAD.pack(self._version, len(data), zlib.crc32(data))
            os.pwrite(file.fileno(), head + data, _PLACES[self._version % 2])

    def read(self) -> bytes:
        """The last version; empty if there is none."""
        try:
            with self._path.open("rb", buffering=0) as file:
                for _ in range(_TRIES):  # both places may have been read while they were written
                    version, data = max(_versions(file))
                    if version:
                        return data
        except FileNotFoundError:
            pass
        return b""


def _versions(file: BinaryIO) -> list[tuple[int, bytes]]:
    """What is whole in each place; version 0 where nothing is."""
    return [_version_at(file.fileno(), place) for place in _PLACES]


def _version_at(file: int, place: int) -> tuple[int, bytes]:
    head = os.pread(file, _HEAD.size, place)
    if len(head) < _HEAD.size:
        return 0, b""
    version, size, checksum = _HEAD.unpack(head)
    data = os.pread(file, size, place + _HEAD.size)
    return (version, data) if len(data) == size and zlib.crc32(data) == checksum else (0, b"")
