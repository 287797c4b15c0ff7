"""Endpoints that are found by one lookup answer as those that FastAPI's router finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Scope

from quire.errors import RequestError
from quire.serving.app import DirectRoutesMiddleware
from tests.api.server import Server, running

GENERATING = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/invocations",
    "/api/chat",
    "/api/generate",
]
OTHER_SHAPES = ("/v1/messages", "/api/chat", "/api/generate")
"""Their errors have a shape of their own, behind the prefix of a proxy OpenAI's."""


@pytest.fixture(scope="module")
def behind_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its proxy leaves the prefix in the path, so that nothing is found directly."""
    with running(tmp_path_factory.mktemp("model"), root_path="/llm") as server:
        yield server


def test_the_prefix_of_a_proxy_is_taken_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    with running(tmp_path, root_path="/llm") as server:
        assert server.get("/llm/version").status_code == server.get("/version").status_code == 200
        assert server.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert [str(warning.message) for warning in recwarn if "root_path" in str(warning.message)] == []


def ask(app: Any, method: str, path: str) -> tuple[int, bytes, Scope]:
    """Status, body and scope of an answer."""
    return asyncio.run(_ask(app, method, path))


async def _ask(app: Any, method: str, path: str) -> tuple[int, bytes, Scope]:
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "state": {}}
    said: list[Message] = []

    async def send(message: Message) -> None:
        said.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive, send)
    return said[0]["status"], said[1]["body"], scope


def routed() -> FastAPI:
    app = FastAPI()

    @app.post("/plain")
    async def plain(request: Request) -> Response:
        return PlainTextResponse("direct")

    @app.post("/refuses")
    async def refuses(request: Request) -> Response:
        raise RequestError("No.", param="it")

    @app.post("/unsupported")
    async def unsupported(request: Request) -> Response:
        raise HTTPException(415, "Not this.", {"X-Why": "because"})

    @app.post("/of/{name}")
    async def named(request: Request, name: str) -> Response:
        return PlainTextResponse(name)

    @app.post("/asked")
    async def asked(request: Request, query: int = 0) -> Response:
        return PlainTextResponse(str(query))

    @app.get("/plain")
    async def got(request: Request) -> Response:
        return PlainTextResponse("got")

    return app


async def router(scope: Scope, receive: Any, send: Any) -> None:
    await PlainTextResponse("router")(scope, receive, send)


def test_posts_to_endpoints_that_take_a_request_alone_are_direct_and_nothing_else_is() -> None:
    direct = DirectRoutesMiddleware(router, routes=routed().routes)
    status, body, scope = ask(direct, "POST", "/plain")
    assert (status, body, scope["route"].path) == (200, b"direct", "/plain")
    others = [("GET", "/plain"), ("POST", "/of/x"), ("POST", "/asked"), ("POST", "/nothing"), ("OPTIONS", "/plain")]
    for method, path in others:
        assert ask(direct, method, path)[1] == b"router", (method, path)


def test_errors_become_answers() -> None:
    direct = DirectRoutesMiddleware(router, routes=routed().routes)
    status, body, _ = ask(direct, "POST", "/refuses")
    assert (status, b'"No."' in body, b'"it"' in body) == (400, True, True)
    status, body, _ = ask(direct, "POST", "/unsupported")
    assert (status, b'"Not this."' in body) == (415, True)


def test_all_generating_endpoints_are_direct(server: Server) -> None:
    direct = DirectRoutesMiddleware(router, routes=server.app.router.routes)
    assert set(GENERATING) <= direct.paths
    posts = {route.path for route in server.app.router.routes if isinstance(route, APIRoute)}
    assert "/v1/files/{file_id}" in posts
    assert not any("{" in path for path in direct.paths)


@pytest.mark.parametrize("path", [path for path in GENERATING if path not in OTHER_SHAPES])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"prompt": "ab", "max_tokens": 2, "stream": false}', "application/json"),
        (b"{", "application/json"),
        (b"{}", "text/plain"),
        (b'{"model": "another", "messages": [{"role": "user", "content": "a"}], "prompt": "a"}', "application/json"),
    ],
)
def test_answers_are_those_of_the_router(
    server: Server, behind_proxy: Server, path: str, body: bytes, kind: str
) -> None:
    headers = {"Content-Type": kind, "Origin": "https://a.example", "X-Request-Id": "r-1"}
    direct = server.http.post(server.url + path, content=body, headers=headers)
    found = behind_proxy.http.post(f"{behind_proxy.url}/llm{path}", content=body, headers=headers)
    assert direct.status_code == found.status_code
    varies = ("date", "content-length")
    assert {name: value for name, value in direct.headers.items() if name not in varies} == {
        name: value for name, value in found.headers.items() if name not in varies
    }
    if direct.status_code != 200:
        assert direct.content == found.content


def test_the_handler_of_a_direct_answer_is_counted(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.post("/v1/completions", {"prompt": "ab", "max_tokens": 1})
        server.post("/v1/completions", {"prompt": []})
        answers = server.session.stats.http.answers
        deadline = time.monotonic() + 20
        while sum(answers.values()) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)  # an answer is counted when it is over
        counted = {answered: number for answered, number in answers.items() if answered.method == "POST"}
        assert counted == {("POST", "/v1/completions", "2xx"): 1, ("POST", "/v1/completions", "4xx"): 1}
