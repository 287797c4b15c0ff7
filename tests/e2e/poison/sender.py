"""Sends poison to a server and says what came back. Plain sockets and threads: the streams beside it are asyncio's."""

from __future__ import annotations

import re
import socket
import time
from urllib.parse import urlsplit

import httpx

from tests.e2e.poison.poison import Poison

ANSWER_S = 180.0
"""A crowd of 1,024 sequences takes some seconds, and a machine that is shared ten times as long."""
LEAKS = re.compile(rb"Traceback|0x[0-9a-f]{6,}|\.py\b|site-packages")
CLOSED = 0


def send(url: str, poison: Poison, body: bytes | None = None) -> tuple[int, str]:
    """The status of the answer, CLOSED without one, and what is wrong with its text; empty if nothing is.

    Args:
        body: The poison's, if it is made already.
    """
    if poison.wire is not None:
        return _send_wire(url, poison)
    return _send_body(url, poison, poison.body() if body is None else body)


def _send_body(url: str, poison: Poison, body: bytes) -> tuple[int, str]:
    try:
        answer = httpx.request(poison.method, url + poison.path, content=body, headers=poison.headers, timeout=ANSWER_S)
    except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):
        return CLOSED, ""
    if answer.status_code == 200:
        return 200, ""
    if "error" not in answer.json():
        return answer.status_code, f"no error in {answer.text[:200]}"
    leak = LEAKS.search(answer.content)
    return answer.status_code, f"it leaks {leak[0]!r}" if leak else ""


def _send_wire(url: str, poison: Poison) -> tuple[int, str]:
    assert poison.wire is not None
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=ANSWER_S) as connection:
        try:
            for part in poison.wire():
                connection.sendall(part)
                time.sleep(poison.pause_s)
            if poison.hang_up:
                return CLOSED, ""
            answer = _read(connection)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
    first = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    leak = LEAKS.search(answer)
    return int(first[1]) if first else CLOSED, f"it leaks {leak[0]!r}" if leak else ""


def _read(connection: socket.socket) -> bytes:
    """What comes until the other side closes, or has said nothing for a while behind an answer."""
    answer = b""
    while True:
        if answer:
            connection.settimeout(0.3)
        try:
            data = connection.recv(2**16)
        except TimeoutError:
            return answer
        if not data:
            return answer
        answer += data
