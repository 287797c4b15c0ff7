"""Questions with tools as OpenAI requests: the chat template makes the same prompt of them."""

import functools
import json
from typing import Any

import pytest
from quill.chat import Sample, render
from quill.examination import examination
from quill.toolchat import answer_text, calls_are_valid, request_with_tools

from quire import builtin
from quire.text.template_files import load_chat_template


@functools.cache
def samples() -> list[Sample]:
    """Drawn by the first test, as drawing takes seconds: every run of tests imports this file."""
    return [sample for sample in examination() if sample.task == "tools"]


def test_the_shipped_template_makes_the_prompt_that_quill_was_trained_on() -> None:
    template = load_chat_template(builtin.path("quill"))
    assert template is not None
    roles = set()
    for sample in samples():
        request = request_with_tools(sample.question)
        roles |= {message["role"] for message in request["messages"]}
        messages: list[dict[str, Any]] = [
            {**message, "content": message["content"] or ""} for message in request["messages"]
        ]
        prompt = template.render(messages, tools=request["tools"])
        assert prompt == render(sample.question, add_generation_prompt=True)
    assert len(samples()) == 71
    assert roles == {"system", "user", "assistant", "tool"}


def test_references_as_tool_calls_are_right_and_valid() -> None:
    for sample in samples():
        tools = request_with_tools(sample.question, strict=True)["tools"]
        assert all(tool["function"]["strict"] for tool in tools)
        message = _message(sample.answer)
        assert sample.check(answer_text(message))
        assert calls_are_valid(message, tools)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("g", "{}"), ("f", "{}"), ("f", '{"x": "1"}'), ("f", '{"x": true}'), ("f", '{"x": 1, "y": 2}'), ("f", '{"x": 1')],
)
def test_calls_that_do_not_match_are_seen(name: str, arguments: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = {"function": {"name": name, "arguments": arguments}}
    assert not calls_are_valid({"content": None, "tool_calls": [call]}, tools)
    call["function"] = {"name": "f", "arguments": '{"x": 1}'}
    assert calls_are_valid({"content": None, "tool_calls": [call]}, tools)


def test_a_call_in_the_content_is_no_answer() -> None:
    sample = next(sample for sample in samples() if sample.answer.startswith("<tool_call>"))
    assert not sample.check(answer_text({"content": sample.answer}))


def _message(answer: str) -> dict[str, Any]:
    """What a server makes of a reference."""
    if not answer.startswith("<tool_call>"):
        return {"content": answer}
    call = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
