"""Anthropic's Messages API, through the official client and over plain HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import anthropic
import jsonschema
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.beta import BetaMemoryTool20250818Command
from pydantic import TypeAdapter

from tests.api.server import KEY, Server, prompts_sent, running
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
    with prompts_sent(server) as sent:
        ask(server, **fields)
    text: str = server.post("/detokenize", {"tokens": sent[0]}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version={}; cch={};\nBe brief.",
        [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version={}; cch={};"},
            {"type": "text", "text": "Be brief."},
        ],
    ],
    ids=["line", "block"],
)
def test_claude_codes_billing_line_is_no_part_of_the_prompt(server: Server, system: Any) -> None:
    written = json.dumps(system)
    first, second = (
        prompt(server, system=json.loads(written.replace("{}", name))) for name in ("2.1.197.a1b", "2.1.197.c2d")
    )
    assert first == second == prompt(server, system="Be brief.")
    elsewhere = "Be brief.\nx-anthropic-billing-header: is a header."
    assert elsewhere in prompt(server, system=elsewhere)


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/a"}),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {"command": "view", "path": "/a", "view_range": [1, -1]},
        ),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ],
)
def test_tools_of_anthropics_that_the_client_runs(
    client: anthropic.Anthropic, server: Server, model: Speaker, kind: str, name: str, call: dict[str, Any]
) -> None:
    tool: Any = {"type": kind, "name": name}
    model.text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': call})}\n</tool_call>"
    message = client.beta.messages.create(model="tiny", max_tokens=200, messages=QUESTION, tools=[tool])
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert (block.name, block.input) == (name, call)
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
    history: Any = [*QUESTION, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    shown = prompt(server, messages=json.loads(json.dumps(history, default=lambda it: it.model_dump())), tools=[tool])
    known = json.loads(shown.partition("<tools>")[2].partition("</tools>")[0])["function"]
    assert known["name"] == name
    jsonschema.validate(call, known["parameters"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": 7}, known["parameters"])


def test_memory_has_the_commands_of_anthropics_sdk(server: Server) -> None:
    shown = prompt(server, tools=[{"type": "memory_20250818", "name": "memory"}])
    schema = json.loads(shown.partition("<tools>")[2].partition("</tools>")[0])["function"]["parameters"]
    union = get_args(get_args(BetaMemoryTool20250818Command)[0])
    assert {get_args(each.model_fields["command"].annotation)[0] for each in union} == set(
        schema["properties"]["command"]["enum"]
    )
    assert set().union(*(each.model_fields for each in union)) == set(schema["properties"])


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


IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF: Any = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (IMAGE, "[image: this model cannot see images]"),
        (PDF, "[document: this model cannot read documents of this kind]"),
        (
            {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}},
            "T\nabc",
        ),
        ({"type": "tool_reference", "tool_name": "get_time"}, "[tool: get_time]"),
        (
            {"type": "search_result", "source": "a.txt", "title": "A", "content": [{"type": "text", "text": "words"}]},
            "A\na.txt\nwords",
        ),
    ],
)
def test_what_a_tool_gave_is_text_whatever_it_was(server: Server, model: Speaker, block: Any, text: str) -> None:
    """A block that an agent's tool returned stays in its history: refused, the session could not go on."""
    model.text = "I see."
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a:"}, block]}
    messages = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert f"<|im_start|>tool\na:\n{text}<|im_end|>" in prompt(server, messages=messages)


def test_turns_of_a_model_with_hosted_tools_go_on(server: Server, model: Speaker) -> None:
    model.text = "Yes."
    found = {"type": "web_search_result", "title": "Weather", "url": "https://x.example", "encrypted_content": "Zx9"}
    used = {"id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather"}}
    ran = {"type": "code_execution_result", "stdout": "42", "stderr": "", "return_code": 0, "content": []}
    before = [
        {"type": "server_tool_use", **used},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [found]},
        {"type": "mcp_tool_use", "id": "a", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "a", "is_error": False, "content": [{"type": "text", "text": "5"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "b", "content": ran},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "text", "text": "It is cold."},
    ]
    summary = {"type": "compaction", "content": "They spoke of rain.", "encrypted_content": "Zx9"}
    turns = [{"role": "assistant", "content": [summary]}, *QUESTION, {"role": "assistant", "content": before}]
    said = prompt(server, messages=[*turns, {"role": "user", "content": "Sure?"}])
    assert "assistant\nThey spoke of rain.<|im_end|>" in said
    for readable in (
        "[web_search gave:\nWeather\nhttps://x.example\n]",
        "[mcp gave:\n5\n]",
        "gave:\n42\n]",
        "It is cold.",
    ):
        assert readable in said
    assert "Zx9" not in said


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


def test_only_what_may_be_null_is(server: Server, model: Speaker) -> None:
    """Clients in other languages take a null for a list where a field may be left out, but never be null."""
    model.text = THINKING + "One moment.\n" + CALL
    bodies: list[Any] = [ask(server, tools=[WEATHER]), *stream(server, tools=[WEATHER])]
    nulls = {name for body in bodies for name in null_fields(body)}
    assert nulls == {"stop_reason", "stop_sequence"}


def null_fields(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(null_fields, value))
    if not isinstance(value, dict):
        return set()
    inside = set().union(*map(null_fields, value.values()))
    return inside | {name for name, found in value.items() if found is None}


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens must be a valid integer."),
        ({"messages": []}, "messages must not be empty."),
        ({"temperature": -1.0}, "temperature must be"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences must be a valid list."),
        ({"typical_p": 0.5}, "'typical_p' is not a known field."),
        ({"container": "x"}, "'container' is not supported yet: leave it out."),
        ({"compaction": {"type": "x"}}, "'compaction' is not supported yet: ask for a summary in a message."),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "'context_management.edits[0].type' is",
        ),
        ({"previous_message_id": "msg_1"}, "'previous_message_id' is not a known field."),
        ({"system": [{"type": "image"}]}, "system"),
        (
            {"tools": [WEATHER, {"type": "computer_20250124", "name": "computer"}]},
            "'tools[1].type' is not supported yet: 'computer_20250124' is for models that see the screen; describe "
            "what others can use as a tool of type custom, with name, description and input_schema.",
        ),
        ({"tools": [{"type": "telepathy", "name": "x"}]}, "tools[0].type must be 'custom', not 'telepathy'."),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]}, "'tools[0].allowed_callers' is not"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice: a name belongs to type tool"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]: image input is not served: this model reads text only. Send text instead.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0]: document input is not served",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "x"}]}]},
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


def test_anthropics_tool_runner_goes_on_without_a_thread(
    server: Server, model: Speaker, client: anthropic.Anthropic
) -> None:
    """Newer SDKs ask the server to keep the conversation, and continue it with its last turn alone. A server that
    ignored that would answer without the conversation."""
    model.text = CALL
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        model.text = "It is cold."
        return "-5 degrees"

    with prompts_sent(server) as sent:
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=99, messages=QUESTION, tools=[get_weather])
        last = runner.until_done()
    assert asked == ["Oslo"]
    assert last.content[0].type == "text"
    assert last.content[0].text == "It is cold."
    first, second = (server.post("/detokenize", {"tokens": tokens}).json()["prompt"] for tokens in sent)
    assert "How is the weather in Oslo?" in first
    assert "How is the weather in Oslo?" in second
    assert "-5 degrees" in second


def test_threads_are_refused_in_the_words_that_sdks_know(server: Server) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = server.post(path, {"thread": thread, "max_tokens": 9, "messages": QUESTION})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert (error["type"], "thread" in error["message"]) == ("invalid_request_error", True)
    assert "details" not in server.post("/v1/messages", {"max_tokens": 9, "messages": []}).json()["error"]


def test_the_key_goes_in_either_header(tmp_path: Path) -> None:
    with running(tmp_path, api_key=(KEY,)) as server:
        for given in ({"api_key": KEY}, {"auth_token": KEY}):
            client = anthropic.Anthropic(base_url=server.url, max_retries=0, **given)  # type: ignore[arg-type]
            assert client.messages.create(model="tiny", max_tokens=1, messages=QUESTION).usage.output_tokens == 1
        wrong = anthropic.Anthropic(base_url=server.url, max_retries=0, api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError) as refusal:
            wrong.messages.create(model="tiny", max_tokens=1, messages=QUESTION)
        assert refusal.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
