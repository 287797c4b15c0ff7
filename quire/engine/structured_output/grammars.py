"""Translates a constraint to the grammar that the compiler reads, in llguidance's JSON or Lark, and compiles it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.engine.structured_output.ebnf import is_ebnf, lark_from_ebnf
from quire.engine.structured_output.json_schema import SchemaRefused, Simplified, prepare_schema
from quire.engine.structured_output.lark_input import input_grammar
from quire.engine.structured_output.messages import Constraint, LenientSchema
from quire.engine.structured_output.structural_tag import SpecialTokens, grammar_from_structural_tag, pattern
from quire.text.output_parsers.call_grammar import FORM
from quire.text.output_parsers.lark_rules import LEFT_OUT, quoted

_SCHEMA_RULE = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
_INPUT_RULE = re.compile(r"^(\w+: %lark )(\{.*\})$", re.MULTILINE)
PARSER_LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Limits of a compiled grammar. Large regular expressions are not tried on the whole vocabulary beforehand: that takes
seconds for large vocabularies, and masks are quick without it. Error messages leave out the grammar."""


def grammar_of(
    constraint: Constraint,
    special: SpecialTokens,
    lenient: list[LenientSchema] | None = None,
    simplified: Simplified = Simplified.NOT,
) -> str:
    """The grammar of a constraint.

    Args:
        lenient: Gets the schemas that are not strict, with what the grammar does not enforce of each.
        simplified: What is left out of such schemas though it might be enforced.

    Raises:
        ValueError: The constraint cannot be honoured; the message says what to do.
    """
    lenient = [] if lenient is None else lenient

    def prepared(schema: Any, left_out: list[str] | None = None) -> dict[str, Any]:
        return prepare_schema(
            schema,
            whitespace=constraint.whitespace,
            any_whitespace=constraint.any_whitespace,
            closed=constraint.closed,
            left_out=left_out,
            simplified=Simplified.NOT if left_out is None else simplified,
        )

    text = constraint.text
    match constraint.kind:
        case "structural_tag":
            grammar = grammar_from_structural_tag(text, prepared, _lark, special)
        case "json" | "json_object":
            schema = json.loads(text) if constraint.kind == "json" else {"type": "object"}
            left_out: list[str] | None = None if constraint.strict else []
            if left_out is not None:
                lenient.append(LenientSchema(left_out, schema=text))
            grammar = json.dumps({"grammars": [{"json_schema": prepared(schema, left_out)}]})
        case "regex":
            grammar = f"start: {pattern(text)}"
        case "choice":
            grammar = "start: CHOICE\nCHOICE: " + " | ".join(quoted(each) for each in json.loads(text))
        case _:
            lenient += _notes(text)
            grammar = _SCHEMA_RULE.sub(lambda rule: _prepared_rule(rule, lenient, simplified), _lark(text))
            grammar = _INPUT_RULE.sub(_input_rule, grammar)
    return _behind(constraint.behind, grammar) if constraint.behind else grammar


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of a grammar. Raises ValueError if the grammar does not compile."""
    matcher = LLMatcher(tokenizer, grammar, limits=PARSER_LIMITS, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _behind(front: str, grammar: str) -> str:
    """A grammar behind `front`, which refers to it as FORM."""
    written = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = written["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": front}, {**first, "name": FORM}, *others]})


def _notes(grammar: str) -> Iterator[LenientSchema]:
    """What `LarkRules.leave_out` has noted."""
    for line in grammar.splitlines():
        if line.startswith(LEFT_OUT):
            with suppress(ValueError, TypeError):
                tool, left_out = msgspec.json.decode(line.removeprefix(LEFT_OUT), type=tuple[str, list[str]])
                yield LenientSchema(left_out, tool)


def _prepared_rule(rule: re.Match[str], lenient: list[LenientSchema], simplified: Simplified) -> str:
    """A rule of a JSON schema, prepared if `LarkRules.json` has written it."""
    try:
        schema: dict[str, Any] = json.loads(rule[2])
    except (ValueError, RecursionError):
        return rule[0]
    options = schema.pop("x-quire", None)
    if not isinstance(options, dict):
        return rule[0]
    name, tool, strict = str(options.pop("name", "")), str(options.pop("tool", "")), options.pop("strict", True)
    left_out: list[str] | None = None if strict else []
    try:
        simplified = Simplified.NOT if strict else simplified
        prepared = prepare_schema(schema, **options, left_out=left_out, simplified=simplified)
    except SchemaRefused as error:
        raise SchemaRefused(f"{name}: {error}" if name else str(error)) from None
    schema.pop("x-guidance", None)
    if left_out is not None and schema.keys() - {"type"}:  # arguments that the model may choose have no more
        named = [f"{each} of {name}" if name else each for each in left_out]
        lenient.append(LenientSchema(named, tool, "" if tool else json.dumps(schema, ensure_ascii=False)))
    return rule[1] + json.dumps(prepared, ensure_ascii=False)


def _input_rule(rule: re.Match[str]) -> str:
    """A rule of a tool's input, rewritten if `LarkRules.input` has written it."""
    try:
        asked: dict[str, Any] = json.loads(rule[2])
        tool = asked.pop("x-quire")
    except (ValueError, RecursionError, LookupError):
        return rule[0]
    try:
        return f"{rule[1]}{{\n{input_grammar(**asked)}\n}}"
    except ValueError as error:
        raise ValueError(f"the input of the tool '{tool}': {error}") from None


def _lark(grammar: str) -> str:
    return lark_from_ebnf(grammar) if is_ebnf(grammar) else grammar
