"""What a 404 says: of a route that a flag would add, of one that is not served yet, and of any other path."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.routing import Route

from quire.serving.api.error_responses import UNKNOWN, absent_route_message
from tests.api.server import KEY, Server, running


def said(server: Server, method: str, path: str) -> str:
    answer = server.http.request(method, server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 404
    body = answer.json()
    return str(body["error"] if path.startswith("/api/") else body["error"]["message"])


def routes(server: Server) -> set[tuple[str, str]]:
    return {
        (method, route.path)
        for route in server.app.router.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and "{" not in route.path
    }


def test_every_route_that_settings_add_says_which(tmp_path: Path) -> None:
    with running(tmp_path, enable_tokenizer_info_endpoint=True, enable_lora=True) as server:
        everything = routes(server)
    with running(tmp_path, developer_mode=False, disable_fastapi_docs=True) as server:
        missing = everything - routes(server)
        assert {path for _, path in missing} >= {"/pause", "/v1/load_lora_adapter", "/tokenizer_info", "/debug/counts"}
        for method, path in missing:
            message = said(server, method, path)
            assert path in message
            assert "--" in message or "developer mode" in message


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        ({}, "/reset_prefix_cache", ("--api-key", "VLLM_SERVER_DEV_MODE=1")),
        ({"enable_lora": True}, "/v1/load_lora_adapter", ("--api-key", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")),
        ({"api_key": (KEY,)}, "/v1/load_lora_adapter", ("--enable-lora",)),
        ({}, "/generative_scoring", ("/generative_scoring is not served yet",)),
        ({}, "/sleep", ("/sleep is not served yet", "POST /admin/model")),
        ({"root_path": "/x"}, "/x/v1/realtime", ("/v1/realtime is not served yet",)),
    ],
)
def test_a_404_says_what_is_missing(
    tmp_path: Path, settings: dict[str, object], path: str, words: tuple[str, ...]
) -> None:
    with running(tmp_path, developer_mode=False, **settings) as server:
        message = said(server, "POST", path)
        assert all(word in message for word in words), message
        assert said(server, "POST", "/v1/nothing") == UNKNOWN


def test_a_path_with_braces_is_not_formatted() -> None:
    assert absent_route_message("/{path}") == UNKNOWN
