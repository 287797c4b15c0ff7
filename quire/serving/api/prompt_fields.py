"""What responses say about prompts: their tokens, their log probabilities, and for `echo` their text.

Owns vLLM's `prompt_logprobs` and `prompt_token_ids`. Knows nothing about streams or the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.json_pieces import JsonPieces, encode_in_slices
from quire.text.deltas import ChoiceDelta
from quire.text.sequence_accumulator import logprobs_dict
from quire.text.tokenizer import Tokenizer

THREAD_THRESHOLD = 1_000
"""Longer prompts become text in a thread."""


@dataclass(frozen=True)
class PromptFields:
    """The prompts of one request.

    Attributes:
        prompts: Their token ids.
        n: Choices for each prompt: those of the first prompt come first.
        tokenizer: None on a server without one.
        show_logprobs: Whether `prompt_logprobs` is in the response.
        show_token_ids: Whether `prompt_token_ids` is in the response.
    """

    prompts: Sequence[Sequence[int]]
    n: int
    tokenizer: Tokenizer | None
    show_logprobs: bool = False
    show_token_ids: bool = False
    _texts: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> bool:
        """Whether the response says anything about prompts."""
        return self.show_logprobs or self.show_token_ids

    def tokens(self, index: int) -> Sequence[int]:
        """The token ids of a choice's prompt."""
        return self.prompts[index // self.n]

    def text(self, index: int) -> str:
        """The text of a choice's prompt, special tokens included; empty without a tokenizer."""
        number = index // self.n
        if self.tokenizer is not None and number not in self._texts:
            self._texts[number] = self.tokenizer.decode(self.prompts[number], skip_special_tokens=False)
        return self._texts.get(number, "")

    async def decode(self, index: int) -> str:
        """The text of a choice's prompt, as `text` returns it. A long prompt is decoded in a thread."""
        if len(self.tokens(index)) > THREAD_THRESHOLD and index // self.n not in self._texts:
            return await asyncio.to_thread(self.text, index)
        return self.text(index)

    def logprobs(self, index: int, choices: Sequence[ChoiceDelta]) -> list[TokenLogprobs]:
        """The log probabilities of a choice's prompt, from the second token on. The engine sends them with the first of
        the choices that share it."""
        return choices[index - index % self.n].prompt_logprobs

    def token_ids_field(self, index: int) -> dict[str, Any]:
        """`prompt_token_ids` of a choice, if they were asked for."""
        return {"prompt_token_ids": self.tokens(index)} if self.show_token_ids else {}

    async def logprobs_fields(self, choices: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
        """`prompt_logprobs` of each prompt, if they were asked for."""
        if not self.show_logprobs:
            return [{} for _ in self.prompts]
        return [
            {"prompt_logprobs": await self._encode(prompt, choices[i * self.n].prompt_logprobs)}
            for i, prompt in enumerate(self.prompts)
        ]

    async def _encode(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]) -> JsonPieces:
        """vLLM's list: for each token of the prompt a dict by token id; None for the first, and for those that were not
        computed before the engine ended the request."""

        def rows(start: int, end: int) -> dict[str, list[Any]]:
            dicts = [
                logprobs_dict(prompt[i], entries[i - 1], self.tokenizer) if 0 < i <= len(entries) else None
                for i in range(start, end)
            ]
            return {"rows": msgspec.to_builtins(dicts, str_keys=True)}

        entries_per_row = 1 + len(entries[0].top_ids) if entries else 1
        return (await encode_in_slices(rows, len(prompt), entries_per_row))["rows"]
