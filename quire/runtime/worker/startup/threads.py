"""Chooses how many threads compute: one for each physical core that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from quire.errors import ConfigError

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def compute_threads(asked: int | None, at_most: int, ranks: int = 1) -> int:
    """Return how many threads of this process compute.

    Args:
        asked: Value of `--cpu-threads`.
        at_most: Upper limit of the default, for example from OMP_NUM_THREADS.
        ranks: Number of processes that share the machine's cores.

    Raises:
        ConfigError: `asked` is less than 1.
    """
    if asked is None:
        return max(1, min(at_most, usable_cores() // ranks))
    if asked < 1:
        raise ConfigError(f"--cpu-threads must be at least 1, got {asked}.", param="cpu_threads")
    return asked


def usable_cores() -> int:
    """Return the physical cores in the process's affinity mask, at least 1 and at most its cgroup quota."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read(Path(_TOPOLOGY.format(p))) or str(p) for p in processors}
    quota = cpu_quota()
    return max(1, len(cores) if math.isinf(quota) else min(len(cores), round(quota)))


def cpu_quota() -> float:
    """Return how many processors the process's cgroups and their parents allow; infinity without a quota.

    The root is always read, because a container often sees its own cgroup there, and the path in /proc may not exist.
    """
    return min((_quota(directory) for directory in _own_cgroups()), default=math.inf)


def _own_cgroups() -> Iterator[Path]:
    yield _CGROUPS
    yield _CGROUPS / "cpu"
    for line in _read(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        within = PurePosixPath(path.lstrip("/"))
        yield from (root / part for part in (within, *within.parents))


def _quota(directory: Path) -> float:
    limit, _, period = _read(directory / "cpu.max").partition(" ")
    if not limit:  # version 1
        limit, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
    if not (limit.isdigit() and period.isdigit() and int(period)):  # "max", or -1
        return math.inf
    return int(limit) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
