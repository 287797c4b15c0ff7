"""Calls in tags that look like XML, an argument in a pair of tags each: Qwen3-Coder and its relatives.

Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, ByteDance-Seed/Seed-OSS-36B-Instruct and
MiniMaxAI/MiniMax-M2; the encoding that comes with deepseek-ai/DeepSeek-V3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.output_parsers.argument_types import ArgumentTypes, TypedArguments
from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import CallSyntax, KeyedArguments, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer


@dataclass(frozen=True)
class XmlTags:
    """One format's tags.

    Attributes:
        block: Opening and closing tag around calls; both are no content, and may be missing.
        function: What stands before a function's name, what behind it, and the closing tag.
        parameter: What stands before an argument's name, what behind it, and the closing tag.
        typed: Other endings of an argument's opening tag, and whether each means a string.
    """

    block: tuple[str, str]
    function: tuple[str, str, str]
    parameter: tuple[str, str, str]
    typed: tuple[tuple[str, bool], ...] = ()


class XmlCalls:
    """Reads answers of one such format."""

    def __init__(self, tags: XmlTags) -> None:
        self._block = tags.block
        self._function, name_end, self._function_end = tags.function
        self._parameter, key_end, self._parameter_end = tags.parameter
        self._typed: dict[str, bool | None] = {key_end: None, **dict(tags.typed)}
        self._outside = Tags(self._function, tags.block[0])
        self._behind = Tags(self._function, *tags.block)
        self._name_end = Tags(name_end, "\n", "<")
        self._inside = Tags(self._parameter, self._function_end, self._function, tags.block[1])
        self._key_end = Tags(*self._typed, "\n", "<")
        self._value_end = Tags(self._parameter_end, self._parameter, self._function_end, tags.block[1])

    def read(self, scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
        called = False  # then the block's closing tag is expected, and is no content
        while tag := (yield from scanner.until(self._behind if called else self._outside, answer.text)):
            before = ""
            if tag == self._block[0]:
                scanner.start_recording(tag)
                yield from scanner.skip_space()
                function = yield from scanner.skip_tag(self._outside)
                before = scanner.recorded()
                if function != self._function:
                    yield from answer.text(before)
                    continue
            elif tag == self._function:
                before = tag
            called = tag != self._block[1] and (yield from self._call(scanner, answer, tools, before))

    def _call(self, scanner: TextScanner, answer: Answer, tools: Sequence[Tool], before: str) -> Steps[bool]:
        """Read a call behind the tag that begins a function; False if there is none, and it became content with
        `before`."""
        scanner.start_recording(before)
        name, tag = yield from scanner.text_until(self._name_end)
        recorded = scanner.recorded()
        name = name.strip()
        if not name or tag in (None, "\n", "<"):
            yield from answer.text(recorded)
            return False
        yield from answer.start(name)
        arguments = TypedArguments(scanner, answer, ArgumentTypes(tools, name))
        while tag := (yield from scanner.until(self._inside, answer.text, consume=False)):
            if tag != self._parameter:
                break
            scanner.start_recording()
            yield from scanner.skip_tag(self._inside)
            key, key_end = yield from scanner.text_until(self._key_end)
            recorded = scanner.recorded()
            if key_end is None or key_end in ("\n", "<"):
                yield from answer.text(recorded)
                continue
            ended = yield from arguments.read(key.strip(), self._value_end, string=self._typed[key_end])
            if ended is None:
                return True
            if ended == self._parameter_end:
                yield from scanner.skip_tag(self._value_end)
        if tag is not None:
            yield from arguments.close()
            if tag == self._function_end:
                yield from scanner.skip_tag(self._inside)
        return True


def _format(tags: XmlTags, *special: str) -> ToolFormat:
    block, end_block = tags.block
    function, name_end, function_end = tags.function
    parameter, key_end, parameter_end = tags.parameter
    syntax = CallSyntax(
        f"{block}\n{function}",
        f"{name_end}\n",
        f"{function_end}\n{end_block}",
        trigger=function,
        separator="\n",
        keyed=KeyedArguments(
            parameter,
            f"{key_end}\n",
            f"\n{parameter_end}\n",
            text_end=f"\n{parameter_end}",
            never_in_text=(parameter_end, parameter, function_end, end_block),
        ),
    )
    return ToolFormat(XmlCalls(tags).read, (*tags.block, *special), () if tags.typed else (syntax,))


_QWEN = (("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>"))
_DSML = "｜DSML｜"

QWEN3_CODER = _format(XmlTags(("<tool_call>", "</tool_call>"), *_QWEN))
SEED_OSS = _format(XmlTags(("<seed:tool_call>", "</seed:tool_call>"), *_QWEN))
MINIMAX_M2 = _format(
    XmlTags(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ('<invoke name="', '">', "</invoke>"),
        ('<parameter name="', '">', "</parameter>"),
    )
)
DEEPSEEK_V32 = _format(
    XmlTags(
        (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
        (f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>"),
        (f'<{_DSML}parameter name="', '">', f"</{_DSML}parameter>"),
        (('" string="true">', True), ('" string="false">', False)),
    ),
    _DSML,
)
