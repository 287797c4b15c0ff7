"""Qwen3-Coder's XML and its relatives, with the types that the tool's schema gives.

Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, ByteDance-Seed/Seed-OSS-36B-Instruct and
MiniMaxAI/MiniMax-M2, the encoding of deepseek-ai/DeepSeek-V3.2; vLLM's tests of qwen3_coder for a missing <tool_call>.
The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript, function

F = function(
    "f",
    s="string",
    i="integer",
    x="number",
    b="boolean",
    o="object",
    a="array",
    n={"anyOf": [{"type": "string"}, {"type": "null"}]},
    m={"type": ["integer", "string"]},
    e={"enum": ["1", "2"]},
    r={"$ref": "#/properties/o"},
    any={},
)
Coder = partial(Transcript, "qwen3_coder", None, tools=(F,))


def parameter(key: str, value: str) -> str:
    """As the template writes it."""
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(*parameters: str) -> str:
    """A call of f."""
    return f"<tool_call>\n<function=f>\n{''.join(parameters)}</function>\n</tool_call>"


def one(name: str, key: str, text: str, value: str) -> Transcript:
    """A call with one argument, and that argument as JSON."""
    return Coder(name, call(parameter(key, text)), calls=(Call("f", f'{{"{key}": {value}}}'),))


TRANSCRIPTS = [
    Coder(
        "text and two arguments",
        "Ok.\n" + call(parameter("s", "a b"), parameter("i", "3")),
        content="Ok.\n",
        calls=(Call("f", '{"s": "a b", "i": 3}'),),
    ),
    one("string of digits", "s", "1", '"1"'),
    one("string with quotes, lines and tags", "s", '\n"é"\\\n</x>\n', r'"\n\"é\"\\\n</x>\n"'),
    one("empty string", "s", "", '""'),
    one("number", "x", "1.5e3", "1.5e3"),
    one("no number", "i", "three", '"three"'),
    one("boolean as Python writes it", "b", "True", "true"),
    one("object", "o", '{"k": [1, {}]}', '{"k": [1, {}]}'),
    one("object as Python writes it", "o", "{'k': None}", '{"k": null}'),
    one("object by reference", "r", '{"k": 1}', '{"k": 1}'),
    one("broken array", "a", "[1, ", '"[1, "'),
    one("null", "n", "null", "null"),
    one("string that may be null", "n", "no", '"no"'),
    one("integer before string", "m", "12", "12"),
    one("strings by enumeration", "e", "1", '"1"'),
    one("container of any type", "any", "[1]", "[1]"),
    one("anything else of any type", "any", "1", '"1"'),
    one("not in the schema", "q", "1", '"1"'),
    Coder("no arguments", call(), calls=(Call("f", "{}"),)),
    Coder("two calls", call() + "\n" + call(parameter("i", "1")), calls=(Call("f", "{}"), Call("f", '{"i": 1}'))),
    Coder(
        "two functions in a block",
        "<tool_call><function=f></function>\n<function=f></function></tool_call>",
        calls=(Call("f", "{}"), Call("f", "{}")),
    ),
    Coder(
        "no tool_call tag",
        "Hm\n<function=f>\n" + parameter("i", "1") + "</function>\n</tool_call>",
        content="Hm\n",
        calls=(Call("f", '{"i": 1}'),),
    ),
    Coder(
        "no closing tags",
        "<tool_call><function=f><parameter=s>x<parameter=i>1</function>",
        calls=(Call("f", '{"s": "x", "i": 1}'),),
    ),
    Coder("cut off in a string", "<tool_call>\n<function=f>\n<parameter=s>\nab", calls=(Call("f", '{"s": "ab'),)),
    Coder("cut off in a number", "<function=f><parameter=i>1", calls=(Call("f", '{"i": 1'),)),
    Coder("cut off in a tag", "<function=f><parameter=s>a</par", calls=(Call("f", '{"s": "a</par'),)),
    Coder("cut off in the name", "<tool_call>\n<function=f", content="<tool_call>\n<function=f"),
    Coder("malformed: no function", "<tool_call>\nabc</tool_call>", content="<tool_call>\nabc</tool_call>"),
    Coder("nameless", "<function=>\n<parameter=s>1", content="<function=>\n<parameter=s>1"),
    Coder(
        "words between",
        "<function=f>\nhm <parameter=i>1</parameter></function>",
        content="\nhm ",
        calls=(Call("f", '{"i": 1}'),),
    ),
    Coder(
        "broken parameter", "<function=f><parameter=\n</function>", content="<parameter=\n", calls=(Call("f", "{}"),)
    ),
    Coder("mathematics", "a<b and <c>", content="a<b and <c>"),
    Transcript(
        "qwen3_xml", None, "the same format", call(parameter("i", "1")), tools=(F,), calls=(Call("f", '{"i": 1}'),)
    ),
    Transcript(
        "seed_oss",
        None,
        "other block",
        "<seed:tool_call>\n<function=f>\n<parameter=i>1</parameter>\n</function>\n</seed:tool_call>",
        tools=(F,),
        calls=(Call("f", '{"i": 1}'),),
    ),
    Transcript(
        "minimax_m2",
        None,
        "invoke",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="i">1</parameter>\n</invoke>\n</minimax:tool_call>',
        tools=(F,),
        calls=(Call("f", '{"i": 1}'),),
    ),
    Transcript(
        "deepseek_v32",
        None,
        "types in the tags",
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="a" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>',
        tools=(F,),
        calls=(Call("f", '{"q": "1", "a": [1]}'),),
    ),
]
