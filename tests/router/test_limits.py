"""Keys: who may send, how many a minute and how many at once; what is too much is 429 with the time to wait."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import uvloop

from quire.errors import OverloadedError
from quire.serving.router.backend_list import KeyLimits, RateLimiter
from tests.engine.test_client_liveness import ManualClock
from tests.router.stubs import StubBackend, raw, running_router, until

KEYS: dict[str, Any] = {"api_key": ("one-key", "other-key")}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_only_health_and_metrics_are_shown() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one, **KEYS) as router:
            for headers in ({}, bearer("wrong"), {"Authorization": "Basic one-key"}):
                answer = await router.ask(headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                for path in ("/v1/models", "/backends"):
                    assert (await router.client.get(path, headers=headers)).status_code == 401
            assert one.seen == []
            for path in ("/health", "/ping", "/ready", "/version", "/metrics"):
                assert (await router.client.get(path)).status_code == 200
            assert (await router.ask(headers=bearer("other-key"))).status_code == 200
            assert "authorization" not in one.seen[0].headers, "a key of the router is no server's business"

    uvloop.run(check())


def test_without_keys_of_its_own_clients_keys_go_on_to_servers() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            assert (await router.ask(headers=bearer("mine"))).status_code == 200
            assert one.seen[0].headers["authorization"] == "Bearer mine"
            async with running_router(one, backend_api_key="theirs") as with_key:
                await with_key.ask(headers=bearer("mine"))
            assert one.seen[1].headers["authorization"] == "Bearer theirs"

    uvloop.run(check())


def test_more_than_a_minutes_requests_are_429_until_time_has_passed() -> None:
    async def check() -> None:
        clock = ManualClock()
        async with StubBackend() as one, running_router(one, clock=clock, requests_per_minute=3, **KEYS) as router:
            left = []
            for _ in range(3):
                answer = await router.ask(headers=bearer("one-key"))
                assert answer.headers["x-ratelimit-limit-requests"] == "3"
                left.append(answer.headers["x-ratelimit-remaining-requests"])
            assert left == ["2", "1", "0"]
            refused = await router.ask(headers=bearer("one-key"))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert (await router.ask(headers=bearer("other-key"))).status_code == 200, "each key has its own"
            assert await router.metric('quire:router_rejections_total{reason="requests_per_minute"}') == 1
            clock.time += 20
            assert (await router.ask(headers=bearer("one-key"))).status_code == 200
            clock.time += 3_600
            statuses = [(await router.ask(headers=bearer("one-key"))).status_code for _ in range(4)]
            assert statuses == [200, 200, 200, 429], "a minute's burst, whatever was left unused"
            anthropic = await router.client.post("/v1/messages", json={"model": "m"}, headers={"x-api-key": "one-key"})
            assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")

    uvloop.run(check())


def test_more_than_may_be_open_at_once_are_429_until_one_ends() -> None:
    async def check() -> None:
        done = asyncio.Event()
        async with (
            StubBackend(behaviour=raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no", wait=done)) as one,
            running_router(one, max_concurrent_requests=2, **KEYS) as router,
        ):
            key: dict[str, Any] = {"headers": bearer("one-key")}
            for left_by in (False, True):
                asking = [asyncio.create_task(router.ask(**key)) for _ in range(2)]
                await until(lambda: router.router._app.num_open == 2)
                refused = await router.ask(**key)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                for task in asking:
                    if left_by:
                        task.cancel()
                done.set()
                await asyncio.gather(*asking, return_exceptions=True)
                await until(lambda: router.router._app.num_open == 0)
                done.clear()
            assert await router.metric('quire:router_rejections_total{reason="max_concurrent_requests"}') == 2

    uvloop.run(check())


def limits(per_minute: int | None = None, at_once: int | None = None, name: bytes = b"k") -> KeyLimits:
    return KeyLimits("k", name, per_minute, at_once)


def test_a_bucket_fills_evenly() -> None:
    clock = ManualClock()
    limiter = RateLimiter(clock)
    key = limits(per_minute=15)
    for _ in range(15):
        limiter.begin(key)
        limiter.end(key)
    passed = 0
    for _ in range(120):
        clock.time += 1
        with contextlib.suppress(OverloadedError):
            limiter.begin(key)
            limiter.end(key)
            passed += 1
    assert passed == 30


def test_a_refused_request_costs_nothing_and_a_key_that_was_away_begins_anew() -> None:
    limiter = RateLimiter(ManualClock())
    key = limits(per_minute=2, at_once=1)
    assert limiter.begin(key) == 1
    for _ in range(5):
        with pytest.raises(OverloadedError, match="open"):
            limiter.begin(key)
    limiter.end(key)
    assert limiter.begin(key) == 0
    limiter.keep([limits(name=b"another")])
    limiter.end(key)
    limiter.keep([key])
    assert limiter.begin(key) == 1
