"""/v1/responses with the official client: bodies and events are what its types say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.api.openai_types import check, unknown_fields
from tests.api.responses.wire import TEXT_EVENTS, connect, events_of, kinds
from tests.api.scripted import ScriptedClient
from tests.api.server import Server, running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return connect(server)


# --- whole ----------------------------------------------------------------------------------------------------------


def test_a_text_is_answered(client: openai.OpenAI, server: Server) -> None:
    raw = server.post("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 4}).json()
    assert unknown_fields(check(Response, raw)) == []
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=4)
    assert len(answer.output_text) == 4
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4
    assert answer.error is None
    (item,) = answer.output
    assert (item.type, item.status) == ("message", "incomplete")


def test_it_is_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three\nfour"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, seed=1)
    answer = client.responses.create(
        model="tiny",
        instructions="be brief",
        input=[
            {"role": "user", "content": "one"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "three"}, {"type": "input_text", "text": "four"}],
            },
        ],  # type: ignore[list-item]
        max_output_tokens=6,
        extra_body={"seed": 1},
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_what_was_asked_is_said_back(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="alias", input="hi", max_output_tokens=1, metadata={"a": "b"}, temperature=0.5, top_p=0.25,
        truncation="auto", parallel_tool_calls=False, user="somebody", text={"format": {"type": "text"}},
        instructions="x", safety_identifier="me", prompt_cache_key="key",
    )  # fmt: skip
    assert (answer.model, answer.metadata, answer.temperature, answer.top_p) == ("alias", {"a": "b"}, 0.5, 0.25)
    assert (answer.truncation, answer.parallel_tool_calls, answer.user) == ("auto", False, "somebody")
    assert (answer.instructions, answer.safety_identifier, answer.prompt_cache_key) == ("x", "me", "key")


def test_an_answer_that_stops_is_complete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hi", extra_body={"stop": ["d"], "max_output_tokens": 90})
    assert answer.status == "completed"
    assert answer.completed_at is not None
    assert answer.output[0].status == "completed"


def test_times_are_integers_and_nothing_that_open_responses_requires_is_missing(server: Server) -> None:
    body = {"input": "hi", "stop": "d", "presence_penalty": 0.5, "store": False}
    whole = server.post("/v1/responses", body).json()
    events = events_of(server, body)
    background = server.post("/v1/responses", {"input": "hi", "stop": "d", "background": True}).json()
    assert background["store"] is True
    for response in (whole, background, *(event["response"] for event in events if "response" in event)):
        assert type(response["created_at"]) is int
        assert type(response["completed_at"]) is (int if response["status"] == "completed" else type(None))
        if response is not background:
            asked = (response["store"], response["presence_penalty"], response["frequency_penalty"])
            assert asked == (False, 0.5, 0.0)


def test_log_probabilities(client: openai.OpenAI, server: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    raw = server.post("/v1/responses", body).json()
    assert unknown_fields(check(Response, raw)) == []
    entries = raw["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == raw["output"][0]["content"][0]["text"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    deltas = [event for event in events_of(server, body) if event["type"] == "response.output_text.delta"]
    assert all("".join(entry["token"] for entry in d["logprobs"]) == d["delta"] for d in deltas)
    with pytest.raises(openai.BadRequestError, match="include"):
        client.responses.create(model="tiny", input="hi", top_logprobs=2)


def test_tokens_are_counted_without_an_answer(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="some words", instructions="x")
    answer = client.responses.create(model="tiny", input="some words", instructions="x", max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


# --- streamed -------------------------------------------------------------------------------------------------------


def test_events_come_in_openais_order(server: Server) -> None:
    events = events_of(server, {"input": "hi", "max_output_tokens": 5})
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert deltas == last["output"][0]["content"][0]["text"]
    assert len(deltas) == 5
    assert events[0]["response"]["id"] == last["id"]
    assert events[0]["response"]["output"] == []
    stopped = events_of(server, {"input": "hi", "stop": "d"})
    assert kinds(stopped) == [*TEXT_EVENTS, "response.completed"]


def test_the_clients_stream_puts_it_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi", extra_body={"stop": "d"}) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == deltas
    assert final.status == "completed"


def test_the_asynchronous_client(server: Server) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert len(asyncio.run(ask())) == 3


def test_the_first_event_does_not_wait_for_a_token(scripted: tuple[Server, ScriptedClient]) -> None:
    server, _ = scripted  # whose engine says nothing
    with connect(server) as client:
        stream = client.responses.create(model="tiny", input="hi", max_output_tokens=1, stream=True)
        first = next(iter(stream))
        assert first.type == "response.created"
        assert server.session.num_sequences == 1
        stream.close()


def test_a_client_that_goes_ends_its_request(tmp_path: Path) -> None:
    with running(tmp_path, step_s=0.02) as server, connect(server) as client:
        stream = client.responses.create(model="tiny", input="hi", stream=True)
        next(iter(stream))
        stream.close()
        server.assert_all_free()


# --- conversations that do not fit ----------------------------------------------------------------------------------


def test_a_conversation_that_is_too_long_is_refused_or_loses_its_oldest_turns(client: openai.OpenAI) -> None:
    turns = [
        message
        for i in range(40)
        for message in ({"role": "user", "content": f"{i} " + "x" * 30}, {"role": "assistant", "content": "y" * 30})
    ]
    question = {"role": "user", "content": "last"}
    with pytest.raises(openai.BadRequestError, match="512") as error:
        client.responses.create(model="tiny", input=[*turns, question], max_output_tokens=4)  # type: ignore[list-item]
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "input"
    answer = client.responses.create(
        model="tiny",
        instructions="short",
        input=[*turns, question],  # type: ignore[list-item]
        max_output_tokens=4,
        truncation="auto",
    )
    assert answer.usage is not None
    assert 200 < answer.usage.input_tokens <= 508
    with pytest.raises(openai.BadRequestError):  # one question that does not fit is never cut
        client.responses.create(model="tiny", input="x" * 5000, truncation="auto")


# --- what is refused ------------------------------------------------------------------------------------------------

IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [IMAGE]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": "x", "shape": "round"}]}, "tools[0].shape"),
        ({"tools": [{"type": "apply_patch", "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{"type": "tool_search", "execution": "client"}]}, "tools[0].type"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"input": [{"type": "custom_tool_call", "name": "y", "input": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "shell_call_output", "call_id": "x", "output": []}]}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"summary": "epic"}}, "reasoning.summary"),
        ({"text": {"verbosity": "epic"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"include": ["everything"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"model": "other"}, "model"),
        ({"inputs": "x"}, "inputs"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_or_not_served_is_refused_by_name(server: Server, body: dict[str, Any], param: str) -> None:
    sent = body if body == {} or "input" in body else {"input": "x", **body}
    answer = server.post("/v1/responses", sent)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert answer.status_code == (404 if param in ("model", "previous_response_id") else 400)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    yield
    server.assert_all_free()
