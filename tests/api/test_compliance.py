"""The questions of public test suites for servers: Open Responses' compliance tests and llama.cpp's server tests.

They are put to one server whose model says what the test wants. All that comes back is held against the published types
besides (`answer_types.py`). What of these suites is left out, docs/api.md says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.responses.wire import TEXT_EVENTS, events_of, kinds
from tests.api.server import Server
from tests.api.speaker import Speaker, speaking

LOCATION = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
WEATHER = {"name": "get_weather", "description": "The weather at a location", "parameters": LOCATION}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
CHAT = "/v1/chat/completions"
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    conversations[1].text = "Ahoy, matey!"
    return conversations[0]


@pytest.fixture(scope="module")
def formed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    """A server whose engine takes grammars; its model keeps to them if the test says so."""
    with speaking(tmp_path_factory.mktemp("model"), masked=True) as both:
        yield both


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    text = server.post(path, {**body, "stream": True}).text
    data = re.findall(r"(?m)^data: (\{.*)$", text)
    return [json.loads(each) for each in data]


# --- Open Responses --------------------------------------------------------------------------------------------------


def turn(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


@pytest.mark.parametrize(
    "turns",
    [
        [turn("user", "Say hello in exactly 3 words.")],
        [turn("system", "You are a pirate. Always respond in pirate speak."), turn("user", "Say hello.")],
        [turn("user", "My name is Alice."), turn("assistant", "Hello Alice!"), turn("user", "What is my name?")],
    ],
    ids=["basic", "system prompt", "multi-turn"],
)
def test_a_conversation_is_completed_whole_and_streamed(server: Server, turns: Any) -> None:
    whole = ask(server, "/v1/responses", input=turns)
    streamed = events_of(server, {"input": turns})
    for response in (whole, streamed[-1]["response"]):
        assert (response["status"], [item["type"] for item in response["output"]]) == ("completed", ["message"])
    assert kinds(streamed) == [*TEXT_EVENTS, "response.completed"]
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))


def test_a_function_is_called_whole_and_streamed(server: Server, model: Speaker) -> None:
    model.text = CALL
    body = {"input": [turn("user", "How is the weather?")], "tools": [{"type": "function", **WEATHER}]}
    assert [item["type"] for item in ask(server, "/v1/responses", **body)["output"]] == ["function_call"]
    found = events_of(server, body)
    items = [event for event in found if event["type"].startswith("response.output_item.")]
    assert [event["item"]["type"] for event in items] == ["function_call"] * 2
    assert {f"response.function_call_arguments.{kind}" for kind in ("delta", "done")} <= set(kinds(found))


# --- llama.cpp: chat -------------------------------------------------------------------------------------------------


def test_chat_says_what_was_used_and_how_it_ended(server: Server) -> None:
    for content in ("What is the best book", [{"type": "text", "text": "What is"}, {"type": "text", "text": "a book"}]):
        answer = ask(server, CHAT, max_tokens=2, messages=[{"role": "user", "content": content}])
        assert "cmpl" in answer["id"]
        assert answer["usage"]["completion_tokens"] == 2
        assert (answer["choices"][0]["message"]["role"], answer["choices"][0]["finish_reason"]) == (
            "assistant",
            "length",
        )


def test_a_stream_of_chat_has_one_id_one_role_and_an_end_without_content(server: Server) -> None:
    first, *rest = events(server, CHAT, messages=BOOK)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in rest)
    assert len({chunk["id"] for chunk in (first, *rest)}) == 1
    assert not rest[-1]["choices"][0]["delta"].get("content")
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None] * (len(rest) - 1) + ["stop"]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in (first, *rest))
    assert text == "Ahoy, matey!"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_object", "schema": {"items": [{"type": "integer"}]}}, "[ -3000 ]"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "foooooo"}}}, '"foooooo"'),
        ({"type": "json_object"}, "{}"),
        ({"type": "sound"}, None),
        ({"type": "json_object", "schema": 123}, None),
        ({"type": "json_object", "schema": {"type": 123}}, None),
        ({"type": "json_object", "schema": {"type": "hiccup"}}, None),
    ],
)
def test_a_response_format_is_taken_or_refused(formed: tuple[Server, Speaker], form: Any, text: str | None) -> None:
    server, model = formed
    model.text = text or ""
    answer = server.post(CHAT, {"messages": BOOK, "response_format": form})
    assert answer.status_code == (400 if text is None else 200), answer.text
    assert text is None or answer.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    "messages",
    [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [BOOK[0], {}]],
    ids=str,
)
def test_messages_that_are_none_are_refused(server: Server, messages: Any) -> None:
    assert server.post(CHAT, {"messages": messages}).status_code == 400


def test_log_probabilities_of_chat_spell_the_answer(server: Server) -> None:
    asked = {"messages": BOOK, "logprobs": True, "top_logprobs": 4}
    whole = ask(server, CHAT, **asked)["choices"][0]["logprobs"]["content"]
    chunks = [chunk["choices"][0] for chunk in events(server, CHAT, **asked)]
    streamed = [each for choice in chunks if choice.get("logprobs") for each in choice["logprobs"]["content"]]
    for entries in (whole, streamed):
        text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert text.startswith("Ahoy, matey!")
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 4 for entry in entries)


@pytest.mark.parametrize("choice", ["auto", "none", None])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_if_they_may_be(server: Server, model: Speaker, choice: str | None, stream: bool) -> None:
    model.text = CALL
    body = {"messages": BOOK, "tools": [{"type": "function", "function": WEATHER}], "tool_choice": choice}
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(server, CHAT, **body)]
        called = any(delta.get("tool_calls") for delta in deltas)
    else:
        called = bool(ask(server, CHAT, **body)["choices"][0]["message"].get("tool_calls"))
    assert called == (choice != "none")


# --- llama.cpp: responses --------------------------------------------------------------------------------------------


def test_responses_and_messages_have_ids_of_their_kinds(server: Server) -> None:
    found = events_of(server, {"input": BOOK, "max_output_tokens": 8})
    (response,) = {event["response"]["id"] for event in found if "response" in event}
    (item,) = {event.get("item_id") or event["item"]["id"] for event in found if "response" not in event}
    assert (response[:5], item[:4]) == ("resp_", "msg_")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}, '"foooooo"'),
        ({"type": "json_object"}, "{}"),
        ({"type": "text"}, "Suddenly"),
        ({"type": "json_schema", "name": "test"}, None),
    ],
)
def test_the_format_of_a_response_is_taken_or_refused(
    formed: tuple[Server, Speaker], form: Any, text: str | None
) -> None:
    server, model = formed
    model.text = text or ""
    answer = server.post("/v1/responses", {"input": "Write an example", "text": {"format": form}})
    assert answer.status_code == (400 if text is None else 200), answer.text
    assert text is None or answer.json()["output"][-1]["content"][0]["text"] == text


# --- llama.cpp: Anthropic's Messages ---------------------------------------------------------------------------------

USER = {"role": "user", "content": "What's the weather?"}
USED = {"type": "tool_use", "id": "test123", "name": "get_weather", "input": {"location": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "test123", "content": "Sunny"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER], "system": "You are a helpful assistant."},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": " is?"}]}
            ]
        },
        {"messages": [USER, {"role": "assistant", "content": "Hi!"}, USER]},
        {"messages": [USER, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [RESULT]}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USED]},
                {"role": "user", "content": [{"type": "text", "text": "Here:"}, {**RESULT, "is_error": True}]},
            ]
        },
        {"messages": [USER], "temperature": 0.5, "top_p": 0.9, "top_k": 40, "metadata": {"user_id": "a"}},
    ],
)
def test_messages_are_answered_counted_and_streamed(server: Server, fields: Any) -> None:
    whole = ask(server, "/v1/messages", max_tokens=50, **fields)
    assert (whole["stop_reason"], whole["content"][0]["text"]) == ("end_turn", "Ahoy, matey!")
    assert whole["usage"].keys() >= {"input_tokens", "output_tokens", "cache_read_input_tokens"}
    counted = {name: fields[name] for name in fields.keys() & {"messages", "system"}}
    assert ask(server, "/v1/messages/count_tokens", **counted).keys() == {"input_tokens"}
    found = events(server, "/v1/messages", max_tokens=50, **fields)
    assert found[0]["message"]["content"] == []
    assert [event["type"] for event in (found[0], *found[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert {event["index"] for event in found if "index" in event} == {0}


def test_a_tool_is_used_and_a_stop_sequence_named(server: Server, model: Speaker) -> None:
    stopped = ask(server, "/v1/messages", max_tokens=50, messages=[USER], stop_sequences=["matey"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "matey")
    model.text = CALL
    tools = [{"name": "get_weather", "input_schema": LOCATION}]
    used = ask(server, "/v1/messages", max_tokens=200, messages=[USER], tools=tools)
    assert (used["stop_reason"], used["content"][-1]["input"]) == ("tool_use", {"location": "San Francisco, CA"})
    found = events(server, "/v1/messages", max_tokens=200, messages=[USER], tools=tools)
    deltas = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert json.loads("".join(deltas)) == used["content"][-1]["input"]


@pytest.mark.parametrize("missing", ["messages", "max_tokens"])
def test_a_message_without_what_it_needs_is_refused(server: Server, missing: str) -> None:
    body = {"max_tokens": 50, "messages": [USER]}
    del body[missing]
    answer = server.post("/v1/messages", body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


# --- llama.cpp: completions ------------------------------------------------------------------------------------------


def test_completions_are_the_same_streamed_as_tokens_and_again(server: Server) -> None:
    body = {"prompt": "I believe the meaning of life is", "max_tokens": 8, "seed": 42}
    whole = ask(server, "/v1/completions", **body)["choices"][0]["text"]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in events(server, "/v1/completions", **body))
    tokens = ask(server, "/tokenize", prompt=body["prompt"])["tokens"]
    several = ask(server, "/v1/completions", **{**body, "prompt": [tokens, tokens]})["choices"]
    assert [whole, streamed] == [each["text"] for each in several]
    assert ask(server, "/detokenize", tokens=tokens)["prompt"] == body["prompt"]


def test_a_prompt_that_is_too_long_is_refused(server: Server) -> None:
    assert server.post("/v1/completions", {"prompt": "I believe the meaning of life is" * 512}).status_code == 400
