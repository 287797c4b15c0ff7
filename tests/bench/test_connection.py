"""The load generator's HTTP: connections are used again, answers of every framing end where they end."""

from __future__ import annotations

import asyncio

import pytest

from quire.foundation.http_client.http1 import HttpAddress, HttpError
from quire.tools.bench.client import Connections

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nabcde"
CLOSING = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nabcde"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcde"


async def asked(answer: bytes, times: int, *, hang_up: bool = False) -> tuple[list[tuple[int, bytes]], int]:
    """Statuses and bodies of requests one after another, and how many connections they took."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        try:
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /root/path HTTP/1.1\r\n"):
                assert await reader.readexactly(2) == b"{}"
                for at in range(len(answer)):  # answers do not come in one piece
                    writer.write(answer[at : at + 1])
                    await writer.drain()
                if hang_up:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    answers = []
    async with server, Connections(f"http://127.0.0.1:{port}/root", 5.0, {"X": "y"}) as connections:
        for _ in range(times):
            pieces: list[bytes] = []
            status = await connections.post("/path", b"{}", pieces.append)
            answers.append((status, b"".join(pieces)))
    return answers, opened


@pytest.mark.parametrize(("answer", "status"), [(CHUNKED, 200), (SIZED, 404)])
def test_a_connection_is_used_again(answer: bytes, status: int) -> None:
    assert asyncio.run(asked(answer, 3)) == ([(status, b"abcde")] * 3, 1)


def test_one_that_the_server_closes_is_not() -> None:
    assert asyncio.run(asked(CLOSING, 2, hang_up=True)) == ([(200, b"abcde")] * 2, 2)


def test_one_that_the_server_closed_while_it_was_idle_is_replaced() -> None:
    assert asyncio.run(asked(SIZED, 2, hang_up=True)) == ([(404, b"abcde")] * 2, 2)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    assert asyncio.run(asked(UNTIL_CLOSED, 2, hang_up=True)) == ([(200, b"abcde")] * 2, 2)


def test_an_answer_that_breaks_off_is_an_error() -> None:
    with pytest.raises(HttpError):
        asyncio.run(asked(CHUNKED[:-6], 1, hang_up=True))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="no HTTP address"):
        HttpAddress.of(url)


def test_a_header_cannot_end_its_line() -> None:
    with pytest.raises(ValueError, match="the header 'X' has a line break"):
        Connections("http://127.0.0.1:1", 5.0, {"X": "y\r\nHost: elsewhere"})
