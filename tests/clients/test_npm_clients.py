"""SDKs of npm's over the APIs, unmodified, each asking Quill: what they saw, and what went over the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.server import ANSWERS
from tests.api.speaker import speaking
from tests.clients.conftest import Quill, leave_refused_threads
from tests.clients.environment import run_npm_script

pytestmark = pytest.mark.long("api")
CALL = ["get_weather", {"city": "Oslo"}]


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("anthropic", "/v1/messages"),
        ("chat", "/v1/chat/completions"),
        ("responses", "/v1/responses"),
    ],
)
def test_the_ai_sdk(quill: Quill, api: str, path: str) -> None:
    seen = run_npm_script("ai_sdk", quill.url, quill.key, api)
    assert seen["errors"] == []
    assert "42" in seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["usage"]["outputTokens"] > 0
    assert seen["object"] == seen["streamedObject"] == {"name": "Anna", "city": "Oslo"}
    for calls, answer in (("calls", "answer"), ("streamedCalls", "streamedAnswer")):
        assert seen[calls] == [[CALL], []]
        assert "snowy" in seen[answer]
    assert set(quill.paths) == {path}


def test_anthropics_tool_runner(quill: Quill) -> None:
    seen = run_npm_script("anthropic_tool_runner", quill.url, quill.key)
    assert seen["cities"] == ["Oslo", "Oslo"]
    assert "snowy" in seen["whole"]
    assert "snowy" in seen["streamed"]
    leave_refused_threads(quill)
    assert set(quill.paths) == {"/v1/messages"}


MESSAGES = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "The weather in a city", "parameters": PARAMETERS}
TAGGED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 400,
        "messages": MESSAGES,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
    },
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/completions": {"prompt": "The weather is", "max_tokens": 400, "logprobs": 2},
    "/v1/responses": {"input": MESSAGES, "tools": [{"type": "function", **FUNCTION}]},
}


def test_the_ai_sdk_reads_all_that_servers_say(tmp_path: Path) -> None:
    """Its schemas are strict, and its users see no more of a body that breaks one than an error of type validation."""
    ANSWERS.clear()
    with speaking(tmp_path, reasoning_parser="qwen3", max_model_len=2048) as (server, model):
        for model.text in ("It is cold.", f"<think>Let me see.</think>\n\nOne moment.{TAGGED}{TAGGED}", "long" * 500):
            for path, body in ASKED.items():
                for stream in (False, True):
                    assert server.post(path, {**body, "stream": stream}).status_code == 200
    kept = [{"path": each.path, "kind": each.content_type, "body": each.body.decode()} for each in ANSWERS]
    ANSWERS.clear()
    (tmp_path / "answers.json").write_text(json.dumps(kept))
    seen = run_npm_script("types", str(tmp_path / "answers.json"), packages="ai_sdk")
    assert seen["errors"] == []
    assert {"text", "reasoning", "tool-call", "text-delta"} <= seen["parts"]["anthropic /v1/messages"].keys()
    for name in ("openai", "openai-compatible"):
        assert {"text", "tool-call", "text-delta"} <= seen["parts"][f"{name} /v1/chat/completions"].keys()
    for name in ("openai", "open-responses"):
        assert {"text", "reasoning", "tool-call", "text-delta"} <= seen["parts"][f"{name} /v1/responses"].keys()
