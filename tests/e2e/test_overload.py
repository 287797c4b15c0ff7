"""A minute of three times what a server can do: it does as much as ever, soon, and tells all others so at once.

What of this is arithmetic is in `tests/api/test_overload.py`, on a clock of its own; here refusals cost time.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.overload import Figures, Overload
from tests.e2e.serve import QuireServe

SHARE = 0.7
"""Of what is done without a flood. The aim is 0.9, which `python -m benchmarks.overload` measures on an idle machine;
with neighbours the same code does 0.75 to 0.96 of it within an hour."""

SOON_S = 4.0
"""To a first token. What waits for 2 s in the queue is refused."""


@pytest.mark.long("reliability")
def test_overload() -> None:
    """A neighbour of the machine's may take a share of one part of a measurement alone, so a second one counts as well:
    how much is done and how soon, and not what is answered.
    """
    limits = ("--max-queue-time", "2", "--max-num-seqs", "32", "--disable-uvicorn-access-log")
    with QuireServe("--port", "0", *limits, "--api-key", "flood", "light") as server:
        overload = Overload(server.wait_ready().url, seconds=60, other_seconds=20)
        figures = asyncio.run(overload.measure())
        if not does_as_much_as_ever(figures) or figures.flood.p99_ttft > SOON_S:
            figures = asyncio.run(overload.measure())
    flood = figures.flood
    assert does_as_much_as_ever(figures)
    assert flood.p99_ttft <= SOON_S
    assert flood.statuses[429] > flood.statuses[200]
    assert figures.light_beside.p99_ttft < flood.p99_ttft, "what is let in of another tenant does not wait behind it"


def does_as_much_as_ever(figures: Figures) -> bool:
    """Beside a flood; and what is answered is right in any case."""
    assert figures.closed_loop.statuses.keys() == {200}
    assert figures.flood.statuses.keys() == {200, 429}
    assert {200} <= figures.light_beside.statuses.keys() <= {200, 429}
    return figures.flood.rate / figures.maximum >= SHARE
