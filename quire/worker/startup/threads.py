"""How many threads compute: the physical cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import ConfigError

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_UNLIMITED = 1 << 16


def compute_threads(asked: int | None, at_most: int) -> int:
    """How many threads compute.

    Args:
        asked: `--cpu-threads`.
        at_most: What OMP_NUM_THREADS allows, if it is set.

    Raises:
        ConfigError: Less than one was asked for.
    """
    if asked is None:
        return min(at_most, usable_cores())
    if asked < 1:
        raise ConfigError(f"--cpu-threads must be at least 1, got {asked}.", param="cpu_threads")
    return asked


def usable_cores() -> int:
    """Physical cores within the process's affinity, at most the cgroup's CPU quota, at least 1."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read(Path(_TOPOLOGY.format(p))) or str(p) for p in processors}
    return max(1, min(len(cores), cpu_quota()))


def cpu_quota() -> int:
    """The cgroup's CPU quota in whole processors; a very large number where there is none."""
    limit, _, period = _read(_QUOTA).partition(" ")
    if not (limit.isdigit() and period.isdigit()):
        return _UNLIMITED
    return round(int(limit) / int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
