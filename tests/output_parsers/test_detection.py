"""The parsers that a chat template tells.

Sources: the chat templates of the named models. What stands here is, in our own words, the part of each that writes a
former call or what the model thought; Quill's template is the real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quire.builtin
from quire.errors import ConfigError
from quire.text.output_parsers.detection import detect_reasoning_parser, detect_tool_parser
from quire.text.output_parsers.registry import (
    NOT_SERVED,
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_format,
    tool_format,
)
from quire.text.template_files import load_chat_template

TEMPLATES = [
    ("Qwen/Qwen2.5-7B-Instruct", "<|im_start|> <tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes", None),
    ("Qwen/Qwen3-8B", "<think>\n{{ thought }}\n</think> <tool_call>\n{{ call | tojson }}", "hermes", "qwen3"),
    ("Qwen/Qwen3-Coder-30B", "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder", None),
    ("Llama-3.1", '<|start_header_id|> Respond with {"name": function name, "parameters": …}', "llama3_json", None),
    ("Llama-3.2, pythonic", "<|start_header_id|> as [func_name1(params_name1=…)]", "pythonic", None),
    ("Llama-4", '<|header_start|> Respond with {"name": function name, "parameters": …}', "llama4_json", None),
    ("Llama-4, pythonic", "<|header_start|> as [func_name1(param1=…)]", "llama4_pythonic", None),
    ("Mistral-Small-3.1", "[TOOL_CALLS] [{{ call | tojson }}]", "mistral", None),
    ("Magistral-Small-2509", "[THINK]{{ thought }}[/THINK] [TOOL_CALLS]{{ name }}[ARGS]", "mistral", "mistral"),
    ("DeepSeek-R1", "<｜Assistant｜> split('</think>') <｜tool▁calls▁begin｜> ```json", "deepseek_v3", "deepseek_r1"),
    (
        "DeepSeek-V3-0324",
        "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function ```json",
        "deepseek_v3",
        None,
    ),
    ("DeepSeek-V3.1", "{% if thinking %} <｜Assistant｜></think><｜tool▁calls▁begin｜>", "deepseek_v31", "deepseek_v3"),
    ("gpt-oss-20b", "<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("granite-3.1-8b", "<|start_of_role|>assistant<|tool_call|>{{ calls | tojson }}", "granite", None),
    ("granite-3.2-8b", "<|tool_call|> <|start_of_role|> Here is my thought process: …", "granite", "granite"),
    ("granite-4.0", "<|start_of_role|> <tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes", None),
    ("GLM-4.5", "<think></think> <tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45", "glm45"),
    ("Phi-4-mini", "<|tool|>{{ tool | tojson }}<|/tool|>", "phi4_mini_json", None),
    ("Kimi-K2-Thinking", "<think> <|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "kimi_k2"),
    ("MiniMax-M2", "<think> <minimax:tool_call>\n<invoke name=", "minimax_m2", "minimax_m2"),
    ("Seed-OSS", "<seed:think> <seed:tool_call>\n<function=", "seed_oss", "seed_oss"),
    ("gemma-4", "<|channel>thought <channel|> <|tool_call>call:{{ name }}{<tool_call|>", "gemma4", "gemma4"),
    ("functiongemma", "<start_function_call>call:{{ name }}{<end_function_call>", "functiongemma", None),
    ("command-a", '<|START_THINKING|> <|START_ACTION|>[{"tool_name": …', "cohere_command3", "cohere_command3"),
    ("internlm2.5", "<|action_start|><|plugin|>", "internlm", None),
    ("LFM2", "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "lfm2", None),
    ("Olmo-3", "<functions>{{ tools }}</functions> <function_calls>{{ call }}</function_calls>", "olmo3", None),
    ("no tools", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}", None, None),
]


@pytest.mark.parametrize(("model", "template", "tool", "reasoning"), TEMPLATES)
def test_the_template_tells_the_parsers(model: str, template: str, tool: str | None, reasoning: str | None) -> None:
    assert (detect_tool_parser(template).name, detect_reasoning_parser(template).name) == (tool, reasoning)
    assert tool is None or tool in TOOL_PARSERS
    assert reasoning is None or reasoning in REASONING_PARSERS


def test_quill_calls_as_hermes_does() -> None:
    template = load_chat_template(Path(quire.builtin.__file__).parent / "quill")
    assert template
    found = detect_tool_parser(template.source)
    assert (found.name, found.reason) == ("hermes", "the chat template has '<tool_call>'")


@pytest.mark.parametrize(
    ("make", "setting"), [(tool_format, "tool_call_parser"), (reasoning_format, "reasoning_parser")]
)
def test_a_parser_that_only_vllm_has_is_refused_by_name(make: Any, setting: str) -> None:
    for name in NOT_SERVED[setting]:
        with pytest.raises(ConfigError, match=f"{name} is not served yet: leave it out"):
            make(name)
    with pytest.raises(ConfigError, match="Choose one of"):
        make("no_such")


def test_without_a_template_nothing_is_told() -> None:
    assert detect_tool_parser(None).name is None
    assert "no chat template" in detect_reasoning_parser(None).reason
