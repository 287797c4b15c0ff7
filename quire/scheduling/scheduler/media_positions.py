"""Positions of tokens around images, in models whose rotary embedding tells rows and columns (M-RoPE).

Tokens of texts have one position, which counts as time, row and column. An image's tokens have the time at which it
begins, and rows and columns from there on; behind it, positions go on from its largest row or column (Wang et al.
2024, "Qwen2-VL", section 2.1). A video is one such image for each of its slices, whose times
differ. Images of other models, whose `columns` are 0, take as many positions as tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.foundation.messages.to_engine import MediaSpan, Medium
from quire.foundation.messages.workers import MediaPiece, MediaRow


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
    return max(medium.rows, medium.columns) if medium.columns else medium.count


def _axes(spans: Sequence[MediaSpan], start: int, end: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return time, row and column of each token from `start` to `end`, [3, tokens]."""
    axes = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    shift = 0
    for span in spans:
        axes[:, max(0, span.end - start) :] += _positions_of(span.medium) - span.medium.count
        first, behind = max(start, span.start), min(end, span.end)
        if span.medium.columns and first < behind:
            own = np.arange(first, behind) - span.start
            begin = span.start + shift
            place = slice(first - start, behind - start)
            slices, in_slice = np.divmod(own, span.medium.rows * span.medium.columns)
            axes[0, place] = begin + (np.frombuffer(span.medium.times, np.int32)[slices] if span.medium.times else 0)
            axes[1, place] = begin + in_slice // span.medium.columns
            axes[2, place] = begin + own % span.medium.columns
        shift += _positions_of(span.medium) - span.medium.count
    return axes
