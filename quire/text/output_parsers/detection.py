"""Which parsers fit a model, as its chat template tells: it has to write former calls and reasoning in their format.

Owns the signs. A template without any tells nothing, and a flag has to.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Detection:
    """A parser and why.

    Attributes:
        name: In the registry; None if the template tells none.
        reason: For the log: what was seen in the template.
    """

    name: str | None
    reason: str


@dataclass(frozen=True)
class _Sign:
    """All of these texts stand in the template."""

    parser: str
    texts: tuple[str, ...]

    def fits(self, template: str) -> bool:
        return all(text in template for text in self.texts)


_TOOL_SIGNS = (
    _Sign("openai", ("<|channel|>", "<|message|>")),
    _Sign("gemma4", ("<|tool_call>", "<tool_call|>")),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("cohere_command3", ("<|START_ACTION|>", '"tool_name"')),
    _Sign("internlm", ("<|action_start|>", "<|plugin|>")),
    _Sign("lfm2", ("<|tool_list_start|>",)),
    _Sign("olmo3", ("<function_calls>", "<functions>")),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("deepseek_v32", ("｜DSML｜",)),
    _Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("longcat", ("<longcat_tool_call>",)),
    _Sign("glm45", ("<arg_key>", "<arg_value>")),
    _Sign("qwen3_coder", ("<function=", "<parameter=")),
    _Sign("granite-20b-fc", ("<|function_call_library|>",)),
    _Sign("granite", ("<|tool_call|>", "<|start_of_role|>")),
    _Sign("phi4_mini_json", ("functools",)),
    _Sign("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    _Sign("jamba", ("<tool_calls>",)),
    _Sign("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    _Sign("pythonic", ("[func_name1(",)),
    _Sign("llama4_json", ("<|header_start|>", '"parameters": ')),
    _Sign("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    _Sign("hermes", ("<tool_call>",)),
)
_REASONING_SIGNS = (
    _Sign("openai_gptoss", ("<|channel|>", "<|message|>")),
    _Sign("gemma4", ("<|channel>", "<channel|>")),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("mistral", ("[THINK]",)),
    _Sign("seed_oss", ("<seed:think>",)),
    _Sign("granite", ("Here is my thought process",)),
    _Sign("kimi_k2", ("<think>", "<|tool_calls_section_begin|>")),
    _Sign("minimax_m2", ("<think>", "<minimax:tool_call>")),
    _Sign("glm45", ("<think>", "<arg_key>")),
    _Sign("deepseek_v3", ("</think>", "<｜Assistant｜>", "thinking")),
    _Sign("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    _Sign("qwen3", ("<think>",)),
    _Sign("qwen3", ("</think>",)),
)


def detect_tool_parser(template: str | None) -> Detection:
    """The tool parser that a chat template's source tells."""
    return _detect(template, _TOOL_SIGNS, "how calls are written")


def detect_reasoning_parser(template: str | None) -> Detection:
    """The reasoning parser that a chat template's source tells."""
    return _detect(template, _REASONING_SIGNS, "how reasoning is written")


def _detect(template: str | None, signs: tuple[_Sign, ...], what: str) -> Detection:
    if template is None:
        return Detection(None, "there is no chat template")
    for sign in signs:
        if sign.fits(template):
            return Detection(sign.parser, f"the chat template has {' and '.join(map(repr, sign.texts))}")
    return Detection(None, f"the chat template does not tell {what}")
