"""A server that does what a test says, at almost no cost: raw asyncio, one thread, OpenAI's routes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Body = dict[str, Any]
Answer = Callable[[Body, asyncio.StreamWriter], Awaitable[None]]
HEAD = "HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"


def event(**fields: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    """A chunk of a completion."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


async def tokens(
    body: Body,
    writer: asyncio.StreamWriter,
    *,
    gap: float = 0.0,
    before_each: Callable[[], Awaitable[None]] | None = None,
    cached: int | None = None,
) -> None:
    """As many tokens as asked, `gap` seconds apart, each once `before_each` returns; then usage and [DONE]."""
    writer.write(HEAD.format(status=200, kind="text/event-stream").encode())
    count = body.get("max_tokens") or body["max_completion_tokens"]
    for number in range(count):
        if gap and number:
            await asyncio.sleep(gap)
        if before_each is not None:
            await before_each()
        if "messages" in body:
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            said = event(choices=[{"delta": {"content": "x"}, "finish_reason": None}])
            writer.write(said if number else event(choices=[opening]) + said)
        else:
            writer.write(text_event("x"))
        await writer.drain()
    prompt = body.get("prompt") or body["messages"][0]["content"]
    usage: Body = {"prompt_tokens": len(prompt), "completion_tokens": count}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    writer.write(text_event("", "length") + event(choices=[], usage=usage) + b"data: [DONE]\n\n")


class ScriptedServer:
    """Listens on a free port in a thread; a context that ends it.

    Attributes:
        bodies: Of all generation requests, in order.
        metrics: What /metrics shows.
        health: Status of /health.
        max_open: Most generation requests at one time.
    """

    def __init__(self, answer: Answer = tokens) -> None:
        self._answer = answer
        self.bodies: list[Body] = []
        self.headers: list[str] = []
        self.metrics = ""
        self.health = 200
        self.max_open = self._open = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._ended.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        path = head.split(" ")[1]
        if path.startswith("/v1/") and path != "/v1/models":
            self.bodies.append(body)
            self.headers.append(head)
            self._open += 1
            self.max_open = max(self.max_open, self._open)
            await self._answer(body, writer)
            self._open -= 1
        else:
            self._page(path, body, writer)
        await writer.drain()
        writer.close()

    def _page(self, path: str, body: Body, writer: asyncio.StreamWriter) -> None:
        pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/health": {},
            "/tokenize": {"tokens": [ord(c) for c in body.get("prompt", "")]},
            "/detokenize": {"prompt": "".join(map(chr, body.get("tokens", [])))},
        }
        status = self.health if path == "/health" else 200
        text = self.metrics if path == "/metrics" else json.dumps(pages[path])
        writer.write(HEAD.format(status=status, kind="text/plain").encode() + text.encode())
