"""What the files beside this one lack of what every parser must have: a call, one that is cut off and one that is
malformed; reasoning, reasoning that is cut off and a tag that stands where none belongs.

Sources: for the JSON formats, Gemma's, GLM's, DeepSeek's and Cohere's those named beside them. That one format is
another's: the chat templates of ibm-granite/granite-4.0-h-small, baidu/ERNIE-4.5-21B-A3B-Thinking (Hermes),
tencent/Hunyuan-A13B-Instruct (Jamba), XiaomiMiMo/MiMo-V2-Flash and stepfun-ai/Step-3.5-Flash (Qwen3-Coder);
Hcompany/Holo2-8B, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, allenai/Olmo-3-7B-Think, stepfun-ai/step3 (<think>).
The texts are our own.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.text.output_parsers.formats import Turn
from tests.output_parsers.transcripts.qwen_coder import F as TYPED
from tests.output_parsers.transcripts.qwen_coder import call, parameter
from tests.output_parsers.transcripts.transcript import Call, Transcript, function

OPEN = Turn(prompt="<|im_start|>assistant\n<think>\n")
UNTYPED = (function("f"), function("a.b"))

JSON_TAGS = {
    "ernie45": ("<tool_call>\n", "\n</tool_call>\n"),
    "granite-20b-fc": ("<function_call> ", ""),
    "granite4": ("<tool_call>\n", "\n</tool_call>"),
    "hunyuan_a13b": ("<tool_calls>[", "]</tool_calls>"),
    "internlm": ("<|action_start|><|plugin|>\n", "<|action_end|>\n"),
    "jamba": ("<tool_calls>[", "]</tool_calls>"),
    "longcat": ("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "minimax": ("<tool_calls>\n", "\n</tool_calls>"),
    "phi4_mini_json": ("functools[", "]"),
}


def json_calls(tool: str, opening: str, closing: str) -> Iterator[Transcript]:
    """Calls that are JSON objects between two tags."""
    key = "parameters" if tool == "internlm" else "arguments"
    whole = f'{{"name": "f", "{key}": {{"a": [1, 2]}}}}'
    yield Transcript(tool, None, "whole", opening + whole + closing, calls=(Call("f", '{"a": [1, 2]}'),))
    yield Transcript(tool, None, "cut off", opening + whole[:-5], calls=(Call("f", '{"a": [1,'),))
    for wrong in ('{"name": 1}', f'{{"name": "f", "{key}": 1}}', f'{{"{key}": [], "name": "f"}}'):
        text = opening + wrong + closing
        yield Transcript(tool, None, f"malformed: {wrong}", text, content=text)


def coder_calls(tool: str) -> Iterator[Transcript]:
    """Calls as Qwen3-Coder writes them."""
    text = call(parameter("i", "3"))
    yield Transcript(tool, None, "whole", text, tools=(TYPED,), calls=(Call("f", '{"i": 3}'),))
    text = "<tool_call>\n<function=f>\n<parameter=s>\nab"
    yield Transcript(tool, None, "cut off", text, tools=(TYPED,), calls=(Call("f", '{"s": "ab'),))
    text = "<tool_call>\n<function>\nf(1)\n</function>\n</tool_call>"
    yield Transcript(tool, None, "malformed: no name", text, tools=(TYPED,), content=text)


def thoughts(parser: str, begin: str, end: str, *, always: bool) -> Iterator[Transcript]:
    """Reasoning between tags; `always` where an output without the first one begins with it too."""
    yield Transcript(None, parser, "whole", f"{begin}\nHm.\n{end}\n\nYes.", reasoning="Hm.", content="Yes.")
    cut_off = f"Hm.{end[:3]}"
    yield Transcript(None, parser, "cut off", begin + cut_off, reasoning=cut_off)
    said = ("Hm.", "Yes.") if always else ("", f"Hm.{end}Yes.")
    yield Transcript(None, parser, "malformed: no beginning", f"Hm.{end}Yes.", reasoning=said[0], content=said[1])
    if begin == "<think>":
        text = "<think>a</think>b</think>c"
        yield Transcript(None, parser, "malformed: two", text, turn=OPEN, reasoning="a", content="b</think>c")


def refused(tool: str, text: str, *tools: object) -> Transcript:
    """No call at all, so the text comes out as it is."""
    return Transcript(tool, None, "malformed", text, content=text, tools=tools)  # type: ignore[arg-type]


_ACTION = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>'
_DSML, _END_DSML = "<｜DSML｜function_calls>\n<｜DSML｜invoke", "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"

TRANSCRIPTS = [
    *(transcript for tool, tags in JSON_TAGS.items() for transcript in json_calls(tool, *tags)),
    *(transcript for tool in ("mimo", "qwen3_xml", "step3p5") for transcript in coder_calls(tool)),
    *(
        transcript
        for parser in ("deepseek_r1", "minimax_m2", "step3", "step3p5")
        for transcript in thoughts(parser, "<think>", "</think>", always=True)
    ),
    *(
        transcript
        for parser in ("deepseek_v3", "glm45", "holo2", "kimi_k2", "mimo", "nemotron_v3", "olmo3", "qwen3")
        for transcript in thoughts(parser, "<think>", "</think>", always=False)
    ),
    *thoughts("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>", always=False),
    *thoughts("gemma4", "<|channel>thought", "<channel|>", always=False),
    *thoughts("granite", "Here is my thought process:", "Here is my response:", always=False),
    *thoughts("mistral", "[THINK]", "[/THINK]", always=False),
    *thoughts("seed_oss", "<seed:think>", "</seed:think>", always=False),
    Transcript("cohere_command3", None, "cut off", _ACTION[:83], calls=(Call("f", '{"a": 1'),)),
    refused("cohere_command3", _ACTION.replace('"tool_name": "f", ', "")),
    Transcript("deepseek_v31", None, "cut off", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a', calls=(Call("f", '{"a'),)),
    Transcript("deepseek_v31", None, "malformed", "<｜tool▁call▁begin｜>f {}", content="<｜tool▁call▁begin｜>f {}"),
    Transcript(
        "deepseek_v32",
        None,
        "cut off",
        f'{_DSML} name="f">\n<｜DSML｜parameter name="s" string="true">ab',
        tools=(TYPED,),
        calls=(Call("f", '{"s": "ab'),),
    ),
    Transcript(
        "deepseek_v32",
        None,
        "whole",
        f'{_DSML} name="f">\n<｜DSML｜parameter name="i" string="false">1</｜DSML｜parameter>{_END_DSML}',
        tools=(TYPED,),
        calls=(Call("f", '{"i": 1}'),),
    ),
    refused("deepseek_v32", f"{_DSML}>{_END_DSML}", TYPED),
    Transcript(
        "functiongemma",
        None,
        "cut off",
        "<start_function_call>call:f{city:<escape>Os",
        content="<start_function_call>call:f{city:<escape>Os",
    ),
    refused("functiongemma", "<start_function_call>call:f{city}<end_function_call>"),
    Transcript(
        "glm47",
        None,
        "cut off",
        "<tool_call>f<arg_key>s</arg_key><arg_value>a b",
        tools=(TYPED,),
        calls=(Call("f", '{"s": "a b'),),
    ),
    refused("glm47", "<tool_call>{}</tool_call>", TYPED),
    Transcript("lfm2", None, "cut off", "<|tool_call_start|>[f(x=1), f(x=", tools=UNTYPED,
               content=", f(x=", calls=(Call("f", '{"x": 1}'),)),
    refused("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", *UNTYPED),
    Transcript("llama4_json", None, "cut off", '{"name": "f", "parameters": {"a": 1', calls=(Call("f", '{"a": 1'),)),
    refused("llama4_json", '{"name": "f", "parameters": 1}'),
    refused("llama3_json", '{"name": "f", "parameters": "x"}'),
    Transcript("llama4_pythonic", None, "cut off", "<|python_start|>[f(x=1), f(x=", tools=UNTYPED,
               content=", f(x=", calls=(Call("f", '{"x": 1}'),)),
    refused("llama4_pythonic", "<|python_start|>[f(1)]<|python_end|>", *UNTYPED),
    Transcript(
        "minimax_m2",
        None,
        "cut off",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">ab',
        tools=(TYPED,),
        calls=(Call("f", '{"s": "ab'),),
    ),
    refused("minimax_m2", "<minimax:tool_call>\n<invoke>\n</invoke>\n</minimax:tool_call>", TYPED),
    refused("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": [1]}]'),
    Transcript(
        "seed_oss",
        None,
        "cut off",
        "<seed:tool_call>\n<function=f>\n<parameter=s>ab",
        tools=(TYPED,),
        calls=(Call("f", '{"s": "ab'),),
    ),
    refused("seed_oss", "<seed:tool_call>\nf(1)\n</seed:tool_call>", TYPED),
]  # fmt: skip
