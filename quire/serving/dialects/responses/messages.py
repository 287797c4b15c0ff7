"""Input items as messages of a chat, and as the items that a response lists.

Knows nothing about requests and about where items are kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError
from quire.serving.dialects.dialect import function_call
from quire.serving.dialects.responses.message_schemas import (
    FunctionCallItem,
    FunctionCallOutputItem,
    HostedItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    joined,
    part_text,
)


def new_id(kind: str) -> str:
    """An id for an item, as `msg_…`."""
    return f"{kind}_{uuid.uuid4().hex}"


def chat_messages(
    instructions: str | None,
    items: Sequence[InputItem],
    model_name: Callable[[str | None, str], str] = lambda namespace, name: name,
) -> list[dict[str, Any]]:
    """The messages of a chat.

    What the model thought, said and called between two messages of others is one message of its own, as chat templates
    expect.

    Args:
        model_name: What the model calls a function, by its namespace and name.

    Raises:
        RequestError: An output belongs to no call.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    calls: set[str] = set()
    turn = _ModelTurn(model_name)
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn.texts.append(joined(item.content))
            case FunctionCallItem():
                turn.calls.append(item)
                calls.add(item.call_id)
            case ReasoningItem():
                turn.thoughts.append(joined(item.content or item.summary))
            case HostedItem():
                turn.texts += [item.text] if item.text else []  # nothing to read is no turn
            case FunctionCallOutputItem():
                if item.call_id not in calls:
                    raise RequestError(
                        f"input: no function call has the call_id '{item.call_id[:64]}' of this output.", param="input"
                    )
                messages += turn.end()
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
            case MessageItem():
                messages += turn.end()
                messages.append({"role": item.role, "content": joined(item.content)})
    return [*messages, *turn.end()]


@dataclass
class _ModelTurn:
    """What the model thought, said and called one after the other."""

    model_name: Callable[[str | None, str], str]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[FunctionCallItem] = field(default_factory=list)

    def end(self) -> list[dict[str, Any]]:
        """Its message, if there is any; the next turn is empty."""
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, self.texts))}
        if thought := "\n".join(filter(None, self.thoughts)):
            message["reasoning"] = thought
        if self.calls:
            message["tool_calls"] = [
                function_call(call.call_id, self.model_name(call.namespace, call.name), call.arguments)
                for call in self.calls
            ]
        said = bool(self.texts or self.calls or thought)
        self.texts, self.thoughts, self.calls = [], [], []
        return [message] if said else []


def listed_items(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """The items as responses list them: with ids, and all fields."""
    return [_listed(item) for item in items]


def _listed(item: InputItem) -> dict[str, Any]:
    match item:
        case MessageItem(role="assistant"):
            content = [{"type": "output_text", "text": t, "annotations": [], "logprobs": []} for t in _texts(item)]
            return _item("msg", "message", role="assistant", content=content)
        case MessageItem():
            return _item(
                "msg", "message", role=item.role, content=[{"type": "input_text", "text": t} for t in _texts(item)]
            )
        case FunctionCallItem():
            more = {} if item.namespace is None else {"namespace": item.namespace}
            return _item("fc", "function_call", call_id=item.call_id, name=item.name, arguments=item.arguments, **more)
        case HostedItem():
            return {"id": new_id("item"), **item.model_dump()}
        case FunctionCallOutputItem():
            return _item("fco", "function_call_output", call_id=item.call_id, output=joined(item.output))
        case ReasoningItem():
            content = [{"type": "reasoning_text", "text": part_text(part)} for part in item.content or ()]
            summary = [{"type": "summary_text", "text": part_text(part)} for part in item.summary]
            return _item("rs", "reasoning", summary=summary, content=content)


def _item(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": new_id(prefix), "type": kind, "status": "completed", **fields}


def _texts(item: MessageItem) -> list[str]:
    return [item.content] if isinstance(item.content, str) else [part_text(part) for part in item.content]
