"""Forms of the output over HTTP: what strict means, and whose fault an output without a next token is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.foundation.messages.from_engine import Deltas, End
from tests.api.scripted import ScriptedClient
from tests.api.server import Server
from tests.api.speaker import Speaker, speaking

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


@pytest.fixture(scope="module")
def formed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    """A server whose model is held to grammars, and what it says."""
    with speaking(tmp_path_factory.mktemp("model"), masked=True, max_model_len=1024) as both:
        yield both


def _answer(server: Server, body: dict[str, Any], *, stream: bool) -> tuple[str, dict[str, Any]]:
    """How an answer ended, and its error if it has one."""
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 200, "stream": stream})
    if not stream:
        found = answer.json()
        return ("", {**found["error"], "status": answer.status_code}) if "error" in found else (
            found["choices"][0]["finish_reason"], {}
        )  # fmt: skip
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    ends = [choice["finish_reason"] for event in events for choice in event.get("choices", ())]
    return next(filter(None, ends), ""), next((event["error"] for event in events if "error" in event), {})


def _misses(server: Server) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:schema_misses_total"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_value_that_breaks_what_was_left_out_is_an_error_and_counted(
    formed: tuple[Server, Speaker], stream: bool
) -> None:
    server, model = formed
    before = _misses(server)
    model.text = '{"where": "a", "tags": ["a", "a"]}'
    finish_reason, error = _answer(server, _asked(LOOSE), stream=stream)
    assert not finish_reason
    assert (error["code"], error["param"]) == ("schema_mismatch", "response_format")
    assert "/tags breaks 'uniqueItems'" in error["message"]
    assert error.get("status", 422) == 422
    assert _misses(server) == before + 1
    model.text = '{"where": "a", "tags": ["a", "b"]}'
    assert _answer(server, _asked(LOOSE), stream=stream) == ("stop", {})
    assert _misses(server) == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_arguments_of_calls_are_checked_too(formed: tuple[Server, Speaker], stream: bool) -> None:
    server, model = formed
    tools = [{"type": "function", "function": {"name": "get", "parameters": LOOSE}}]
    for tags, ended in ((["a", "b"], "tool_calls"), (["a", "a"], "")):
        call = {"name": "get", "arguments": {"where": "a", "tags": tags}}
        model.text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        body = {**CHAT, "tools": tools, "tool_choice": "required"}
        finish_reason, error = _answer(server, body, stream=stream)
        assert finish_reason == ended
        assert ("the call of 'get' is not valid" in error.get("message", "")) == (not ended)
    assert _answer(server, {**CHAT, "tools": tools}, stream=stream)[0] == "tool_calls", "nothing was enforced"


def test_what_was_cut_off_is_not_checked(formed: tuple[Server, Speaker]) -> None:
    server, model = formed
    model.text = '{"tags": ["a", "a"]}'
    body = {**_asked(LOOSE), "max_tokens": 3}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["finish_reason"] == "length"
