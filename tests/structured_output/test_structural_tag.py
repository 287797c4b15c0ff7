"""Structural tags: free text around tags whose contents have a form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.engine.structured_output.grammars import grammar_of
from quire.engine.structured_output.messages import Constraint
from tests.structured_output.accepting import accepts, accepts_tokens, tokenizer

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=get>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=put>", "schema": {"type": "string", "maxLength": 3}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def tag(begin: str, content: dict[str, Any], end: Any = "") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def grammar(structural_tag: dict[str, Any], special: dict[str, int] | None = None) -> str:
    return grammar_of(Constraint("structural_tag", json.dumps(structural_tag)), special or {})


def form(part: dict[str, Any]) -> str:
    return grammar({"type": "structural_tag", "format": part})


JSON_PART = {"type": "json_schema", "json_schema": SCHEMA}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text, 1 < 2", True),
        ('I call <function=get>{"x": 3}</function> now', True),
        ('<function=get>{"x": 3}</function><function=put>"abc"</function>', True),
        ('<function=get>{"x": "3"}</function>', False),
        ('<function=get>{"x": 3}', False),
        ("<function=drop>{}</function>", False),
        ('<function=put>"abcd"</function>', False),
    ],
)
def test_a_trigger_begins_one_of_its_tags(text: str, expected: bool) -> None:
    assert accepts(grammar(LEGACY), text) == expected


TAGS = [tag("<a>", JSON_PART, "</a>"), tag("<b>", {"type": "any_text"}, "</b>")]


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ({"type": "const_string", "value": "yes"}, ["yes"], ["no", ""]),
        ({"type": "regex", "pattern": "[0-9]{2}"}, ["12"], ["1", "123"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x"]),
        ({"type": "any_text"}, ["", "what ever\n"], []),
        (JSON_PART, ['{"x":1}'], ["{}"]),
        (
            {"type": "sequence", "elements": [{"type": "const_string", "value": "go "}, JSON_PART]},
            ['go {"x": 1}'],
            ["go ", '{"x": 1}'],
        ),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": "no"}, JSON_PART]},
            ["no", '{"x": 1}'],
            ["yes"],
        ),
        (tag("<think>", {"type": "any_text"}, "</think>"), ["<think>a < b</think>"], ["<think>a", "a</think>"]),
        (tag("<a>", JSON_PART, ["</a>", "<end>"]), ['<a>{"x":1}</a>', '<a>{"x":1}<end>'], ['<a>{"x":1}']),
        (
            {"type": "tags_with_separator", "tags": TAGS, "separator": ", ", "at_least_one": True},
            ['<a>{"x":1}</a>', '<a>{"x":1}</a>, <b>any</b>'],
            ["", '<a>{"x":1}</a><b>any</b>'],
        ),
        (
            {"type": "tags_with_separator", "tags": TAGS, "separator": ",", "stop_after_first": True},
            ["", "<b>any</b>"],
            ["<b>any</b>,<b>any</b>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": TAGS, "at_least_one": True},
            ['<a>{"x":1}</a> and', '<a>{"x":1}</a>, <b>t</b>'],
            ["text", 'text <a>{"x":1}</a>'],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": TAGS, "at_least_one": True, "stop_after_first": True},
            ['<a>{"x":1}</a>'],
            ['<a>{"x":1}</a> and'],
        ),
    ],
)
def test_each_part_accepts_its_texts(part: dict[str, Any], good: list[str], bad: list[str]) -> None:
    compiled = form(part)
    assert [text for text in good + bad if accepts(compiled, text)] == good


def test_special_tokens_in_a_tag_are_tokens() -> None:
    known = tokenizer()
    special = {"<|im_end|>": known.eos_tokens[0], "<|im_start|>": 1}
    part = {
        "type": "triggered_tags",
        "triggers": ["<|im_start|>"],
        "tags": [tag("<|im_start|>call ", JSON_PART, "<|im_start|>")],
    }
    compiled = grammar({"type": "structural_tag", "format": part}, special)
    text, body = known.tokenize_str("so: "), known.tokenize_str('call {"x": 1}')
    assert accepts_tokens(compiled, [*text, 1, *body, 1])
    assert not accepts_tokens(compiled, [*text, 1, *body])
    assert accepts_tokens(compiled, text)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "poem"}, "'poem' is not a supported part"),
        ({"type": "triggered_tags", "triggers": ["["], "tags": TAGS}, "no trigger begins the tag"),
        ({"type": "triggered_tags", "triggers": [], "tags": TAGS}, "needs a list of triggers"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, JSON_PART]}, "any_text must come last"),
        ({"type": "json_schema", "json_schema": {"contains": {}}}, "keyword 'contains'"),
        (tag("<a>", {"type": "const_string", "value": "x"}, 3), "a tag's end must be"),
    ],
)
def test_a_malformed_tag_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form(part)
