"""Request heads that are too large, too slow or no HTTP."""

from __future__ import annotations

import http.client
import json
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.serving.api import http_server, request_body
from quire.serving.api.http_server import MAX_HEAD_BYTES, BoundedHttpProtocol
from tests.api.server import Server, running


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.3)
    with running(tmp_path) as server:
        yield server


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)


def answer(connection: socket.socket, request: bytes = b"") -> tuple[int, dict[str, object]]:
    """Status and error of the answer to a request, or to what was sent; after it the connection must be closed."""
    connection.sendall(request)
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def send_headers_for_ever(connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\nX-Large: ")
    for _ in range(1_000):
        connection.sendall(b"x" * 100_000)


def send_slowly(connection: socket.socket) -> None:
    for _ in range(600):
        connection.sendall(b"x")
        time.sleep(0.1)


def test_headers_up_to_the_limit_pass_and_beyond_it_not(server: Server) -> None:
    assert server.get("/version", headers={"X-Large": "x" * (MAX_HEAD_BYTES - 2_000)}).status_code == 200
    for head in (
        b"GET /version HTTP/1.1\r\nX-Large: " + b"x" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n",
        b"GET /version HTTP/1.1\r\n" + b"X-Many: y\r\n" * 10_000 + b"\r\n",
        b"GET /version HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEAD_BYTES // 5 + 1) + b"\r\n",
        b"GET /" + b"x" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n",
    ):
        with connect(server) as connection:
            connection.sendall(head)
            status, error = answer(connection)
            assert status == 431
            assert str(MAX_HEAD_BYTES) in str(error["message"])


def test_who_still_sends_gets_its_answer_and_no_reset(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset takes an answer away that was not read, from a client on a system that drops what it has received."""
    monkeypatch.setattr(http_server, "LINGER_S", 60.0)  # however late this client is
    with connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nX-Large: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert select.select([connection], [], [], 60)[0]
        for _ in range(5):
            connection.sendall(b"x" * 10_000)
            time.sleep(0.05)  # so that a reset would come
        assert answer(connection)[0] == 431


def test_a_request_behind_one_that_is_refused_is_not_run(server: Server) -> None:
    refused = b"GET /version HTTP/1.1\r\nX-Large: " + b"x" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(refused + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(connection)[0] == 431  # and one answer alone


def test_who_never_stops_sending_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 0.2)
    with connect(server) as connection:
        connection.sendall(b"HELLO\r\n\r\n")
        assert answer(connection)[0] == 400
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_slowly(connection)


def test_endless_headers_are_cut_off_and_cost_no_memory(server: Server) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connect(server) as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_headers_for_ever(connection)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; 100 MB were sent
    assert server.get("/version").status_code == 200


@pytest.mark.parametrize("trailers", [b"A: " + b"x" * 100_000, b"A: bcdef\r\n" * 10_000])
def test_trailers_without_end_are_cut_off(server: Server, trailers: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        connection.sendall(b"".join([head, b"2\r\n{}\r\n0\r\n", *[trailers] * 1_000]))
    assert server.get("/version").status_code == 200


def test_small_chunks_and_later_requests_of_a_connection_pass(server: Server) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 5_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connect(server) as connection:
        for _ in range(20):
            connection.sendall(head)
            for at in range(0, len(chunks), 1_000):
                connection.sendall(chunks[at : at + 1_000])
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 200
            response.read()


def test_headers_a_byte_at_a_time_run_out_of_time(hasty: Server) -> None:
    with connect(hasty) as connection:
        for byte in b"GET /version HTTP/1.1\r\nHost: " + b"x" * 3_000:
            connection.sendall(bytes([byte]))
            if select.select([connection], [], [], 0.01)[0]:
                break
        else:
            pytest.fail("each byte got a time of its own")
        status, error = answer(connection)
        assert (status, error["message"]) == (408, "The request's headers did not arrive in time.")


def test_a_body_a_byte_at_a_time_runs_out_of_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "READ_TIMEOUT_S", 0.3)
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        status = connection.recv(65536).split()[1]
        assert status == b"408"
    server.assert_all_free()


def test_a_connection_that_says_nothing_is_closed(hasty: Server) -> None:
    with connect(hasty) as connection:
        assert connection.recv(100) == b""


def test_later_requests_of_a_connection_have_their_own_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(request)  # comes in one piece: from its first byte to the end of its head no time passes
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert (response.status, bool(response.read())) == (200, True)
            monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.1)
            time.sleep(0.2)
        connection.sendall(request[:10])
        assert answer(connection)[0] == 408


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00", b"HELLO\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
def test_what_is_no_http_is_told_so(server: Server, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        status, error = answer(connection)
        assert (status, error["message"]) == (400, "This is no valid HTTP request.")
        assert set(error) == {"message", "type", "param", "code"}


def whole_answer(connection: socket.socket, request: bytes) -> tuple[bytes, bytes]:
    """Head and body, up to the end of the connection, which the server must close."""
    connection.sendall(request)
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return head.lower() + b"\r\n", body


def post(path: str, body: dict[str, object], version: str = "1.0", *headers: str) -> bytes:
    sent = json.dumps(body)
    head = f"POST {path} HTTP/{version}", "Content-Type: application/json", f"Content-Length: {len(sent)}", *headers
    return ("\r\n".join(head) + "\r\n\r\n" + sent).encode()


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",), ("Expect: 100-continue",)], ids=str)
def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(
    server: Server, headers: tuple[str, ...]
) -> None:
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    for path, body, first in (
        ("/v1/chat/completions", {**chat, "stream": True}, b"data: "),
        ("/v1/chat/completions", chat, b"{"),
        ("/v1/messages", {**chat, "model": "tiny", "stream": True}, b"event: message_start"),
        ("/api/chat", {**chat, "model": "tiny"}, b"{"),
        ("/v1/chat/completions", {**chat, "messages": []}, b'{"error"'),
    ):
        with connect(server) as connection:
            head, answered = whole_answer(connection, post(path, body, "1.0", *headers))
        assert head.startswith(b"http/1.1 ")  # and no 100
        assert not head.startswith(b"http/1.1 100")
        assert b"\r\ntransfer-encoding:" not in head
        assert b"\r\nconnection: close\r\n" in head
        assert answered.startswith(first)
        if b"content-length" in head:
            assert b"content-length: %d\r\n" % len(answered) in head
        assert answered.strip().endswith((b"[DONE]", b"}"))
    server.assert_all_free()


def test_a_client_of_http_1_1_gets_chunks_and_keeps_its_connection(server: Server) -> None:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(post("/v1/chat/completions", body, "1.1", "Host: x"))
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(65536)
            assert b"\r\ntransfer-encoding: chunked\r\n" in data
        head, _ = whole_answer(connection, post("/v1/chat/completions", body, "1.1", "Host: x", "Connection: close"))
        assert b"\r\ntransfer-encoding: chunked\r\n" in head


def test_a_request_of_http_1_0_without_a_body_is_answered(server: Server) -> None:
    for method, status in ((b"GET", b"200"), (b"HEAD", b"405")):
        with connect(server) as connection:
            head, body = whole_answer(connection, method + b" /version HTTP/1.0\r\n\r\n")
        assert head.startswith(b"http/1.1 " + status)
        assert b"\r\nconnection: close\r\n" in head
        assert bool(body) == (method == b"GET")


NO_UTF_8 = (
    b"/\xff", b"/%FF", b"/%00", b"/%ED%A0%80", b"/v1/models/%FF", b"/v1/models/\xff", b"/v1/responses/%FF",
    b"/v1/responses/%00", b"/v1/files/%FF/content", b"/v1/batches/%FF", b"/v1/files?after=%FF", b"/v1/files?\xff",
    b"/v1/batches?limit=%FF", b"http://x/%FF", b"http://x", b"//%FF", b"/%", b"*", b"?a",
)  # fmt: skip


@pytest.mark.parametrize("method", [b"GET", b"POST", b"DELETE"])
def test_a_path_or_query_that_is_no_utf_8_is_refused(server: Server, method: bytes) -> None:
    for path in NO_UTF_8:
        with connect(server) as connection:
            request = method + b" " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            status, error = answer(connection, request)
        assert status in (400, 404, 405, 415), path
        assert error["message"]
