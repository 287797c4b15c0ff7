"""Memory that processes share, and numbers that they tell each other without a message."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import weakref
from pathlib import Path

_NUMBER = struct.Struct("q")


class SharedMemory:
    """Memory of `size` bytes, zeros at first, that all processes see which map the same descriptor. `descriptor` is
    memory that another process has made; None to make it. What was made here is open until nobody refers to this, or
    `close_descriptor` is called."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = _new(size) if descriptor is None else descriptor
        self._close = weakref.finalize(self, os.close, self.descriptor) if descriptor is None else None
        self.view = mmap.mmap(self.descriptor, size)

    def close_descriptor(self) -> None:
        """Close what was made here, because all others have it; the memory stays mapped. More calls do nothing."""
        if self._close is not None:
            self._close()


class HostBlockMemory:
    """Memory for `size` bytes of host blocks, and behind it as much for an index of them. Pages that nobody writes are
    not taken. `path` is memory that another process has made, as it says by `path`; None to make it.

    Attributes:
        blocks, index: The two parts.
    """

    def __init__(self, size: int, path: str | None = None) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if path is None:
            self._memory = SharedMemory(2 * size)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._memory = SharedMemory(2 * size, descriptor)
            os.close(descriptor)  # it stays mapped
        self._whole = memoryview(self._memory.view)
        self.blocks, self.index = self._whole[:size], self._whole[size:]

    @property
    def path(self) -> str:
        """Where this user's processes find it, as long as this one lives; they may have begun before it was made."""
        return f"/proc/{os.getpid()}/fd/{self._memory.descriptor}"

    def close(self) -> None:
        """Let go of memory that was made here, and is used elsewhere alone."""
        for view in (self.blocks, self.index, self._whole):
            view.release()
        self._memory.view.close()
        self._memory.close_descriptor()


def _new(size: int) -> int:
    """A descriptor of new memory, whose pages are only taken when they are first written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class SharedNumbers:
    """One number for each of `count` processes, zero at first. The file is made if there is none.

    `own` is the place of this process, whose number becomes zero.
    """

    def __init__(self, path: Path, own: int, count: int) -> None:
        size = count * _NUMBER.size
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, size)
        self._memory = mmap.mmap(file, size)
        os.close(file)
        self._own = own
        self._others = [other for other in range(count) if other != own]
        self.own = 0

    @property
    def own(self) -> int:
        return self._at(self._own)

    @own.setter
    def own(self, number: int) -> None:
        _NUMBER.pack_into(self._memory, self._own * _NUMBER.size, number)

    @property
    def least_other(self) -> int:
        return min(map(self._at, self._others))

    def _at(self, process: int) -> int:
        number: int = _NUMBER.unpack_from(self._memory, process * _NUMBER.size)[0]
        return number
