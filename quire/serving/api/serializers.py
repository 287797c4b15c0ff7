"""How choices look in responses: the parts in which the endpoints differ.

Owns the JSON of choices and log probabilities. Knows nothing about streams or the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.chat_serializer import finish_fields, token_ids_field
from quire.serving.api.json_pieces import encode_in_slices
from quire.serving.api.token_fields import (
    PromptFields,
    TokenNames,
    chat_logprobs,
    encode_chat_logprobs,
    entries_per_row,
    finite,
)
from quire.text.deltas import ChoiceDelta


class Serializer(Protocol):
    """One endpoint's JSON."""

    @property
    def text_only(self) -> bool:
        """Whether chunks report text alone: no log probabilities and no token ids."""
        ...

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        """Fields that begin the response, or each chunk of a stream."""
        ...

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Fields of the chunk that comes before a choice's output, if there is one: `choices` and others."""
        ...

    def chunks(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The choice of each chunk that says what was gained; none for nothing."""
        ...

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice of the chunk that ends it."""
        ...

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """Fields of a response that is not streamed, without its head."""
        ...


@dataclass(frozen=True)
class CompletionSerializer:
    """Choices of /v1/completions.

    Attributes:
        names: Names of tokens.
        shows_logprobs: Whether log probabilities are shown.
        prompt: Fields about the prompts.
        echo: Put each prompt before its output.
        token_ids: Whether `token_ids` are shown.
    """

    names: TokenNames
    shows_logprobs: bool
    prompt: PromptFields
    echo: bool = False
    token_ids: bool = False
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # where a choice's text goes on

    @property
    def text_only(self) -> bool:
        return not self.shows_logprobs and not self.token_ids

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        return {"id": f"cmpl-{request_id}", "created": created, "model": model, "object": "text_completion"}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        if not self.echo and not self.prompt.show_token_ids:
            return None
        text = self.prompt.text(index) if self.echo else ""
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {"choices": [choice | self.prompt.token_ids_field(index) | token_ids_field([], self.token_ids)]}

    def chunks(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        if not _says_something(delta, self.text_only):
            return []
        logprobs = self._columns(index, delta.tokens, delta.logprobs) if self.shows_logprobs else None
        choice = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        return [choice | token_ids_field(delta.tokens, self.token_ids)]

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": "",
            "logprobs": None,
            **finish_fields(delta),
            **token_ids_field([], self.token_ids),
        }

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        prompt_logprobs = await self.prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            text = await self.prompt.decode(index) if self.echo else ""
            logprobs = await self._all_columns(index, choices) if self.shows_logprobs else None
            shown.append({
                "index": index,
                "text": text + choice.text,
                "logprobs": logprobs,
                **finish_fields(choice),
                **token_ids_field(choice.tokens, self.token_ids),
                **prompt_logprobs[index // self.prompt.n],
                **self.prompt.token_ids_field(index),
            })  # fmt: skip
        return {"choices": shown}

    async def _all_columns(self, index: int, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """The log probabilities of a whole choice, with `echo` behind those of its prompt."""
        choice = choices[index]
        tokens: list[int] = choice.tokens
        entries: list[TokenLogprobs | None] = [*choice.logprobs]
        if self.echo:
            tokens = [*self.prompt.tokens(index), *tokens]
            of_prompt: list[TokenLogprobs | None] = [None, *self.prompt.logprobs(index, choices)]
            missing = len(tokens) - len(of_prompt) - len(entries)  # the engine ended it before all were computed
            entries = [*of_prompt, *[None] * missing, *entries]
        return await encode_in_slices(
            lambda start, end: self._columns(index, tokens[start:end], entries[start:end]),
            len(tokens),
            entries_per_row(entries),
        )

    def _columns(
        self, index: int, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """OpenAI's columns for the next tokens of a choice; only the first token of a prompt has no entry."""
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += self.names.num_characters(token)
        texts = [self.names.text(token) for token in tokens]
        tops: list[dict[str, float] | None] = []
        for text, entry in zip(texts, entries, strict=True):
            if entry is None:
                tops.append(None)
                continue
            likeliest = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = {self.names.text(token): finite(logprob) for token, logprob in likeliest}
            tops.append({text: finite(entry.logprob)} | top)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "tokens": texts,
            "top_logprobs": tops,
        }


_BY_ID = TokenNames(None)


@dataclass(frozen=True)
class GenerateSerializer:
    """Choices of /inference/v1/generate, which have token ids and no text.

    Attributes:
        num_logprobs: How many likeliest tokens are shown; None for no log probabilities.
        prompt: Fields about the prompt.
    """

    num_logprobs: int | None
    prompt: PromptFields
    text_only = False

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        return {"request_id": f"generate-tokens-{request_id}"}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def chunks(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        if not _says_something(delta, self.text_only):
            return []
        logprobs = None if self.num_logprobs is None else chat_logprobs(_BY_ID, self.num_logprobs, delta)
        return [{"index": index, "logprobs": logprobs, "finish_reason": None, "token_ids": delta.tokens}]

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {"index": index, "logprobs": None, **finish_fields(delta), "token_ids": []}

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (prompt_logprobs,) = await self.prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            logprobs = await encode_chat_logprobs(_BY_ID, self.num_logprobs, choice)
            shown.append({"index": index, "logprobs": logprobs, **finish_fields(choice), "token_ids": choice.tokens})
        return {"choices": shown, **prompt_logprobs}


def _says_something(delta: ChoiceDelta, text_only: bool) -> bool:
    return bool(delta.text or (delta.tokens and not text_only))
