"""Conversations: from a ChatRequest to its answers, which are running.

Owns all that endpoints for conversations share: rendering and encoding the prompt, the sampling parameters, and handing
the request to the engine. An endpoint with another JSON makes a ChatRequest from it and writes the choices in its own
way. Knows nothing about HTTP and about responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.engine_session import EngineSession
from quire.api.prompt_renderer import PromptRenderer
from quire.api.request_choices import RequestChoices
from quire.api.schemas.chat import ChatRequest
from quire.sampling import SamplingParams
from quire.text.model_text import ModelText


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the engine takes it.

    Attributes:
        tokens: The rendered conversation; `params.truncate_prompt_tokens` may cut it.
        options: See EngineSession.add_request.
    """

    tokens: Sequence[int]
    params: SamplingParams
    options: dict[str, Any]


@dataclass(frozen=True)
class ChatService:
    """Conversations with one model."""

    session: EngineSession
    text: ModelText
    renderer: PromptRenderer

    async def start(self, fields: ChatRequest) -> RequestChoices:
        """The running answers. Must be closed.

        Raises:
            QuireError: See `prepare` and `run`.
        """
        return self.run(fields, await self.prepare(fields))

    async def prepare(self, fields: ChatRequest) -> ChatPrompt:
        """Check a request and render its conversation; nothing runs yet.

        Raises:
            RequestError: A field is wrong; the error names it.
            UnavailableError: No work is taken now.
        """
        longest = self.session.submission.longest
        with fields.named_as_sent():
            params, options = self._sampling(fields), fields.options(self.text.tokenizer)
        text = await self.renderer.render(
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            variables=fields.chat_template_kwargs,
        )
        limit = longest if params.truncate_prompt_tokens is None else None
        tokens = await self.renderer.encode(text, bool(fields.add_special_tokens), limit)
        if fields.longest is None:
            params = self.text.defaults.limit_chat(params, longest - len(tokens))
        return ChatPrompt(tokens, params, options)

    def run(self, fields: ChatRequest, prompt: ChatPrompt) -> RequestChoices:
        """Start what was prepared. Must be closed.

        Raises:
            RequestError: The engine could not run it.
            UnavailableError: No work is taken now.
        """
        with fields.named_as_sent():
            collector = self.session.add_request([prompt.tokens], prompt.params, **prompt.options)
        return RequestChoices(self.session, collector, self.text.tokenizer)

    def _sampling(self, fields: ChatRequest) -> SamplingParams:
        return fields.sampling(
            self.text.defaults,
            text=self.text.tokenizer is not None,
            max_tokens=fields.longest,
            logprobs=fields.num_logprobs,
        )
