"""The blocks that a message of Anthropic's is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag

from quire.serving.api.schemas.known_fields import Part, optional

_NEUTRAL = "Ignored: it changes no answer here."


class _Block(Part):
    cache_control: dict[str, Any] | None = optional("Keep the prefix cached, for ttl 5m or 1h.")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = optional(_NEUTRAL)


class ThinkingBlock(_Block):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = optional("Ignored: nothing here is signed.")


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
    caller: dict[str, Any] | None = optional(_NEUTRAL)
    toolset_name: str | None = optional(_NEUTRAL)


class ImageBlock(_Block):
    """A picture, which no model here can see."""

    type: Literal["image"]
    source: dict[str, Any]
    transformations: dict[str, Any] | None = optional(_NEUTRAL)


class DocumentBlock(_Block):
    """A document; those that are text are served."""

    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = optional(_NEUTRAL)


class SearchResultBlock(_Block):
    """What a search of the client's found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: dict[str, Any] | None = optional(_NEUTRAL)


class ToolReferenceBlock(_Block):
    """A tool that a search for tools found."""

    type: Literal["tool_reference"]
    tool_name: str


class HostedCallBlock(Part, extra="ignore"):
    """A call of a tool that Anthropic runs, of an earlier turn; left out."""

    type: Literal["server_tool_use", "mcp_tool_use"]


class HostedResultBlock(Part, extra="ignore"):
    """What a tool that Anthropic runs gave; what can be read of it is text."""

    type: Literal[
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "mcp_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]
    content: Any = None


class CompactionBlock(Part, extra="ignore"):
    """A summary in place of earlier turns."""

    type: Literal["compaction"]
    content: str | None = None


class FallbackBlock(Part, extra="ignore"):
    """Where another of Anthropic's models went on; left out."""

    type: Literal["fallback"]


_BLOCKS: dict[str, type[BaseModel]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_reference": ToolReferenceBlock,
    "compaction": CompactionBlock,
    "fallback": FallbackBlock,
    **dict.fromkeys(("server_tool_use", "mcp_tool_use"), HostedCallBlock),
}


def _class_of(block: Any) -> str | None:
    """The class of a block, by its type; other than pydantic, this finds it in one step."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    if not isinstance(kind, str):
        return None
    if kind == "tool_result":
        return "ToolResultBlock"
    found = HostedResultBlock if kind.endswith("_tool_result") else _BLOCKS.get(kind)
    return None if found is None else found.__name__


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[DocumentBlock, Tag("DocumentBlock")]
    | Annotated[SearchResultBlock, Tag("SearchResultBlock")]
    | Annotated[ToolReferenceBlock, Tag("ToolReferenceBlock")],
    Discriminator(
        _class_of,
        custom_error_type="unknown_block",
        custom_error_message="a block of type text, image, document, search_result, tool_reference",
    ),
]
"""A part of what a call gave."""


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = optional("Ignored: the content says what went wrong.")
    toolset_name: str | None = optional(_NEUTRAL)


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[ImageBlock, Tag("ImageBlock")]
    | Annotated[DocumentBlock, Tag("DocumentBlock")]
    | Annotated[SearchResultBlock, Tag("SearchResultBlock")]
    | Annotated[HostedCallBlock, Tag("HostedCallBlock")]
    | Annotated[HostedResultBlock, Tag("HostedResultBlock")]
    | Annotated[CompactionBlock, Tag("CompactionBlock")]
    | Annotated[FallbackBlock, Tag("FallbackBlock")],
    Discriminator(
        _class_of,
        custom_error_type="unknown_block",
        custom_error_message="a block of type text, thinking, redacted_thinking, tool_use, tool_result, document, "
        "search_result, compaction, fallback, or of a tool that Anthropic runs",
    ),
]
"""A part of a message."""
