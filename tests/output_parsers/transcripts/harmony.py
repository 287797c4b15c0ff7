"""GPT-OSS: harmony messages.

Source: docs/format.md in openai/harmony (channels, recipients in either place, preambles, stop tokens). The texts are
our own; an output begins behind `<|start|>assistant`, and its stop token is not shown.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript

Harmony = partial(Transcript, "openai", "openai_gptoss")
ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
F = Call("f", '{"a":1}')

TRANSCRIPTS = [
    Harmony("answer", f"{ANALYSIS}{NEXT}{FINAL}2 < 4.", reasoning="Think.", content="2 < 4."),
    Harmony("stop token shown", f"{FINAL}Hi<|return|>", content="Hi"),
    Harmony(
        "call",
        f'{ANALYSIS}{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a":1}}<|call|>',
        reasoning="Think.",
        calls=(F,),
    ),
    Harmony(
        "recipient behind the role",
        f'{ANALYSIS}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a":1}}',
        reasoning="Think.",
        calls=(F,),
    ),
    Harmony("recipient first of all", ' to=functions.f<|channel|>commentary json<|message|>{"a":1}', calls=(F,)),
    Harmony(
        "two calls",
        f'<|channel|>commentary to=functions.f<|message|>{{"a":1}}<|call|>{NEXT}<|channel|>commentary '
        "to=functions.g<|message|><|call|>",
        calls=(F, Call("g", "{}")),
    ),
    Harmony("preamble", f"<|channel|>commentary<|message|>First.<|end|>{NEXT}{FINAL}Then.", content="First.\nThen."),
    Harmony("thought twice", f"{ANALYSIS}{NEXT}{ANALYSIS}{NEXT}{FINAL}A", reasoning="Think.\nThink.", content="A"),
    Harmony("built-in tool", "<|channel|>analysis to=python code<|message|>1+1<|call|>", reasoning="1+1"),
    Harmony("cut off in the reasoning", "<|channel|>analysis<|message|>Thi<|en", reasoning="Thi<|en"),
    Harmony(
        "cut off in the header", f"{ANALYSIS}{NEXT}<|channel|>fi", reasoning="Think.", content=f"{NEXT}<|channel|>fi"
    ),
    Harmony("cut off in the call", '<|channel|>commentary to=functions.f <|message|>{"a"', calls=(Call("f", '{"a"'),)),
    Harmony("malformed: no header", "Hello <|x|>", content="Hello <|x|>"),
    Harmony("header without a message", f"<|channel|>final<|end|>{NEXT}{FINAL}A", content="<|channel|>finalA"),
    Transcript(
        None,
        "openai_gptoss",
        "no tool parser",
        f'{ANALYSIS}{NEXT}<|channel|>commentary to=functions.f<|message|>{{"a":1}}',
        reasoning="Think.",
        content='{"a":1}',
    ),
]
