"""/v1/responses on the wire: events, each checked against the types of the `openai` package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent

from tests.api.openai_types import check, unknown_fields
from tests.api.server import Server

TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
"""Of an answer that is one text, in front of what ends it."""


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def response_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """A response, whose types were checked."""
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    assert unknown_fields(check(Response, response)) == []
    return response


def events_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire, each checked."""
    with server.http.stream("POST", server.url + "/v1/responses", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return checked_events("".join(answer.iter_text()))


def checked_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert unknown_fields(check(ResponseStreamEvent, events[-1])) == []
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """Types of events, without repetitions in a row."""
    names = [event["type"] for event in events]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
