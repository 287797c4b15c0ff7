"""The bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Owns their fields. What they mean as a chat is in `quire.api.anthropic_chat`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from quire.api.schemas.chat import MAX_MESSAGES
from quire.api.schemas.known_fields import FieldLists

MESSAGES_FIELDS = FieldLists(
    ignored=frozenset({"metadata", "service_tier", "cache_control", "inference_geo", "diagnostics", "user_profile_id"}),
    unsupported={
        "container": (),
        "context_management": (
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},  # Claude Code's
        ),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "workspace_id": (),
    },
)
_NEUTRAL = "Ignored: it changes no answer here."


class _Block(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    cache_control: dict[str, Any] | None = Field(default=None, description="Ignored: prefixes are always cached.")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = Field(default=None, description=_NEUTRAL)


class ThinkingBlock(_Block):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Ignored: nothing here is signed.")


class RedactedThinkingBlock(_Block):
    """Thoughts that only Anthropic's models can read; left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(default=None, description=_NEUTRAL)
    toolset_name: str | None = Field(default=None, description=_NEUTRAL)


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(default=None, description="Ignored: the content says what went wrong.")
    toolset_name: str | None = Field(default=None, description=_NEUTRAL)


_CLASS_OF_TYPE = {
    "text": "TextBlock",
    "thinking": "ThinkingBlock",
    "redacted_thinking": "RedactedThinkingBlock",
    "tool_use": "ToolUseBlock",
    "tool_result": "ToolResultBlock",
}


def _class_of(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return _CLASS_OF_TYPE.get(kind) if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    Discriminator(
        _class_of,
        custom_error_type="unknown_block",
        custom_error_message="a block of type " + ", ".join(_CLASS_OF_TYPE),
    ),
]


class Message(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(BaseModel):
    """A function that the model may call. Anthropic's own server tools are not served."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of type object.")
    strict: bool | None = Field(default=None, description="Calls must match the schema.")
    cache_control: dict[str, Any] | None = Field(default=None, description="Ignored: prefixes are always cached.")
    eager_input_streaming: bool | None = Field(default=None, description="Ignored: inputs are always streamed.")
    defer_loading: Literal[False] | None = Field(default=None, description="No tool is searched for.")
    allowed_callers: list[Literal["direct"]] | None = Field(default=None, description="No code is executed here.")
    input_examples: list[dict[str, Any]] | None = Field(default=None, description=_NEUTRAL)


class AnthropicToolChoice(BaseModel):
    """Whether the model may, must or must not call a tool."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="The one tool to call; with type tool only.")
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Whether the model thinks first, where its chat template has a switch for it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        default=None, ge=0, description="Most tokens of thinking; ignored where the model's thinking is not told apart."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: thinking blocks are empty."
    )


class OutputFormat(BaseModel):
    """The JSON schema of the answer."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How the answer is made."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(BaseModel):
    """A conversation whose tokens are counted."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model: str | None = Field(default=None, description="A name from /v1/models; may be left out.")
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: int
    stop_sequences: list[str] | None = Field(default=None, description="Strings that end the answer.")
    stream: bool | None = Field(default=None, description="Server-sent events.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
