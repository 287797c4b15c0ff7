"""Function calls and reasoning in /v1/responses: items, events in order, and what the next turn's model sees."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.api.responses.wire import connect, events_of, kinds, response_of
from tests.api.server import Server
from tests.api.speaker import Speaker

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
TIME: Any = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = CALL.replace("Oslo", "Rome")


def group(name: str, *functions: Any, **fields: Any) -> Any:
    """A namespace of functions."""
    return {"type": "namespace", "name": name, "description": f"All of {name}.", "tools": list(functions), **fields}


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return connect(server)


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """A response, whose types were checked."""
    return response_of(server, {"input": "How is the weather?", "tools": [WEATHER], **fields})


def prompt_of(server: Server, add: Any) -> str:
    text: str = server.post("/detokenize", {"tokens": add}).json()["prompt"]
    return text


# --- calls ----------------------------------------------------------------------------------------------------------


def test_a_call_is_an_item(server: Server, model: Speaker) -> None:
    model.text = f"<think>\nhm\n</think>\n\nLet me see. {CALL}{SECOND}"
    body = ask(server)
    assert body["status"] == "completed"
    reasoning, message, first, second = body["output"]
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert reasoning["content"][0]["text"].strip() == "hm"
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (first["name"], json.loads(first["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert json.loads(second["arguments"]) == {"city": "Rome"}
    assert first["call_id"] != second["call_id"]
    assert {item["status"] for item in body["output"]} == {"completed"}
    assert 0 < body["usage"]["output_tokens_details"]["reasoning_tokens"] < body["usage"]["output_tokens"]
    assert body["tools"] == [WEATHER]


def test_a_stream_has_the_items_of_the_whole(server: Server, model: Speaker) -> None:
    model.text = f"<think>\nhm\n</think>\n\nLet me see. {CALL}{SECOND}"
    whole = ask(server)
    events = events_of(server, {"input": "How is the weather?", "tools": [WEATHER]})
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *call,
        *call,
        "response.completed",
    ]
    final = events[-1]["response"]["output"]

    def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]

    assert without_ids(final) == without_ids(whole["output"])
    for at, item in enumerate(final):
        mine = [event for event in events if event.get("output_index") == at]
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
        assert mine[0]["item"]["id"] == item["id"]
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1]["item"] == item
        if item["type"] == "function_call":
            assert "".join(event.get("delta", "") for event in mine) == item["arguments"]


def test_the_client_collects_calls(client: openai.OpenAI, model: Speaker) -> None:
    model.text = CALL
    with client.responses.stream(model="tiny", input="x", tools=[WEATHER]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert json.loads("".join(deltas)) == json.loads(call.arguments) == {"city": "Oslo"}


def test_one_call_at_most_when_asked(server: Server, model: Speaker) -> None:
    model.text = CALL + SECOND
    body = ask(server, parallel_tool_calls=False)
    assert [item["type"] for item in body["output"]] == ["function_call"]
    assert body["parallel_tool_calls"] is False


def test_a_choice_of_no_tool_leaves_calls_as_text(server: Server, model: Speaker) -> None:
    model.text = CALL
    body = ask(server, tool_choice="none")
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["tool_choice"] == "none"


def test_only_allowed_tools_are_shown(server: Server, client: openai.OpenAI) -> None:
    def tokens(**fields: Any) -> int:
        return client.responses.input_tokens.count(model="tiny", input="x", **fields).input_tokens

    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    assert tokens(tools=[WEATHER, TIME], tool_choice=allowed) == tokens(tools=[TIME]) < tokens(tools=[WEATHER, TIME])


def test_the_next_turn_sees_calls_outputs_and_reasoning(server: Server, client: openai.OpenAI, model: Speaker) -> None:
    model.text = f"<think>\nhm\n</think>\n\nLet me see. {CALL}"
    first = client.responses.create(model="tiny", input="How is the weather?", tools=[WEATHER])
    call = first.output[-1]
    assert call.type == "function_call"
    model.text = "It rains."
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="tiny", input=[output], tools=[WEATHER], previous_response_id=first.id)
    assert second.output_text == "It rains."
    sent_back = client.responses.create(
        model="tiny",
        tools=[WEATHER],
        store=False,
        input=[{"role": "user", "content": "How is the weather?"}, *first.output, output],  # type: ignore[list-item]
    )
    as_chat = client.chat.completions.create(
        model="tiny",
        tools=[{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}],  # type: ignore[typeddict-item]
        messages=[
            {"role": "user", "content": "How is the weather?"},
            {
                "role": "assistant",
                "content": first.output[1].content[0].text,  # type: ignore[union-attr]
                "reasoning": first.output[0].content[0].text,  # type: ignore[union-attr, index]
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": call.arguments},
                    }
                ],
            },  # type: ignore[typeddict-unknown-key]
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ],
    )
    counts = {second.usage.input_tokens, sent_back.usage.input_tokens, as_chat.usage.prompt_tokens}  # type: ignore[union-attr]
    assert len(counts) == 1
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip


def test_an_answer_cut_off_in_the_middle_of_a_call(server: Server, model: Speaker) -> None:
    model.text = CALL
    body = ask(server, max_output_tokens=server.post("/tokenize", {"prompt": CALL[:50]}).json()["count"])
    assert body["status"] == "incomplete"
    assert body["output"][-1]["status"] == "incomplete"


def test_log_probabilities_belong_to_the_text_alone(server: Server, model: Speaker) -> None:
    model.text = f"<think>\nhm\n</think>\n\nYes.{CALL}"
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    body = ask(server, **fields)
    text = body["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in text["logprobs"]) == text["text"] == "Yes."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "name": 5}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "async": True}]}, "tools[0].async"),
        ({"tools": [{**WEATHER, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TIME, group("a", WEATHER, {**WEATHER, "name": "two words"})]}, "tools[1].tools[1].name"),
        ({"tools": [group("a", WEATHER, WEATHER)]}, "tools[0].tools[1].name"),
        ({"tools": [group("a", {"type": "custom", "name": "two words"})]}, "tools[0].tools[0].name"),
        ({"tools": [group("a", {"type": "web_search"})]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [group("a", *[TIME] * 600), group("b", *[TIME] * 600)]}, "tools"),
        ({"tools": [{"type": "web_search"}] * 1025}, "tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "get_weather"}] * 1025}}, "tool_choice.tools"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        (
            {"tools": [group("a", TIME), group("b", TIME)], "tool_choice": {"type": "function", "name": "get_time"}},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "other"}]}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_the_name_that_was_sent(server: Server, fields: Any, param: str) -> None:
    answer = server.post("/v1/responses", {"input": "x", "tools": [WEATHER], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
