"""How much of the machine is left to a server and its test: what other processes take is not the server's doing."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from pathlib import Path

from tests.e2e.process_usage import descendants

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.5
"""How often new processes are looked for."""


class MachineShare:
    """Processor time of all processes but this one and its descendants, as proc(5) counts it, in ticks of 10 ms. Time
    that the machine's host took counts too; time of a descendant that is neither waited for nor seen does."""

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._own: list[int] = []
        self._looked = 0.0
        self._seen: list[tuple[float, float]] = []  # when, and what others had taken
        self.sample()

    def sample(self) -> float:
        """Look now; to be called often. Returns when that was."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._own, self._looked = descendants(os.getpid()), now
        self._seen.append((now, _busy_s() - sum(map(_process_s, self._own))))
        return now

    def lost(self, begin: float, end: float) -> float:
        """Of the seconds between, how many went to others: the part of all cores' time that they took."""
        first = max(0, bisect_left(self._seen, (begin, 0.0)) - 1)
        last = min(len(self._seen) - 1, bisect_left(self._seen, (end, 0.0)))
        return max(0.0, self._seen[last][1] - self._seen[first][1]) / self._cores


def _busy_s() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(interrupts)) * _TICK_S


def _process_s(pid: int) -> float:
    """Of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK_S
