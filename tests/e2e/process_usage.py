"""What a server's processes take of the machine: memory, file descriptors, threads, as proc(5) tells."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_NAMES = {
    "quire.cli.main": "supervisor",
    "quire.serving.start": "api",
    "quire.engine.start": "engine",
    "quire.engine.early_start": "engine",
}
"""By the module that a process runs; others keep the last part of theirs."""
PROMPT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
"""Freed memory is the system's again at once, so that what is resident is what is held. Otherwise glibc keeps up to
64 MiB of what large tensors have taken, now more and now less (mallopt(3), M_MMAP_THRESHOLD)."""


@dataclass(frozen=True)
class Usage:
    """Of the processes of one name together.

    Attributes:
        rss: Resident memory in bytes.
        fds: Open file descriptors.
        pids: Which processes these are.
    """

    processes: int = 0
    rss: int = 0
    fds: int = 0
    threads: int = 0
    pids: frozenset[int] = frozenset()

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.processes + other.processes,
            self.rss + other.rss,
            self.fds + other.fds,
            self.threads + other.threads,
            self.pids | other.pids,
        )


def usage(root: int) -> dict[str, Usage]:
    """Of a process and all its descendants, by name. Those that end meanwhile are left out."""
    found: defaultdict[str, Usage] = defaultdict(Usage)
    for pid in descendants(root):
        entry = Path(f"/proc/{pid}")
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            one = Usage(1, int(fields[21]) * _PAGE, len(os.listdir(entry / "fd")), int(fields[17]), frozenset([pid]))
            found[_name(entry)] += one
        except (OSError, IndexError):
            continue
    return dict(found)


def descendants(root: int) -> list[int]:
    """The ids of a process, its children, theirs and so on; parents come first."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children[parent].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def children_of(parent: int) -> list[int]:
    """The ids of a process's children, in the order in which they were started: ids begin anew behind the largest."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            if int(fields[1]) == parent:
                found.append((int(fields[19]), int(entry.name)))  # when it started
    return [pid for _, pid in sorted(found)]


def command_line(pid: int) -> list[str]:
    """A process's words; none if it is gone. Until it runs its own program, they are its parent's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def ranks_of(engine: int) -> list[int]:
    """Process ids of an engine's ranks, in the order of their start."""
    return [pid for pid in children_of(engine) if "quire.runtime.executor.rank_process" in command_line(pid)]


def processor_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _name(entry: Path) -> str:
    arguments = (entry / "cmdline").read_text().split("\0")
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments else arguments[0]
    return _NAMES.get(module, module.rsplit(".", 1)[-1])
