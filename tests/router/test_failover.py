"""Servers that die, lie or are silent: until the first byte another one answers, after it the client sees the end."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
import uvloop

from tests.engine.test_client_liveness import ManualClock
from tests.router.stubs import (
    Behaviour,
    StubBackend,
    chunked,
    json_answer,
    raw,
    read_all,
    run_steadily,
    running_router,
    until,
)

HOSTILE: dict[str, Behaviour] = {
    "closes without a word": raw(),
    "half a head": raw(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "a head and no body": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
    "a head of chunks and no body": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
    "no HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "huge headers": raw(b"HTTP/1.1 200 OK\r\n", *[b"x-%d: %s\r\n" % (number, b"y" * 8_000) for number in range(20)]),
    "a header without an end": raw(b"HTTP/1.1 200 OK\r\nx: ", *[b"y" * 8_000] * 20),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello"),
    "length and chunks": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    "a negative length": raw(b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello"),
    "a bad chunk": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n"),
    "another protocol": raw(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello"),
    "a split response": raw(b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 2\r\n\r\nok"),
    "unavailable": json_answer("bad", 503),
    "a bad gateway": json_answer("bad", 502),
    "too much to do": json_answer("bad", 429),
}


def test_another_server_answers_for_one_that_fails_before_the_first_byte() -> None:
    async def check() -> None:
        async with (
            StubBackend("bad") as bad,
            StubBackend("good") as good,
            running_router(bad, good, routing_logic="roundrobin", cb_failure_threshold=10**6) as router,
        ):
            for name, behaviour in HOSTILE.items():
                bad.behaviour = behaviour
                before = len(bad.seen)
                for _ in range(2):  # in turn: one of them went to the bad one first
                    answer = await router.ask(name)
                    assert (answer.status_code, answer.json()) == (200, {"from": "good"}), name
                assert len(bad.seen) == before + 1, f"{name}: sent once, not again"
            assert await router.metric(f'quire:router_retries_total{{backend="{bad.url}"}}') == len(HOSTILE)

    uvloop.run(check())


def test_without_another_server_a_hostile_one_is_a_clear_error() -> None:
    async def check() -> None:
        async with StubBackend("bad") as bad, running_router(bad, cb_failure_threshold=10**6) as router:
            for name, behaviour in HOSTILE.items():
                bad.behaviour = behaviour
                answer = await router.ask(name)
                assert answer.status_code in (429, 502, 503), name
                if answer.headers.get("x-from") != "bad":
                    assert answer.json()["error"]["code"] == "unavailable", name
                    assert answer.headers["retry-after"]
            bad.behaviour = json_answer("well")
            assert (await router.ask()).json() == {"from": "well"}

    uvloop.run(check())


@pytest.mark.parametrize(
    "answer",
    [
        chunked(b"data: 1\n\n"),
        (*chunked(b"data: 1\n\n"), b"zz\r\n"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n", b"half"),
    ],
    ids=["closed", "garbled", "too short"],
)
def test_an_answer_that_breaks_off_does_not_look_whole(answer: tuple[bytes, ...]) -> None:
    async def check() -> None:
        async with (
            StubBackend("bad", behaviour=raw(*answer)) as bad,
            StubBackend("good", models=("n",)) as good,
            running_router(bad, good) as router,
        ):
            got: list[bytes] = []
            with pytest.raises(httpx.RemoteProtocolError):
                await read_all(router, got)
            assert got in ([b"data: 1\n\n"], [b"half"])
            assert len(bad.seen) == 1, "it had begun: nobody is asked again"

    uvloop.run(check())


def test_a_body_until_the_connection_closes_is_whole_and_what_follows_an_answer_is_dropped() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            one.behaviour = raw(b"HTTP/1.0 200 OK\r\n\r\n", b"until the end")
            assert (await router.ask()).content == b"until the end"
            one.behaviour = raw(
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
            )
            for _ in range(3):
                assert b"evil" not in (await router.ask()).content
            one.behaviour = raw(
                b"HTTP/1.1 103 Early Hints\r\nx: 1\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
            )
            answer = await router.ask()
            assert answer.content == b"ok"
            assert "x" not in answer.headers

    uvloop.run(check())


def test_a_silent_server_is_504_and_not_asked_twice() -> None:
    async def check() -> None:
        async with (
            StubBackend("bad", behaviour=raw(wait=asyncio.Event())) as bad,
            running_router(bad, request_timeout_secs=0.2) as router,
        ):
            answer = await router.ask()
            assert answer.status_code == 504
            await bad.aborted.wait()
            assert len(bad.seen) == 1
            assert (
                await router.metric(f'quire:router_backend_failures_total{{backend="{bad.url}",reason="timeout"}}') == 1
            )

    run_steadily(check())


def test_requests_that_wait_for_a_server_that_stopped_go_to_another() -> None:
    async def check() -> None:
        async with (
            StubBackend("bad") as bad,
            StubBackend("good") as good,
            running_router(bad, good, routing_logic="roundrobin") as router,
        ):
            bad.behaviour = raw(wait=asyncio.Event())
            asking = [asyncio.create_task(router.ask(str(number))) for number in range(6)]
            await until(lambda: len(bad.seen) == 3)
            await bad.kill()
            assert [answer.json() for answer in await asyncio.gather(*asking)] == [{"from": "good"}] * 6

    uvloop.run(check())


def test_a_circuit_opens_and_one_request_tries_it_again() -> None:
    async def check() -> None:
        clock = ManualClock()
        settings = {"routing_logic": "roundrobin", "cb_failure_threshold": 2, "cb_timeout_duration_secs": 10.0}
        async with (
            StubBackend("bad", behaviour=raw()) as bad,
            StubBackend("good") as good,
            running_router(bad, good, clock=clock, **settings) as router,
        ):
            for _ in range(8):
                assert (await router.ask()).status_code == 200
            assert len(bad.seen) == 2
            assert (await router.states())[bad.url]["circuit_open"]
            clock.time += 10
            for _ in range(8):
                assert (await router.ask()).status_code == 200
            assert len(bad.seen) == 3, "one tried, and failed"
            clock.time += 10
            bad.behaviour = json_answer("bad")
            answers = [(await router.ask()).json()["from"] for _ in range(6)]
            assert answers.count("bad") >= 2
            assert not (await router.states())[bad.url]["circuit_open"]

    uvloop.run(check())


def test_a_server_that_comes_back_is_used_again() -> None:
    async def check() -> None:
        async with StubBackend("one") as one, running_router(one) as router:
            assert (await router.ask()).status_code == 200
            port = one.port
            await one.kill()
            answer = await router.ask()
            assert answer.status_code == 503
            await until(lambda: _ready_is(router, one.url, False))
            assert (await router.client.get("/ready")).status_code == 503
            assert (await router.client.get("/health")).status_code == 200
            with contextlib.suppress(OSError):
                await one.start(port)
            await until(lambda: _ready_is(router, one.url, True))
            assert (await router.ask()).json() == {"from": "one"}

    uvloop.run(check())


async def _ready_is(router: object, url: str, ready: bool) -> bool:
    return bool((await router.states())[url]["ready"]) is ready  # type: ignore[attr-defined]


def test_a_connection_that_the_server_closed_while_it_was_idle_is_no_failure() -> None:
    async def check() -> None:
        async def once(_: object, writer: asyncio.StreamWriter, seen: object) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()

        settings = {"cb_failure_threshold": 1, "health_check_interval": 3_600.0}  # questions would be cut, too
        async with StubBackend(behaviour=once) as one, running_router(one, **settings) as router:
            assert (await router.ask()).content == b"ok"
            for _ in range(5):
                for task in list(one._connections):
                    task.cancel()
                assert (await router.ask()).content == b"ok"
            assert not (await router.states())[one.url]["circuit_open"]

    uvloop.run(check())
