"""What responses say about tokens: their names, log probabilities, and vLLM's fields about prompts."""

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

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
THREAD_THRESHOLD = 1_000
"""Prompts of more tokens become text in a thread."""


@dataclass(frozen=True)
class TokenNames:
    """Names of one model's tokens: by id with `as_ids`, or without a tokenizer."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def text(self, token: int) -> str:
        """A token's text; `bytes:\\x…` when it is no whole characters; `token_id:…` by id."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token: int) -> list[int]:
        """The bytes that the token adds to the text."""
        return list(self.tokenizer.token_bytes(token)) if self.tokenizer else []

    def num_characters(self, token: int) -> int:
        """How many characters of the text begin in the token."""
        data = self.tokenizer.token_bytes(token) if self.tokenizer else b""
        return sum(byte & 0xC0 != 0x80 for byte in data)


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(names: TokenNames, num_top: int, delta: ChoiceDelta) -> dict[str, list[Any]]:
    """The log probabilities of a delta's tokens, in the form of a chat choice's `logprobs`."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(logprob), "bytes": names.bytes(token)}

    content = []
    for token, entry in zip(delta.tokens, delta.logprobs, strict=True):
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
        top = [one(other, logprob) for other, logprob in likeliest]
        content.append({**one(token, entry.logprob), "top_logprobs": top})
    return {"content": content}


async def encode_chat_logprobs(names: TokenNames, num_top: int | None, choice: ChoiceDelta) -> dict[str, Any] | None:
    """Encode the log probabilities of a whole choice as JSON; None if the request did not ask for them."""
    if num_top is None:
        return None
    return await encode_in_slices(
        lambda start, end: chat_logprobs(
            names, num_top, ChoiceDelta(tokens=choice.tokens[start:end], logprobs=choice.logprobs[start:end])
        ),
        len(choice.tokens),
        entries_per_row(choice.logprobs),
    )


def entries_per_row(entries: Sequence[TokenLogprobs | None]) -> int:
    """How many entries one token has, which `encode_in_slices` takes as the cost of a row."""
    return 1 + max((len(entry.top_ids) for entry in entries[:2] if entry is not None), default=0)


@dataclass(frozen=True)
class PromptFields:
    """What a response says about its prompts, each of which has `n` choices, one prompt's after the other's."""

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
        """The log probabilities of a choice's prompt, from the second token on: the first choice has them."""
        return choices[index - index % self.n].prompt_logprobs

    def token_ids_field(self, index: int) -> dict[str, Any]:
        """`prompt_token_ids` of a choice, if the request asked for them."""
        return {"prompt_token_ids": self.tokens(index)} if self.show_token_ids else {}

    async def logprobs_fields(self, choices: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
        """`prompt_logprobs` of each prompt, if the request asked for them."""
        if not self.show_logprobs:
            return [{} for _ in self.prompts]
        return [
            {"prompt_logprobs": await self._encode(prompt, choices[i * self.n].prompt_logprobs)}
            for i, prompt in enumerate(self.prompts)
        ]

    async def _encode(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]) -> JsonPieces:
        """vLLM's list: a dict by token id for each token of the prompt; None for those that have none."""

        def rows(start: int, end: int) -> dict[str, list[Any]]:
            dicts = [
                logprobs_dict(prompt[i], entries[i - 1], self.tokenizer) if 0 < i <= len(entries) else None
                for i in range(start, end)
            ]
            return {"rows": msgspec.to_builtins(dicts, str_keys=True)}

        entries_per_row = 1 + len(entries[0].top_ids) if entries else 1
        return (await encode_in_slices(rows, len(prompt), entries_per_row))["rows"]
