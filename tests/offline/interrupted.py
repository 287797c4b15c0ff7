"""Calls that are interrupted by real signals at random times; run as a process of its own by test_interrupts.py."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

from tests.offline.test_interrupts import EXPECTED, Calls

ROUNDS = 60
SWITCH_S = 1e-5
"""So that the thread which sends the signal does not wait for the one that it interrupts."""


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    calls, delays = Calls(), random.Random(0)
    calls.generate()
    began = time.perf_counter()
    calls.generate()
    longest, interrupted = time.perf_counter() - began, 0
    for number in range(ROUNDS):
        delay = delays.uniform(0, longest)
        killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        try:
            killer.start()
            calls.generate()
            time.sleep(longest + 1)  # the signal comes now, at the latest; `join` may turn it into another error
        except KeyboardInterrupt:
            interrupted += 1
        assert calls.generate() == EXPECTED, number
    assert interrupted == ROUNDS
    calls.assert_all_free()


if __name__ == "__main__":
    main()
