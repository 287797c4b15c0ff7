"""What this machine has to offer: memory that can be used, and whether its processor multiplies in bfloat16."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What automatic choices look at.

    Attributes:
        memory_bytes: Memory that is available now.
        native_bfloat16: Whether bfloat16 products are native.
    """

    memory_bytes: int
    native_bfloat16: bool


def this_machine() -> Machine:
    """Memory that is available (also under a cgroup's limit) and the processor's flags, from /proc and /sys."""
    available = _meminfo("MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        used = _read("/sys/fs/cgroup/memory.current")
        available = min(available, int(limit) - int(used or 0))
    flags = next((line for line in _read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features"))), "")
    return Machine(available, any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16")))


def _meminfo(key: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
