"""A piece of memory that processes share. It has no name: it is handed on as a descriptor, and is gone with the last
process that has mapped it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile


class SharedMemory:
    """Zeros at first, seen by all that map the same descriptor.

    Args:
        size: Bytes.
        descriptor: Of what another process has made; None: make it.

    Attributes:
        descriptor: To be inherited by other processes.
        view: The bytes.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.descriptor = _new(size) if descriptor is None else descriptor
        self.view = mmap.mmap(self.descriptor, size)


def _new(size: int) -> int:
    """A descriptor of memory, which takes a page when it is first written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
