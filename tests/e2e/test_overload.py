"""Two minutes of three times what a server can do: it does as much as ever, soon, and tells all others so at once.

What of this is arithmetic is in `tests/api/test_overload.py`, on a clock of its own; here refusals cost time.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.overload import Overload
from tests.e2e.serve import QuireServe


@pytest.mark.long("reliability")
def test_overload() -> None:
    limits = ("--max-queue-time", "2", "--max-num-seqs", "32", "--disable-uvicorn-access-log")
    with QuireServe("--port", "0", *limits, "--api-key", "flood", "light") as server:
        overload = Overload(server.wait_ready().url, seconds=120, other_seconds=20)
        figures = asyncio.run(overload.measure())
    flood = figures.flood
    assert figures.closed_loop.statuses.keys() == {200}
    assert flood.rate >= 0.9 * figures.maximum
    assert flood.p99_ttft <= 4.0
    assert flood.statuses.keys() == {200, 429}
    assert flood.statuses[429] > flood.statuses[200]
    assert figures.light_beside.completed >= 0.9 * figures.light_alone.completed
    assert figures.light_beside.statuses.keys() == {200}
