"""Whether what a server sent is what the `openai` package says it sends."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict, TypeAdapter


def check(kind: Any, value: Any) -> Any:
    """The value as a type of the `openai` package; fails where a field is missing or of another type, as 1 for true.

    The package itself is lenient: it builds its types without looking at the values.
    """
    return TypeAdapter(kind).validate_python(value, strict=True)


OPEN_RESPONSES = ("frequency_penalty", "presence_penalty", "store")
"""Fields of a response that the Open Responses specification requires and the `openai` package does not know."""


def unknown_fields(value: Any, place: str = "") -> list[str]:
    """Fields of a checked value that the package does not know, however deep."""
    found: list[str] = []
    if isinstance(value, BaseModel):
        assert value.model_config == ConfigDict() or value.model_config.get("extra") == "allow"
        known = OPEN_RESPONSES if isinstance(value, Response) else ()
        found += [f"{place}.{name}" for name in value.model_extra or {} if name not in known]
        for name in type(value).model_fields:
            found += unknown_fields(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for each in value:
            found += unknown_fields(each, f"{place}[]")
    return found
