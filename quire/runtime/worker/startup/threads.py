"""How many threads compute: the physical cores this process may use."""

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
    """How many threads of this process compute.

    Args:
        asked: `--cpu-threads`.
        at_most: What OMP_NUM_THREADS allows, if it is set.
        ranks: Processes that share the machine's cores.

    Raises:
        ConfigError: Less than one was asked for.
    """
    if asked is None:
        return max(1, min(at_most, usable_cores() // ranks))
    if asked < 1:
        raise ConfigError(f"--cpu-threads must be at least 1, got {asked}.", param="cpu_threads")
    return asked


def usable_cores() -> int:
    """Physical cores within the process's affinity, at most what cgroups leave, at least 1."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read(Path(_TOPOLOGY.format(p))) or str(p) for p in processors}
    quota = cpu_quota()
    return max(1, len(cores) if math.isinf(quota) else min(len(cores), round(quota)))


def cpu_quota() -> float:
    """Processors that the process's cgroup and those around it leave it; infinite where none has a quota.

    Both versions of cgroups are looked at. Where the file system shows a container's own cgroup as the root, as
    containers usually see it, the path in /proc may not be there; the root counts in any case.
    """
    return min((_quota(directory) for directory in _own_cgroups()), default=math.inf)


def _own_cgroups() -> Iterator[Path]:
    """The directories of the process's cgroups that control processors, and of all around them."""
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
    """How many processors one cgroup may use."""
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
