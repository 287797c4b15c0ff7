"""Reasoning in front of the answer, by whether the prompt has begun it.

Sources: the chat templates of deepseek-ai/DeepSeek-R1 (the prompt ends with <think>), Qwen/Qwen3-8B (the output begins
with it; without thinking, the prompt ends with an empty pair of tags), ByteDance-Seed/Seed-OSS and moonshotai's
Kimi-K2-Thinking; the model card of ibm-granite/granite-3.2-8b-instruct; vLLM's and SGLang's issues about tags in the
content. The texts are our own.
"""

from __future__ import annotations

from functools import partial

from quire.text.output_parsers.formats import Turn
from tests.output_parsers.transcripts.transcript import Call, Transcript

R1 = partial(Transcript, None, "deepseek_r1")
Qwen = partial(Transcript, None, "qwen3")
Granite = partial(Transcript, None, "granite")
OPEN = Turn(prompt="<|im_start|>assistant\n<think>\n")
CLOSED = Turn(prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n")

TRANSCRIPTS = [
    R1("begun in the prompt", "Hm.\n\nSo.\n</think>\n\nYes.", turn=OPEN, reasoning="Hm.\n\nSo.", content="Yes."),
    R1("prompt unknown", "Hm.</think>Yes.", reasoning="Hm.", content="Yes."),
    R1("begun twice", "<think>\nHm.</think>Yes.", turn=OPEN, reasoning="Hm.", content="Yes."),
    R1("nothing thought", "\n</think>\nYes.", turn=OPEN, content="Yes."),
    R1("never ends", "Hm. <b></thin\n", turn=OPEN, reasoning="Hm. <b></thin\n"),
    Qwen("begins itself", "<think>\nHm.\n</think>\n\nYes.", reasoning="Hm.", content="Yes."),
    Qwen("white space first", "\n<think>Hm.</think>Yes.", reasoning="Hm.", content="Yes."),
    Qwen("no thinking", "\n<thin>Yes.", content="\n<thin>Yes."),
    Qwen("switched off", "<think> is a tag", turn=CLOSED, content="<think> is a tag"),
    Qwen("tags in the answer", "<think>a</think>Use <think>b</think>.", reasoning="a", content="Use <think>b</think>."),
    Qwen("bare closing tag", "Yes.</think>No.", content="Yes.</think>No."),
    Qwen("a prompt that only mentions it", "Yes.", turn=Turn(prompt="What is <think>?<|im_end|>\n"), content="Yes."),
    Qwen("continued within", "b</think>c", turn=Turn(continued="<think>a"), reasoning="b", content="c"),
    Qwen("continued behind", "<think>c", turn=Turn(continued="<think>a</think>b"), content="<think>c"),
    Qwen("continued answer", "<think>c", turn=Turn(continued="b"), content="<think>c"),
    Qwen("blank", "\n ", content="\n "),
    Transcript(
        "hermes",
        "qwen3",
        "then a call",
        '<think>\n<tool_call>?\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        reasoning="<tool_call>?",
        calls=(Call("f", "{}"),),
    ),
    Transcript(
        "kimi_k2",
        "kimi_k2",
        "a call ends it",
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        reasoning="Hm.",
        calls=(Call("f", "{}", "f:0"),),
    ),
    Transcript(
        "deepseek_v31", "deepseek_v3", "begun in the prompt", "a</think>b", turn=OPEN, reasoning="a", content="b"
    ),
    Transcript(None, "seed_oss", "other tags", "<seed:think>a</seed:think>b", reasoning="a", content="b"),
    Transcript(None, "minimax_m2", "begun in the prompt", "a\n</think>\n\nb", turn=OPEN, reasoning="a", content="b"),
    Transcript(None, "glm45", "begins itself", "\n<think>a</think>\nb", reasoning="a", content="b"),
    Granite(
        "thoughts and response",
        "Here is my thought process:\nHm.\n\nHere is my response:\nYes.",
        reasoning="Hm.",
        content="Yes.",
    ),
    Granite(
        "contracted", "Here's my thought process: Hm. Here's my response: Yes.", reasoning=" Hm. ", content=" Yes."
    ),
    Granite("no thoughts", "Here is my thought.", content="Here is my thought."),
    Transcript(None, None, "no parser", " <think>a</think>", content=" <think>a</think>"),
]
