"""Anthropic's messages as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from quire.errors import RequestError
from quire.serving.api.schemas.chat import NOT_SEEN, not_served
from quire.serving.dialects.anthropic.message_schemas import (
    Block,
    CompactionBlock,
    DocumentBlock,
    FallbackBlock,
    HostedCallBlock,
    HostedResultBlock,
    ImageBlock,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.serving.dialects.anthropic.schemas import Message
from quire.serving.dialects.dialect import function_call, hosted_output

_READABLE = ("text", "title", "url", "stdout", "stderr", "content", "tool_name", "error_code")
"""Fields of a hosted tool's result that say something to a model; others are encrypted, or bookkeeping."""
MAX_DEPTH = 8
"""Levels of results that are looked through; Anthropic's have half as many."""


def chat_messages(system: str | Sequence[TextBlock] | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of the chat; raises RequestError if a block belongs to another role, or cannot be read."""
    first = []
    if system:
        content = system if isinstance(system, str) else [_part(block.text) for block in system]
        first = [{"role": "system", "content": content}]
    turns = (_turn(message, f"messages[{i}]") for i, message in enumerate(messages))
    return [*first, *(message for turn in turns for message in turn)]


def _turn(message: Message, place: str) -> list[dict[str, Any]]:
    blocks: Sequence[Block] = message.content if isinstance(message.content, list) else ()
    if message.role == "assistant" and blocks:
        return [_answer(blocks, place)]
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _question(message.role, blocks, place)


def _answer(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(_part(block.text))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(function_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
            case HostedResultBlock() if shown := _hosted_result(block):
                texts.append(_part(shown))
            case CompactionBlock() if block.content:
                texts.append(_part(block.content))
            case (
                RedactedThinkingBlock() | FallbackBlock() | HostedCallBlock() | HostedResultBlock() | CompactionBlock()
            ):
                pass  # says nothing that can be read
            case ToolResultBlock():
                raise RequestError(f"{place}.content[{i}]: results belong to the user's turns.", param=place)
            case _:
                raise _wrong(block, "assistant", f"{place}.content[{i}]")
    answer: dict[str, Any] = {"role": "assistant", "content": texts or ("" if not calls else None)}
    if thoughts:
        answer["reasoning"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _question(role: str, blocks: Sequence[Block], place: str) -> list[dict[str, Any]]:
    """The messages of a turn that is no answer; results of calls are messages of their own."""
    messages: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block:
            case ToolResultBlock() if role == "user":
                content = block.content or ""
                shown = content if isinstance(content, str) else [_part(_result(each)) for each in content]
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": shown})
                texts = []
            case _:
                if (text := _read(block)) is None:
                    raise _wrong(block, role, f"{place}.content[{i}]")
                if not texts:
                    messages.append({"role": role, "content": texts})
                texts.append(_part(text))
    return messages or [{"role": role, "content": ""}]


def _wrong(block: Block, role: str, place: str) -> RequestError:
    if isinstance(block, ImageBlock | DocumentBlock):
        return RequestError(f"{place}: {not_served(block.type)}", param=place)
    return RequestError(f"{place}: '{block.type}' is no block of role {role}.", param=place)


def _read(block: Block | ResultBlock) -> str | None:
    """The text of a block that a user, the system or a tool may send; None if a model can read none."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return "\n".join([block.title, block.source, *(part.text for part in block.content)])
        case DocumentBlock():
            return _document(block)
        case ToolReferenceBlock():
            return f"[tool: {block.tool_name}]"
        case CompactionBlock():
            return block.content or None
    return None


def _result(block: ResultBlock) -> str:
    text = _read(block)
    return NOT_SEEN[block.type] if text is None else text


def _document(block: DocumentBlock) -> str | None:
    source = block.source
    if source.get("type") == "text":
        text = source.get("data")
    elif source.get("type") == "content":
        content = source.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        text = "\n".join(map(str, texts)) if all(isinstance(part, str) for part in texts) else None
    else:
        return None
    if not isinstance(text, str):
        return None
    return "\n".join(filter(None, [block.title, block.context, text]))


def _hosted_result(block: HostedResultBlock) -> str:
    """What a tool of Anthropic's gave, as far as it can be read; empty if nothing can."""
    name = block.type.removesuffix("_result").removesuffix("_tool")
    return hosted_output(name, _readable(block.content, MAX_DEPTH))


def _readable(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, list) and depth:
        for each in value:
            yield from _readable(each, depth - 1)
    elif isinstance(value, dict) and depth:
        for name in _READABLE:
            yield from _readable(value.get(name), depth - 1)


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
