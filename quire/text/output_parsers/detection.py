"""Which parsers fit a model, as its chat template tells by the format of former calls and reasoning.

A template without any sign tells nothing, and a flag has to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Detection:
    """A parser's name, or None if the template tells none, and what was seen in the template, for the log."""

    name: str | None
    reason: str


_Signs: TypeAlias = tuple[tuple[str, ...], ...]
"""A parser, and texts that are all in the templates of its models. The first parser that fits counts."""
_TOOL_SIGNS: _Signs = (
    ("openai", "<|channel|>", "<|message|>"),
    ("gemma4", "<|tool_call>", "<tool_call|>"),
    ("functiongemma", "<start_function_call>"),
    ("cohere_command3", "<|START_ACTION|>", '"tool_name"'),
    ("internlm", "<|action_start|>", "<|plugin|>"),
    ("lfm2", "<|tool_list_start|>"),
    ("olmo3", "<function_calls>", "<functions>"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek_v32", "｜DSML｜"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>", "```json"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("minimax_m2", "<minimax:tool_call>"),
    ("seed_oss", "<seed:tool_call>"),
    ("longcat", "<longcat_tool_call>"),
    ("glm45", "<arg_key>", "<arg_value>"),
    ("qwen3_coder", "<function=", "<parameter="),
    ("granite-20b-fc", "<|function_call_library|>"),
    ("granite", "<|tool_call|>", "<|start_of_role|>"),
    ("phi4_mini_json", "functools"),
    ("phi4_mini_json", "<|tool|>", "<|/tool|>"),
    ("jamba", "<tool_calls>"),
    ("llama4_pythonic", "<|header_start|>", "[func_name1("),
    ("pythonic", "[func_name1("),
    ("llama4_json", "<|header_start|>", '"parameters": '),
    ("llama3_json", "<|start_header_id|>", '"parameters": '),
    ("hermes", "<tool_call>"),
)
_REASONING_SIGNS: _Signs = (
    ("openai_gptoss", "<|channel|>", "<|message|>"),
    ("gemma4", "<|channel>", "<channel|>"),
    ("cohere_command3", "<|START_THINKING|>"),
    ("mistral", "[THINK]"),
    ("seed_oss", "<seed:think>"),
    ("granite", "Here is my thought process"),
    ("kimi_k2", "<think>", "<|tool_calls_section_begin|>"),
    ("minimax_m2", "<think>", "<minimax:tool_call>"),
    ("glm45", "<think>", "<arg_key>"),
    ("deepseek_v3", "</think>", "<｜Assistant｜>", "thinking"),
    ("deepseek_r1", "</think>", "<｜Assistant｜>"),
    ("qwen3", "<think>"),
    ("qwen3", "</think>"),
)


def detect_tool_parser(template: str | None) -> Detection:
    """The tool parser that a chat template's source tells."""
    return _detect(template, _TOOL_SIGNS, "how calls are written")


def detect_reasoning_parser(template: str | None) -> Detection:
    """The reasoning parser that a chat template's source tells."""
    return _detect(template, _REASONING_SIGNS, "how reasoning is written")


def _detect(template: str | None, signs: _Signs, what: str) -> Detection:
    if template is None:
        return Detection(None, "there is no chat template")
    for parser, *texts in signs:
        if all(text in template for text in texts):
            return Detection(parser, f"the chat template has {' and '.join(map(repr, texts))}")
    return Detection(None, f"the chat template does not tell {what}")
