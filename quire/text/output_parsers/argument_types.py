"""From the texts of arguments to JSON, by the types that the tool's schema gives them.

Strings stream, while other values wait for their end. A text that does not fit its type becomes a string: it is never
lost, and whoever gets the call can see what is wrong with it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from quire.text.output_parsers.events import OutputEvent, Tool
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.schema_references import SchemaReferences
from quire.text.output_parsers.tool_calls import Answer

_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_TYPE_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class ArgumentTypes:
    """The types of one tool's arguments."""

    def __init__(self, tools: Sequence[Tool], name: str) -> None:
        """Find the types of the tool with this name. Arguments of an unknown tool are strings or JSON containers."""
        self._schema = next((tool.parameters for tool in tools if tool.name == name), {})

    def is_string(self, key: str) -> bool:
        """Whether this argument can only be a string, so that its text needs no conversion."""
        return self._types(key) == {"string"}

    def may_be_string(self, key: str) -> bool:
        """Whether a text of any form can stand for this argument."""
        return "string" in self._types(key) or not self._types(key)

    def json_of(self, key: str, text: str) -> str:
        """An argument's text as JSON."""
        types = self._types(key)
        stripped = text.strip()
        if "null" in types and stripped.lower() in ("null", "none"):
            return "null"
        if "boolean" in types and stripped.lower() in ("true", "false"):
            return stripped.lower()
        pattern = _NUMBER if "number" in types else _INTEGER
        if types & {"number", "integer"} and pattern.fullmatch(stripped):
            return stripped
        if (types & {"object", "array"} or not types) and stripped[:1] in ("{", "["):
            return _container(stripped) or json.dumps(text, ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False)

    def _types(self, key: str) -> frozenset[str]:
        properties = self.references.merged(self._schema).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return frozenset(self._types_of(schema))

    def _types_of(self, schema: Any) -> set[str]:
        """The types of a schema and its alternatives, each visited once: references may lead in circles."""
        found: set[str] = set()
        waiting, seen = [schema], set[int]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            kind = schema.get("type")
            if "$ref" in schema:
                with suppress(LookupError):
                    waiting.append(self.references.target(schema))
            elif isinstance(kind, str):
                found.add(kind)
            elif isinstance(kind, Sequence):
                found.update(entry for entry in kind if isinstance(entry, str))
            else:
                values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
                found.update(_TYPE_OF_VALUE.get(type(value), "object") for value in values)
                waiting += [each for keyword in ("anyOf", "oneOf", "allOf") for each in _list(schema.get(keyword))]
        return found

    @cached_property
    def references(self) -> SchemaReferences:
        """The references of the tool's schema."""
        return SchemaReferences(self._schema)


class TypedArguments:
    """The arguments of one call, which has started, as a JSON object from keys and texts."""

    def __init__(self, scanner: TextScanner, answer: Answer, types: ArgumentTypes) -> None:
        self._scanner = scanner
        self._answer = answer
        self._types = types
        self._separator = "{"

    def read(self, key: str, ends: Tags, *, string: bool | None = None) -> Steps[str | None]:
        """Read a value up to one of the tags (`ends`), which is returned and stays unread; None if the text ends
        before. One newline at each side belongs to the tags. `string` says whether the value is a string, where the
        format tells."""
        yield from self._answer.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        if (yield from self._scanner.peek()) == "\n":
            self._scanner.take()
        if string or (string is None and self._types.is_string(key)):
            return (yield from self._read_string(ends))
        text, tag = yield from self._scanner.text_until(ends, consume=False)
        if tag is None:
            yield from self._answer.arguments(text)
        else:
            yield from self._answer.arguments(self._types.json_of(key, text.removesuffix("\n")))
        return tag

    def close(self) -> Iterator[OutputEvent]:
        """End the arguments."""
        yield from self._answer.arguments("{}" if self._separator == "{" else "}")

    def _read_string(self, ends: Tags) -> Steps[str | None]:
        yield from self._answer.arguments('"')
        newline = False

        def emit(piece: str) -> Iterator[OutputEvent]:
            nonlocal newline
            text = "\n" + piece if newline else piece
            newline = text.endswith("\n")
            if text := text.removesuffix("\n"):
                yield from self._answer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        tag = yield from self._scanner.until(ends, emit, consume=False)
        if tag is not None:
            yield from self._answer.arguments('"')
        return tag


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _container(text: str) -> str | None:
    """An object or array as JSON, read from JSON or from Python's notation."""
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
