"""A question with tools in the form of an OpenAI request, and the answer's calls as the text that checks know.

Owns the way there and back, and whether calls match their schemas. Knows nothing about what is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quill.chat import TOOLS_CLOSING, TOOLS_OPENING, Message, tool_call

_CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\n(.*)\n</tool_response>", re.DOTALL)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def request_with_tools(question: Sequence[Message], *, strict: bool = False) -> dict[str, Any]:
    """`messages` and `tools` of a question; no `tools` where its system message lists none.

    Args:
        strict: Whether each function is `strict`.
    """
    system, tools = _split_system(question[0])
    messages = [{"role": "system", "content": system}] if system else []
    for message in question[1:] if question[0].role == "system" else question:
        messages.append(_openai_message(message, f"call_{len(messages) - 1}"))
    if not tools:
        return {"messages": messages}
    if strict:
        tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    return {"messages": messages, "tools": tools}


def answer_text(message: Mapping[str, Any]) -> str:
    """An answer as the model would have written it. A call that stands in the content was not recognised: it is no
    answer."""
    content = str(message.get("content") or "")
    if "<tool_call>" in content:
        return ""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    written = [tool_call(call["name"], _arguments(call)) for call in calls]
    return "\n".join([content, *written] if content else written)


def calls_are_valid(message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every call is one of the tools' and its arguments match the schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return all(call["name"] in schemas and _matches(call, schemas[call["name"]]) for call in calls)


def _split_system(first: Message) -> tuple[str, list[dict[str, Any]]]:
    if first.role != "system":
        return "", []
    opening, found, listed = first.content.partition(TOOLS_OPENING)
    if not found:
        return first.content, []
    assert listed.endswith(TOOLS_CLOSING)
    return opening.removesuffix("\n\n"), [
        json.loads(line) for line in listed[: -len(TOOLS_CLOSING)].strip().split("\n")
    ]


def _openai_message(message: Message, call_id: str) -> dict[str, Any]:
    """The only call before a response is the message before it."""
    if message.role == "assistant" and (match := _CALL.fullmatch(message.content)):
        call = json.loads(match[1])
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
    if message.role == "user" and (match := _RESPONSE.fullmatch(message.content)):
        number = int(call_id.removeprefix("call_")) - 1
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": match[1]}
    return {"role": message.role, "content": message.content}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Empty where they are no JSON object, which no check takes for right."""
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _matches(call: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return False
    if not isinstance(arguments, dict) or not set(schema["required"]) <= arguments.keys():
        return False
    properties = schema["properties"]
    return all(name in properties and _is(value, properties[name]["type"]) for name, value in arguments.items())


def _is(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
