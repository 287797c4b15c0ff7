"""When a process searches all its objects for cycles: one that serves, while few sequences are open and few objects
live; a user's process, seldom while it generates.

Such a search stops all threads, for a time in proportion to the live objects: some thirty for each open sequence, so a
crowd that lives for a moment makes it long. Only very much garbage does not wait until the crowd has gone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.foundation.processes.launch import Report, SendReport

CALM_SEQUENCES = 256
CALM_OBJECTS = 30_000
"""A search of this many takes some 10 ms. Large and deep request bodies have more."""
_PENDING = 10
"""Fewer collections of younger objects leave nothing worth a search."""
_MAX_PENDING = 100
"""After this many, with some 700,000 objects more than before, Python searches whatever is open."""


def begin_serving() -> None:
    """Never search again what lives now. From here on `collect_in_calm` does most searches."""
    gc.freeze()
    gc.collect()  # of next to nothing: Python searches only when what is new is a quarter of what it found last
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _MAX_PENDING)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Within this context, search all objects as seldom as in a process that serves. Searching those of a program with
    torch takes 0.2 s, and Python would do so every few hundred steps of a large batch."""
    young, middle, old = gc.get_threshold()
    if old >= _MAX_PENDING:  # within another such context, perhaps of a thread that leaves it sooner
        yield
        return
    gc.set_threshold(young, middle, _MAX_PENDING)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def begin_anew() -> None:
    """Search everything once, because much of what has lived since the start is gone; what is left stays."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_in_calm(open_sequences: int) -> None:
    """Search for cycles if there may be some, and few sequences and objects are there. Call this every second or so."""
    if open_sequences > CALM_SEQUENCES or gc.get_count()[2] < _PENDING:
        return
    if open_sequences == 0 or len(gc.get_objects()) <= CALM_OBJECTS:  # counting takes a fifth of a search
        gc.collect()


def collecting(report: SendReport, open_sequences: Callable[[], int]) -> SendReport:
    """Collect with each report. A live process sends one every second."""

    def send(what: Report) -> None:
        report(what)
        collect_in_calm(open_sequences())

    return send


@contextmanager
def no_collection() -> Iterator[None]:
    """Within this context, search nothing: objects that are made stay, or go with their last reference."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
