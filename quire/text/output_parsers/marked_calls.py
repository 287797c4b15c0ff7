"""Calls that stand between special tokens: a header with the name, then the arguments as JSON.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1, and the tool calling
guide in moonshotai/Kimi-K2-Instruct (docs/tool_call_guidance.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import NUMBER, CallSyntax, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer

_FENCE = Tags("```")


def marked_calls(syntax: CallSyntax, end: str, separator: str, header: str, *sections: str) -> ToolFormat:
    """The format with these tokens; `syntax.trigger` begins a call.

    Args:
        end, separator: Tokens behind a call and within it.
        header: A pattern of what stands in front of the arguments, with the groups `name` and, where it has one, `id`.
        sections: Tokens around all calls, in any spelling; they are no content.
    """
    begin, pattern = syntax.trigger, re.compile(header)
    tokens, header_end = Tags(begin, end, *sections), Tags("{", begin, end, *sections)

    def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
        while tag := (yield from scanner.until(tokens, answer.text)):
            if tag == begin:
                yield from read_call(scanner, answer)

    def read_call(scanner: TextScanner, answer: Answer) -> Steps[None]:
        scanner.start_recording(begin)
        text, tag = yield from scanner.text_until(header_end, consume=False)
        found = pattern.fullmatch(text)
        recorded = scanner.recorded()
        if found is None or tag is None:
            yield from answer.text(recorded)
            return
        yield from answer.start(found["name"], found.groupdict().get("id"))
        if tag != "{":
            yield from answer.arguments("{}")
            return
        yield from scanner.json_container(tokens, answer.arguments)
        yield from scanner.skip_space()
        yield from scanner.skip_tag(_FENCE)

    return ToolFormat(read, (begin, end, separator, *sections), (syntax,))


def _deepseek(header: str, before_name: str, after_name: str, after_arguments: str, between: str) -> ToolFormat:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    sections = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    syntax = CallSyntax(
        begin + before_name, after_name, after_arguments + end,
        trigger=begin, begin=sections[0], separator=between, end=sections[1],
    )  # fmt: skip
    return marked_calls(syntax, end, _SEPARATOR, header, *sections)


_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_V3 = _deepseek(
    r"\s*function<｜tool▁sep｜>(?P<name>[^\s<`]+)\s*(?:```json\s*)?",
    f"function{_SEPARATOR}", "\n```json\n", "\n```", "\n",
)  # fmt: skip
DEEPSEEK_V31 = _deepseek(r"\s*(?P<name>[^\s<]+)<｜tool▁sep｜>\s*", "", _SEPARATOR, "", "")
KIMI_K2 = marked_calls(
    CallSyntax(
        "<|tool_call_begin|>functions.",
        f":{NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        trigger="<|tool_call_begin|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>", "<|tool_call_section_end|>",
)  # fmt: skip
