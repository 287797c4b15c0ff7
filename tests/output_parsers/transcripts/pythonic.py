"""Llama 3.2 and 4, LFM2, OLMo 3: calls as Python writes them.

Sources: models/llama3_2/text_prompt_format.md and models/llama4/prompt_format.md in meta-llama/llama-models; vLLM's
tests of pythonic and llama4_pythonic (parallel calls, <|python_start|>); the chat templates of LiquidAI/LFM2-1.2B and
allenai/Olmo-3-7B-Instruct. The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript, function

Pythonic = partial(Transcript, "pythonic", None, tools=(function("f"), function("a.b")))
Olmo = partial(Transcript, "olmo3", None)
LINES = (Call("f", '{"x": 1}'), Call("a.b", "{}"))

TRANSCRIPTS = [
    Pythonic("one", '[f(city="Paris", days=3)]', calls=(Call("f", '{"city": "Paris", "days": 3}'),)),
    Pythonic("two", "[f(), a.b(x=-1.5)]", calls=(Call("f", "{}"), Call("a.b", '{"x": -1.5}'))),
    Pythonic(
        "literals",
        "[f(a=[1, {'k': None}], b=True, c=(), d=null)]",
        calls=(Call("f", '{"a": [1, {"k": null}], "b": true, "c": [], "d": null}'),),
    ),
    Pythonic(
        "brackets and quotes in strings",
        r"""[f(a=")]'\"", b='\\', c="\n\u00e9")]""",
        calls=(Call("f", r"""{"a": ")]'\"", "b": "\\", "c": "\né"}"""),),
    ),
    Pythonic("text around it", "Look:\n[f(x=1)]\nDone", content="Look:\nDone", calls=(Call("f", '{"x": 1}'),)),
    Pythonic("cut off", "[f(x=1), f(x=", content=", f(x=", calls=(Call("f", '{"x": 1}'),)),
    Pythonic("cut off behind a backslash", '[f(x="\\', content='[f(x="\\'),
    Pythonic("no closing bracket", "[f(x=1)", calls=(Call("f", '{"x": 1}'),)),
    Pythonic("not a literal", "[f(x=y)]", content="[f(x=y)]"),
    Pythonic("malformed: an expression", "[f(x=1+1)]", content="[f(x=1+1)]"),
    Pythonic("positional", "[f(1)]", content="[f(1)]"),
    Pythonic("keys that are no strings", "[f(x={1: 2})]", content="[f(x={1: 2})]"),
    Pythonic("too large a number", "[f(x=1e999)]", content="[f(x=1e999)]"),
    Pythonic("another function", "[h(x=1)]", content="[h(x=1)]"),
    Pythonic("a list", "[1, 2]\n[f]", content="[1, 2]\n[f]"),
    Pythonic("a link", "See [f](http://x) now", content="See [f](http://x) now"),
    Transcript(
        "llama4_pythonic", None, "tags", '<|python_start|>[f(x="a")]<|python_end|>', calls=(Call("f", '{"x": "a"}'),)
    ),
    Transcript(
        "llama4_pythonic",
        None,
        "text before the tag",
        "Ok <|python_start|>[f()]<|python_end|>",
        content="Ok ",
        calls=(Call("f", "{}"),),
    ),
    Transcript(
        "lfm2",
        None,
        "list",
        'Ok.<|tool_call_start|>[f(x="a"), a.b(y=True)]<|tool_call_end|>Done.',
        content="Ok.Done.",
        calls=(Call("f", '{"x": "a"}'), Call("a.b", '{"y": true}')),
        tools=(function("f"), function("a.b")),
    ),
    Olmo("lines", "Ok\n<function_calls>\nf(x=1)\na.b()\n</function_calls>", content="Ok\n", calls=LINES),
    Olmo("one line", "<function_calls>f(x=1) a.b()</function_calls> Bye", content=" Bye", calls=LINES),
    Olmo("cut off", "<function_calls>\nf(x=1)\na.b(", content="\na.b(", calls=LINES[:1]),
    Olmo("none", "<function_calls>\n</function_calls>", content="<function_calls>\n</function_calls>"),
    Olmo(
        "malformed",
        "<function_calls>\nwhat?</function_calls>",
        content="<function_calls>\nwhat?</function_calls>",
    ),
]
