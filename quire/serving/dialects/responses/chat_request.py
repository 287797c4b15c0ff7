"""A request of /v1/responses as one of /v1/chat/completions, and its items as messages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError
from quire.serving.api.schemas.chat import ChatRequest
from quire.serving.api.schemas.known_fields import FieldNames
from quire.serving.dialects.dialect import function_call, json_format, make_chat
from quire.serving.dialects.responses.schemas import (
    SAMPLING,
    ClientCallItem,
    ClientOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    HostedItem,
    InputItem,
    MediaPart,
    MessageItem,
    ReasoningConfig,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    TextPart,
    has_images,
    joined,
    part_text,
)
from quire.serving.dialects.responses.tools import ResponseTools
from quire.text.hints import HintLog


def chat_request(fields: ResponsesRequest, messages: Sequence[dict[str, Any]], tools: ResponseTools) -> ChatRequest:
    """The chat request that answers a request; raises RequestError if a field is wrong or not served."""
    body: dict[str, Any] = {name: getattr(fields, name) for name in SAMPLING}
    body |= {
        "model": fields.model,
        "messages": list(messages),
        "max_completion_tokens": fields.max_output_tokens,
        "tools": tools.chat_tools or None,
        "tool_choice": tools.choice if tools.allowed or tools.choice not in ("none", "auto") else None,
        "parallel_tool_calls": fields.parallel_tool_calls if tools.allowed else None,
        "response_format": _response_format(fields.text.format if fields.text else None),
        "reasoning_effort": fields.reasoning.effort if fields.reasoning else None,
        "verbosity": fields.text.verbosity if fields.text else None,
    }
    if fields.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return make_chat(body, _names(tools))


def _names(tools: ResponseTools) -> FieldNames:
    """Fields of chat requests by their names in /v1/responses, where these differ."""
    return FieldNames({
        "messages": lambda _: "input",
        "prompt": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function": "tool_choice",
        "tools": tools.sent_place,
    })  # fmt: skip


def log_hints(fields: ResponsesRequest, hints: HintLog) -> None:
    """Log the hints that no model here can follow."""
    reasoning = fields.reasoning or ReasoningConfig()
    if {reasoning.summary, reasoning.generate_summary} & {"concise", "detailed"}:
        hints.drop("reasoning.summary", "reasoning is shown as it is, and not summarized")
    if reasoning.mode not in (None, "standard"):
        hints.drop("reasoning.mode", "a model has one")
    if reasoning.context not in (None, "auto", "all_turns"):
        hints.drop("reasoning.context", "the chat template chooses which reasoning is shown again")


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.json_schema is None:
        raise RequestError("text.format.schema is required.", param="text.format.schema")
    options = {"description": form.description, "strict": form.strict}
    given = {name: value for name, value in options.items() if value is not None}
    return json_format(form.name or "answer", form.json_schema, **given)


def new_id(kind: str) -> str:
    """An id for an item, as `msg_…`."""
    return f"{kind}_{uuid.uuid4().hex}"


def chat_messages(
    instructions: str | None,
    items: Sequence[InputItem],
    model_name: Callable[[str | None, str], str] = lambda namespace, name: name,
    *,
    sees: bool = False,
) -> list[dict[str, Any]]:
    """The messages of a chat, for a model that `sees` images or does not; raises RequestError if an output belongs to
    no call.

    What the model thought, said and called between two messages of others is one message of its own, as chat templates
    expect. `model_name` tells what the model calls a function, by its namespace and name.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    calls: dict[str, str] = {}
    turn = _ModelTurn(model_name)
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn.texts.append(joined(item.content))
            case FunctionCallItem():
                turn.calls.append(item)
                calls[item.call_id] = item.call_id
            case ClientCallItem():
                turn.calls.append(item.function_call)
                calls |= {item.id or item.call_id: item.call_id, item.call_id: item.call_id}
            case ReasoningItem():
                turn.thoughts.append(joined(item.content or item.summary))
            case HostedItem():
                turn.texts += [item.text] if item.text else []  # nothing to read is no turn
            case FunctionCallOutputItem() | ClientOutputItem():
                named = item.call_id or (item.id if isinstance(item, ClientOutputItem) else None) or ""
                if named not in calls:
                    raise RequestError(
                        f"input: no function call has the call_id '{named[:64]}' of this output.", param="input"
                    )
                told = item.text if isinstance(item, ClientOutputItem) else _content(item.output, sees=sees)
                messages += turn.end()
                messages.append({"role": "tool", "tool_call_id": calls[named], "content": told})
            case MessageItem():
                messages += turn.end()
                messages.append({"role": item.role, "content": _content(item.content, sees=sees)})
    return [*messages, *turn.end()]


def _content(content: str | Sequence[TextPart | MediaPart], *, sees: bool) -> str | list[dict[str, Any]]:
    """What somebody said or a tool gave: parts only where a model sees pictures among them."""
    if isinstance(content, str) or not sees or not has_images(content):
        return joined(content)
    return [_part(part) for part in content]


def _part(part: TextPart | MediaPart) -> dict[str, Any]:
    if isinstance(part, MediaPart) and part.type == "input_image":
        return {"type": "image_url", "image_url": {"url": part.image_url}, "file_id": part.file_id}
    return {"type": "text", "text": part_text(part)}


@dataclass
class _ModelTurn:
    """What the model thought, said and called one after the other."""

    model_name: Callable[[str | None, str], str]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[FunctionCallItem] = field(default_factory=list)

    def end(self) -> list[dict[str, Any]]:
        """The message of this turn, if there is any; the next turn is empty."""
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


def listed_item(item: InputItem) -> dict[str, Any]:
    """The item as responses list it: with an id, and all fields."""
    match item:
        case MessageItem(role="assistant"):
            content = [{"type": "output_text", "text": t, "annotations": [], "logprobs": []} for t in _texts(item)]
            return _item("msg", "message", role="assistant", content=content)
        case MessageItem():
            return _item("msg", "message", role=item.role, content=_listed(item.content))
        case FunctionCallItem():
            more = {} if item.namespace is None else {"namespace": item.namespace}
            return _item("fc", "function_call", call_id=item.call_id, name=item.name, arguments=item.arguments, **more)
        case HostedItem():
            return {"id": new_id("item"), **item.model_dump()}
        case ClientCallItem() | ClientOutputItem():
            said = item.model_dump(exclude_unset=True, exclude_none=True)
            return {"id": new_id("item"), "status": "completed", **said}
        case FunctionCallOutputItem():
            output = _listed(item.output) if has_images(item.output) else joined(item.output)
            return _item("fco", item.type, call_id=item.call_id, output=output)
        case ReasoningItem():
            content = [{"type": "reasoning_text", "text": part_text(part)} for part in item.content or ()]
            summary = [{"type": "summary_text", "text": part_text(part)} for part in item.summary]
            return _item("rs", "reasoning", summary=summary, content=content)


def _item(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": new_id(prefix), "type": kind, "status": "completed", **fields}


def _listed(content: str | Sequence[TextPart | MediaPart]) -> list[dict[str, Any]]:
    """The parts of content as responses list them."""
    parts = [TextPart(type="input_text", text=content)] if isinstance(content, str) else content
    return [
        {"type": "input_image", "image_url": part.image_url, "file_id": part.file_id, "detail": "auto"}
        if isinstance(part, MediaPart) and part.type == "input_image"
        else {"type": "input_text", "text": part_text(part)}
        for part in parts
    ]


def _texts(item: MessageItem) -> list[str]:
    return [item.content] if isinstance(item.content, str) else [part_text(part) for part in item.content]
