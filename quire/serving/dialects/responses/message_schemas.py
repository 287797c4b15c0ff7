"""Items of a conversation in /v1/responses: messages, calls, their results, and reasoning.

Owns reading them from JSON. Items that an earlier response returned can be sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from quire.errors import RequestError, UnsupportedField
from quire.serving.api.schemas.chat import KINDS, NOT_SEEN
from quire.serving.api.schemas.known_fields import Part
from quire.serving.dialects.dialect import hosted_output


class _Item(Part, extra="ignore"):
    """What a response says beside these fields is sent back unused."""


class TextPart(_Item):
    """A piece of a text, the model's reasons for none, or a piece of its reasoning."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


class MediaPart(_Item):
    """A picture or another file that a tool gave, which no model here can see."""

    type: Literal["input_image", "input_file", "input_audio"]


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]


class FunctionCallItem(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(_Item):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart | MediaPart]


class ReasoningItem(_Item):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] | None = None


HOSTED_ITEMS = frozenset({
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "web_search_call",
})  # fmt: skip
"""Items about tools that OpenAI runs."""


class HostedItem(Part, extra="allow"):
    """What a tool that OpenAI runs did in an earlier turn."""

    type: str

    @property
    def text(self) -> str:
        """What it gave, as far as a model can read it; empty if nothing can be read."""
        fields = self.model_extra or {}
        match self.type:
            case "mcp_call":
                found = [fields.get("output")]
            case "program_output":
                found = [fields.get("result")]
            case "code_interpreter_call":
                found = _each(fields.get("outputs"), "logs")
            case "file_search_call":
                found = _each(fields.get("results"), "text")
            case _:
                found = []
        texts = [text for text in found if isinstance(text, str) and text]
        name = str(fields.get("name", self.type.removesuffix("_call").removesuffix("_output")))
        return hosted_output(name, texts)


def _each(values: Any, name: str) -> list[Any]:
    return [value.get(name) for value in values if isinstance(value, dict)] if isinstance(values, list) else []


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | HostedItem
_KINDS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    **dict.fromkeys(HOSTED_ITEMS, HostedItem),
}


def parse_items(items: Sequence[Any], place: str = "input") -> list[InputItem]:
    """The items of a list as it came.

    Raises:
        UnsupportedField: One is of a kind that is not served.
        RequestError: One is wrong; the error names it.
    """
    return [_parse(item, f"{place}[{at}]") for at, item in enumerate(items)]


def part_text(part: TextPart | MediaPart) -> str:
    """What a part says."""
    if isinstance(part, MediaPart):
        return NOT_SEEN[KINDS[part.type]]
    return part.text if part.text is not None else part.refusal or ""


def joined(content: str | Sequence[TextPart | MediaPart]) -> str:
    """A text of several parts in one."""
    return content if isinstance(content, str) else "\n".join(map(part_text, content))


def _parse(item: Any, place: str) -> InputItem:
    if not isinstance(item, dict):
        raise RequestError(f"{place} must be an object.", param=place)
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedField(f"{place}.type", f"items of type '{str(kind)[:64]}' cannot be read")
    parts = item.get("content")
    for at, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and str(part.get("type")) in KINDS:
            raise UnsupportedField(
                f"{place}.content[{at}].type", f"this model reads text only; send text in place of '{part['type']}'"
            )
    try:
        return _KINDS[kind].model_validate(item)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        inside = [str(part) for part in wrong["loc"] if not str(part).startswith(("str", "list"))]
        where = ".".join([place, *inside])
        raise RequestError(f"{where}: {wrong['msg'][:200]}.", param=where) from None
