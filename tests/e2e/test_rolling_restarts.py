"""Two servers are restarted in turn behind a load balancer that follows /ready: no request is lost.

Fifty restarts are `python -m benchmarks.rolling_restarts --restarts 50`.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.rolling_restarts import CLIENTS, rolling_restarts

RESTARTS = 6


@pytest.mark.long("reliability")
def test_rolling_restarts_lose_no_request() -> None:
    rolling = asyncio.run(rolling_restarts(RESTARTS))
    print(f"{rolling.answered} requests; restarts took {[f'{took:.1f}' for took in rolling.restart_s]} s")
    assert rolling.lost == []
    assert rolling.exit_codes == [0] * RESTARTS
    assert rolling.answered > RESTARTS * CLIENTS
