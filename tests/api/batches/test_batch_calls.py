"""How a batch's requests reach the endpoints: with the lowest priority, again while the server takes none, and over
/metrics of run-batch."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.foundation.config import Config, SchedulerConfig
from quire.serving.api.routes.monitoring import metrics_app
from quire.serving.dialects.batches.requests import BatchCalls, BatchLine


class Endpoint:
    """An application with answers that the test gives.

    Attributes:
        bodies: What came.
    """

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._statuses = list(statuses)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": self._statuses.pop(0) if self._statuses else 200})
        await send({"type": "http.response.body", "body": b"{}"})


def calls(endpoint: Endpoint, session: Any, **scheduler: Any) -> BatchCalls:
    return BatchCalls(endpoint, (), session, SchedulerConfig(max_num_seqs=8, **scheduler))


IDLE = SimpleNamespace(num_sequences=0, state="ready")
LINE = BatchLine("a", "/v1/completions", b'{"prompt": "x"}')


def test_requests_have_the_lowest_priority_where_there_are_priorities() -> None:
    endpoint = Endpoint()
    asyncio.run(calls(endpoint, IDLE, scheduling_policy="priority").answer(LINE))
    for body in (b'{"priority": 3, "prompt": "x"}', b'{"priority": null, "prompt": "x"} ', b"{ }"):
        own = BatchLine("a", "/v1/completions", body)
        asyncio.run(calls(endpoint, IDLE, scheduling_policy="priority").answer(own))
    asyncio.run(calls(endpoint, IDLE).answer(LINE))
    most = 2**31 - 1
    assert endpoint.bodies == [
        {"prompt": "x", "priority": most},
        {"prompt": "x", "priority": 3},
        {"prompt": "x", "priority": most},
        {"priority": most},
        {"prompt": "x"},
    ]


def test_a_request_is_sent_again_while_the_server_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serving.dialects.batches.requests.RETRY_S", 0.001)
    endpoint = Endpoint(503, 503, 200)
    _, answer = asyncio.run(calls(endpoint, IDLE).answer(LINE))
    assert (answer.status, len(endpoint.bodies)) == (200, 3)


def test_there_is_room_only_while_others_leave_some() -> None:
    session = SimpleNamespace(num_sequences=4, state="ready")
    batch = calls(Endpoint(), session)

    async def wait() -> bool:
        try:
            async with asyncio.timeout(0.1):
                await batch.wait_for_room()
            return True
        except TimeoutError:
            return False

    async def both() -> list[bool]:
        busy = await wait()
        session.num_sequences = 3
        return [busy, *[await wait() for _ in range(5)]]

    assert asyncio.run(both()) == [False, True, True, True, True, False]  # four slots, and the fifth waits


def test_run_batch_serves_metrics() -> None:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app=metrics_app(ServerStats([Stats()]), Config()))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get("/metrics")

    assert "vllm:num_requests_running" in asyncio.run(get()).text
