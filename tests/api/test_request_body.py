"""What bodies are read as, without a server."""

from __future__ import annotations

import tracemalloc

import pytest

from quire.errors import RequestError
from quire.serving.api.request_body import MAX_PLACE, decode_body


def test_half_a_surrogate_pair_behind_many_long_names_needs_little_memory() -> None:
    """Places of all entries, written out one by one, took gigabytes for a body of 200 KB."""
    deep, entries = 100, 5_000
    body = (b'{"' + b"n" * 64 + b'":') * deep + b"[" + b"1," * entries + b'"\\ud800"]' + b"}" * deep
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
            decode_body(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(caught.value.param or "") == MAX_PLACE
    assert peak < 20 * len(body)
