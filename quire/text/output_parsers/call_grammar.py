"""A grammar, in llguidance's dialect of Lark, that makes a model call tools as it should.

Turns a format's syntax and the tools' schemas into rules: for an answer that must call (`tool_choice` required or a
function); for one that may, where what follows the announcement of a call is enforced; and for one that is either calls
or JSON of a schema. Reasoning may come in front. Knows nothing about compiling or masks. What cannot be enforced in
full is refused.

Source: docs/syntax.md in guidance-ai/llguidance (`%json`, lazy lexemes, special tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.text.output_parsers.argument_grammar import ArgumentGrammar, may_name, object_rule
from quire.text.output_parsers.events import Tool
from quire.text.output_parsers.formats import CallSyntax, ReasoningFormat, ToolFormat, Turn
from quire.text.output_parsers.lark_rules import ANY_TEXT, LarkRules
from quire.text.output_parsers.registry import reasoning_format, tool_format

_FIRST_KEYS = "name|type|id|function|parameters|arguments"
FORM = "form"
"""Name of the grammar of the answer's form, which stands behind the reasoning."""
_SPACE = r"/[\r\n]{0,4}/"


def call_grammar(
    tool_parser: str,
    tools: Sequence[Tool],
    *,
    must_call: bool,
    every_schema: bool = False,
    parallel: bool = True,
    form: Mapping[str, Any] | None = None,
    reasoning_parser: str | None = None,
    turn: Turn | None = None,
    special_ids: Mapping[str, int] | None = None,
) -> str:
    """The grammar of an answer.

    Args:
        tools: What may be called: one tool where `tool_choice` names it.
        must_call: Whether the answer is one call or more, and nothing else; each matches its tool's schema, as far as
            that can be enforced if the tool is not `strict`. Otherwise the model chooses, and only tools that are
            `strict` have their schema enforced.
        every_schema: Whether that of tools that are not `strict` is, as far as it can be.
        form: The schema of an answer that does not call, with the options of `LarkRules.json` as its `x-quire`; None
            for any text. It says nothing about an answer that must call.
        reasoning_parser: Allows reasoning in front of the answer.
        special_ids: The vocabulary's special tokens, which text cannot write.

    Raises:
        ConfigError: There is no such parser.
        RequestError: The format cannot be enforced, or not this schema.
    """
    rules = LarkRules(special_ids or {})
    syntax = _syntax(tool_format(tool_parser), tool_parser, rules)
    arguments = ArgumentGrammar(rules, syntax.keyed)
    of_tools = {tool.name: arguments.rule(tool, enforced=must_call or every_schema or tool.strict) for tool in tools}
    calls = _Calls(rules, syntax, of_tools, parallel=parallel)
    if must_call:
        answer = calls.group()
    elif form is None:
        answer = _optional_calls(rules, syntax, calls)
    elif syntax.arguments_key:
        answer = _objects_or_form(rules, syntax, tools, form, parallel, every_schema=every_schema)
    else:
        answer = _calls_or_form(rules, syntax, calls, form)
    if reasoning_parser and (must_call or not syntax.messages):
        answer = f"{reasoning(rules, reasoning_format(reasoning_parser), turn or Turn())} {answer}".lstrip()
    return rules.text(answer)


def _syntax(found: ToolFormat, name: str, rules: LarkRules) -> CallSyntax:
    for syntax in found.syntaxes:
        if not syntax.only_with or rules.is_special(syntax.only_with):
            return syntax
    raise RequestError(
        f"tools: calls in the format '{name}' cannot be enforced yet: leave 'strict' out and send tool_choice 'auto'.",
        param="tools",
    )


class _Calls:
    """Writes calls of these tools; `arguments` has the rule for each tool's arguments."""

    def __init__(self, rules: LarkRules, syntax: CallSyntax, arguments: Mapping[str, str], *, parallel: bool) -> None:
        self._rules = rules
        self._syntax = syntax
        self._arguments = arguments
        self.parallel = parallel

    def group(self, *, before: str | None = None, parallel: bool | None = None) -> str:
        """One call or several; `before` replaces what stands in front of the first name."""
        syntax = self._syntax
        items = [self._one(syntax.begin + syntax.before_name if before is None else before)]
        if self.parallel if parallel is None else parallel:
            items.append(f"{self._one(syntax.separator + syntax.before_name)}*")
        return self._rules.add("calls", " ".join([*items, *self._rules.literal(syntax.end)]))

    def _one(self, before: str) -> str:
        """One call. All up to its arguments is one literal, since a lexer takes the longest match."""
        syntax, literal = self._syntax, self._rules.literal
        return self._rules.add("call", " | ".join(
            " ".join([*literal(before + name + syntax.after_name), arguments, *literal(syntax.after_arguments)])
            for name, arguments in self._arguments.items()
        ))  # fmt: skip


def _optional_calls(rules: LarkRules, syntax: CallSyntax, calls: _Calls) -> str:
    """Text with calls in it, or text alone. What follows the announcement of a call must be a call."""
    before = syntax.begin + syntax.before_name
    if syntax.messages:
        last = " ".join([*rules.literal(syntax.last_message), rules.terminal(ANY_TEXT)])
        return rules.add("answer", f"{_messages(rules, syntax.messages)} ({calls.group()} | {last})")
    if not syntax.trigger:
        opening = rf"\{{[ \t\r\n]*\"({_FIRST_KEYS})\"" if before.startswith("{") else r"\[[ \t\r\n]*[\w.\-]+\("
        return rules.add("answer", f"{calls.group()} | {rules.text_without_line(opening)}")
    several = calls.parallel and bool(syntax.begin)  # else each is announced
    group = calls.group(before=before.partition(syntax.trigger)[2], parallel=several)
    announced = f"{rules.text_up_to(syntax.trigger)} {group}"
    text = rules.terminal(ANY_TEXT)
    return rules.add("answer", f"({announced})* {text}" if calls.parallel else f"{announced} | {text}")


def _calls_or_form(rules: LarkRules, syntax: CallSyntax, calls: _Calls, form: Mapping[str, Any]) -> str:
    """Calls alone, or JSON alone. What begins the calls is a lexeme of its own: it may begin the JSON as well."""
    if syntax.messages:
        before_calls, before_form = _messages(rules, syntax.messages), _messages(rules, syntax.messages[:1])
        last = " ".join([*rules.literal(syntax.last_message), _form(rules, form)])
        return rules.add("answer", f"{before_calls} {calls.group()} | {before_form} {last}")
    group = " ".join([*rules.literal(syntax.begin), calls.group(before=syntax.before_name)])
    return rules.add("answer", f"{group} | {_form(rules, form)}")


def _objects_or_form(
    rules: LarkRules,
    syntax: CallSyntax,
    tools: Sequence[Tool],
    form: Mapping[str, Any],
    parallel: bool,
    *,
    every_schema: bool,
) -> str:
    """Calls alone, or JSON alone, where calls are JSON objects themselves. Schemas describe both, since the lexer
    would not see other JSON that begins like a literal."""
    if any(tool.strict for tool in tools) and may_name(form):
        raise RequestError(
            "tools: in this model's format of calls an object with 'name' may be a call, so beside strict tools the "
            "schema of an answer needs additionalProperties false and no property 'name': leave 'strict' out.",
            param="tools",
        )
    objects = [object_rule(rules, tool, syntax.arguments_key, enforced=every_schema or tool.strict) for tool in tools]
    call = rules.add("call", " | ".join(objects))
    several = f" ({' '.join(rules.literal(syntax.separator))} {call})*" if parallel else ""
    return rules.add("answer", f"{call}{several} | {_form(rules, form)}")


def _form(rules: LarkRules, form: Mapping[str, Any]) -> str:
    return rules.json(form, **form.get("x-quire", {}))


def _messages(rules: LarkRules, kinds: Sequence[tuple[str, str]]) -> str:
    each = [" ".join([*rules.literal(before), rules.text_up_to(after)]) for before, after in kinds]
    return f"({' | '.join(each)})*"


def reasoning_in_front(reasoning_parser: str | None, turn: Turn, special_ids: Mapping[str, int]) -> str:
    """The grammar, in Lark, of an answer with a form behind its reasoning; empty where no reasoning can come.

    Args:
        special_ids: The vocabulary's special tokens, which text cannot write.
    """
    if reasoning_parser is None:
        return ""
    found = reasoning_format(reasoning_parser)
    rules = LarkRules(special_ids)
    front = _reasoning_messages(rules, found) if found.answer_start else reasoning(rules, found, turn)
    return rules.text(f"{front} @{FORM}") if front else ""


def reasoning(rules: LarkRules, found: ReasoningFormat, turn: Turn) -> str:
    """Items that match an answer's reasoning; empty if there is none."""
    opened = found.opened(turn)
    if opened is False:
        return ""
    start = " ".join(rules.literal(found.start))
    thought = f"{rules.text_up_to(found.end)} {rules.terminal(_SPACE)}"
    if opened is None:
        return f"({start} {thought})?"
    # A model that always reasons may write the tag that the prompt has not. Where it is text, it is a part of the rest.
    return f"({start})? {thought}" if rules.is_special(found.start) else thought


def _reasoning_messages(rules: LarkRules, found: ReasoningFormat) -> str:
    each = " ".join([*rules.literal(found.start), rules.text_up_to(found.end)])
    return " ".join([f"({each})*", *rules.literal(found.answer_start)])
