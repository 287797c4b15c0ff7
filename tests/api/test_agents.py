"""What coding agents and long conversations send: bodies as they are, with all that changes no answer here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.api.server import Server
from tests.api.speaker import Speaker, speaking

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 64,
    "temperature": 1,
    "metadata": {"user_id": "user_account_session"},
    "system": [{"type": "text", "text": "You are an agent.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False, **CACHED},
        ]},
    ],
    "tools": [{
        "type": "custom", "name": "Bash", "description": "Run", "input_schema": SCHEMA, "eager_input_streaming": True,
        "defer_loading": False, "allowed_callers": ["direct"], **CACHED,
    }],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}  # fmt: skip
"""In the manner of Claude Code's, from the types of the `anthropic` package (`beta.messages`)."""
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Run", "strict": False, "parameters": SCHEMA},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents.",
            "tools": [
                {"type": "function", "name": name, "description": "An agent", "strict": False, "parameters": SCHEMA}
                for name in ("spawn_agent", "wait_agent")
            ],
        },
        {"type": "function", "name": "view_image", "description": "See", "strict": False, "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session",
    "client_metadata": {"installation": "a"},
}
"""In the manner of what Codex 0.171 sends with its default settings."""


@pytest.fixture
def server(conversations: tuple[Server, Speaker]) -> Server:
    return conversations[0]


def test_a_coding_agent_over_messages(server: Server, model: Speaker) -> None:
    model.text = 'So.<tool_call>\n{"name": "Bash", "arguments": {"command": "cat a.txt"}}\n</tool_call>'
    answer = server.post("/v1/messages?beta=true", CLAUDE_CODE).json()
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    assert answer["content"][1]["input"] == {"command": "cat a.txt"}
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools", "thinking")}
    tokens = server.post("/v1/messages/count_tokens?beta=true", counted).json()["input_tokens"]
    assert tokens == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        {"tools": [{**CLAUDE_CODE["tools"][0], "allowed_callers": ["code_execution_20250825"]}]},
    ],
)
def test_what_would_change_the_answer_is_refused(server: Server, wrong: dict[str, Any]) -> None:
    answer = server.post("/v1/messages", {**CLAUDE_CODE, **wrong})
    assert answer.status_code == 400
    assert next(iter(wrong)) in answer.json()["error"]["message"]


PLAIN = "{{ tools if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
"""A template without any switch for reasoning, as Llama 3's and Qwen2.5's."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with speaking(tmp_path_factory.mktemp("plain"), PLAIN, tool_call_parser="hermes") as (server, model):
        model.text = "Done."
        yield server


def logged(caplog: pytest.LogCaptureFixture, name: str) -> int:
    return sum(record.getMessage().startswith(name) for record in caplog.records)


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        ({"output_config": {"effort": "high"}}, "reasoning_effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, "thinking_token_budget"),
        ({"thinking": {"type": "disabled"}}, "thinking.type disabled"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type between_tools"),
        ({"thinking": {"type": "adaptive", "display": "updates", "block_binding": {}}}, None),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"speed": "fast"}, "speed"),
        ({"speed": "standard"}, None),
        ({"fallbacks": []}, None),
        ({"fallbacks": [{"model": "claude-haiku-4-5"}]}, "fallbacks"),
        ({"billing_policy": {"type": "billing_policy", "bill_to": "self"}, "fallback_credit_token": "x"}, None),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ],
)
def test_hints_of_claude_code_never_cost_an_answer(
    plain: Server, hint: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plain.text.hints._named.clear()  # by other tests
    body = {"max_tokens": 64, "messages": [{"role": "user", "content": "Hello."}], **hint}
    for _ in range(2):
        answer = plain.post("/v1/messages?beta=true", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"] == [{"type": "text", "text": "Done."}]
    assert logged(caplog, named or "") == (0 if named is None else 1)


def test_a_coding_agent_over_responses(server: Server, model: Speaker) -> None:
    model.text = '<tool_call>\n{"name": "spawn_agent", "arguments": {"command": "ls"}}\n</tool_call>'
    answer = server.post("/v1/responses", CODEX)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["output"]
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "spawn_agent")
    model.text = "Done."
    image = [
        {"type": "input_text", "text": "a.png:"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBO"},
    ]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": image}
    turn = {**CODEX, "input": [*CODEX["input"], call, output]}
    second = server.post("/v1/responses", turn)
    assert second.status_code == 200, second.text
    assert second.json()["output"][-1]["content"][0]["text"] == "Done."
    output["output"] = "a.png:\n[image: this model cannot see images]"
    assert server.post("/v1/responses", turn).json()["usage"]["input_tokens"] == second.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("hint", "named"),
    [
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning_effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"verbosity": "medium"}}, None),
        ({"prompt_cache_options": {"mode": "explicit"}, "image": {"context_compression": "auto"}}, None),
        ({"tools": [{**CODEX["tools"][0], "defer_loading": True}]}, "tools.defer_loading"),
        ({"tools": [{**CODEX["tools"][0], "output_schema": {}}]}, None),
        ({"tools": [{**CODEX["tools"][0], "output_schema": {"type": "object"}}]}, "tools.output_schema"),
        ({"tools": [{**CODEX["tools"][0], "allowed_callers": ["direct", "programmatic"]}]}, None),
    ],
)
def test_hints_of_codex_never_cost_an_answer(
    plain: Server, hint: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plain.text.hints._named.clear()  # by other tests
    for _ in range(2):
        answer = plain.post("/v1/responses", {"input": "Hello.", **hint})
        assert answer.status_code == 200, answer.text
        assert answer.json()["output"][-1]["content"][0]["text"] == "Done."
    assert logged(caplog, named or "") == (0 if named is None else 1)


@pytest.mark.parametrize(("think", "named"), [(True, "think"), ("max", "reasoning_effort"), (None, None)])
def test_whether_to_think_is_a_hint_to_ollamas_clients_too(
    plain: Server, think: Any, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plain.text.hints._named.clear()  # by other tests
    for _ in range(2):
        answer = ollama.Client(host=plain.url).chat("tiny", [{"role": "user", "content": "Hello."}], think=think)
        assert answer.message.content == "Done."
    assert logged(caplog, named or "") == (0 if named is None else 1)


def prompt(server: Server, messages: list[dict[str, Any]]) -> str:
    """What the model reads."""
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    text: str = server.post("/detokenize", {"tokens": answer.json()["prompt_token_ids"]}).json()["prompt"]
    return text


def test_a_broken_call_goes_back_to_the_model_as_it_wrote_it(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    said = prompt(
        server,
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "no JSON"},
        ],
    )
    assert '"arguments": "{\\"a\\": "' in said
    assert "no JSON" in said


def test_a_picture_that_a_tool_gave_does_not_end_a_conversation(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    given = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.png"}, picture]}
    assert "[image: this model cannot see images]" in prompt(server, [*asked, given])
    refused = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ],
)
def test_a_refusal_of_another_model_is_text(server: Server, refused: dict[str, Any]) -> None:
    said = prompt(server, [{"role": "user", "content": "a"}, {"role": "assistant", **refused}])
    assert "assistant\nI cannot.<|im_end|>" in said
