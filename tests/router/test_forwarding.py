"""A request and its answer pass the router as they are; what belongs to a connection does not."""

from __future__ import annotations

import asyncio

import uvloop

from tests.router.stubs import RouterUnderTest, StubBackend, chunked, json_answer, raw, running_router, until

SSE = [b'data: {"a": "\xc3\xa4"}\n\n', b": comment\r\n\r\n", b"da", b"ta: [DO", b"NE]\n\n"]


def test_an_answer_is_the_servers() -> None:
    async def check() -> None:
        async with StubBackend("one") as one, running_router(one) as router:
            answer = await router.ask(
                "hi", headers={"X-Mine": "1", "Connection": "X-Hop", "X-Hop": "2"}, params={"q": "%2F"}
            )
            assert answer.status_code == 200
            assert answer.json() == {"from": "one"}
            assert answer.headers["x-from"] == "one"
            (seen,) = one.seen
            assert seen.path == "/v1/completions?q=%252F"
            assert seen.body == answer.request.content
            assert seen.headers["x-mine"] == "1"
            assert seen.headers["host"] == one.url.removeprefix("http://")
            assert seen.headers["x-forwarded-for"] == "127.0.0.1"
            assert seen.headers["x-request-id"]
            assert "x-hop" not in seen.headers
            assert "connection" not in seen.headers

    uvloop.run(check())


def test_a_stream_has_the_same_bytes() -> None:
    async def check() -> None:
        async with StubBackend(behaviour=raw(*chunked(*SSE), b"0\r\n\r\n")) as one, running_router(one) as router:
            answer = await router.ask()
            assert answer.content == b"".join(SSE)
            assert answer.headers["content-type"] == "text/event-stream"

    uvloop.run(check())


def test_a_client_of_http_1_0_gets_the_same_bytes_without_chunks() -> None:
    async def check() -> None:
        async with StubBackend(behaviour=raw(*chunked(*SSE), b"0\r\n\r\n")) as one, running_router(one) as router:
            answer = await _answer(router, b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert body == b"".join(SSE)
            assert b"transfer-encoding" not in head.lower()
            assert b"\r\nconnection: close" in head.lower()

    uvloop.run(check())


def test_a_path_or_query_that_is_no_utf_8_is_refused() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            for path in (
                b"/%FF",
                b"/\xff",
                b"/v1/completions/%FF",
                b"/v1/completions?\xff",
                b"http://x",
                b"*",
                b"/%00",
            ):
                request = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}" % path
                answer = await _answer(router, request)
                assert answer[9:12] in (b"400", b"404"), path
                assert b'{"error"' in answer
            assert not one.seen
            passed = await _answer(router, b"POST /v1/completions?a=%FF HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
            assert passed[9:12] == b"200"
            assert one.seen[0].path == "/v1/completions?a=%FF"

    uvloop.run(check())


async def _answer(router: RouterUnderTest, request: bytes) -> bytes:
    """All bytes up to the end of the connection."""
    reader, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_each_part_of_a_stream_comes_before_the_next_is_made() -> None:
    async def check() -> None:
        turns = [asyncio.Event() for _ in SSE]

        async def behave(_: object, writer: asyncio.StreamWriter, seen: object) -> None:
            head, *parts = chunked(*SSE)
            writer.write(head)
            for part, turn in zip(parts, turns, strict=True):
                writer.write(part)
                await turn.wait()
            writer.write(b"0\r\n\r\n")
            await writer.drain()

        async with StubBackend(behaviour=behave) as one, running_router(one) as router:
            async with router.client.stream("POST", "/v1/completions", json={"model": "m"}) as answer:
                got = []
                async for part in answer.aiter_raw():
                    got.append(part)
                    turns[len(got) - 1].set()
            assert got == SSE

    uvloop.run(check())


def test_trace_context_and_request_id_go_on_as_they_are() -> None:
    async def check() -> None:
        trace = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=1,b=2"}
        async with StubBackend() as one, running_router(one) as router:
            answer = await router.ask(headers={**trace, "X-Request-Id": "mine-1", "X-Forwarded-For": "10.1.1.1"})
            assert answer.headers["x-request-id"] == "mine-1"
            headers = one.seen[0].headers
            assert {name: headers[name] for name in trace} == trace
            assert headers["x-request-id"] == "mine-1"
            assert headers["x-forwarded-for"] == "10.1.1.1, 127.0.0.1"

    uvloop.run(check())


def test_an_error_of_a_server_is_passed_on() -> None:
    async def check() -> None:
        async with StubBackend("one", behaviour=json_answer("one", 422)) as one, running_router(one) as router:
            answer = await router.ask()
            assert (answer.status_code, answer.json()) == (422, {"from": "one"})

    uvloop.run(check())


def test_what_operates_a_server_is_not_reached() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            for method, path in (
                ("POST", "/pause"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/files"), ("GET", "/debug/counts"),
                ("POST", "/v1/completions/../../pause"), ("POST", "//v1/completions"), ("DELETE", "/v1/completions"),
                ("POST", "/v1/%63ompletions%2f..%2f..%2fpause"),
            ):  # fmt: skip
                request = router.client.build_request(method, router.url + "/x", json={"model": "m"})
                request.url = request.url.copy_with(raw_path=path.encode())
                answer = await router.client.send(request)
                assert answer.status_code == 404, path
                assert "does not serve" in answer.json()["error"]["message"]
            assert one.seen == []

    uvloop.run(check())


def test_a_large_body_is_refused_and_a_bad_one_too() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one, max_request_bytes=1_000) as router:
            assert (await router.ask("x" * 2_000)).status_code == 413
            for body in (b"{", b"[]", b'{"model": 3}', b"\xff", b'"m"', b"[" * 900):
                answer = await router.client.post("/v1/completions", content=body)
                assert answer.status_code == 400, body
                assert answer.json()["error"]["type"] == "invalid_request_error"
            assert one.seen == []
            assert (await router.ask()).status_code == 200

    uvloop.run(check())


def test_errors_of_the_router_have_the_shape_of_the_endpoint() -> None:
    async def check() -> None:
        async with StubBackend() as one, running_router(one) as router:
            answer = await router.client.post("/v1/messages", json={"model": "other", "messages": []})
            assert answer.status_code == 404
            assert answer.json()["type"] == "error", "Anthropic's"
            ollama = await router.client.post("/api/chat", json={"model": "other"})
            assert isinstance(ollama.json()["error"], str)

    uvloop.run(check())


async def leave(router: RouterUnderTest, server: StubBackend, begun: bool) -> None:
    """Ask, and leave once the server has the request, or the answer has begun."""
    body = {"model": "m", "prompt": "hi"}
    if begun:
        async with router.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
        return
    asking = asyncio.ensure_future(router.client.post("/v1/completions", json=body))
    await until(lambda: bool(server.seen))
    asking.cancel()
    await asyncio.wait({asking})


def test_an_abandoned_request_is_aborted_at_the_server() -> None:
    async def check() -> None:
        never = asyncio.Event()
        async with StubBackend(behaviour=raw(wait=never)) as one, running_router(one) as router:
            for begun in ((), chunked(b"data: 1\n\n")):
                one.aborted.clear()
                one.behaviour = raw(*begun, wait=never)
                one.seen.clear()
                async with asyncio.timeout(60):
                    await leave(router, one, begun=bool(begun))
                    await one.aborted.wait()
            assert (await router.states())[one.url]["requests"] == 0

    uvloop.run(check())
