"""Hermes: JSON objects between <tool_call> tags.

Sources: the format as the model card of NousResearch/Hermes-2-Pro-Llama-3-8B and the chat templates of Qwen2.5 and
Qwen3 describe it; vLLM's tests of its parsers for what models do beyond that. The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript

Hermes = partial(Transcript, "hermes", None)
PARIS = Call("get_weather", '{"city": "Paris"}')
PARIS_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

TRANSCRIPTS = [
    Hermes("no call", "The answer is 4 < 5.\n", content="The answer is 4 < 5.\n"),
    Hermes("one call", PARIS_TEXT, calls=(PARIS,)),
    Hermes("text around it", f"I look.\n{PARIS_TEXT}\nWait.", content="I look.\n\nWait.", calls=(PARIS,)),
    Hermes(
        "two calls",
        PARIS_TEXT + '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n',
        calls=(PARIS, Call("f", "{}")),
    ),
    Hermes(
        "two in one pair of tags",
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>',
        calls=(Call("f", "{}"), Call("g", "{}")),
    ),
    Hermes(
        "no closing tag between",
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
        calls=(Call("f", "{}"), Call("g", "{}")),
    ),
    Hermes(
        "tags, quotes and braces inside of a string",
        r'<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\"\\", "b": [{}]}}</tool_call>',
        calls=(Call("f", r'{"a": "}</tool_call>\"\\", "b": [{}]}'),),
    ),
    Hermes(
        "arguments first",
        '<tool_call>{"arguments": {"a": [1]}, "name": "f", "x": 1e5}</tool_call>',
        calls=(Call("f", '{"a": [1]}'),),
    ),
    Hermes("no arguments", '<tool_call>{"name": "f"}</tool_call>', calls=(Call("f", "{}"),)),
    Hermes("null", '<tool_call>{"name": "f", "arguments": null}</tool_call>', calls=(Call("f", "{}"),)),
    Hermes(
        "arguments in a string",
        r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
        calls=(Call("f", '{"a": 1}'),),
    ),
    Hermes("cut off in the tag", "So: <tool_ca", content="So: <tool_ca"),
    Hermes("cut off in the name", '<tool_call>\n{"name": "get', content='<tool_call>\n{"name": "get'),
    Hermes("cut off in a string", '<tool_call>{"name": "f", "arguments": {"a": "x\\', calls=(Call("f", '{"a": "x\\'),)),
    Hermes("cut off in the closing tag", PARIS_TEXT[:-3], content="</tool_ca", calls=(PARIS,)),
    Hermes("a brace is missing", PARIS_TEXT.replace("}}", "}"), calls=(PARIS,)),
    Hermes(
        "both braces are missing",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> Done.',
        content=" Done.",
        calls=(Call("f", '{"a": 1'),),
    ),
    Hermes("malformed", "<tool_call>f(1)</tool_call> and more", content="<tool_call>f(1)</tool_call> and more"),
    Hermes(
        "not a call, then one",
        '<tool_call>{"nam": 1}</tool_call>' + PARIS_TEXT,
        content='<tool_call>{"nam": 1}</tool_call>',
        calls=(PARIS,),
    ),
    Hermes("no name", '<tool_call>{"name": "", "x": 1}', content='<tool_call>{"name": "", "x": 1}'),
    Hermes("a list", "<tool_call>[1]</tool_call>", content="<tool_call>[1]</tool_call>"),
    Hermes("a closing tag alone", "a</tool_call>b", content="a</tool_call>b"),
    Hermes("only white space", " \n ", content=" \n "),
    Hermes("nothing", ""),
]
