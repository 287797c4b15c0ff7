"""Hermes: JSON objects between <tool_call> tags.

Sources: the format as the model card of NousResearch/Hermes-2-Pro-Llama-3-8B and the chat templates of Qwen2.5 and
Qwen3 describe it; vLLM's tests of its parsers for what models do beyond that. The texts are our own.
"""

from __future__ import annotations

from functools import partial

from quire.text.output_parsers.events import Tool
from tests.output_parsers.transcripts.transcript import Call, Transcript, function

Hermes = partial(Transcript, "hermes", None)
Coder = partial(Transcript, "hermes", None, tools=(function("get_weather", city="string"), function("f")))
"""A model that leaves the tags out, as Qwen2.5-Coder does."""
PARIS = Call("get_weather", '{"city": "Paris"}')
PARIS_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BARE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
SPREAD = '{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}'
SPREAD_PARIS = Call("get_weather", '{\n    "city": "Paris"\n  }')
SCHEMA = '{"name": "f", "description": "Does.", "parameters": {"type": "object"}}'

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
    Coder("bare", BARE, calls=(PARIS,)),
    Coder("bare, over several lines", f"\n{SPREAD}\n", calls=(SPREAD_PARIS,)),
    Coder("in a block", f"```json\n{SPREAD}\n```", calls=(SPREAD_PARIS,)),
    Coder("in a block without a language", f"```\n{BARE}\n```\n", calls=(PARIS,)),
    Coder("in the tags of tools", f"<tools>\n{BARE}\n</tools>", calls=(PARIS,)),
    Coder("with tags", f"I look.\n{PARIS_TEXT}", content="I look.\n", calls=(PARIS,)),
    Coder("text around a block", f"I look:\n```json\n{BARE}\n```\nWait.", content="I look:\n\nWait.", calls=(PARIS,)),
    Coder("bare in two lines", f"{BARE}\n{BARE}", calls=(PARIS, PARIS)),
    Coder("two blocks", f"```json\n{BARE}\n```\n\n```json\n{BARE}\n```", calls=(PARIS, PARIS)),
    Coder("two in a block", f"```json\n{BARE}\n{BARE}\n```", calls=(PARIS, PARIS)),
    Coder("a bare list", f"[{BARE}, {BARE}]", calls=(PARIS, PARIS)),
    Coder("a closing tag without an opening one", f"{BARE}\n</tool_call>", calls=(PARIS,)),
    Coder("cut off in a bare name", BARE[:15], content=BARE[:15]),
    Coder("cut off in bare arguments", BARE[:-5], calls=(Call("get_weather", '{"city": "Par'),)),
    Coder("cut off in a block", f"```json\n{BARE}\n``", calls=(PARIS,), content="``"),
    Coder("malformed block", f"```json\n{BARE[:-2]}\n```", calls=(Call("get_weather", '{"city": "Paris"\n'),)),
    Coder("another name", BARE.replace("get_weather", "get_time"), content=BARE.replace("get_weather", "get_time")),
    Coder("an answer in JSON", '{"name": "Paris", "country": 1}', content='{"name": "Paris", "country": 1}'),
    Coder("an answer in a block", '```json\n{"a": [1]}\n```', content='```json\n{"a": [1]}\n```'),
    Coder("code", "```python\nf()\n```", content="```python\nf()\n```"),
    Coder("a tool described", SCHEMA, content=SCHEMA),
    Coder("a name alone", '{"name": "f"}', content='{"name": "f"}'),
    Coder("within a line", f"Write {BARE}.", content=f"Write {BARE}."),
    Coder("no tools", BARE, content=BARE, tools=()),
    Coder("a strict tool", BARE, content=BARE, tools=(Tool("get_weather", {}, strict=True),)),
]
