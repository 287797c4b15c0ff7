"""Positions of tokens around images, in models whose rotary embedding tells rows and columns (M-RoPE).

Tokens of texts have one position, which counts as time, row and column. An image's tokens have the time at which it
begins, and rows and columns from there on. A video is one such image for each of its slices, whose times differ.
Behind either, positions go on from the largest one (Wang et al. 2024, "Qwen2-VL", section 2.1): vLLM counts like this,
and so did the published models' own code, where transformers 5 leaves times out. Where texts tell the times of slices
(Qwen3-VL), each slice is an image of its own. Images of other models, whose `columns` are 0, take as many positions as
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.foundation.messages.to_engine import MediaSpan, Medium
from quire.foundation.messages.workers import MediaPiece, MediaRow

_Axes = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def shift_behind(spans: Sequence[MediaSpan]) -> int:
    """Return what is added to the positions of tokens behind all of these images."""
    return sum(_positions_of(span.medium) - span.medium.count for span in spans)


def media_row(spans: Sequence[MediaSpan], row: int, start: int, end: int) -> MediaRow | None:
    """Return what a row of a prompt's tokens from `start` to `end` has of the prompt's images; None: nothing."""
    pieces, touches = [], False
    for span in spans:
        first, behind = max(start, span.start), min(end, span.end)
        if first < behind:
            touches = True  # the plan may add an image here, with none of its vectors in this row
            pieces += _pieces(span, start, first, behind)
    tells_rows = any(span.medium.columns for span in spans) and start < spans[-1].end
    axes = _axes(spans, start, end).tobytes() if tells_rows else b""
    return MediaRow(row, pieces, axes) if touches or axes else None


def _pieces(span: MediaSpan, start: int, first: int, behind: int) -> list[MediaPiece]:
    """Return the tokens from `first` to `behind` that stand for vectors, of a row that begins at `start`: each run of
    tokens beside one another."""
    medium = span.medium
    if not medium.places:
        return [MediaPiece(first - start, behind - first, first - span.start, medium.digest, medium.two_sided)]
    places = np.frombuffer(medium.places, dtype=np.int32)
    begin, end = np.searchsorted(places, (first - span.start, behind - span.start))
    own = places[begin:end]
    runs = np.split(np.arange(begin, end), np.flatnonzero(np.diff(own) != 1) + 1) if len(own) else []
    return [
        MediaPiece(span.start + int(places[run[0]]) - start, len(run), int(run[0]), medium.digest, medium.two_sided)
        for run in runs
    ]


def _positions_of(medium: Medium) -> int:
    if not medium.columns:
        return medium.count
    squares, side = medium.rows * medium.columns, max(medium.rows, medium.columns)
    if medium.places:
        return medium.count - medium.num_vectors // squares * (squares - side)
    return max(side, int(np.frombuffer(medium.times, np.int32)[-1]) + 1 if medium.times else 0)


def _axes(spans: Sequence[MediaSpan], start: int, end: int) -> _Axes:
    """Return time, row and column of each token from `start` to `end`, [3, tokens]."""
    axes = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    shift = 0
    for span in spans:
        first, behind = max(start, span.start), min(end, span.end)
        if span.medium.columns and first < behind:
            own = _own_axes(span.medium)[:, first - span.start : behind - span.start]
            axes[:, first - start : behind - start] = span.start + shift + own
        change = _positions_of(span.medium) - span.medium.count
        axes[:, max(0, span.end - start) :] += change
        shift += change
    return axes


def _own_axes(medium: Medium) -> _Axes:
    """Return time, row and column of each token of a medium, [3, count], from its first one on."""
    squares, side = medium.rows * medium.columns, max(medium.rows, medium.columns)
    vectors = np.arange(medium.num_vectors)
    slices, in_slice = np.divmod(vectors, squares)
    axes = np.tile(np.arange(medium.count), (3, 1))
    if medium.places:  # texts stand between slices
        places = np.frombuffer(medium.places, dtype=np.int32)
        axes -= (squares - side) * np.searchsorted(places[squares - 1 :: squares], axes[0])
        begins = axes[0, places[::squares]][slices]
        axes[:, places] = begins, begins + in_slice // medium.columns, begins + in_slice % medium.columns
        return axes
    times = np.frombuffer(medium.times, np.int32)[slices] if medium.times else 0
    axes[0], axes[1], axes[2] = times, in_slice // medium.columns, in_slice % medium.columns
    return axes
