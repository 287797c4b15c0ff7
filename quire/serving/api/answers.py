"""OpenAI's answers: choices as server-sent events or one JSON body, and the JSON of completions and token ids.

A stream has a first chunk, text, an end for each choice, usage if it is asked for, and `[DONE]` once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.chat_serializer import finish_fields, token_ids_field
from quire.serving.api.json_pieces import encode_in_slices
from quire.serving.api.stream_response import EVENT_STREAM
from quire.serving.api.token_fields import (
    PromptFields,
    TokenNames,
    chat_logprobs,
    encode_chat_logprobs,
    entries_per_row,
    finite,
)
from quire.text.deltas import ChoiceDelta
from quire.text.output_parsers.events import ContentDelta, OutputEvent

DONE = b"data: [DONE]\n\n"
_ANY_TEXT = "\0"
_encode = msgspec.json.Encoder().encode
_BY_ID = TokenNames(None)


def event(body: dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + _encode(body) + b"\n\n"


class Choices(Protocol):
    """The choices of a request: RequestChoices, or those that a beam search has found."""

    async def collect(self) -> list[ChoiceDelta]: ...

    def usage(self) -> dict[str, Any]: ...

    def usage_of(self, index: int, num_tokens: int | None = None) -> dict[str, int]: ...


class SseChunks:
    """The AnswerFormat of OpenAI's endpoints. `head` begins the body and every chunk; `usage` says whether token counts
    stand in a chunk of their own at the end, and whether in all chunks. `metrics` has the times of the request, if they
    are reported."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        head: dict[str, Any],
        serializer: Serializer,
        choices: Choices,
        usage: tuple[bool, bool],
        metrics: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._head = head
        self._serializer = serializer
        self._choices = choices
        self._last_usage, self._every_usage = usage
        self._metrics = metrics
        self._text_only = serializer.text_only and not self._every_usage
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice, of those that have begun

    async def body(self) -> dict[str, Any]:
        outputs = await self._choices.collect()
        body = await self._serializer.body(outputs)
        return {**self._head, **body, "usage": self._choices.usage(), **self._metrics_field()}

    def delta(self, index: int, gained: ChoiceDelta) -> bytes:
        data = b""
        if index not in self._around_text:
            self._around_text[index] = self._split_at_text(index) if self._text_only else (b"", b"")
            if (first := self._serializer.first_chunk(index)) is not None:
                data = self._chunk(index, first, num_tokens=0)
        text = gained.text if gained.events is None else _only_content(gained.events)
        if self._text_only and text is not None:
            if text:
                before, behind = self._around_text[index]
                data += before + _encode(text) + behind
        else:
            for choice in self._serializer.chunks(index, gained):
                data += self._chunk(index, {"choices": [choice]})
        if gained.finish_reason is not None:
            data += self._chunk(index, {"choices": [self._serializer.last_chunk(index, gained)]})
        return data

    def end(self) -> bytes:
        if not self._last_usage and self._metrics is None:
            return DONE
        usage = {"usage": self._choices.usage()} if self._last_usage else {}
        return event({**self._head, "choices": [], **usage, **self._metrics_field()}) + DONE

    def _metrics_field(self) -> dict[str, Any]:
        return {} if self._metrics is None else {"metrics": self._metrics()}

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body) + DONE

    def _split_at_text(self, index: int) -> tuple[bytes, bytes]:
        """A choice's chunk before and after its text. From one chunk to the next only the text differs."""
        chunk = self._chunk(index, {"choices": self._serializer.chunks(index, ChoiceDelta(_ANY_TEXT))})
        before, _, behind = chunk.rpartition(_encode(_ANY_TEXT))
        return before, behind

    def _chunk(self, index: int, fields: dict[str, Any], num_tokens: int | None = None) -> bytes:
        """A chunk of one choice, which has `num_tokens` tokens up to here; None for all that it has."""
        body = {**self._head, **fields}
        if self._every_usage:
            body["usage"] = self._choices.usage_of(index, num_tokens)
        elif self._last_usage:
            body["usage"] = None
        return event(body)


def _only_content(events: list[OutputEvent]) -> str | None:
    """The content that a parser has found; None if it has found anything else. Merged, content is one event."""
    if not events:
        return ""
    return events[0].text if len(events) == 1 and isinstance(events[0], ContentDelta) else None


class Serializer(Protocol):
    """Writes one endpoint's JSON."""

    @property
    def text_only(self) -> bool:
        """Whether chunks report text alone: no log probabilities and no token ids."""

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        """Fields that begin the response, or each chunk of a stream."""

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The `choices` and other fields of the chunk before a choice's output; None if there is none."""

    def chunks(self, index: int, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The choice of each chunk that says what was gained."""

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice of the chunk that ends the choice."""

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """Fields of a response that is not streamed, without its head."""


@dataclass(frozen=True)
class CompletionSerializer:
    """Writes choices of /v1/completions; with `echo`, each prompt comes before its output."""

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
        choice = {"index": index, "text": "", "logprobs": None, **finish_fields(delta)}
        return choice | token_ids_field([], self.token_ids)

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
        """The log probabilities of a whole choice; with `echo`, those of its prompt come first."""
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


@dataclass(frozen=True)
class GenerateSerializer:
    """Writes choices of /inference/v1/generate, which have token ids and no text. `num_logprobs` is None for none."""

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
