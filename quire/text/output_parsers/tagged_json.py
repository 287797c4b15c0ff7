"""Calls as JSON objects behind an opening tag: alone, one after the other, or in a list.

Some models, Qwen2.5-Coder among them, are told to write the tag and leave it out: then an object at the beginning of a
line, in a block of code or not, is a call if it names a tool and its arguments and says nothing else.

Sources: Hermes: the model card of NousResearch/Hermes-2-Pro-Llama-3-8B and Qwen2.5's chat template. Granite 20B: its
model card. vLLM's template for Phi-4. Other formats: the chat templates of ibm-granite/granite-3.1-8b-instruct,
microsoft/Phi-4-mini-instruct, ai21labs/AI21-Jamba-1.5-Mini, MiniMaxAI/MiniMax-M1-40k,
meituan-longcat/LongCat-Flash-Chat, internlm/internlm2_5-7b-chat and CohereLabs/c4ai-command-a-03-2025.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import NUMBER, CallSyntax, ReadAnswer, ToolFormat
from quire.text.output_parsers.scanner import Steps, Tags, TextScanner
from quire.text.output_parsers.tool_calls import Answer, JsonCall


def tagged_json(
    syntax: CallSyntax, *opening: str, closing: tuple[str, ...] = (), tags_left_out: bool = False
) -> ToolFormat:
    """The format with these tags; several opening ones are spellings of one. Without a closing tag, the JSON ends
    itself. `tags_left_out` says that calls are also read where models leave the tags out."""
    inside = Tags(*opening, *closing)

    def reader(*line: str) -> ReadAnswer:
        """Reads what stands behind tags, and with a newline as `line` also what stands at the beginning of one."""
        expected, opens = Tags(*line, *opening, *closing), Tags(*line, *opening)

        def read(scanner: TextScanner, answer: Answer, tools: Sequence[Tool]) -> Steps[None]:
            names = {tool.name for tool in tools if line and not tool.strict}  # nothing enforces what is not announced
            called = False  # then a closing tag is expected, and is no content
            tag: str | None = "\n"
            while tag:
                while tag == "\n" and names and (yield from _read_untagged(scanner, answer, inside, names)):
                    called = True
                tag = yield from scanner.until(expected if called else opens, answer.text)
                if tag == "\n":
                    yield from answer.text(tag)
                elif tag:
                    called = tag in opening and (yield from read_objects(scanner, answer, tag, inside))

        return read

    special = (*opening, *closing)
    if tags_left_out:
        return ToolFormat(reader("\n"), special, (syntax,), read_calls_or_form=reader())
    return ToolFormat(reader(), special, (syntax,))


_FENCES = {"```json": "```", "```tool_call": "```", "```": "```", "<tools>": "</tools>"}
"""What models put around calls in place of the tags."""
_OPENING_FENCES, _CLOSING_FENCES = Tags(*_FENCES), Tags(*_FENCES.values())


def _read_untagged(scanner: TextScanner, answer: Answer, tags: Tags, names: Collection[str]) -> Steps[bool]:
    """Read the beginning of a line as calls of tools of these names; anything else becomes content. Returns whether
    there is a call; then a fence around it is gone."""
    scanner.start_recording()
    yield from scanner.skip_space()
    fence = yield from scanner.skip_tag(_OPENING_FENCES)
    first = yield from (scanner.skip_space() if fence else scanner.peek())
    before = scanner.recorded()
    if first not in ("{", "["):
        yield from answer.text(before)
        return False
    inside = Tags(*tags.tags, _FENCES[fence]) if fence else tags
    called = yield from read_objects(scanner, answer, before, inside, names)
    if called and fence:
        scanner.start_recording()
        yield from scanner.skip_space()
        closed = yield from scanner.skip_tag(_CLOSING_FENCES)
        behind = scanner.recorded()
        yield from answer.text("" if closed else behind)
    return called


def read_objects(
    scanner: TextScanner, answer: Answer, tag: str, tags: Tags, names: Collection[str] | None = None
) -> Steps[bool]:
    """Read what stands behind the opening `tag`: one call, several, or a list of them. Returns whether there is a call;
    anything else has become content, with the tag if no call came before it. An object that is a call and nothing else
    may call tools in `names`; None for any object with a name."""
    scanner.start_recording(tag)
    called = False
    first = yield from scanner.skip_space()
    in_list = first == "["
    if in_list:
        scanner.take()
        first = yield from scanner.skip_space()
    whole = names is not None
    while first == "{" and (yield from JsonCall(scanner, answer, closing=tags, names=names, whole=whole).read()):
        called = True
        scanner.start_recording()
        first = yield from scanner.skip_space()
        if first in (",", ";"):
            scanner.take()
            first = yield from scanner.skip_space()
    if called and in_list and first == "]":
        scanner.take()
        scanner.recorded()
        return True
    skipped = scanner.recorded()
    if not (called and skipped.isspace()):
        yield from answer.text(skipped)
    return called


_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '


def _one_each(opening: str, closing: str) -> CallSyntax:
    return CallSyntax(f"{opening}\n{_NAME}", _ARGUMENTS, "}\n" + closing, trigger=opening, separator="\n")


def _list_behind(opening: str, closing: str = "") -> CallSyntax:
    return CallSyntax(_NAME, _ARGUMENTS, "}", trigger=opening, begin=opening + "[", separator=", ", end="]" + closing)


HERMES = tagged_json(
    _one_each("<tool_call>", "</tool_call>"), "<tool_call>", closing=("</tool_call>",), tags_left_out=True
)
GRANITE = tagged_json(_list_behind("<|tool_call|>"), "<|tool_call|>", "<tool_call>", closing=("</tool_call>",))
GRANITE_20B_FC = tagged_json(
    CallSyntax(f"<function_call> {_NAME}", _ARGUMENTS, "}", trigger="<function_call>", separator=" "),
    "<function_call>",
)
PHI4_MINI = tagged_json(
    CallSyntax(f"<|tool_call|>{_NAME}", _ARGUMENTS, "}<|/tool_call|>", trigger="<|tool_call|>"),
    "functools",
    "<|tool_call|>",
    closing=("<|/tool_call|>",),
)
JAMBA = tagged_json(_list_behind("<tool_calls>", "</tool_calls>"), "<tool_calls>", closing=("</tool_calls>",))
MINIMAX = tagged_json(
    CallSyntax(
        _NAME, _ARGUMENTS, "}",
        trigger="<tool_calls>", begin="<tool_calls>\n", separator="\n", end="\n</tool_calls>",
    ),
    "<tool_calls>", closing=("</tool_calls>",),
)  # fmt: skip
_LONGCAT, _END_LONGCAT = "<longcat_tool_call>", "</longcat_tool_call>"
LONGCAT = tagged_json(_one_each(_LONGCAT, _END_LONGCAT), _LONGCAT, closing=(_END_LONGCAT,))
_PLUGIN = "<|action_start|><|plugin|>"
INTERNLM = replace(
    tagged_json(
        CallSyntax(f"{_PLUGIN}\n{_NAME}", '", "parameters": ', "}<|action_end|>", trigger=_PLUGIN, separator="\n"),
        _PLUGIN,
        closing=("<|action_end|>",),
    ),
    special_tokens=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
)
_ACTION, _END_ACTION = "<|START_ACTION|>", "<|END_ACTION|>"
COHERE_COMMAND3 = tagged_json(
    CallSyntax(
        f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
        '", "parameters": ',
        "}",
        trigger=_ACTION,
        begin=f"{_ACTION}[\n    ",
        separator=",\n    ",
        end=f"\n]{_END_ACTION}",
    ),
    _ACTION,
    closing=(_END_ACTION,),
)
