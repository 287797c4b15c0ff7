"""Granite, Phi-4, Jamba, LongCat, MiniMax, InternLM, Command: JSON lists and objects behind other tags.

Sources: the chat templates of ibm-granite/granite-3.1-8b-instruct, microsoft/Phi-4-mini-instruct ("prefix function
calls with functools marker"), ai21labs/AI21-Jamba-1.5-Mini, meituan-longcat/LongCat-Flash-Chat,
MiniMaxAI/MiniMax-M1-40k, internlm/internlm2_5-7b-chat and CohereLabs/c4ai-command-a-03-2025; the model card of
ibm-granite/granite-20b-functioncalling. The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript

Granite = partial(Transcript, "granite", None)
Phi = partial(Transcript, "phi4_mini_json", None)
F = Call("f", '{"a": [1, 2]}')
G = Call("g", "{}")
LIST = '[{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {}}]'

TRANSCRIPTS = [
    Granite("list", f"<|tool_call|>{LIST}", calls=(F, G)),
    Granite("as text, and more", f"Yes.<tool_call> {LIST}\nBye", content="Yes.\nBye", calls=(F, G)),
    Granite("empty list", "<|tool_call|>[]", content="<|tool_call|>[]"),
    Granite("cut off", f"<|tool_call|>{LIST[:38]}", calls=(Call("f", '{"a": [1, '),)),
    Granite("no bracket at the end", f"<|tool_call|>{LIST[:-1]}", calls=(F, G)),
    Granite(
        "malformed: second is none",
        '<|tool_call|>[{"name": "g", "arguments": {}}, {"no": 1}] x',
        content=', {"no": 1}] x',
        calls=(G,),
    ),
    Transcript(
        "granite-20b-fc",
        None,
        "two",
        '<function_call> {"name": "g", "arguments": {}} <function_call> {"name": "g", "arguments": {}}',
        calls=(G, G),
    ),
    Phi("list", f"functools{LIST}", calls=(F, G)),
    Phi("parameters", 'functools[{"name": "g", "parameters": {}}]', calls=(G,)),
    Phi("only a word", "Use functools.reduce(f, [1])", content="Use functools.reduce(f, [1])"),
    Phi("ends in the word", "Use functools", content="Use functools"),
    Phi("as its template writes it", f"<|tool_call|>{LIST}<|/tool_call|>", calls=(F, G)),
    Transcript("jamba", None, "list", f"Ok <tool_calls>{LIST}</tool_calls>", content="Ok ", calls=(F, G)),
    Transcript(
        "longcat",
        None,
        "one",
        '<longcat_tool_call>\n{"name": "g", "arguments": {}}\n</longcat_tool_call>',
        calls=(G,),
    ),
    Transcript(
        "minimax",
        None,
        "a line each",
        '<tool_calls>\n{"name": "f", "arguments": {"a": [1, 2]}}\n{"name": "g", "arguments": {}}\n</tool_calls>',
        calls=(F, G),
    ),
    Transcript("hunyuan_a13b", None, "list", f"<tool_calls>{LIST}</tool_calls>", calls=(F, G)),
    Transcript(
        "internlm",
        None,
        "one",
        'Ok<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": [1, 2]}}<|action_end|>\n',
        content="Ok",
        calls=(F,),
    ),
    Transcript(
        "cohere_command3",
        "cohere_command3",
        "plan and actions",
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": [1, 2]}}\n]<|END_ACTION|>',
        reasoning="I look.",
        calls=(F,),
    ),
]
