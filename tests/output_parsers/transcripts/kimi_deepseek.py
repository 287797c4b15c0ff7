"""DeepSeek V3, V3.1 and Kimi K2: calls between special tokens.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1; docs/tool_call_guidance.md of
moonshotai/Kimi-K2-Instruct; sglang's and vLLM's Kimi parsers for the singular spelling of the section. The texts are
our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript

V3 = partial(Transcript, "deepseek_v3", None)
V31 = partial(Transcript, "deepseek_v31", None)
Kimi = partial(Transcript, "kimi_k2", None)
ALL, END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def v3(name: str, arguments: str) -> str:
    """One call."""
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


TRANSCRIPTS = [
    V3("one", "Ok" + ALL + v3("f", '{"a": 1}') + END_ALL, content="Ok", calls=(Call("f", '{"a": 1}'),)),
    V3(
        "two",
        v3("f", "{}") + "\n" + v3("g", '{"b": "```"}'),
        calls=(Call("f", "{}"), Call("g", '{"b": "```"}')),
    ),
    V3("cut off", f'{ALL}{BEGIN}function{SEP}f\n```json\n{{"a', calls=(Call("f", '{"a'),)),
    V3("cut off in the header", f"{ALL}{BEGIN}function{SEP}f", content=f"{BEGIN}function{SEP}f"),
    V3(
        "malformed",
        f"{BEGIN}function{SEP}\n```json\n{{}}\n```{END}",
        content=f"{BEGIN}function{SEP}\n```json\n{{}}\n```",
    ),
    V31("one", f'{ALL}{BEGIN}f{SEP}{{"a": 1}}{END}{END_ALL}', calls=(Call("f", '{"a": 1}'),)),
    V31(
        "two",
        f"Hm{ALL}{BEGIN}f{SEP}{{}}{END}{BEGIN}g{SEP}{{}}{END}{END_ALL}",
        content="Hm",
        calls=(Call("f", "{}"), Call("g", "{}")),
    ),
    V31("no arguments", f"{BEGIN}f{SEP}{END}", calls=(Call("f", "{}"),)),
    V31("a brace is missing", f'{BEGIN}f{SEP}{{"a": 1{END}{END_ALL}x', content="x", calls=(Call("f", '{"a": 1'),)),
    V31("words behind the arguments", f"{BEGIN}f{SEP}{{}} hm{END}", content="hm", calls=(Call("f", "{}"),)),
    V31("no separator", f"{BEGIN}f {{}}{END}", content=f"{BEGIN}f {{}}"),
    Kimi(
        "one",
        f'I look.{SECTION}{CALL}functions.f:0{ARGUMENT}{{"a": 1}}{END_CALL}{END_SECTION}',
        content="I look.",
        calls=(Call("f", '{"a": 1}', r"functions\.f:0"),),
    ),
    Kimi(
        "two, numbered on",
        f"{CALL}functions.f:3{ARGUMENT}{{}}{END_CALL}{CALL}functions.a.b:4 {ARGUMENT}{{}}{END_CALL}",
        calls=(Call("f", "{}", r"functions\.f:3"), Call("a.b", "{}", r"functions\.a\.b:4")),
    ),
    Kimi(
        "singular section",
        f"<|tool_call_section_begin|>{CALL}functions.f:0{ARGUMENT}{{}}{END_CALL}<|tool_call_section_end|>",
        calls=(Call("f", "{}", r"functions\.f:0"),),
    ),
    Kimi("cut off", f'{SECTION}{CALL}functions.f:0{ARGUMENT}{{"a": "<|', calls=(Call("f", '{"a": "<|', ".*:0"),)),
    Kimi(
        "malformed",
        f"{SECTION}{CALL}functions.f:0 {{}}{END_CALL}x",
        content=f"{CALL}functions.f:0 {{}}x",
    ),
]
