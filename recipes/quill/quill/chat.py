"""What a conversation is, and the exact text the model sees of it.

Owns ``Message`` and ``Sample``, the ChatML rendering, and how tools are listed in a system prompt. The chat template
that is shipped with the model (``tokenizer.CHAT_TEMPLATE``) says the same in jinja; a test holds the two together.
Knows nothing about what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quill.checks import Check

Role = Literal["system", "user", "assistant"]
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

BEGIN, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

TOOLS_OPENING = """# Tools

You may call one or more functions to help with the user's request.

The functions are described inside <tools></tools> tags:
<tools>"""

TOOLS_CLOSING = """
</tools>

For each call, answer with a JSON object inside <tool_call></tool_call> tags:
<tool_call>
{"name": <function name>, "arguments": <arguments as a JSON object>}
</tool_call>"""


@dataclass(frozen=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True)
class Sample:
    """A conversation that ends with the reference answer, and the check any other answer must pass.

    ``key`` names what is asked, independent of most of the wording; it decides on which side of the held-out line
    the sample falls, so two samples that share a first user message must share their key.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    check: Check

    def __post_init__(self) -> None:
        assert self.messages[-1].role == "assistant"
        assert any(m.role == "user" for m in self.messages)

    @property
    def question(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        return self.messages[-1].content


def single_turn(task: str, key: str, question: str, answer: str, check: Check, system: str | None = None) -> Sample:
    opening = () if system is None else (Message("system", system),)
    return Sample(task, key, (*opening, Message("user", question), Message("assistant", answer)), check)


def render(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """The ChatML text of a conversation, as the shipped chat template renders it."""
    turns = "".join(f"{BEGIN}{m.role}\n{m.content}{END}\n" for m in messages)
    return turns + (f"{BEGIN}assistant\n" if add_generation_prompt else "")


def system_with_tools(tools: Sequence[Mapping[str, Json]], system: str | None = None) -> str:
    """The system message the chat template writes for ``tools`` (OpenAI function schemas)."""
    opening = f"{system}\n\n" if system else ""
    return opening + TOOLS_OPENING + "".join("\n" + dump_json(tool) for tool in tools) + TOOLS_CLOSING


def tool_call(name: str, arguments: Mapping[str, Json]) -> str:
    return f"<tool_call>\n{dump_json({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def tool_response(content: str) -> Message:
    """A tool's result; the template sends the role ``tool`` as a user turn in ``<tool_response>`` tags."""
    return Message("user", f"<tool_response>\n{content}\n</tool_response>")


def dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
