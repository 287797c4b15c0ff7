"""Frameworks over the APIs, unmodified, each asking Quill: what they saw, and what went over the wire.

Their packages are in an environment of their own (`frameworks.txt`), because they need another `openai` than we do.
"""

from __future__ import annotations

import pytest

from tests.clients.conftest import Quill
from tests.clients.environment import run_script

pytestmark = pytest.mark.long("api")
CALL = ["get_weather", {"city": "Oslo"}]


def test_langchain_openai_runs_an_agent(quill: Quill) -> None:
    seen = run_script("langchain_agent", quill.url, quill.key)
    assert seen["types"] == ["human", "ai", "tool", "ai"]
    assert [(call["name"], call["args"]) for call in seen["calls"]] == [("get_weather", {"city": "Oslo"})]
    assert "snowy" in seen["answer"]
    assert "-5" in seen["answer"]
    assert seen["streamed"] == seen["answer"]
    assert "42" in seen["sum"]
    assert seen["usage"]["output_tokens"] > 0
    assert quill.paths == ["/v1/chat/completions"] * 5
    second = quill.exchanges[1].sent["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "tool"]
    assert second[2]["tool_call_id"] == second[1]["tool_calls"][0]["id"]


def test_llama_index(quill: Quill) -> None:
    seen = run_script("llama_index_chat", quill.url, quill.key)
    assert "42" in seen["chat"]
    assert seen["streamed"] == seen["chat"]
    assert seen["completed"]
    assert seen["calls"] == [CALL]
    assert set(quill.paths) == {"/v1/chat/completions", "/v1/completions"}


def test_litellm_through_each_of_our_apis(quill: Quill) -> None:
    seen = run_script("litellm_providers", quill.url, quill.key)
    for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
        answers = seen[provider]
        assert "42" in answers["whole"], provider
        assert answers["streamed"] == answers["whole"], provider
        assert answers["finish"] == "stop", provider
        assert answers["completion_tokens"] > 0, provider
        assert answers["calls"] == [CALL], provider
    assert {"/v1/chat/completions", "/v1/messages", "/api/chat"} <= set(quill.paths)
    keyless = [exchange for exchange in quill.exchanges if not exchange.has_key]
    assert {(exchange.path, exchange.status) for exchange in keyless} <= {("/api/show", 401)}  # LiteLLM's own mistake
    quill.exchanges[:] = [exchange for exchange in quill.exchanges if exchange not in keyless]


def test_instructor_makes_pydantic_models(quill: Quill) -> None:
    seen = run_script("instructor_models", quill.url, quill.key)
    assert len(seen) == 4
    for mode, person in seen.items():
        assert person == {"name": "Anna", "city": "Oslo"}, mode
