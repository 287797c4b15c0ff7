"""What a request may cost the event loop, in calls of Python functions: they are the same on every machine."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest
from starlette.types import Message, Scope

from quire.foundation.messages.from_engine import Deltas, Load
from tests.api.scripted import ScriptedClient
from tests.api.server import Server

FULL = Load(running=16, waiting=500, queued_tokens=10**6, tokens_per_s=1_000.0)
MAX_CALLS_OF_A_REFUSAL = 130


class CountedCalls:
    """Calls of Python functions inside the block."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> CountedCalls:
        sys.setprofile(self._on_event)
        return self

    def _on_event(self, frame: Any, event: str, argument: Any) -> None:
        self.number += event == "call"

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


async def refuse(server: Server) -> tuple[int, int]:
    """The status of a request whose body never comes, and the calls that it took."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"1000")]
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "root_path": "", "query_string": b"",
        "headers": headers, "client": None, "server": None, "state": {},
    }  # fmt: skip
    said: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("its body is not read")

    async def send(message: Message) -> None:
        said.append(message)

    numbers = []
    for _ in range(5):  # neither what is built at the first counts, nor what a search for garbage calls
        said.clear()
        with CountedCalls() as calls:
            await server.app({**scope, "state": {}}, receive, send)
        numbers.append(calls.number)
    return said[0]["status"], min(numbers)


def test_to_turn_a_request_away_takes_few_calls_and_not_its_body(
    scripted: tuple[Server, ScriptedClient], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "quire.access")  # what pytest does with a line of the log would count
    server, engine = scripted
    engine.say(Deltas([], [], [], load=FULL))

    async def until_full() -> None:
        while not server.session.admission_limit.sequences:
            await asyncio.sleep(0.001)

    server.in_loop(until_full())
    status, calls = server.in_loop(refuse(server))
    assert status == 429
    assert calls <= MAX_CALLS_OF_A_REFUSAL
