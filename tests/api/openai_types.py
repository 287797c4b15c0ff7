"""Whether what a server sent is what the `openai` package says it sends."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from tests.api import answer_types


def check(kind: Any, value: Any) -> Any:
    """The value as a type of the `openai` package; fails where a field is missing or of another type, as 1 for true.

    The package itself is lenient: it builds its types without looking at the values.
    """
    return TypeAdapter(kind).validate_python(value, strict=True)


def unknown_fields(value: Any) -> list[str]:
    """Fields of a checked value that the package does not know, however deep."""
    return list(answer_types.unknown_fields(value))
