"""Parsers by vLLM's names, and how one is put together for a choice.

Owns the names and the composition: reasoning in front of the answer. Knows no format.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from quire.errors import ConfigError
from quire.output_parsers.events import ContentDelta, OutputParser, Tool
from quire.output_parsers.formats import ReasoningFormat, ToolFormat, Turn
from quire.output_parsers.scanner import FormatParser, Steps, Tags, TextScanner

TOOL_PARSERS = {
    "hermes": "quire.output_parsers.hermes:FORMAT",
}

REASONING_PARSERS = {
    "deepseek_r1": "quire.output_parsers.thinking:DEEPSEEK_R1",
    "qwen3": "quire.output_parsers.thinking:QWEN3",
}


def tool_format(name: str) -> ToolFormat:
    """The format of a tool parser.

    Raises:
        ConfigError: There is none of this name.
    """
    found = _load(TOOL_PARSERS, name, "tool_call_parser")
    assert isinstance(found, ToolFormat)
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of a reasoning parser.

    Raises:
        ConfigError: There is none of this name.
    """
    found = _load(REASONING_PARSERS, name, "reasoning_parser")
    assert isinstance(found, ReasoningFormat)
    return found


def create_parser(
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    tools: Sequence[Tool] = (),
    turn: Turn | None = None,
) -> OutputParser:
    """A parser for one choice.

    Args:
        tool_parser: None leaves calls in the text.
        reasoning_parser: None leaves reasoning in the text.
        tools: What the model may call. Some formats take types of arguments from them.
        turn: How the turn begins in the prompt.
    """
    reasoning = reasoning_format(reasoning_parser) if reasoning_parser else None
    if tool_parser:
        read_answer = tool_format(tool_parser).read
    else:
        read_answer = (reasoning and reasoning.answer) or read_plain

    def read(scanner: TextScanner) -> Steps[None]:
        if reasoning:
            yield from reasoning.read(scanner, turn or Turn())
        yield from read_answer(scanner, tools)

    return FormatParser(read)


def special_tokens(tool_parser: str | None, reasoning_parser: str | None) -> frozenset[str]:
    """Tokens that the text must show for these parsers, whatever `skip_special_tokens` says."""
    tools = tool_format(tool_parser).special_tokens if tool_parser else ()
    reasoning = reasoning_format(reasoning_parser).special_tokens if reasoning_parser else ()
    return frozenset((*tools, *reasoning))


def read_plain(scanner: TextScanner, tools: Sequence[Tool]) -> Steps[None]:
    """All text is content."""
    yield from scanner.until(_NO_TAGS, lambda piece: (ContentDelta(piece),))


def _load(table: dict[str, str], name: str, param: str) -> object:
    if name not in table:
        flag = "--" + param.replace("_", "-")
        raise ConfigError(
            f"{flag}: there is no parser {name!r}. Choose one of {', '.join(sorted(table))}.", param=param
        )
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


_NO_TAGS = Tags()
