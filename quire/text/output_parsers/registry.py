"""Parsers by vLLM's names, and how a choice's parser is made of them: reasoning, then the answer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from quire.errors import ConfigError
from quire.text.output_parsers.calls_in_thoughts import Thoughts
from quire.text.output_parsers.events import ContentDelta, OutputEvent, Tool
from quire.text.output_parsers.formats import ReasoningFormat, ToolFormat, Turn
from quire.text.output_parsers.scanner import OutputParser, Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer

TOOL_PARSERS = {
    "cohere_command3": "quire.text.output_parsers.tagged_json:COHERE_COMMAND3",
    "deepseek_v3": "quire.text.output_parsers.marked_calls:DEEPSEEK_V3",
    "deepseek_v31": "quire.text.output_parsers.marked_calls:DEEPSEEK_V31",
    "deepseek_v32": "quire.text.output_parsers.xml_calls:DEEPSEEK_V32",
    "ernie45": "quire.text.output_parsers.tagged_json:HERMES",
    "functiongemma": "quire.text.output_parsers.gemma_calls:FUNCTION_GEMMA",
    "gemma4": "quire.text.output_parsers.gemma_calls:GEMMA4",
    "glm45": "quire.text.output_parsers.glm:GLM45",
    "glm47": "quire.text.output_parsers.glm:GLM47",
    "granite": "quire.text.output_parsers.tagged_json:GRANITE",
    "granite-20b-fc": "quire.text.output_parsers.tagged_json:GRANITE_20B_FC",
    "granite4": "quire.text.output_parsers.tagged_json:HERMES",
    "hermes": "quire.text.output_parsers.tagged_json:HERMES",
    "hunyuan_a13b": "quire.text.output_parsers.tagged_json:JAMBA",
    "internlm": "quire.text.output_parsers.tagged_json:INTERNLM",
    "jamba": "quire.text.output_parsers.tagged_json:JAMBA",
    "kimi_k2": "quire.text.output_parsers.marked_calls:KIMI_K2",
    "lfm2": "quire.text.output_parsers.pythonic:LFM2",
    "llama3_json": "quire.text.output_parsers.llama_json:FORMAT",
    "llama4_json": "quire.text.output_parsers.llama_json:FORMAT",
    "llama4_pythonic": "quire.text.output_parsers.pythonic:FORMAT",
    "longcat": "quire.text.output_parsers.tagged_json:LONGCAT",
    "mimo": "quire.text.output_parsers.xml_calls:QWEN3_CODER",
    "minimax": "quire.text.output_parsers.tagged_json:MINIMAX",
    "minimax_m2": "quire.text.output_parsers.xml_calls:MINIMAX_M2",
    "mistral": "quire.text.output_parsers.mistral:FORMAT",
    "olmo3": "quire.text.output_parsers.pythonic:OLMO3",
    "openai": "quire.text.output_parsers.harmony:FORMAT",
    "phi4_mini_json": "quire.text.output_parsers.tagged_json:PHI4_MINI",
    "pythonic": "quire.text.output_parsers.pythonic:FORMAT",
    "qwen3_coder": "quire.text.output_parsers.xml_calls:QWEN3_CODER",
    "qwen3_xml": "quire.text.output_parsers.xml_calls:QWEN3_CODER",
    "seed_oss": "quire.text.output_parsers.xml_calls:SEED_OSS",
    "step3p5": "quire.text.output_parsers.xml_calls:QWEN3_CODER",
}

REASONING_PARSERS = {
    "cohere_command3": "quire.text.output_parsers.thinking:COHERE_COMMAND3",
    "deepseek_r1": "quire.text.output_parsers.thinking:DEEPSEEK_R1",
    "deepseek_v3": "quire.text.output_parsers.thinking:DEEPSEEK_V3",
    "gemma4": "quire.text.output_parsers.thinking:GEMMA4",
    "glm45": "quire.text.output_parsers.thinking:GLM45",
    "granite": "quire.text.output_parsers.thinking:GRANITE",
    "holo2": "quire.text.output_parsers.thinking:QWEN3",
    "kimi_k2": "quire.text.output_parsers.thinking:KIMI_K2",
    "mimo": "quire.text.output_parsers.thinking:QWEN3",
    "minimax_m2": "quire.text.output_parsers.thinking:MINIMAX_M2",
    "mistral": "quire.text.output_parsers.thinking:MISTRAL",
    "nemotron_v3": "quire.text.output_parsers.thinking:QWEN3",
    "olmo3": "quire.text.output_parsers.thinking:QWEN3",
    "openai_gptoss": "quire.text.output_parsers.harmony:REASONING",
    "qwen3": "quire.text.output_parsers.thinking:QWEN3",
    "seed_oss": "quire.text.output_parsers.thinking:SEED_OSS",
    "step3": "quire.text.output_parsers.thinking:DEEPSEEK_R1",
    "step3p5": "quire.text.output_parsers.thinking:DEEPSEEK_R1",
}

NOT_SERVED = {
    "tool_call_parser": (
        "apertus", "cohere_command4", "deepseek_v4", "gigachat3", "hy_v3", "poolside_v1", "step3", "xlam",
    ),
    "reasoning_parser": (
        "cohere_command4", "deepseek_v4", "ernie45", "hunyuan_a13b", "hy_v3", "minimax_m2_append_think", "poolside_v1",
    ),
}  # fmt: skip
"""Further parsers of vLLM, by the setting that names them."""


def tool_format(name: str) -> ToolFormat:
    """The format of a tool parser. Raises ConfigError if there is no such parser."""
    found = _load(TOOL_PARSERS, name, "tool_call_parser")
    assert isinstance(found, ToolFormat)
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of a reasoning parser. Raises ConfigError if there is no such parser."""
    found = _load(REASONING_PARSERS, name, "reasoning_parser")
    assert isinstance(found, ReasoningFormat)
    return found


def create_parser(
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    tools: Sequence[Tool] = (),
    turn: Turn | None = None,
    calls_or_form: bool = False,
) -> OutputParser:
    """Return a parser for one choice. Without a parser's name, calls or reasoning stay in the text. Some formats take
    types of arguments from `tools`. With `calls_or_form` the answer is calls alone or content alone (see
    `call_grammar`): nothing within the content is a call. Of reasoning with nothing behind it, calls within it are."""
    reasoning = reasoning_format(reasoning_parser) if reasoning_parser else None
    tool = tool_format(tool_parser) if tool_parser else None
    read_answer = tool.read if tool else (reasoning and reasoning.answer) or read_plain
    either = calls_or_form and tool is not None and not tool.has_messages
    if calls_or_form and tool is not None and tool.read_calls_or_form is not None:
        read_answer = tool.read_calls_or_form

    def read(scanner: TextScanner) -> Steps[None]:
        if reasoning:
            yield from reasoning.read(scanner, turn or Turn())
        answer = Answer(tool.new_id if tool else None)
        steps = read_answer(scanner, answer, tools)
        yield from _content_to_the_end(steps, scanner, answer) if either else steps
        yield from answer.finish()

    if reasoning is None or tool is None or tool.has_messages or calls_or_form:
        return OutputParser(read)

    def read_with_lost_calls(scanner: TextScanner) -> Steps[None]:
        thoughts = Thoughts()
        yield from thoughts.watch(read(scanner))
        if scanner.whole:
            yield from thoughts.calls(tool, tools)

    return OutputParser(read_with_lost_calls)


def special_tokens(tool_parser: str | None, reasoning_parser: str | None) -> frozenset[str]:
    """Tokens that the text must show for these parsers, whatever `skip_special_tokens` says."""
    tools = tool_format(tool_parser).special_tokens if tool_parser else ()
    reasoning = reasoning_format(reasoning_parser).special_tokens if reasoning_parser else ()
    return frozenset((*tools, *reasoning))


def read_plain(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
    yield from scanner.until(_NO_TAGS, lambda piece: (ContentDelta(piece),))


def _content_to_the_end(steps: Steps[None], scanner: TextScanner, answer: Answer) -> Iterator[OutputEvent | None]:
    """An answer whose text is all content from the first content on."""
    for event in steps:
        yield event
        if isinstance(event, ContentDelta):
            break
    yield from read_plain(scanner, answer, ())


def _load(table: dict[str, str], name: str, param: str) -> object:
    if name not in table:
        flag = "--" + param.replace("_", "-")
        if name in NOT_SERVED[param]:
            what = "calls" if param == "tool_call_parser" else "reasoning"
            raise ConfigError(
                f"{flag} {name} is not served yet: leave it out, and {what} stay in the answer's text.", param=param
            )
        raise ConfigError(
            f"{flag}: there is no parser {name!r}. Choose one of {', '.join(sorted(table))}.", param=param
        )
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


_NO_TAGS = Tags()
