"""Hermes: JSON objects between <tool_call> tags.

Sources: the format as the model card of NousResearch/Hermes-2-Pro-Llama-3-8B and the chat templates of Qwen2.5 and
Qwen3 describe it; the texts are our own.
"""

from __future__ import annotations

import pytest

from tests.output_parsers.transcript import Call, Transcript, check

PARIS = Call("get_weather", '{"city": "Paris"}')
PARIS_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

TRANSCRIPTS = [
    Transcript("no call", "The answer is 4 < 5.\n", content="The answer is 4 < 5.\n"),
    Transcript("one call", PARIS_TEXT, calls=(PARIS,)),
    Transcript("text around it", f"I look.\n{PARIS_TEXT}\nWait.", content="I look.\n\nWait.", calls=(PARIS,)),
    Transcript(
        "two calls",
        PARIS_TEXT + '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n',
        calls=(PARIS, Call("f", "{}")),
    ),
    Transcript(
        "two in one pair of tags",
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>',
        calls=(Call("f", "{}"), Call("g", "{}")),
    ),
    Transcript(
        "no closing tag between",
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
        calls=(Call("f", "{}"), Call("g", "{}")),
    ),
    Transcript(
        "tags, quotes and braces inside of a string",
        r'<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\"\\", "b": [{}]}}</tool_call>',
        calls=(Call("f", r'{"a": "}</tool_call>\"\\", "b": [{}]}'),),
    ),
    Transcript(
        "arguments first",
        '<tool_call>{"arguments": {"a": [1]}, "name": "f", "x": 1e5}</tool_call>',
        calls=(Call("f", '{"a": [1]}'),),
    ),
    Transcript("no arguments", '<tool_call>{"name": "f"}</tool_call>', calls=(Call("f", "{}"),)),
    Transcript("null", '<tool_call>{"name": "f", "arguments": null}</tool_call>', calls=(Call("f", "{}"),)),
    Transcript(
        "arguments in a string",
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        calls=(Call("f", '{"a": 1}'),),
    ),
    Transcript("cut off in the tag", "So: <tool_ca", content="So: <tool_ca"),
    Transcript("cut off in the name", '<tool_call>\n{"name": "get', content='<tool_call>\n{"name": "get'),
    Transcript(
        "cut off in a string", '<tool_call>{"name": "f", "arguments": {"a": "x\\', calls=(Call("f", '{"a": "x\\'),)
    ),
    Transcript("cut off in the closing tag", PARIS_TEXT[:-3], content="</tool_ca", calls=(PARIS,)),
    Transcript("a brace is missing", PARIS_TEXT.replace("}}", "}"), calls=(PARIS,)),
    Transcript(
        "both braces are missing",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Done.',
        content=" Done.",
        calls=(Call("f", '{"a": 1'),),
    ),
    Transcript("no JSON", "<tool_call>f(1)</tool_call> and more", content="<tool_call>f(1)</tool_call> and more"),
    Transcript(
        "not a call, then one",
        '<tool_call>{"nam": 1}</tool_call>' + PARIS_TEXT,
        content='<tool_call>{"nam": 1}</tool_call>',
        calls=(PARIS,),
    ),
    Transcript("no name", '<tool_call>{"name": "", "x": 1}', content='<tool_call>{"name": "", "x": 1}'),
    Transcript("a list", "<tool_call>[1]</tool_call>", content="<tool_call>[1]</tool_call>"),
    Transcript("a closing tag alone", "a</tool_call>b", content="a</tool_call>b"),
    Transcript("only white space", " \n ", content=" \n "),
    Transcript("nothing", ""),
]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)
def test_however_the_text_is_cut_it_says_the_same(transcript: Transcript) -> None:
    check(transcript, "hermes", None)
