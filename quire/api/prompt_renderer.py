"""Texts and conversations to token ids, without blocking the event loop.

Owns where that work runs: short texts in the event loop, long ones in a few threads. Knows nothing about sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from quire.api.schemas.chat import ChatMessage, plain_messages
from quire.errors import ContextLengthError, RequestError
from quire.text.chat_template import ChatTemplate
from quire.text.fill_in_middle import FillInMiddle, fill_in_middle
from quire.text.model_text import ModelText
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")

THREAD_THRESHOLD = 4_000
"""Texts of more characters are encoded in a thread; shorter ones take less time than handing them over would."""
THREADS = 4


class PromptRenderer:
    """Renders chat templates and encodes prompts for one model."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: The server works on token ids only.
        """
        if self._text.tokenizer is None:
            raise RequestError("This server has no tokenizer: send token ids.", param="prompt")
        return self._text.tokenizer

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """The marks of prompts with a gap; None where the model has none."""
        return fill_in_middle(self.tokenizer)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, add_special_tokens: bool, longest: int | None) -> list[int]:
        """Token ids of a text.

        Args:
            longest: Refuse at once what cannot be this short; None when only a part of the text is wanted.

        Raises:
            RequestError: It is no valid Unicode.
            ContextLengthError: It is so long that it cannot fit into `longest` tokens.
        """
        tokenizer = self.tokenizer
        _check_length(tokenizer.fewest_tokens(text), longest)
        return await self._run(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def encode_gap(self, marks: FillInMiddle, before: str, behind: str, longest: int | None) -> list[int]:
        """Token ids of a prompt that asks for what stands between two texts; see `encode`."""
        tokenizer = self.tokenizer
        _check_length(tokenizer.fewest_tokens(before) + tokenizer.fewest_tokens(behind), longest)
        return await self._run(len(before) + len(behind), lambda: marks.prompt(tokenizer, before, behind))

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        tokenizer = self.tokenizer
        return await self._run(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))

    async def render(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        variables: dict[str, Any] | None,
    ) -> str:
        """The text of a conversation.

        Raises:
            RequestError: The model has no chat template, or the template refuses the messages.
        """
        template = self._template()
        plain = plain_messages(messages, knows_developer="developer" in template.source)
        size = sum(len(message["content"]) for message in plain) + THREAD_THRESHOLD // 100 * len(plain)
        continues = bool(continue_final_message)
        opens = not continues if add_generation_prompt is None else add_generation_prompt
        return await self._run(
            size,
            lambda: template.render(
                plain, add_generation_prompt=opens, continue_final_message=continues, variables=variables
            ),
        )

    def _template(self) -> ChatTemplate:
        if self._text.chat_template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        return self._text.chat_template

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= THREAD_THRESHOLD:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _check_length(fewest: int, longest: int | None) -> None:
    if longest is not None and fewest > longest:
        raise ContextLengthError(
            f"The prompt has more than {fewest} tokens; a sequence here holds at most {longest}. Shorten it.",
            param="prompt",
        )
