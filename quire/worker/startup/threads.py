"""How many threads compute: the physical cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Physical cores within the process's affinity, at most the cgroup's processor quota, at least 1."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read(Path(_TOPOLOGY.format(p))) or str(p) for p in processors}
    return max(1, min(len(cores), quota()))


def quota() -> int:
    """Whole processors' worth of time that the cgroup allows; very many where it sets no limit."""
    limit, _, period = _read(_QUOTA).partition(" ")
    if not (limit.isdigit() and period.isdigit()):
        return 1 << 16
    return round(int(limit) / int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
