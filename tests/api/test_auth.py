"""Without a key, nothing but a short list of public routes answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.routing import Route

from quire.serving.api.auth import PUBLIC
from tests.api.server import KEY, Server, running

EXPECTED_PUBLIC = {
    "/", "/health", "/ready", "/ping", "/version", "/load", "/metrics",
    "/docs", "/docs/files/{name}", "/page/{version}/{name:path}", "/redoc", "/openapi.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("model"), api_key=("another", KEY)) as server:
        yield server


def ask(server: Server, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """The answer, read unless it is a stream of events, which may have no end."""
    body = {} if method == "POST" else None
    with server.http.stream(method, server.url + path, json=body, headers=headers) as answer:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.read()
    return answer


def test_every_route_is_public_on_purpose_or_guarded(guarded: Server) -> None:
    assert PUBLIC == EXPECTED_PUBLIC
    seen = 0
    for route in guarded.app.router.routes:
        assert isinstance(route, Route), "a mounted application would need a look of its own"
        for method in route.methods or ():
            path = route.path.replace("{name:path}", "tiny").replace("{name}", "swagger-ui.css")
            answer = ask(guarded, method, path, {})
            if route.path in PUBLIC:
                assert answer.status_code != 401, path
            else:
                assert answer.status_code == 401, path
                if not path.startswith(("/v1/messages", "/api/")):  # whose errors have other shapes
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                allowed = {"Authorization": f"Bearer {KEY}"}
                answer = ask(guarded, method, path, allowed)
                assert answer.status_code in (200, 400, 404, 415, 503), path  # let in, whatever it says then
            seen += 1
    assert seen >= 18


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Token {KEY}",
    ],
)
def test_a_wrong_key_is_no_key(guarded: Server, header: str) -> None:
    answer = guarded.get("/v1/models", headers={"Authorization": header} if header else {})
    assert answer.status_code == 401
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("key", ["another", KEY])
def test_each_key_opens(guarded: Server, key: str) -> None:
    assert guarded.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "target",
    ["/v1/models", "/V1/models", "//v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models",
     "/v1/models?x=/health", "/v1%2fmodels", "/v1/models/", "/health/", "/nothing", "/v1/models#/health", "http://x/health/../v1/models"],
)  # fmt: skip
@pytest.mark.parametrize("host", ["x", "x/health", "x/health?", "localhost/docs#"])
def test_no_spelling_and_no_host_leads_around(guarded: Server, target: str, host: str) -> None:
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "X-Forwarded-Prefix: /health", "X-Original-URL: /health",
             "X-Forwarded-For: 127.0.0.1", "Connection: close", "", ""]  # fmt: skip
    with socket.create_connection(("127.0.0.1", int(guarded.url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        status = connection.makefile("rb").readline().split()[1]
    assert status in (b"401", b"307", b"400"), status
    assert status != b"200"


@pytest.mark.parametrize("key", ["another", KEY])
def test_anthropics_header_opens_as_well(guarded: Server, key: str) -> None:
    assert guarded.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    assert guarded.get("/v1/models", headers={"x-api-key": key + "x"}).status_code == 401


def test_a_public_route_is_public_for_its_own_methods_only(guarded: Server) -> None:
    assert guarded.post("/health", {}).status_code == 401
    assert guarded.http.delete(guarded.url + "/metrics").status_code == 401


def test_preflights_need_no_key(guarded: Server) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = guarded.http.options(guarded.url + "/v1/chat/completions", headers=headers)
    assert answer.status_code == 200
    refused = guarded.get("/v1/models", headers={"Origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
