"""Where chat templates run: the environment that published ones are written for, and its limits.

A template is foreign code: it gets no attribute that changes anything, and can fill neither memory nor time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

from quire.errors import RequestError

MAX_CHARACTERS = 32 * 2**20
MAX_SECONDS = 10.0
MAX_RANGE = 1_000_000
"""How far all ranges of one rendering may count together."""
MAX_REPETITION = 100_000
"""Maximum number of characters of a repeated string."""


def template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that templates are compiled in."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def limited(pieces: Iterator[str]) -> Iterator[str]:
    """Pass on the pieces of a template's output. Raises RequestError when they are too many or take too long."""
    deadline, length = time.monotonic() + MAX_SECONDS, 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS or time.monotonic() > deadline:
            raise RequestError("The chat template's output is too large.", param="messages")
        yield piece


def counted_range() -> Any:
    """Make a `range` for one rendering, which counts no further than MAX_RANGE in all."""
    left = MAX_RANGE

    def counted(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise jinja2.TemplateRuntimeError("it counts too far")
        return numbers

    return counted


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiplication that cannot fill the memory."""
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "**" or (sizes != [left, right] and sizes[0] * sizes[1] > MAX_REPETITION):
            raise jinja2.exceptions.SecurityError(f"'{operator}' is not allowed here")
        return left * right


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it on the instance)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
