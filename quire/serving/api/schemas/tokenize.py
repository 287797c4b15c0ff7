"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quire.serving.api.schemas.chat import MAX_MESSAGES, ChatMessage
from quire.serving.api.schemas.known_fields import Body
from quire.serving.api.schemas.tools import ChatTool

MAX_TOKENS = 2**18
"""Of one text to be made: while it is made no other Python code of the process runs."""


class TokenizeRequest(Body):
    """A text, or a conversation that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = Field(default=None, description="Either this or messages.")
    messages: list[ChatMessage] | None = Field(default=None, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(default=None, description="Default true for a prompt, false for messages.")
    add_generation_prompt: bool | None = Field(default=None, description="Default true.")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ChatTool] | None = Field(default=None, description="As in /v1/chat/completions.")
    return_token_strs: bool | None = Field(
        default=None, description="Also return the tokens as the vocabulary writes them."
    )


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_TOKENS)
