"""Calls that stand between special tokens: a header with the name, then the arguments as JSON.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1, and the tool calling
guide in moonshotai/Kimi-K2-Instruct (docs/tool_call_guidance.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from quire.text.output_parsers.answer_text import AnswerText
from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import NUMBER, CallSyntax, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import ToolCalls

Header = tuple[str, str | None]
"""Name and id."""


class MarkedCalls:
    """One format's tags, and how it writes a header."""

    def __init__(
        self, begin: str, end: str, sections: tuple[str, ...], header: Callable[[str], Header | None], inner: str
    ) -> None:
        """
        Args:
            begin, end: Around one call.
            sections: Around all calls, in any spelling; they are left out.
            header: Takes apart what stands in front of the arguments; None if that is no header.
            inner: The token within a call, for `special_tokens`.
        """
        self._begin = begin
        self._sections = sections
        self._end = end
        self._header = header
        self._all = Tags(begin, end, *sections)
        self._header_end = Tags("{", begin, end, *sections)
        self.special_tokens = (begin, end, inner, *sections)

    def read(self, scanner: TextScanner, tools: Sequence[Tool]) -> Steps[None]:
        """Read an answer."""
        answer = AnswerText()
        calls = ToolCalls(answer)
        while tag := (yield from scanner.until(self._all, answer.text)):
            if tag == self._begin:
                yield from self._call(scanner, answer, calls)
        yield from answer.finish()

    def _call(self, scanner: TextScanner, answer: AnswerText, calls: ToolCalls) -> Steps[None]:
        scanner.start_recording(self._begin)
        text, tag = yield from scanner.text_until(self._header_end, consume=False)
        header = self._header(text)
        recorded = scanner.recorded()
        if header is None or tag is None:
            yield from answer.text(recorded)
            return
        yield from calls.start(*header)
        if tag != "{":
            yield from calls.arguments("{}")
            return
        yield from scanner.json_container(self._all, calls.arguments)
        yield from scanner.skip_space()
        yield from scanner.skip_tag(_FENCE)


def _deepseek_v3(text: str) -> Header | None:
    match = _DEEPSEEK_V3.fullmatch(text)
    return (match[1], None) if match else None


def _deepseek_v31(text: str) -> Header | None:
    match = _DEEPSEEK_V31.fullmatch(text)
    return (match[1], None) if match else None


def _kimi(text: str) -> Header | None:
    match = _KIMI.fullmatch(text)
    return (match[2], match[1]) if match else None


_FENCE = Tags("```")
_DEEPSEEK_V3 = re.compile(r"\s*function<｜tool▁sep｜>([^\s<`]+)\s*(?:```json\s*)?")
_DEEPSEEK_V31 = re.compile(r"\s*([^\s<]+)<｜tool▁sep｜>\s*")
_KIMI = re.compile(r"\s*((?:functions\.)?([^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*")
_DEEPSEEK_TAGS = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"))
_DEEPSEEK_V3_CALLS = MarkedCalls(*_DEEPSEEK_TAGS, _deepseek_v3, "<｜tool▁sep｜>")
_DEEPSEEK_V31_CALLS = MarkedCalls(*_DEEPSEEK_TAGS, _deepseek_v31, "<｜tool▁sep｜>")
_KIMI_CALLS = MarkedCalls(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_section_begin|>",
        "<|tool_call_section_end|>",
    ),
    _kimi,
    "<|tool_call_argument_begin|>",
)

_DEEPSEEK_ALL, _DEEPSEEK_END = _DEEPSEEK_TAGS[2]


def _deepseek_syntax(before_name: str, after_name: str, after_arguments: str, separator: str) -> CallSyntax:
    return CallSyntax(
        f"<｜tool▁call▁begin｜>{before_name}",
        after_name,
        f"{after_arguments}<｜tool▁call▁end｜>",
        trigger="<｜tool▁call▁begin｜>",
        begin=_DEEPSEEK_ALL,
        separator=separator,
        end=_DEEPSEEK_END,
    )


DEEPSEEK_V3 = ToolFormat(
    _DEEPSEEK_V3_CALLS.read,
    _DEEPSEEK_V3_CALLS.special_tokens,
    (_deepseek_syntax("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),),
)
DEEPSEEK_V31 = ToolFormat(
    _DEEPSEEK_V31_CALLS.read,
    _DEEPSEEK_V31_CALLS.special_tokens,
    (_deepseek_syntax("", "<｜tool▁sep｜>", "", ""),),
)
KIMI_K2 = ToolFormat(
    _KIMI_CALLS.read,
    _KIMI_CALLS.special_tokens,
    (
        CallSyntax(
            "<|tool_call_begin|>functions.",
            f":{NUMBER}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            trigger="<|tool_call_begin|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
)
