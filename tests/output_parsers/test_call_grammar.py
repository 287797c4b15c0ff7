"""Whatever a grammar lets through is a call that matches its tool's schema, as the format's own parser reads it.

The reference is llguidance, which compiles the grammar and says what may come next; a random walk stands for a model at
temperature 1 that knows nothing.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from quire.engine.structured_output.grammars import grammar_of
from quire.engine.structured_output.messages import Constraint, LenientSchema
from quire.errors import RequestError
from quire.text.output_parsers.argument_types import ArgumentTypes
from quire.text.output_parsers.call_grammar import call_grammar
from quire.text.output_parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    Tool,
    ToolCallStart,
    merge_events,
)
from quire.text.output_parsers.formats import Turn
from quire.text.output_parsers.registry import TOOL_PARSERS, create_parser, tool_format
from quire.text.output_parsers.schema_references import SchemaReferences

llguidance = pytest.importorskip("llguidance")
llguidance_numpy = pytest.importorskip("llguidance.numpy")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "minLength": 1, "maxLength": 6},
        "i": {"type": "integer", "minimum": 0, "maximum": 99},
        "e": {"enum": ["x", "y z"]},
        "c": {"$ref": "#/$defs/colour", "description": "As pydantic writes an Enum."},
        "o": {"$ref": "#/$defs/flag"},
    },
    "required": ["s", "o"],
    "additionalProperties": False,
    "$defs": {"colour": {"type": "string", "enum": ["red", "blue"]},
              "flag": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"],
                       "additionalProperties": False}},
}  # fmt: skip
TOOLS = (Tool("f", SCHEMA, strict=True), Tool("g", {"type": "object", "additionalProperties": False}, strict=True))
LINES = """
start: line+ "=" /["\\\\]/
line: "+" /.{0,3}/ LF
%import common.LF
"""
ENFORCED = [name for name in TOOL_PARSERS if tool_format(name).syntaxes]
BYTES = llguidance.LLTokenizer("byte")


def compiled(grammar: str) -> Any:
    """The compiler's matcher, of the grammar as it is prepared for it."""
    return llguidance.LLMatcher(BYTES, grammar_of(Constraint("grammar", grammar), {}))


def matches(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the arguments match their tool's schema."""
    if name == "g":
        return arguments == {}
    found = dict(arguments)
    text, flag = found.pop("s", None), found.pop("o", None)
    number, choice, colour = found.pop("i", 0), found.pop("e", "x"), found.pop("c", "red")
    return (
        isinstance(text, str) and 1 <= len(text) <= 6 and flag in ({"k": True}, {"k": False})
        and type(number) is int and 0 <= number <= 99 and choice in ("x", "y z")
        and colour in ("red", "blue") and not found
    )  # fmt: skip


def walk(grammar: str, seed: int, first: str = "") -> str | None:
    """A text that the grammar lets through, behind `first`; None if it became too long."""
    matcher = compiled(grammar)
    assert not matcher.get_error()
    text = bytearray(first.encode())
    assert matcher.try_consume_tokens(list(text)) == len(text), first
    chance = random.Random(seed)
    mask = llguidance_numpy.allocate_token_bitmask(1, BYTES.vocab_size)
    while len(text) < 600:
        if matcher.is_accepting() and chance.random() < 0.5:
            return text.decode()
        llguidance_numpy.fill_next_token_bitmask(matcher, mask)
        [allowed] = np.unpackbits(mask.view(np.uint8), bitorder="little")[:256].nonzero()
        if not len(allowed):
            return text.decode() if matcher.is_accepting() else None
        ascii_only = [token for token in allowed if token < 128]
        token = int(chance.choice(ascii_only if ascii_only and chance.random() < 0.8 else list(allowed)))
        assert matcher.try_consume_tokens([token]) == 1
        text.append(token)
    return None


def parsed(text: str, tool: str, reasoning: str | None = None, turn: Turn | None = None) -> list[OutputEvent]:
    parser = create_parser(tool, reasoning, tools=TOOLS, turn=turn)
    return merge_events([*parser.feed(text), *parser.finish()])


def calls_of(events: list[OutputEvent]) -> list[tuple[str, dict[str, Any]]]:
    starts = [at for at, event in enumerate(events) if isinstance(event, ToolCallStart)]
    return [(getattr(events[at], "name", ""), json.loads(getattr(events[at + 1], "arguments", ""))) for at in starts]


@pytest.mark.parametrize("name", ENFORCED)
def test_an_answer_that_must_call_is_calls_that_match_and_nothing_else(name: str) -> None:
    grammar = call_grammar(name, TOOLS, must_call=True)
    texts = [text for seed in range(12) if (text := walk(grammar, seed)) is not None]
    assert len(texts) >= 6
    for text in texts:
        events = parsed(text, name)
        calls = calls_of(events)
        assert calls, text
        assert all(matches(*call) for call in calls), text
        assert not any(isinstance(event, ContentDelta) for event in events), text


@pytest.mark.parametrize("name", ENFORCED)
def test_the_input_of_a_tool_is_of_its_grammar(name: str) -> None:
    lines = Tool("f", {"properties": {"input": {"type": "string"}}}, strict=True, input_grammar=LINES)
    texts = [walk(call_grammar(name, [lines], must_call=True), seed) for seed in range(12)]
    calls = [call for text in texts if text is not None for call in calls_of(parsed(text, name))]
    assert len(calls) >= 6
    for called, arguments in calls:
        assert called == "f"
        assert arguments.keys() == {"input"}
        assert re.fullmatch(r'(\+[^\n]{0,3}\n)+=["\\\\]', arguments["input"]), arguments


@pytest.mark.parametrize("name", ENFORCED)
def test_without_parallel_calls_there_is_one(name: str) -> None:
    grammar = call_grammar(name, TOOLS[1:], must_call=True, parallel=False)
    assert {len(calls_of(parsed(walk(grammar, seed) or "", name))) for seed in range(4)} == {1}


@pytest.mark.parametrize("name", ENFORCED)
def test_a_named_tool_is_the_only_one(name: str) -> None:
    text = walk(call_grammar(name, TOOLS[1:], must_call=True), 1)
    assert {call for call, _ in calls_of(parsed(text or "", name))} == {"g"}


FIRST = {
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.",
    "hermes": "Hm.<tool_call>",
    "qwen3_coder": "Hm.\n<function=",
    "glm45": "Hm.<tool_call>",
    "kimi_k2": "Hm.<|tool_calls_section_begin|><|tool_call_begin|>",
    "deepseek_v3": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "mistral": "Hm.[TOOL_CALLS]",
    "granite": "Hm.<|tool_call|>",
    "llama3_json": '{"name": "',
    "pythonic": "[f(",
}


@pytest.mark.parametrize(("name", "first"), FIRST.items())
def test_text_may_come_first_and_a_call_that_it_announces_matches(name: str, first: str) -> None:
    grammar = call_grammar(name, TOOLS, must_call=False, parallel=False)
    texts = [text for seed in range(12) if (text := walk(grammar, seed, first)) is not None]
    assert len(texts) >= 6
    for text in texts:
        [call] = calls_of(parsed(text, name))
        assert matches(*call), text


@pytest.mark.parametrize("name", FIRST)
def test_an_answer_that_may_call_may_also_not(name: str) -> None:
    text = "Two lines,\n[1] and {\n <x>"
    if name == "openai":
        text = f"<|channel|>final<|message|>{text}"
    matcher = compiled(call_grammar(name, TOOLS, must_call=False))
    tokens = list(text.encode())
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


SPACING = {"x-guidance": {"whitespace_pattern": " ?"}}
FORM = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
        "required": ["title", "n"], "additionalProperties": False, **SPACING}  # fmt: skip
LOOSE = {"type": "object", **SPACING}
FLAGS = {"type": "array", "items": {"type": "boolean"}, **SPACING}


def accepted(grammar: str, text: str) -> bool:
    matcher = compiled(grammar)
    assert not matcher.get_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("name", ENFORCED)
def test_an_answer_is_calls_that_match_or_json_of_the_form(name: str) -> None:
    grammar = call_grammar(name, TOOLS, must_call=False, form=FORM)
    behind = "<|channel|>final<|message|>" if name == "openai" else ""
    assert accepted(grammar, behind + '{"title": "a<[b", "n": 12}')
    assert not accepted(grammar, behind + "Well, well.")
    assert not accepted(grammar, behind + '{"title": "a"}')
    assert not accepted(grammar, behind + '{"title": "a", "n": 12} and more')
    kinds = set()
    must_call = call_grammar(name, TOOLS, must_call=True)
    calling = next(text for seed in range(12) if (text := walk(must_call, seed)) is not None)
    assert accepted(grammar, calling)
    for text in [calling, *(walk(grammar, seed) for seed in range(10))]:
        if text is None:
            continue
        parser = create_parser(name, tools=TOOLS, calls_or_form=True)
        events = merge_events([*parser.feed(text), *parser.finish()])
        calls = calls_of(events)
        assert all(matches(*call) for call in calls), text
        if not calls:
            [event] = [event for event in events if not isinstance(event, ReasoningDelta)]
            assert isinstance(event, ContentDelta)
            answer = json.loads(event.text)
            assert answer.keys() == {"title", "n"}
            assert len(answer["title"]) <= 5
        kinds.add(bool(calls))
    assert True in kinds


@pytest.mark.parametrize("name", ENFORCED)
@pytest.mark.parametrize(("form", "texts"), [
    (LOOSE, ['{"name": "Ann", "parameters": [1]}', '{"name":"f"}', '{"nam": {"name": 1}}', '{"f": "<t"}', "{}"]),
    (FLAGS, ["[false, true]", "[true]", "[]", "[ false]"]),
])  # fmt: skip
def test_json_that_begins_like_a_call_is_let_through(name: str, form: dict[str, Any], texts: list[str]) -> None:
    tools = [Tool("f", SCHEMA), Tool("false_", SCHEMA)]
    grammar = call_grammar(name, tools, must_call=False, form=form)
    behind = "<|channel|>final<|message|>" if name == "openai" else ""
    assert [text for text in texts if not accepted(grammar, behind + text)] == []


def test_an_object_that_may_be_a_call_is_no_form_beside_strict_tools() -> None:
    with pytest.raises(RequestError, match="'name'"):
        call_grammar("llama3_json", TOOLS, must_call=False, form=LOOSE)
    assert call_grammar("llama3_json", TOOLS, must_call=True, form=LOOSE)


@pytest.mark.parametrize("said", ['{"a": "<tool_call>{}</tool_call><function=f>"}', '[\n{"name": "f"},\n[f(s="")]\n]'])
@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "openai"])
def test_a_call_within_the_form_is_none(name: str, said: str) -> None:
    for pieces in ([said], list(said)):
        parser = create_parser(name, tools=TOOLS, calls_or_form=True)
        events = [event for piece in pieces for event in parser.feed(piece)]
        assert merge_events([*events, *parser.finish()]) == [ContentDelta(said)]


def test_a_tool_that_is_not_strict_takes_any_object_unless_it_must_be_called() -> None:
    loose = Tool("f", SCHEMA)
    call = b'<tool_call>\n{"name": "f", "arguments": {"any": 1}}\n</tool_call>'
    for must_call, wanted in ((False, True), (True, False)):
        matcher = compiled(call_grammar("hermes", [loose], must_call=must_call))
        assert (matcher.try_consume_tokens(list(call)) == len(call)) is wanted


@pytest.mark.parametrize(
    ("turn", "first"), [(Turn("<think>\n"), "Hm.\n</think>\n\n"), (Turn(), "<think>\nHm.</think>\n"), (Turn(), "")]
)
def test_reasoning_comes_first(turn: Turn, first: str) -> None:
    grammar = call_grammar("hermes", TOOLS, must_call=True, reasoning_parser="qwen3", turn=turn)
    events = parsed(walk(grammar, 2, first) or "", "hermes", "qwen3", turn)
    assert ([ReasoningDelta("Hm.")] if first else []) == [e for e in events if isinstance(e, ReasoningDelta)]
    assert all(matches(*call) for call in calls_of(events))


def test_special_tokens_are_named_by_id() -> None:
    grammar = call_grammar("mistral", TOOLS, must_call=True, special_ids={"[TOOL_CALLS]": 9, "[ARGS]": 32})
    assert "<[9]> " in grammar
    assert "<[32]>" in grammar
    assert "TOOL_CALLS" not in grammar


def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    pattern = Tool("f", {"type": "object", "properties": {"s": {"type": "string", "pattern": "a+"}}}, strict=True)
    with pytest.raises(RequestError, match="'s' of the function 'f' has 'pattern'"):
        call_grammar("qwen3_coder", [pattern], must_call=True)
    assert "a+" in call_grammar("hermes", [pattern], must_call=True)
    with pytest.raises(RequestError, match="deepseek_v32"):
        call_grammar("deepseek_v32", TOOLS, must_call=True)


def test_a_tool_that_is_not_strict_is_enforced_as_far_as_its_format_can() -> None:
    loose = Tool("f", {"type": "object", "properties": {"s": {"type": "string", "pattern": "a+"}}, "required": ["s"],
                       "minProperties": 1})  # fmt: skip
    matcher = compiled(call_grammar("qwen3_coder", [loose], must_call=True))
    assert not matcher.get_error()
    call = b"<tool_call>\n<function=f>\n<parameter=s>\nany\n</parameter>\n</function>\n</tool_call>"
    assert matcher.try_consume_tokens(list(call)) == len(call)
    assert compiled(call_grammar("qwen3_coder", [loose], must_call=True)).try_consume_tokens(
        list(call.replace(b"=s>", b"=t>"))
    ) < len(call)


def test_what_a_format_does_not_enforce_of_a_tool_that_is_not_strict_is_named() -> None:
    properties = {"s": {"type": "string", "pattern": "a+"}, "long": {"type": "string", "maxLength": 9_999}}
    parameters = {"type": "object", "properties": properties, "required": ["s"], "minProperties": 1}
    lenient: list[LenientSchema] = []
    grammar = call_grammar("qwen3_coder", [Tool("f", parameters), Tool("g", {"type": "object"})], must_call=True)
    grammar_of(Constraint("grammar", grammar), {}, lenient)
    (found,) = [each for each in lenient if each.left_out]
    assert found.tool == "f"
    assert found.left_out == [
        "'minProperties' of its parameters of the function 'f'",
        "'pattern' of 's' of the function 'f'",
        "'maxLength' of 'long' of the function 'f'",
    ]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "qwen3_coder"])
@pytest.mark.parametrize("reference", ["#", "#/properties/o", "#flag", "https://example.com/flag"])
def test_references_lead_where_they_do_in_the_parameters_alone(name: str, reference: str) -> None:
    flag = {
        "$anchor": "flag",
        "type": "object",
        "properties": {"k": {"type": "boolean"}},
        "additionalProperties": False,
    }
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"o": {"anyOf": [{"$ref": reference}, {"type": "null"}]}},
        "additionalProperties": False,
        "$defs": {"flag": flag, "same": {**flag, "$id": "https://example.com/flag", "$anchor": "other"}},
    }
    own = {"#": {"o": None}, "#/properties/o": None}.get(reference, {"k": True})
    tool = Tool("f", parameters, strict=True)
    value = json.dumps(own)
    form = {"type": "object", "properties": {}, "additionalProperties": False}
    grammar = call_grammar(name, [tool], must_call=False, form=form)
    text = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {{"o": {value}}}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {{"o": {value}}}}}',
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=o>\n{value}\n</parameter>\n</function>\n</tool_call>",
    }[name]
    assert accepted(grammar, text)
    assert not accepted(grammar, text.replace(value, '{"wrong": 1}'))


@pytest.mark.parametrize("parameters", [
    {"$ref": "#/$defs/P", "$defs": {**SCHEMA["$defs"], "P": SCHEMA}},
    {"allOf": [{"$ref": "#/$defs/P"}], "$defs": {**SCHEMA["$defs"], "P": SCHEMA}},
])  # fmt: skip
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "pythonic"])
def test_parameters_behind_a_reference_are_those_it_leads_to(name: str, parameters: dict[str, Any]) -> None:
    tools = [Tool("f", parameters, strict=True)]
    grammar = call_grammar(name, tools, must_call=True)
    texts = [text for seed in range(12) if (text := walk(grammar, seed)) is not None]
    assert len(texts) >= 4
    for text in texts:
        parser = create_parser(name, tools=tools)
        assert all(matches(*call) for call in calls_of(merge_events([*parser.feed(text), *parser.finish()]))), text


def test_a_form_behind_a_reference_may_stand_beside_strict_tools() -> None:
    form = {"$ref": "#/$defs/F", "$defs": {"F": FORM}}
    assert accepted(call_grammar("llama3_json", TOOLS, must_call=False, form=form), '{"title": "a", "n": 1}')
    named = {"$ref": "#/$defs/F", "$defs": {"F": {**FORM, "properties": {"name": {}}, "required": []}}}
    with pytest.raises(RequestError, match="'name'"):
        call_grammar("llama3_json", TOOLS, must_call=False, form=named)


def test_a_client_cannot_loosen_its_schema() -> None:
    sneaky = Tool("f", {**SCHEMA, "x-guidance": {"lenient": True}}, strict=True)
    assert "lenient" not in call_grammar("hermes", [sneaky], must_call=True)


def test_references_are_looked_up_once_for_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    enter = SchemaReferences._enter
    monkeypatch.setattr(SchemaReferences, "_enter", lambda self, *args: read.append(self) or enter(self, *args))
    properties = {f"p{i}": {"type": "string"} for i in range(50)}
    call_grammar("qwen3_coder", [Tool("f", {"type": "object", "properties": properties}, strict=True)], must_call=True)
    assert 0 < len(read) < 5


def test_types_are_found_behind_circles_of_references() -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/a"}] * 1_000 + [{"type": "integer"}]}  # a way through each has no end
    tool = Tool("f", {"$defs": {"a": circle}, "properties": {"x": {"$ref": "#/$defs/a"}}})
    assert ArgumentTypes([tool], "f").json_of("x", "1") == "1"
    assert not ArgumentTypes([tool], "f").may_be_string("x")


def test_a_reference_to_an_entry_of_a_huge_number_leads_nowhere() -> None:
    tool = Tool("f", {"allOf": [{}, {}], "properties": {"x": {"$ref": "#/allOf/" + "9" * 5_000}}})
    assert ArgumentTypes([tool], "f").json_of("x", "1") == '"1"'


def test_a_grammar_that_is_too_long_is_refused_before_it_is_written() -> None:
    """Each argument with a reference has all that it may refer to."""
    properties = {f"p{i}": {"$ref": "#/$defs/K"} for i in range(20_000)}
    tool = Tool("f", {"type": "object", "$defs": {"K": {"type": "integer"}}, "properties": properties}, strict=True)
    with pytest.raises(RequestError, match="limited to 262144 bytes"):
        call_grammar("qwen3_coder", [tool], must_call=True)
