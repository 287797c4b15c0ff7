"""Anthropic's Messages API, through the official client and over plain HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.api.server import KEY, Server, running
from tests.api.speaker import Speaker

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING = "<think>Let me see.</think>\n\n"


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """An answer, whose types were checked."""
    answer = server.post("/v1/messages", {"max_tokens": 200, "messages": QUESTION, **fields})
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json(), strict=True)
    body: dict[str, Any] = answer.json()
    return body


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """All events of a stream, whose names and types were checked."""
    body = {"max_tokens": 200, "messages": QUESTION, "stream": True, **fields}
    *parts, rest = server.post("/v1/messages", body).text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def refused(server: Server, status: int = 400, **fields: Any) -> str:
    """The message of an error, whose shape was checked."""
    answer = server.post("/v1/messages", {"max_tokens": 9, "messages": QUESTION, **fields})
    assert answer.status_code == status, answer.text
    ErrorResponse.model_validate(answer.json(), strict=True)
    return str(answer.json()["error"]["message"])


def prompt(server: Server, **fields: Any) -> str:
    """The prompt that a conversation becomes; the model repeats nothing, so it is asked for as tokens."""
    sent: list[Any] = []
    add = server.session.add_request
    server.session.add_request = lambda prompts, *rest, **options: (  # type: ignore[method-assign]
        sent.extend(prompts),
        add(prompts, *rest, **options),
    )[1]
    try:
        ask(server, **fields)
    finally:
        server.session.add_request = add  # type: ignore[method-assign]
    text: str = server.post("/detokenize", {"tokens": sent[0]}).json()["prompt"]
    return text


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_answer(server: Server, model: Speaker, client: anthropic.Anthropic) -> None:
    model.text = "Fine."
    answer = client.messages.create(model="tiny", max_tokens=50, messages=QUESTION)
    assert [(block.type, getattr(block, "text", None)) for block in answer.content] == [("text", "Fine.")]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.usage.output_tokens > 1
    assert ask(server)["id"].startswith("msg_")


def test_thinking_and_tools_are_blocks_in_their_order(server: Server, model: Speaker) -> None:
    model.text = THINKING + "One moment.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome")
    answer = ask(server, tools=[WEATHER])
    blocks = answer["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "Let me see."
    assert [block["input"] for block in blocks[2:]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert len({block["id"] for block in blocks[2:]}) == 2
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("text", ["Fine.", THINKING + "Fine.", THINKING + CALL, CALL + CALL, "", THINKING])
def test_a_stream_says_what_the_whole_says(
    server: Server, model: Speaker, client: anthropic.Anthropic, text: str
) -> None:
    model.text = text
    whole = ask(server, tools=[WEATHER])
    events = stream(server, tools=[WEATHER])
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    stops = [event for event in events if event["type"] == "content_block_stop"]
    assert [e["index"] for e in starts] == [e["index"] for e in stops] == list(range(len(whole["content"])))
    with client.messages.stream(model="tiny", max_tokens=200, messages=QUESTION, tools=[WEATHER]) as streamed:
        message = streamed.get_final_message().model_dump(exclude={"id"}, exclude_none=True)
    for block in [*message["content"], *whole["content"]]:
        if "id" in block:
            block["id"] = "made anew"
    expected = Message.model_validate({**whole, "id": ""}).model_dump(exclude={"id"}, exclude_none=True)
    assert message["content"] == expected["content"]
    assert message["stop_reason"] == whole["stop_reason"]
    assert message["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    server.assert_all_free()


def test_why_an_answer_ends(server: Server, model: Speaker) -> None:
    model.text = "one two three"
    cut = ask(server, max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    stopped = ask(server, stop_sequences=[" three", " two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    assert stopped["content"][0]["text"] == "one"
    assert stream(server, stop_sequences=[" two"])[-2]["delta"]["stop_sequence"] == " two"


def test_cached_tokens_are_counted_apart(server: Server, model: Speaker) -> None:
    model.text = "Fine."
    system = "Be brief. " * 20
    first, second = (ask(server, system=system)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 0
    total = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (first, second)]
    assert total[0] == total[1]
    assert stream(server, system=system)[0]["message"]["usage"]["cache_read_input_tokens"] > 0


@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}]
)
def test_thoughts_can_be_left_out(server: Server, model: Speaker, thinking: dict[str, Any]) -> None:
    model.text = THINKING + "Fine." if thinking["type"] == "enabled" else "Fine."
    assert [block["type"] for block in ask(server, thinking=thinking)["content"]] == ["text"]
    starts = [event for event in stream(server, thinking=thinking) if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["text"]


# --- conversations ---------------------------------------------------------------------------------------------------


def test_every_kind_of_block_reaches_the_template(server: Server, model: Speaker) -> None:
    model.text = "Cold."
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I ask.", "signature": "x"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "-5"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    text = prompt(server, messages=conversation, system=[{"type": "text", "text": "Be brief."}], tools=[WEATHER])
    assert text.endswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>I ask.</think>One moment.<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n-5<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert '"parameters": {"type": "object"' in text


def test_an_answer_that_was_begun_goes_on(server: Server, model: Speaker) -> None:
    model.text = " cold."
    text = prompt(server, messages=[*QUESTION, {"role": "assistant", "content": "It is"}])
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_thinking_is_the_templates_switch(server: Server, model: Speaker) -> None:
    model.text = "Cold."
    assert prompt(server, thinking={"type": "disabled"}).endswith("<think>\n\n</think>\n\n")
    assert prompt(server, thinking={"type": "adaptive"}).endswith("assistant\n")


def test_a_whole_round_with_the_clients_own_objects(
    server: Server, model: Speaker, client: anthropic.Anthropic
) -> None:
    model.text = CALL
    first = client.messages.create(model="tiny", max_tokens=99, messages=QUESTION, tools=[WEATHER])
    (call,) = first.content
    assert call.type == "tool_use"
    model.text = "It is -5 degrees."
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "-5"}]}
    again = client.messages.create(
        model="tiny", max_tokens=99, messages=[*QUESTION, first.to_param(), result], tools=[WEATHER]
    )
    assert getattr(again.content[0], "text", "") == "It is -5 degrees."


def test_tool_choice(server: Server, model: Speaker) -> None:
    model.text = CALL + CALL
    only = ask(server, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in only["content"]] == ["tool_use"]
    none = ask(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]
    wrong = {"type": "tool", "name": "other"}
    assert "tool_choice" in refused(server, tools=[WEATHER], tool_choice=wrong)


def test_counting_gives_what_is_charged(server: Server, model: Speaker, client: anthropic.Anthropic) -> None:
    model.text = "Fine."
    fields: Any = {"messages": QUESTION, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(model="tiny", **fields)
    MessageTokensCount.model_validate(counted.model_dump(), strict=True)
    usage = ask(server, **fields)["usage"]
    assert counted.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 10**6}, "The prompt has"),
        ({"max_tokens": None}, "max_tokens must be a valid integer."),
        ({"messages": []}, "messages must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences must be a valid list."),
        ({"typo": 1}, "'typo' is not a known field."),
        ({"mcp_servers": [{"name": "x"}]}, "'mcp_servers' is not supported yet"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice: a name belongs to type tool"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0] must be a block of type text, thinking",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text must be a valid string.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]: 'thinking' is no block of role user.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_shape(server: Server, fields: dict[str, Any], message: str) -> None:
    assert message in refused(server, **fields)


def test_errors_become_the_clients_own(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="claude", max_tokens=9, messages=QUESTION)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be"):
        client.messages.create(model="tiny", max_tokens=-1, messages=QUESTION)
    assert server.get("/v1/messages").json()["type"] == "error"


def test_the_key_goes_in_either_header(tmp_path: Path) -> None:
    with running(tmp_path, api_key=(KEY,)) as server:
        for given in ({"api_key": KEY}, {"auth_token": KEY}):
            client = anthropic.Anthropic(base_url=server.url, max_retries=0, **given)  # type: ignore[arg-type]
            assert client.messages.create(model="tiny", max_tokens=1, messages=QUESTION).usage.output_tokens == 1
        wrong = anthropic.Anthropic(base_url=server.url, max_retries=0, api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError) as refusal:
            wrong.messages.create(model="tiny", max_tokens=1, messages=QUESTION)
        assert refusal.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
