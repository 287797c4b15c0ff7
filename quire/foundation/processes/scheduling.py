"""Which process gives way when all processors are busy, as the system's scheduler is told."""

from __future__ import annotations

import contextlib
import os


def do_not_interrupt_others() -> None:
    """Let this thread, and those that it will start, wait until a processor is free or a turn is over, instead of
    interrupting who computes (SCHED_BATCH, see sched(7)).

    A step's kernels share their work out in pieces: a thread that is interrupted within a piece keeps all others
    waiting for as long as the interruption takes. Where a processor is idle, nothing changes.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
