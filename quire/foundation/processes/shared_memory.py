"""Memory that processes share. It has no name: a descriptor is handed on, and the memory is gone with the last process
that has mapped it, however that process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile


class SharedMemory:
    """Zeros at first, seen by all processes that map the same descriptor.

    Args:
        size: Bytes.
        descriptor: Memory that another process has made; None to make it.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = _new(size) if descriptor is None else descriptor
        self.view = mmap.mmap(self.descriptor, size)


def _new(size: int) -> int:
    """A descriptor of new memory, whose pages are only taken when they are first written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
