"""When a process looks for cycles among all its objects: one that serves, while few sequences are open and few
objects live; a user's, seldom while it generates.

Such a collection holds all threads, in proportion to what lives: some thirty objects for each open sequence, so a crowd
that lives for a moment makes it long. Only very much garbage is not left until then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.foundation.processes.launch import Report, SendReport

CALM_SEQUENCES = 256
CALM_OBJECTS = 30_000
"""A search of so many takes some 10 ms. Bodies of requests that are large and deep have more."""
_PENDING = 10
"""Fewer collections of younger objects than this leave nothing worth a search."""
_MAX_PENDING = 100
"""After so many, with some 700,000 objects more than before, Python searches whatever is open."""


def begin_serving() -> None:
    """What lives now stays, and is never searched again; `collect_in_calm` does most searches from here on."""
    gc.freeze()
    gc.collect()  # of next to nothing: Python searches only when what is new is a quarter of what it found last
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _MAX_PENDING)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Within it, all objects are searched as seldom as in a process that serves. Those of a program that has imported
    torch take 0.2 s, which Python else spends every few hundred steps of a large batch."""
    young, middle, old = gc.get_threshold()
    if old >= _MAX_PENDING:  # within another one, say of a thread that may leave it sooner
        yield
        return
    gc.set_threshold(young, middle, _MAX_PENDING)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def begin_anew() -> None:
    """Much of what has lived since the start is gone: search all once, and let what is left stay."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_in_calm(open_sequences: int) -> None:
    """Search for cycles, if there may be some and few sequences are open, beside few objects; to be called every second
    or so."""
    if open_sequences > CALM_SEQUENCES or gc.get_count()[2] < _PENDING:
        return
    if open_sequences == 0 or len(gc.get_objects()) <= CALM_OBJECTS:  # to count takes a fifth of a search
        gc.collect()


def collecting(report: SendReport, open_sequences: Callable[[], int]) -> SendReport:
    """Collect with each report; a process that lives sends one every second."""

    def send(what: Report) -> None:
        report(what)
        collect_in_calm(open_sequences())

    return send


@contextmanager
def no_collection() -> Iterator[None]:
    """Within it nothing is searched: where what is made stays, or goes with its last reference, searches take time
    alone."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
