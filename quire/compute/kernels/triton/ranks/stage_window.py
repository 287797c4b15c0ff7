"""The layout of a window: memory of a card into which a card of another pipeline stage writes. Imports no Triton.

A window has four parts:

    token flag   the last step whose tokens are all there (uint32)
    flags        for each program of `handed_on.py`, the last step whose part of the stream is there (uint32)
    tokens       [slots] int64, the token that each slot sampled last
    streams      [steps, 2, words] of 4 bytes: x and delta of each step that may be on its way

Nobody says that a place is free again. The engine has at most `steps` steps in the stages at the same time: when a step
is sent, the step that had its place before has left all stages. A slot samples its next token only when the first stage
has read the token before.
"""

from __future__ import annotations

from typing import NamedTuple

STREAM_PROGRAMS = 128
"""Programs that send or receive a stream: all run at the same time on a card with as many multiprocessors."""
TILE_WORDS = 1 << 11
"""Words of 4 bytes that a program copies at once."""
_FIRST_FLAG = 128
_ALIGNED = 256


class StageLayout(NamedTuple):
    """Where a window's parts begin, in bytes, its size, its steps, and the words of x of each step."""

    flags: int
    tokens: int
    streams: int
    size: int
    steps: int
    words: int


def layout_of(slots: int, steps: int, stream_bytes: int) -> StageLayout:
    """Return the layout of a window, for `slots` slots of the slot table and `steps` steps in all stages at the same
    time. The largest x has `stream_bytes`; 0 if no streams arrive."""
    tokens = _aligned(_FIRST_FLAG + 4 * STREAM_PROGRAMS)
    streams = _aligned(tokens + 8 * slots)
    each = _aligned(stream_bytes)
    return StageLayout(_FIRST_FLAG, tokens, streams, streams + 2 * steps * each, steps, each // 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
