"""The body of POST /v1/chat/completions/batch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quire.errors import RequestError
from quire.serving.api.schemas.chat import MAX_MESSAGES, ChatMessage, ChatRequest

_ONE_CONVERSATION: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "use_beam_search": (False,),
    "tools": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
}
"""Fields for one conversation alone, with the values (beside null) that ask for nothing."""


class ChatBatchRequest(ChatRequest):
    """Several conversations to answer, each with one choice; all other fields are for all of them."""

    messages: list[list[ChatMessage]] = Field(  # type: ignore[assignment]
        description="Conversations.", max_length=MAX_MESSAGES
    )

    def conversations(self) -> list[ChatRequest]:
        """A request for each.

        Raises:
            RequestError: There are none, or a field is not for several.
        """
        if not self.messages:
            raise RequestError("messages must not be empty.", param="messages")
        for name, neutral in _ONE_CONVERSATION.items():
            if (value := getattr(self, name)) is not None and value not in neutral:
                raise RequestError(f"{name} cannot be combined with several conversations: leave it out.", param=name)
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]
