"""FunctionGemma and Gemma 4: bare keys, and strings between tags.

Sources: the chat templates and model cards of google/functiongemma-270m-it and google/gemma-4-E4B-it. The texts are our
own.
"""

from __future__ import annotations

from functools import partial

from quire.text.output_parsers.formats import Turn
from tests.output_parsers.transcripts.transcript import Call, Transcript

Gemma = partial(Transcript, "gemma4", None)
F = Call("f", '{"city": "Oslo", "days": 3}')

TRANSCRIPTS = [
    Gemma("one", '<|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3}<tool_call|>', calls=(F,)),
    Gemma(
        "two, and text",
        'Look: <|tool_call>call:f{city:<|"|>Oslo<|"|>, days:3}<tool_call|><|tool_call>call:a.b{}<tool_call|>',
        content="Look: ",
        calls=(F, Call("a.b", "{}")),
    ),
    Gemma(
        "values of every kind",
        '<|tool_call>call:f{a:[1,-2.5e3,true],b:{c:null,d:<|"|>x "y" {z}\n<|"|>},e:"q\\n"}<tool_call|>',
        calls=(Call("f", '{"a": [1, -2.5e3, true], "b": {"c": null, "d": "x \\"y\\" {z}\\n"}, "e": "q\\n"}'),),
    ),
    Gemma("quoted key", '<|tool_call>call:f{<|"|>a b<|"|>:1}<tool_call|>', calls=(Call("f", '{"a b": 1}'),)),
    Gemma("no closing tag", "<|tool_call>call:f{}\nBye", content="\nBye", calls=(Call("f", "{}"),)),
    Gemma("cut off", '<|tool_call>call:f{city:<|"|>Os', content='<|tool_call>call:f{city:<|"|>Os'),
    Gemma("no value", "<|tool_call>call:f{a:}<tool_call|>", content="<|tool_call>call:f{a:}<tool_call|>"),
    Gemma("a bare word", "<|tool_call>call:f{a:yes}<tool_call|>", content="<|tool_call>call:f{a:yes}<tool_call|>"),
    Gemma("malformed: no header", "<|tool_call>f()<tool_call|>", content="<|tool_call>f()<tool_call|>"),
    Gemma(
        "too deep",
        "<|tool_call>call:f{a:" + "[" * 40,
        content="<|tool_call>call:f{a:" + "[" * 40,
    ),
    Transcript(
        "gemma4",
        "gemma4",
        "thought first",
        "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{}<tool_call|>",
        reasoning="Hm.",
        calls=(Call("f", "{}"),),
    ),
    Transcript(None, "gemma4", "no thought", "Yes.", content="Yes.", turn=Turn("<|turn>model\n")),
    Transcript(
        "functiongemma",
        None,
        "one",
        "<start_function_call>call:f{city:<escape>Oslo<escape>,days:3}<end_function_call>",
        calls=(F,),
    ),
]
