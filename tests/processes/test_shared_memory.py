"""Memory of processes costs descriptors only as long as somebody has it."""

from __future__ import annotations

import os

from quire.foundation.processes.shared_memory import SharedMemory


def test_what_was_made_is_closed_once_when_nobody_has_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory, another = SharedMemory(4096), SharedMemory(4096)
    for _ in range(2):
        memory.close_descriptor()
    memory.view[:5] = b"still"
    assert memory.view[:5] == b"still"
    mapped = SharedMemory(4096, another.descriptor)
    del memory, another, mapped
    assert len(os.listdir("/proc/self/fd")) == before
