"""What is freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

HOLD_MUCH_THEN_FREE = """
from quire.runtime.worker.host_memory import trim_heap

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

before = resident()
many = [bytearray(50_000) for _ in range(1_000)]  # small enough for the heap
last = bytearray(50_000)  # above them: the heap cannot shrink by itself
held = resident() - before
del many
trim_heap()
print(held, resident() - before)
"""


def test_freed_memory_is_given_back() -> None:
    answer = subprocess.run([sys.executable, "-c", HOLD_MUCH_THEN_FREE], capture_output=True, text=True, check=True)
    held, left = map(int, answer.stdout.split())
    assert held > 45_000
    assert left < 5_000
