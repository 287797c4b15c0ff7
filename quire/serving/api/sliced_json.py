"""Long columns to JSON without holding the event loop: heartbeats and other requests' tokens go on in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from quire.serving.api.json_pieces import JsonPieces

SLICE_ENTRIES = 512
"""Log probabilities that are written in one turn of the event loop: about 2 ms of work."""

_encode = msgspec.json.Encoder().encode


async def encode_in_slices(
    make: Callable[[int, int], dict[str, list[Any]]], num_rows: int, entries_per_row: int
) -> dict[str, JsonPieces]:
    """Columns as JSON arrays, made and written a slice of rows at a time.

    Args:
        make: From a range of rows to these rows of each column; called in order.
        num_rows: Length of the columns.
        entries_per_row: What a row costs; SLICE_ENTRIES bounds it for a slice.
    """
    step = max(1, SLICE_ENTRIES // entries_per_row)
    parts: dict[str, list[bytes]] = {name: [b"["] for name in make(0, 0)}
    for start in range(0, num_rows, step):
        for name, rows in make(start, min(start + step, num_rows)).items():
            parts[name].append((b"," if start else b"") + _encode(rows)[1:-1])
        await asyncio.sleep(0)
    return {name: JsonPieces([*slices, b"]"]) for name, slices in parts.items()}
