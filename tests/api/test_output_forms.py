"""Forms of the output over HTTP: what strict means, and whose fault an output without a next token is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.foundation.messages.from_engine import Deltas, End
from tests.api.scripted import ScriptedClient
from tests.api.server import Server
from tests.api.speaker import Speaker

LOOSE = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "format": "path"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def _asked(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}])
def test_without_strict_what_cannot_be_enforced_is_left_out(server: Server, strict: dict[str, Any]) -> None:
    assert server.post("/v1/chat/completions/render", _asked(LOOSE, **strict)).status_code == 200


@pytest.mark.parametrize("body", [
    _asked(LOOSE, strict=True), {**CHAT, "structured_outputs": {"json": LOOSE}}, {**CHAT, "guided_json": LOOSE},
])  # fmt: skip
def test_a_strict_schema_is_refused_by_the_keyword_and_its_place(server: Server, body: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "keyword 'uniqueItems' is not supported here (at /properties/tags)" in answer.json()["error"]["message"]


def test_structured_outputs_may_be_not_strict(server: Server) -> None:
    body = {**CHAT, "structured_outputs": {"json": LOOSE, "strict": False}}
    assert server.post("/v1/chat/completions/render", body).status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_tool_that_must_be_called_is_enforced_as_far_as_its_strict_says(
    conversations: tuple[Server, Speaker], choice: Any
) -> None:
    server, _ = conversations
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        function = {"name": "get", "parameters": LOOSE, "strict": strict}
        body = {**CHAT, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
        answer = server.post("/v1/chat/completions/render", body)
        assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    named = "the parameters of the function 'get': keyword 'uniqueItems' is not supported here (at /properties/tags)"
    assert named in message
    assert "json" not in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_an_output_that_its_form_leaves_no_token_is_the_requests_error(
    scripted: tuple[Server, ScriptedClient], stream: bool, begun: bool
) -> None:
    server, engine = scripted
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.post, "/v1/chat/completions", {**_asked({"type": "integer"}), "stream": stream})
        (add,) = engine.wait_for_adds(1)
        if begun:
            engine.tokens(add, [5])
        engine.say(Deltas([], [], [], ends=[End(add.id, "refused", "No token is left to draw.")]))
        answer = asked.result()
    if stream:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        error = json.loads(events[-1])["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "response_format"
    assert error["message"] == "response_format: No token is left to draw."


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/messages", {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
         "output_config.format"),
        ("/api/chat", {"model": "", "stream": False, "format": {"type": "integer"}}, "format"),
    ],
)  # fmt: skip
def test_a_late_error_about_the_form_names_the_field_that_was_sent(
    scripted: tuple[Server, ScriptedClient], path: str, fields: dict[str, Any], name: str
) -> None:
    server, engine = scripted
    body = {**fields, "messages": [{"role": "user", "content": "Go."}]}
    if "model" in fields:
        body["model"] = server.get("/v1/models").json()["data"][0]["id"]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.post, path, body)
        (add,) = engine.wait_for_adds(1)
        engine.say(Deltas([], [], [], ends=[End(add.id, "refused", "No token is left to draw.")]))
        answer = asked.result()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]) == f"{name}: No token is left to draw."
