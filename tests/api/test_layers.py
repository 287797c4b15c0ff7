"""Body limit, request ids, CORS, the front page, and failures that nobody foresaw."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.api.server import Server, resolved, running


def raw(server: Server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(65536)


@pytest.mark.parametrize("body", [b"Content-Length: 20000\r\n\r\n", b"Content-Length: 99999999999999999999999\r\n\r\n"])
def test_a_body_that_announces_too_much_is_not_read(tmp_path: Path, body: bytes) -> None:
    with running(tmp_path, max_request_bytes=10_000) as server:
        answer = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + body)
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_a_body_that_grows_too_much_is_left(tmp_path: Path) -> None:
    with running(tmp_path, max_request_bytes=10_000) as server:
        answer = server.http.post(server.url + "/v1/completions", content=(b"x" * 1_000 for _ in range(50)))
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == (
            "The request body is larger than the 10000 bytes that this server reads."
        )
        fits = b'{"prompt": "a"' + b" " * 9_000 + b"}"
        assert server.http.post(server.url + "/v1/completions", content=fits).status_code == 200


def test_a_decent_request_id_is_kept_and_sent_back(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    own = server.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    assert (own.headers["x-request-id"], own.json()["id"]) == ("mine-1", "cmpl-mine-1")
    for bad in ("", "a b", "x" * 129, "<script>", "a\tb"):
        answer = server.post("/v1/completions", body, headers={"X-Request-Id": bad})
        assert "x-request-id" not in answer.headers
        assert len(answer.json()["id"]) == len("cmpl-") + 32


def test_request_ids_can_be_sent_always(tmp_path: Path) -> None:
    with running(tmp_path, enable_request_id_headers=True) as server:
        assert len(server.get("/health").headers["x-request-id"]) == 32


def test_cors_as_configured(tmp_path: Path) -> None:
    with running(tmp_path, allowed_origins=("https://a.example",), allowed_methods=("POST",)) as server:
        allowed = server.get("/version", headers={"Origin": "https://a.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert (
            "access-control-allow-origin" not in server.get("/version", headers={"Origin": "https://b.example"}).headers
        )


def test_a_failure_inside_is_not_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the password is 1234, see /etc/shadow")

    monkeypatch.setattr(server.session, "add_request", broken)
    answer = server.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "r1", "Origin": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "Something failed inside the server. Its log has the details under request id r1.",
        "type": "server_error", "param": None, "code": "internal_error",
    }  # fmt: skip
    assert answer.headers["x-request-id"] == "r1"
    assert answer.headers["access-control-allow-origin"] == "*"


def test_a_failure_inside_a_stream_is_its_last_event(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("quire.text.text_stream.ChoiceState.process", broken)
    answer = server.post("/v1/completions", {"prompt": "a", "stream": True})
    assert answer.status_code == 200
    assert answer.text.count("data: ") == 2
    assert '"code":"internal_error"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "secret" not in answer.text
    monkeypatch.undo()
    server.assert_all_free()


def test_the_front_page_needs_nothing_from_elsewhere(server: Server) -> None:
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_openapi_document_knows_every_body(server: Server) -> None:
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"ChatMessage", "ContentPart", "StreamOptions"} <= set(schemas)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert document["paths"][path]["post"]["requestBody"]["required"] is True
    text = str(document)
    for name in text.split("#/components/schemas/")[1:]:
        assert name.split("'")[0] in schemas


def test_docs_can_be_switched_off(tmp_path: Path) -> None:
    with running(tmp_path, disable_fastapi_docs=True) as server:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert server.get(path).status_code == 404


def test_debug_routes_are_for_developers(tmp_path: Path) -> None:
    with running(tmp_path, developer_mode=False) as server:
        assert server.get("/debug/counts").status_code == 404


def test_the_application_loads_nothing_heavy(tmp_path: Path) -> None:
    resolved(tmp_path)
    heavy = ("torch", "transformers", "openai", "numpy", "sentencepiece", "httpx")
    code = f"import sys, quire.serving.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_huge_prompt_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    async def longest_pause() -> float:
        """By what this process has computed meanwhile: the time of others on the machine does not count."""
        worst, last = 0.0, time.process_time()
        while not finished.is_set():
            await asyncio.sleep(0.001)
            now = time.process_time()
            worst, last = max(worst, now - last), now
        return worst

    finished = threading.Event()
    with running(tmp_path) as server:
        measured = asyncio.run_coroutine_threadsafe(longest_pause(), server.loop)
        begin = time.process_time()
        answer = server.post("/tokenize", {"prompt": "the quick brown fox " * 400})
        assert answer.json()["count"] > 1_000
        answer = server.post("/v1/completions", {"prompt": "the quick brown fox " * 100_000})
        assert answer.status_code == 400
        finished.set()
        assert measured.result(60) < max(0.25, (time.process_time() - begin) / 2)
