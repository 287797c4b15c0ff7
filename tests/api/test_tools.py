"""Tools and reasoning through the official client and over plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import openai.types.chat as openai_chat
import pytest

from quire.engine.structured_output.grammars import grammar_of
from quire.engine.structured_output.messages import Constraint
from quire.serving.api.chat_parsers import ChatParsers
from quire.serving.api.schemas.tools import ToolUse
from quire.text.hints import HintLog
from quire.text.output_parsers.events import Tool
from tests.api.server import Server
from tests.api.speaker import Speaker, speaking
from tests.structured_output.accepting import accepts

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = CALL.replace("Oslo", "Rome")
FENCED = "```json\n" + CALL.split("\n")[1] + "\n```"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    with speaking(tmp_path_factory.mktemp("model")) as both:
        yield both


@pytest.fixture
def server(both: tuple[Server, Speaker]) -> Server:
    return both[0]


@pytest.fixture
def model(both: tuple[Server, Speaker]) -> Speaker:
    return both[1]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    """A choice, whose types were checked."""
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], **fields})
    assert answer.status_code == 200, answer.text
    openai_chat.ChatCompletion.model_validate(answer.json(), strict=True)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def stream(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """All choices of a stream, whose types were checked."""
    body = {"messages": MESSAGES, "tools": [WEATHER], **fields, "stream": True}
    lines = server.post("/v1/chat/completions", body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    for chunk in chunks:
        openai_chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    return [choice for chunk in chunks for choice in chunk["choices"]]


def prompt(server: Server, **fields: Any) -> str:
    """The prompt of a chat request."""
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["prompt_token_ids"]
    text: str = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    return text


def test_a_call_and_the_answer_to_its_result(client: openai.OpenAI, model: Speaker) -> None:
    model.text = CALL
    called = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[WEATHER])  # type: ignore[list-item]
    (choice,) = called.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    model.text = "Rain."
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    again = [*MESSAGES, choice.message, result]
    answer = client.chat.completions.create(model="tiny", messages=again, tools=[WEATHER])  # type: ignore[list-item]
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "Rain.")


PATCH = "+'ä'\n-b"
EDIT: Any = {"type": "custom", "custom": {"name": "edit", "description": "Edit.", "format": {"type": "text"}}}
EDITED = f"<tool_call>\n{json.dumps({'name': 'edit', 'arguments': {'input': PATCH}}, ensure_ascii=False)}\n</tool_call>"


LIST: Any = {"type": "function", "function": {"name": "ls"}}
LISTED = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
ASKED: Any = [{"role": "user", "content": "Go."}]


def test_the_input_of_a_custom_tool_is_text_there_and_back_again(server: Server, model: Speaker) -> None:
    model.text = f"{EDITED}\n{LISTED}"
    asked = {"messages": ASKED, "tools": [EDIT, LIST], "return_token_ids": True}
    whole = server.post("/v1/chat/completions", asked).json()
    message = whole["choices"][0]["message"]
    edited, listed = message["tool_calls"]
    assert edited == {"id": edited["id"], "type": "custom", "custom": {"name": "edit", "input": PATCH}}
    assert listed["function"] == {"name": "ls", "arguments": "{}"}
    first = server.post("/detokenize", {"tokens": whole["prompt_token_ids"]}).json()["prompt"]
    message["tool_calls"] = [edited]
    results = [{"role": "tool", "tool_call_id": edited["id"], "content": "Done."}]
    second = prompt(server, messages=[*ASKED, message, *results], tools=asked["tools"])
    assert second.startswith(first)
    again = second[len(first) :].partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
    assert json.loads(again) == {"name": "edit", "arguments": {"input": PATCH}}


def test_a_custom_call_is_streamed_with_its_whole_input(server: Server, model: Speaker) -> None:
    model.text = f"{LISTED}\n{EDITED}"
    body = {"messages": ASKED, "tools": [LIST, EDIT], "stream": True}
    lines = server.post("/v1/chat/completions", body).text.split("\n\n")[:-2]
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    custom = [call for call in calls if call["index"] == 1]
    assert custom[0] == {"index": 1, "id": custom[0]["id"], "type": "custom", "custom": {"name": "edit", "input": ""}}
    assert custom[1:] == [{"index": 1, "custom": {"input": PATCH}}]
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == "{}"
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_grammar_of_the_input_is_enforced_or_refused(server: Server) -> None:
    def asked(definition: str, behind: str = "") -> Any:
        form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
        tools = [WEATHER, {"type": "custom", "custom": {"name": "edit", "format": form}}]
        return server.post(f"/v1/chat/completions{behind}", {"messages": MESSAGES, "tools": tools})

    recursive = 'start: "\\"" start "b" | "c" LF\n%import common.LF'
    sent = asked(recursive, "/render").json()["sampling_params"]["structured_outputs"]["grammar"]
    grammar = grammar_of(Constraint("grammar", sent), {})
    begun = 'Hm.\n<tool_call>\n{"name": "edit", "arguments": {"input": "'
    inputs = {"c\n": True, '""c\nbb': True, '"c\nbb': False, "c": False}
    written = {text: accepts(grammar, f'{begun}{json.dumps(text)[1:-1]}"}}}}\n</tool_call>') for text in inputs}
    assert written == inputs
    refused = asked('start: "a"\nB.2: "b"')
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(
        "tools: the input of the tool 'edit': line 2 of the grammar: priorities are not supported"
    )


def test_a_grammar_of_the_input_is_a_hint_where_calls_cannot_be_held_to_any(caplog: pytest.LogCaptureFixture) -> None:
    tools = ToolUse((Tool("edit", strict=True, input_grammar='start: "a"'), Tool("f", strict=True)))
    with caplog.at_level("INFO"):
        free, strict = ChatParsers("gemma4").held(tools, HintLog()).tools
    assert (free.strict, free.input_grammar, strict.strict) == (False, "", True)
    assert "a tool's grammar of syntax lark" in caplog.text
    assert ChatParsers("hermes").held(tools, HintLog()) is tools


def test_a_custom_call_that_was_cut_off_has_the_input_so_far(server: Server, model: Speaker) -> None:
    model.text = EDITED
    tokens = server.post("/tokenize", {"prompt": EDITED.partition("ä")[0], "add_special_tokens": False}).json()["count"]
    choice = ask(server, tools=[EDIT], max_tokens=tokens)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["custom"]["input"]) == ("length", "+'")


@pytest.mark.parametrize("choice", [
    {"type": "custom", "custom": {"name": "edit"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "custom", "custom": {"name": "edit"}},
    ]}},
])  # fmt: skip
def test_a_custom_tool_can_be_chosen_and_its_regular_expression_holds(server: Server, choice: Any) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": '[ab]{3}"'}}
    tool = {"type": "custom", "custom": {"name": "edit", "format": form}}
    body = {"messages": MESSAGES, "tools": [WEATHER, tool], "tool_choice": choice, "parallel_tool_calls": False}
    answer = server.post("/v1/chat/completions/render", body)
    assert answer.status_code == 200, answer.text
    grammar = answer.json()["sampling_params"]["structured_outputs"]["grammar"]
    begun = '<tool_call>\n{"name": "edit", "arguments": {"input": "'
    written = {text: accepts(grammar, f'{begun}{text}"}}}}\n</tool_call>') for text in ('abb\\"', "abb", 'abc\\"')}
    assert written == {'abb\\"': True, "abb": False, 'abc\\"': False}


def test_calls_streamed(client: openai.OpenAI, model: Speaker) -> None:
    model.text = f"<think>\nhm\n</think>\n\nI look it up.\n{CALL}\n{SECOND}"
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[WEATHER]) as events:  # type: ignore[list-item]
        kinds = {event.type for event in events}
    message = events.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done", "content.delta"} <= kinds
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert len({call.id for call in message.tool_calls or []}) == 2
    assert events.get_final_completion().choices[0].finish_reason == "tool_calls"


def test_calls_streamed_by_the_asynchronous_client(server: Server, model: Speaker) -> None:
    model.text = CALL

    async def arguments() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=[WEATHER], stream=True  # type: ignore[list-item]
            )  # fmt: skip
            calls = [call async for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.index for call in calls] == [0] * len(calls)
        return "".join(call.function.arguments or "" for call in calls if call.function)

    assert asyncio.run(arguments()) == '{"city": "Oslo"}'


@pytest.mark.parametrize(
    "said", ["hello", CALL, f"<think>hm</think>ok {CALL}", f"a{CALL}{SECOND}", CALL[:-20], "<tool", f"ok\n{FENCED}"]
)
def test_streamed_and_whole_answers_are_equal(server: Server, model: Speaker, said: str) -> None:
    model.text = said
    whole = ask(server)
    first, *others = stream(server)
    assert first["delta"] == {"role": "assistant", "content": None}
    joined: dict[str, str] = {}
    calls: dict[int, dict[str, str]] = {}
    for choice in others[:-1]:
        assert choice["finish_reason"] is None
        for call in choice["delta"].pop("tool_calls", []):
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            for name, text in call["function"].items():
                known[name] += text
        for name, text in choice["delta"].items():
            joined[name] = joined.get(name, "") + text
    assert (others[-1]["delta"], others[-1]["finish_reason"]) == ({}, whole["finish_reason"])
    message = whole["message"]
    assert joined.get("content") == message["content"]
    assert joined.get("reasoning") == message.get("reasoning") == message.get("reasoning_content")
    assert list(calls.values()) == [call["function"] for call in message.get("tool_calls", [])]
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_call_without_tags_is_one_where_tools_are_offered(server: Server, model: Speaker) -> None:
    model.text = FENCED
    for fields in ({}, {"parallel_tool_calls": False}):
        choice = ask(server, **fields)
        assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Oslo"}']
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    for fields in (
        {"tools": None},
        {"tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        assert ask(server, **fields)["message"] == {"role": "assistant", "content": FENCED}
    body = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES, "tools": [
        {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}},
    ]}  # fmt: skip
    answer = server.post("/v1/messages", body).json()
    assert [(block["type"], block["input"]) for block in answer["content"]] == [("tool_use", {"city": "Oslo"})]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_all_that_may_be_called_and_all_are_shown(server: Server) -> None:
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    tools = [WEATHER, other]

    def rendered(choice: Any, **fields: Any) -> dict[str, Any]:
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, **fields}
        answer = server.post("/v1/chat/completions/render", body)
        assert answer.status_code == 200, answer.text
        request: dict[str, Any] = answer.json()
        return request

    def grammar(choice: Any, **fields: Any) -> str:
        form = rendered(choice, **fields)["sampling_params"].get("structured_outputs") or {"grammar": ""}
        text: str = form["grammar"]
        return text

    for mode in ("auto", "required"):
        limited = grammar(allowed(mode, "get_time"))
        assert "get_time" in limited
        assert "get_weather" not in limited
    named = {"type": "function", "function": {"name": "get_time"}}
    assert grammar(allowed("required", "get_time"), parallel_tool_calls=False) == grammar(named)
    assert grammar(allowed("auto", "get_time", "get_weather")) == grammar("auto") == ""
    assert grammar(allowed("required", "get_weather", "get_time")) == grammar("required")
    assert rendered(allowed("auto", "get_time"))["token_ids"] == rendered("auto")["token_ids"]


def test_parallel_tool_calls_false_ends_behind_the_first_call(server: Server, model: Speaker) -> None:
    model.text = CALL + SECOND * 10
    choice = ask(server, parallel_tool_calls=False)
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Oslo"}']
    assert choice["finish_reason"] == "tool_calls"
    names = [call for c in stream(server, parallel_tool_calls=False) for call in c["delta"].get("tool_calls", [])]
    assert {call["index"] for call in names} == {0}
    server.assert_all_free()


def test_fields_that_clients_add_to_messages_and_functions_are_left_out(
    server: Server, model: Speaker, caplog: pytest.LogCaptureFixture
) -> None:
    user = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": "yo"}
    text = {"type": "text", "text": "hi"}
    pairs: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
        ([user, said | {"parsed": {"city": "Oslo"}, "annotations": [], "audio": None}, user], [user, said, user]),
        ([user | {"id": 7, "opts": {"visible": False}}], [user]),
        ([user, said | {"provider_specific_fields": {"refusal": None}, "refusal": None}, user], [user, said, user]),
        ([user, said | {"metadata": {"by": "x"}, "function_call": None, "tool_calls": None}], [user, said]),
        ([user | {"content": [text | {"cache_control": {"type": "ephemeral"}}]}], [user]),
        ([user, {"role": "assistant", "content": None}, user], [user, {"role": "assistant", "content": ""}, user]),
    ]
    made = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "c", "type": "function", "function": made}
    parsed = {**call, "index": 0, "function": {**made, "parsed_arguments": {"city": "Oslo"}, "strict": None}}
    pairs.append(([user, said | {"tool_calls": [parsed]}], [user, said | {"tool_calls": [call]}]))
    with caplog.at_level("DEBUG", "quire.serving.api.schemas.chat"):
        for sent, meant in pairs:
            assert prompt(server, messages=sent) == prompt(server, messages=meant)
    assert "annotations, parsed" in caplog.messages[0]
    assert any("content.cache_control" in line for line in caplog.messages)
    function = {**WEATHER["function"], "return": {"type": "string"}}  # type: ignore[dict-item]
    shown = prompt(server, tools=[{"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}])
    assert json.dumps(function) in shown
    assert "cache_control" not in shown


def test_a_former_call_reaches_a_template_that_asks_for_null(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
        "{{ 'CALL ' + c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if tools %}<tool_call>{% endif %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": "20"}
    with speaking(tmp_path, template) as (server, _):
        for content in ({"content": None}, {"content": ""}, {}):
            messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call], **content}, result]
            assert 'CALL get_weather{"city":"Oslo"}20' in prompt(server, messages=messages)
            tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
            assert "CALL get_weather" in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_a_form_of_any_json_may_have_a_schema(server: Server) -> None:
    def form(response_format: dict[str, Any]) -> Any:
        body = {"messages": MESSAGES, "response_format": response_format, "reasoning_effort": "none"}
        answer = server.post("/v1/chat/completions/render", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["sampling_params"]["structured_outputs"]

    assert form({"type": "json_object", "schema": PERSON}) == form(FORM)
    assert form({"type": "json_object"}) != form(FORM)


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize("form", [{"response_format": FORM}, {"guided_json": PERSON}])
def test_tools_and_a_form_become_one_grammar(server: Server, form: dict[str, Any]) -> None:
    def grammar(**fields: Any) -> str:
        body = {"messages": MESSAGES, "tools": [WEATHER], **form, **fields}
        answer = server.post("/v1/chat/completions/render", body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["sampling_params"]["structured_outputs"]["grammar"]
        return text

    assert "get_weather" in grammar()
    assert '"required": ["name"]' in grammar()
    assert '"required": ["name"]' not in grammar(tool_choice="required")


@pytest.mark.parametrize(("form", "message"), [
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"name": "x", "strict": True, "schema": {"contains": {}}}}},
     "response_format: keyword 'contains'"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs: only JSON can be combined with tools, no regex"),
])  # fmt: skip
def test_a_form_that_cannot_stand_beside_tools_is_refused(server: Server, form: dict[str, Any], message: str) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], **form})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(form))


def test_an_answer_cut_off_within_a_call_ends_by_length(server: Server, model: Speaker) -> None:
    model.text = CALL
    choice = ask(server, max_tokens=len(model.tokenizer.encode(CALL[:-25])) if model.tokenizer else 0)
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Oslo"}'.startswith(call["function"]["arguments"])
    assert choice["finish_reason"] == "length"


def test_without_tools_or_with_none_to_be_called_text_stays_text(server: Server, model: Speaker) -> None:
    model.text = CALL
    assert ask(server, tools=None)["message"] == {"role": "assistant", "content": CALL}
    assert ask(server, tool_choice="none")["message"] == {"role": "assistant", "content": CALL}
    assert "<tools>" in prompt(server, tools=[WEATHER], tool_choice="none")
    assert "<tools>" not in prompt(server)


def test_log_probabilities_cover_calls(server: Server, model: Speaker) -> None:
    model.text = "ok " + CALL
    entries = ask(server, logprobs=True)["logprobs"]["content"]
    streamed = [e for c in stream(server, logprobs=True) if c["logprobs"] for e in c["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == model.text + "<|im_end|>"
    assert streamed == entries


def test_token_ids_of_calls_are_streamed_once(server: Server, model: Speaker) -> None:
    model.text = f"<think>hm</think>{CALL}"
    whole = ask(server, return_token_ids=True)["token_ids"]
    assert [token for choice in stream(server, return_token_ids=True) for token in choice["token_ids"]] == whole


def test_several_choices_have_calls_of_their_own(server: Server, model: Speaker) -> None:
    model.text = CALL
    choices = stream(server, n=3)
    starts = [c for c in choices if c["delta"].get("tool_calls", [{}])[0].get("id")]
    assert sorted(choice["index"] for choice in starts) == [0, 1, 2]
    assert len({choice["delta"]["tool_calls"][0]["id"] for choice in starts}) == 3


def test_reasoning_can_be_left_out_and_comes_back_in_prompts(server: Server, model: Speaker) -> None:
    model.text = "<think>hm</think>ok"
    assert ask(server)["message"] == {
        "role": "assistant", "content": "ok", "reasoning": "hm", "reasoning_content": "hm",
    }  # fmt: skip
    assert ask(server, include_reasoning=False)["message"] == {"role": "assistant", "content": "ok"}
    shown = [choice["delta"] for choice in stream(server, include_reasoning=False)]
    assert all("reasoning" not in delta for delta in shown)
    for name in ("reasoning", "reasoning_content"):
        echoed = [*MESSAGES, {"role": "assistant", "content": "ok", name: "hm"}, *MESSAGES]
        assert "<think>hm</think>ok" in prompt(server, messages=echoed)


def test_an_answer_that_was_cut_off_within_its_reasoning_can_be_sent_back(server: Server, model: Speaker) -> None:
    model.text = "<think>hm hm hm hm"
    message = ask(server, max_tokens=14)["message"]
    assert message["content"] is None
    assert message["reasoning"]
    assert f"<think>{message['reasoning']}</think>" in prompt(server, messages=[*MESSAGES, message, *MESSAGES])


def test_reasoning_that_the_prompt_has_ended_is_none(server: Server, model: Speaker) -> None:
    assert prompt(server, reasoning_effort="none").endswith("</think>\n\n")
    assert not prompt(server, reasoning_effort="high").endswith("</think>\n\n")
    model.text = "ok"
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert ask(server, **fields)["message"] == {"role": "assistant", "content": "ok"}


def test_hints_that_a_template_does_not_read_are_dropped_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with speaking(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}") as (server, model):
        model.text = "Rain."
        plain = prompt(server)
        hints: tuple[dict[str, Any], ...] = (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none"},
            {"verbosity": "low"},
            {"verbosity": "medium"},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking_budget": 5}},
        )
        for hint in hints * 2:
            assert prompt(server, **hint) == plain
        tokens = server.post("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"thinking": True}})
        assert tokens.status_code == 200
        misspelt = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinkin": True}}
        assert server.post("/v1/chat/completions", misspelt).status_code == 400
    named = [line.split(" is ignored")[0] for line in caplog.messages if " is ignored: " in line]
    assert named == [
        "reasoning_effort", "verbosity", "chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking_budget",
        "chat_template_kwargs.thinking",
    ]  # fmt: skip


def test_the_template_gets_tools_as_they_were_sent(server: Server) -> None:
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}  # type: ignore[dict-item]
    text = prompt(server, tools=[tool])
    assert f"<tools>{json.dumps(WEATHER)}</tools>" in text
    tokenized = server.post("/tokenize", {"messages": MESSAGES, "tools": [tool]}).json()
    assert server.post("/detokenize", {"tokens": tokenized["tokens"]}).json()["prompt"] == text


def test_special_tokens_are_seen_by_the_parser_and_hidden_from_the_reader(tmp_path: Path) -> None:
    with speaking(tmp_path, special_tokens=("<tool_call>", "</tool_call>", "<|other|>")) as (server, model):
        model.text = f"a<|other|>b{CALL}"
        message = ask(server)["message"]
        assert message["content"] == "ab"
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
        shown = ask(server, skip_special_tokens=False)["message"]
        assert (shown["content"], len(shown["tool_calls"])) == ("a<|other|>b", 1)
        hidden = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert ask(server, tools=None)["message"]["content"] == "ab" + hidden


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"tool_call_parser": None}, {}, "tools: this model's chat template shows none"),
        ({"chat_template": "{{ tools }}"}, {}, "Start the server with --tool-call-parser"),
        ({"enable_auto_tool_choice": False, "chat_template": "{{ tools }}<tool_call>"}, {}, "tool_choice 'auto' needs"),
    ],
)
def test_tools_are_refused_where_they_cannot_work(
    tmp_path: Path, options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with speaking(tmp_path, "{{ messages[0].content }}", **options) as (server, _):
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], **fields})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_flags(tmp_path: Path) -> None:
    flags = {
        "exclude_tools_when_tool_choice_none": True,
        "default_chat_template_kwargs": {"enable_thinking": False},
        "trust_request_chat_template": True,
    }
    with speaking(tmp_path, **flags) as (server, _):
        assert "<tools>" not in prompt(server, tools=[WEATHER], tool_choice="none")
        assert prompt(server).endswith("</think>\n\n")
        assert not prompt(server, chat_template_kwargs={"enable_thinking": True}).endswith("</think>\n\n")
        template = "{{ documents[0].text }}{{ messages[0].content }}{{ eos_token }}"
        assert prompt(server, chat_template=template, documents=[{"text": "Doc"}]) == (
            "Doc" + MESSAGES[0]["content"] + "<|im_end|>"
        )
        for wrong in ("{% if %}", "{{ ''.__class__.__mro__ }}", "x" * 200_000):
            answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "chat_template": wrong})
            assert answer.status_code == 400, wrong
