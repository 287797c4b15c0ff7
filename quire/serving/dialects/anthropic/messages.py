"""Anthropic's messages as messages of a chat."""

from __future__ import annotations

import json
import re
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
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?\s*")
"""What Claude Code puts at the head of its system prompt, different from turn to turn: it says nothing to a model, and
no prompt behind it would find its prefix in the cache."""


def chat_messages(
    system: str | Sequence[TextBlock] | None, messages: Sequence[Message], *, sees: bool = False
) -> list[dict[str, Any]]:
    """The messages of the chat, for a model that `sees` images or does not; raises RequestError if a block belongs to
    another role, or cannot be read."""
    if isinstance(system, str):
        content: Any = _BILLING_LINE.sub("", system, count=1)
    else:
        texts = [block.text for block in system or ()]
        kept = [_BILLING_LINE.sub("", text, count=1) for text in texts[:1]]
        content = [_part(text) for text in (*(kept if kept == texts[:1] or any(kept) else ()), *texts[1:])]
    first = [{"role": "system", "content": content}] if content else []
    turns = (_turn(message, f"messages[{i}]", sees=sees) for i, message in enumerate(messages))
    return [*first, *(message for turn in turns for message in turn)]


def _turn(message: Message, place: str, *, sees: bool) -> list[dict[str, Any]]:
    blocks: Sequence[Block] = message.content if isinstance(message.content, list) else ()
    if message.role == "assistant" and blocks:
        return [_answer(blocks, place)]
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _question(message.role, blocks, place, sees=sees)


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


def _question(role: str, blocks: Sequence[Block], place: str, *, sees: bool) -> list[dict[str, Any]]:
    """The messages of a turn that is no answer; results of calls are messages of their own."""
    messages: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block:
            case ToolResultBlock() if role == "user":
                content = block.content or ""
                at = f"{place}.content[{i}]"
                shown = content if isinstance(content, str) else [_result(each, at, sees=sees) for each in content]
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": shown})
                texts = []
            case _:
                if (part := _shown(block, f"{place}.content[{i}]", sees=sees)) is None:
                    raise _wrong(block, role, f"{place}.content[{i}]")
                if not texts:
                    messages.append({"role": role, "content": texts})
                texts.append(part)
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


def _result(block: ResultBlock, place: str, *, sees: bool) -> dict[str, Any]:
    return _shown(block, place, sees=sees) or _part(NOT_SEEN[block.type])


def _shown(block: Block | ResultBlock, place: str, *, sees: bool) -> dict[str, Any] | None:
    """The part of a chat that a block is; None if a model can read nothing of it."""
    if isinstance(block, ImageBlock):
        return _image(block.source, place) if sees else None
    text = _read(block)
    return None if text is None else _part(text)


def _image(source: dict[str, Any], place: str) -> dict[str, Any]:
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if not isinstance(url, str):
        raise RequestError(f"{place}.source must have the type base64 or url, with data or a url.", param=place)
    return {"type": "image_url", "image_url": {"url": url}}


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
