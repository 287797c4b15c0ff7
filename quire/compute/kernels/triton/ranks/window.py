"""The layout of a window: memory of a card that the other ranks of its host have mapped. Imports no Triton.

A window has five parts:

    flags      for each program and rank: how many calls of `pulled.py` that rank's program has come to (uint32)
    row flags  for each program and rank: how many steps of `pulled_norm.py` that rank's program has come to (uint32)
    arrivals   [2, ranks, PUSHED_WORDS] packets (int64), which other ranks write: for even and for odd calls
    buffers    [2, PULLED_BYTES], which this rank writes and others read: for even and for odd calls
    rings      for each program of `pulled_norm.py` STEPS places of rows, which this rank writes and others read

A tile of a tensor always belongs to one program and one place of each part, whatever the tensor's size, so each program
counts its own calls. A place is written again two calls later: by then all ranks have come to the call between, and
have ended the first, because kernels of a stream follow one another. So one meeting a call is enough. `pulled_norm.py`
says when it writes a place of a ring again.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_RANKS = 8
PUSHED_TILE = 256
"""Words of 4 bytes of a program of `pushed.py`."""
PUSHED_WORDS = 1 << 18
"""The largest tensor that is pushed: 1 MiB."""
PULLED_TILE_BYTES = 1 << 13
"""Bytes of a tile of `pulled.py`."""
PULLED_PROGRAMS = 128
"""The maximum number of programs of `pulled.py`: all run at once on a card with as many multiprocessors."""
PULLED_BYTES = 1 << 25
"""The largest tensor that is pulled."""
FLAG_BYTES = PULLED_PROGRAMS * MAX_RANKS * 4
STEPS = 4
"""Places of a ring."""
STEP_BYTES = 1 << 14
"""Bytes of the rows in a place."""
PUSHED_PROGRAMS = PUSHED_WORDS // PUSHED_TILE
MAX_POLLS = 1 << 28
"""How often a rank looks for another in vain before it goes on without it, which takes some minutes.

The engine has ended the ranks by then; if a kernel waited for ever, its process could not end.
"""


class Layout(NamedTuple):
    """Where a window's parts begin, in bytes, and where it ends."""

    row_flags: int
    arrivals: int
    buffers: int
    rings: int
    size: int


def layout_of(ranks: int) -> Layout:
    arrivals = 2 * FLAG_BYTES
    buffers = arrivals + 2 * ranks * PUSHED_WORDS * 8
    rings = buffers + 2 * PULLED_BYTES
    return Layout(FLAG_BYTES, arrivals, buffers, rings, rings + PULLED_PROGRAMS * STEPS * STEP_BYTES)
