"""Items of a conversation in /v1/responses: messages, calls, their results, and reasoning.

Owns reading them from JSON. Items that an earlier response returned can be sent as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from quire.errors import RequestError, UnsupportedField


class _Item(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # what a response says beside this is sent back unused


class TextPart(_Item):
    """A piece of a text, the model's reasons for none, or a piece of its reasoning."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None


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


class FunctionCallOutputItem(_Item):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]


class ReasoningItem(_Item):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: list[TextPart] = []
    content: list[TextPart] | None = None


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_KINDS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
_PARTS = ("input_image", "input_file", "input_audio")


def parse_items(items: Sequence[Any], place: str = "input") -> list[InputItem]:
    """The items of a list as it came.

    Raises:
        UnsupportedField: One is of a kind that is not served.
        RequestError: One is wrong; the error names it.
    """
    return [_parse(item, f"{place}[{at}]") for at, item in enumerate(items)]


def part_text(part: TextPart) -> str:
    """What a part says."""
    return part.text if part.text is not None else part.refusal or ""


def joined(content: str | Sequence[TextPart]) -> str:
    """A text of several parts in one."""
    return content if isinstance(content, str) else "\n".join(map(part_text, content))


def _parse(item: Any, place: str) -> InputItem:
    if not isinstance(item, dict):
        raise RequestError(f"{place} must be an object.", param=place)
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedField(f"{place}.type", f"items of type '{str(kind)[:64]}' cannot be read")
    for name in ("content", "output"):
        parts = item.get(name)
        for at, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and part.get("type") in _PARTS:
                raise UnsupportedField(f"{place}.{name}[{at}].type", f"send text; '{part['type']}' cannot be read")
    try:
        return _KINDS[kind].model_validate(item)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        inside = [str(part) for part in wrong["loc"] if not str(part).startswith(("str", "list"))]
        where = ".".join([place, *inside])
        raise RequestError(f"{where}: {wrong['msg'][:200]}.", param=where) from None
