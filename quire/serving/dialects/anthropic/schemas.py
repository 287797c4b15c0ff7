"""The bodies of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.serving.api.schemas.chat import MAX_MESSAGES
from quire.serving.api.schemas.known_fields import Body, FieldLists, Part, optional
from quire.serving.dialects.anthropic.message_schemas import Block, TextBlock

MESSAGES_FIELDS = FieldLists(
    ignored=frozenset({
        "billing_policy",
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "inference_geo",
        "metadata",
        "service_tier",
        "user_profile_id",
        "workspace_id",
    }),
    unsupported={"compaction": (), "container": (), "thread": ()},
)  # fmt: skip
_NEUTRAL = "Ignored: it changes no answer here."


class Message(Part):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(Part):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema of type object.")
    strict: bool | None = optional("Calls must match the schema.")
    cache_control: dict[str, Any] | None = optional("Keep the prefix cached, for ttl 5m or 1h.")
    eager_input_streaming: bool | None = optional("Ignored: inputs are always streamed.")
    defer_loading: bool | None = optional("A hint: no tool is searched for, all are shown.")
    allowed_callers: list[str] | None = optional("direct must be one: no code is executed here.")
    input_examples: list[dict[str, Any]] | None = optional(_NEUTRAL)


class TypedTool(Part, extra="allow"):
    """A tool that Anthropic's models know by its type. Those that Anthropic runs are left out; a client's shell,
    editor or memory is a function."""

    type: str
    name: str | None = None
    strict: bool | None = optional("Calls must match what is known of the type.")


def _class_of(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "TypedTool" if isinstance(kind, str) and kind != "custom" else "CustomTool"


AnthropicTool = Annotated[
    Annotated[CustomTool, Tag("CustomTool")] | Annotated[TypedTool, Tag("TypedTool")], Discriminator(_class_of)
]
"""A tool of either kind."""


class AnthropicToolChoice(Part):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = optional("The one tool to call; with type tool only.")
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model thinks first, where its chat template has a switch for it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(
        default=None, ge=0, description="Most tokens of thinking; ignored where the model's thinking is not told apart."
    )
    display: Literal["summarized", "omitted", "updates"] | None = optional("omitted: no thinking is shown.")
    block_binding: dict[str, Any] | None = optional("Ignored: nothing here is signed.")


class OutputFormat(Part):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """How the answer is made."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = optional("A hint: the model is not told of it.")


class ContextEdit(Part, extra="allow"):
    """A way to shorten what the model reads."""

    type: str


class ContextManagement(Part):
    """What may be cleared from a long conversation. A hint: all of it is read as long as it fits."""

    edits: list[ContextEdit] | None = None


class CountTokensRequest(Body):
    """A conversation whose tokens are counted."""

    model: str | None = optional("A name from /v1/models; may be left out.")
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = optional("Older name of output_config.format.")
    context_management: ContextManagement | None = None
    mcp_servers: list[dict[str, Any]] | None = optional("Left out, as tools that are hosted.")
    speed: str | None = optional("A hint: there is one speed.")
    fallbacks: Any = optional("A hint: no request is declined.")


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: int
    stop_sequences: list[str] | None = optional("Strings that end the answer.")
    stream: bool | None = optional("Server-sent events.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
