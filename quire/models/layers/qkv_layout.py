"""Where queries, keys and values lie in a projection that stores all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from quire.compute.mesh import Span
from quire.models.layers.attention import Heads

QkvLayout = Literal["kinds", "groups", "four blocks"]
"""`kinds`: all queries, all keys, all values. `groups`: for each KV head, its queries, its key and its value. `four
blocks`: four blocks, each of a quarter of the queries, the values and the keys, in this order (CodeGen)."""


def spans_of(layout: QkvLayout, heads: Heads, query: Span, kv: Span) -> tuple[Span, ...]:
    """Return which rows of the projection are these query and KV heads: queries, then keys, then values.

    Args:
        layout: How the projection is stored; not `kinds`.
        heads: The shape of the undivided attention.
        query, kv: The heads that are asked for.
    """
    group = heads.query // heads.kv
    if layout == "groups":
        places = [
            *(q // group * (group + 2) + q % group for q in _numbers(query)),
            *(head * (group + 2) + group for head in _numbers(kv)),
            *(head * (group + 2) + group + 1 for head in _numbers(kv)),
        ]
    else:
        each = heads.query // 4
        kinds = ((0, query), (2, kv), (1, kv))
        places = [q // each * 3 * each + kind * each + q % each for kind, span in kinds for q in _numbers(span)]
    return tuple(Span(first * heads.width, count * heads.width) for first, count in _runs(places))


def _numbers(span: Span) -> range:
    return range(span.start, span.start + span.count)


def _runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """Return first place and length of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for place in places:
        first, count = runs[-1] if runs else (-1, 0)
        if runs and place == first + count:
            runs[-1] = (first, count + 1)
        else:
            runs.append((place, 1))
    return runs
