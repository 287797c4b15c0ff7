"""Servers and clients that want to hold the router up, or fill its memory: both are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from typing import Any

import pytest
import uvloop

from quire.serving.api.http_server import BoundedHttpProtocol
from quire.serving.router import app, prober
from tests.router.stubs import (
    Behaviour,
    RouterUnderTest,
    StubBackend,
    chunked,
    raw,
    run_steadily,
    running_router,
    until,
)

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "a head": (b"HTTP/1.1 200 OK\r\n", b"x-y: %s\r\n" % (b"z" * 1_000)),
    "a header": (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 4_000),
    "a status line": (b"HTTP/1.1 200 ", b"O" * 4_000),
    "informational heads": (b"", b"HTTP/1.1 103 Hints\r\nx: y\r\n\r\n" * 40),
    "sizes of chunks": (HEAD, b"0" * 4_000),
    "extensions of a chunk": (HEAD + b"1;", b"x" * 4_000),
    "trailers": (HEAD + b"0\r\n", b"a: b\r\n" * 600),
}


def endless(first: bytes, more: bytes, sent: list[int]) -> Behaviour:
    """For ever, as fast as it is read."""

    async def behave(_: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: object) -> None:
        writer.write(first)
        while True:
            writer.write(more)
            await writer.drain()
            sent.append(len(more))
            await asyncio.sleep(0)

    return behave


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_cut_off_soon(what: str) -> None:
    async def check() -> None:
        sent: list[int] = []
        before = peak_kib()
        async with (
            StubBackend(behaviour=endless(*ENDLESS[what], sent)) as one,
            running_router(one, cb_failure_threshold=10**6) as router,
        ):
            answer = await router.client.post("/v1/completions", json={"model": "m"})
            assert answer.status_code == 503
            assert sum(sent) < 30 * 2**20, "what sockets hold, and little more"
            assert peak_kib() - before < 60_000
            await until(lambda: _no_requests(router))

    uvloop.run(check())


async def _no_requests(router: RouterUnderTest) -> bool:
    return all(state["requests"] == 0 for state in (await router.states()).values())


def test_a_head_in_drips_gets_the_time_of_one_that_comes_at_once() -> None:
    async def check() -> None:
        async def drip(_: object, writer: asyncio.StreamWriter, seen: object) -> None:
            for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)

        async with StubBackend(behaviour=drip) as one, running_router(one, request_timeout_secs=0.5) as router:
            began = asyncio.get_running_loop().time()
            assert (await router.ask()).status_code == 504
            assert asyncio.get_running_loop().time() - began < 5

    run_steadily(check())


def test_a_stream_whose_parts_come_slowly_is_no_timeout_and_one_that_stops_is() -> None:
    async def check() -> None:
        async def slow(_: object, writer: asyncio.StreamWriter, seen: object) -> None:
            head, *parts = chunked(*[b"data: x\n\n"] * 8)
            writer.write(head)
            for part in parts:
                await asyncio.sleep(0.2)
                writer.write(part)
            writer.write(b"0\r\n\r\n")
            await writer.drain()

        async with StubBackend(behaviour=slow) as one, running_router(one, request_timeout_secs=1.0) as router:
            assert len((await router.ask()).content) == 8 * 9
            one.behaviour = raw(*chunked(b"data: x\n\n"), wait=asyncio.Event())
            with pytest.raises(Exception, match=r"closed|incomplete|peer"):
                await router.ask()
            assert await router.metric(
                f'quire:router_backend_failures_total{{backend="{one.url}",reason="timeout"}}'
            ) == 1  # fmt: skip

    run_steadily(check())


def test_small_chunks_cost_no_memory_and_arrive_whole() -> None:
    async def check() -> None:
        body = bytes(range(256)) * 400
        answer = HEAD + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        async with StubBackend(behaviour=raw(answer)) as one, running_router(one) as router:
            assert (await router.ask()).content == body

    uvloop.run(check())


def test_a_client_that_does_not_read_makes_the_server_wait_and_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SLOW_CLIENT_S", 0.5)

    async def check() -> None:
        sent: list[int] = []
        part = b"%x\r\n%s\r\n" % (2**16, b"x" * 2**16)
        async with StubBackend(behaviour=endless(HEAD, part, sent)) as one, running_router(one) as router:
            before = peak_kib()
            reader, writer = await ask_raw(router)
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(60):
                await one.aborted.wait()
            assert sum(sent) < 40 * 2**20, "what sockets hold"
            assert peak_kib() - before < 60_000
            assert router.router._app.num_open == 0
            writer.transport.abort()

    uvloop.run(check())


async def status_of(router: RouterUnderTest, data: bytes) -> int:
    """What these bytes are answered. An answer counts also where the connection is reset behind it, as the system does
    when bytes are on their way that nobody reads any more; a stream would lose it then."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", int(router.url.rpartition(":")[2])))
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, data)
        async with asyncio.timeout(60):
            return int((await loop.sock_recv(connection, 65_536)).split()[1])


async def ask_raw(router: RouterUnderTest, data: bytes | None = None) -> tuple[asyncio.StreamReader, Any]:
    """A connection on which a request was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    body = b'{"model": "m"}'
    writer.write(data or b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, (431,)),
        (b"NONSENSE\r\n\r\n", (400,)),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9", (408,)),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 900\r\n\r\n{", (400,)),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n{", (413,)),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", (400,)),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", (400,)),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", (400,)),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 20_000,
         (400, 431)),  # too slow, if all of it came in one part
        (b"GET /metrics HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
         b"sec-websocket-key: x\r\n\r\n", (200,)),
    ],
)  # fmt: skip
def test_clients_that_do_not_speak_http_as_they_should(
    data: bytes, statuses: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.5)
    monkeypatch.setattr(app, "BODY_S", 0.5)

    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            assert await status_of(router, data) in statuses
            assert one.seen == []
            assert (await router.ask()).status_code == 200

    run_steadily(check())


def test_a_client_cannot_smuggle_a_second_request_or_a_header() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            body = b'{"model": "m"}'
            smuggled = b"POST /v1/completions HTTP/1.1\r\nx: a\rb: c\r\ncontent-length: %d\r\n\r\n%s" % (
                len(body),
                body,
            )
            reader, writer = await ask_raw(router, smuggled)
            assert b" 400 " in await reader.readline()
            writer.transport.abort()
            chunks = b"e\r\n%s\r\n0\r\n\r\n" % body
            reader, writer = await ask_raw(
                router, b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\nx-a: \xff\t1\r\n\r\n" + chunks
            )
            assert b" 200 " in await reader.readline()
            writer.transport.abort()
            (seen,) = one.seen
            assert (seen.body, seen.headers["content-length"], seen.headers["x-a"]) == (body, "14", "\xff\t1")
            assert "transfer-encoding" not in seen.headers

    uvloop.run(check())


def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    async def check() -> None:
        async with StubBackend(behaviour=raw(HEAD, wait=asyncio.Event())) as one, running_router(one) as router:
            for round_ in range(5):
                leaving = [await ask_raw(router) for _ in range(40)]
                if round_ % 2:
                    await asyncio.sleep(0.05)
                for _, writer in leaving:
                    writer.transport.abort()
            await until(lambda: _no_requests(router))
            await until(lambda: router.router._app.num_open == 0)
            one.behaviour = raw(HEAD + b"2\r\nok\r\n0\r\n\r\n", close=False)
            assert (await router.ask()).text == "ok"

    uvloop.run(check())


HUGE = json.dumps({"data": [{"id": "m" * 1_000, "number": number} for number in range(20_000)]}).encode()


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (HUGE, "too large"),
        (b"[" * 100_000, "not OpenAI's"),
        (b'{"data": [{"id": 1}, 3]}', "not OpenAI's"),
        (b'{"data": []}', "no models"),
        (b"\xff", "not OpenAI's"),
    ],
)
def test_a_server_with_strange_lists_of_models_is_kept_out(models: bytes, said: str) -> None:
    async def check() -> None:
        async with StubBackend() as one, StubBackend("two") as two:
            one.models_page = models
            async with running_router(one, two, ready=False) as router:
                await until(lambda: _ready(router, two.url))
                await until(lambda: _says(router, one.url, said))
                assert (await router.ask()).json() == {"from": "two"}

    assert len(HUGE) > prober.MAX_BYTES
    uvloop.run(check())


async def _ready(router: RouterUnderTest, url: str) -> bool:
    return bool((await router.states())[url]["ready"])


async def _says(router: RouterUnderTest, url: str, said: str) -> bool:
    return said in (await router.states())[url]["reason"]
