"""Calls that are interrupted by real signals at random times; run as a process of its own by test_interrupts.py."""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
import time

from tests.offline.test_interrupts import EXPECTED, Calls

ROUNDS = 60
SWITCH_S = 1e-5
"""So that the thread which sends the signal does not wait for the one that it interrupts."""
PATIENCE_S, SLICE_S = 60.0, 0.01


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    calls, delays = Calls(), random.Random(0)
    calls.generate()
    began = time.perf_counter()
    calls.generate()
    longest, interrupted = time.perf_counter() - began, 0
    asked: queue.SimpleQueue[float] = queue.SimpleQueue()
    threading.Thread(target=_send_signals, args=(asked,), daemon=True).start()
    for number in range(ROUNDS):
        try:
            asked.put(delays.uniform(0, longest))
            calls.generate()
            _wait_for_signal()
        except KeyboardInterrupt:
            interrupted += 1
        assert calls.generate() == EXPECTED, number
    assert interrupted == ROUNDS
    calls.assert_all_free()


def _wait_for_signal() -> None:
    """It comes now, at the latest. One that another thread receives, or that comes just before a sleep begins, does not
    end that sleep: so they are short."""
    for _ in range(round(PATIENCE_S / SLICE_S)):
        time.sleep(SLICE_S)


def _send_signals(delays: queue.SimpleQueue[float]) -> None:
    """One after each of these times. The thread runs all the time and is asked through a queue written in C: a signal
    that comes while `threading` starts a thread, or joins one, may be raised as a RuntimeError of its locks."""
    while True:
        time.sleep(delays.get())
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
