"""How choices look in responses: the parts in which the endpoints differ.

Owns the JSON of choices and log probabilities. Knows nothing about streams or the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from quire.api.prompt_fields import PromptFields
from quire.api.sliced_json import encode_in_slices
from quire.api.token_names import TokenNames, finite
from quire.messages import TokenLogprobs
from quire.text.deltas import ChoiceDelta


class Serializer(Protocol):
    """One endpoint's JSON."""

    text_only: bool
    """Whether chunks report text alone: no log probabilities and no token ids."""

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        """Fields that begin the response, or each chunk of a stream."""
        ...

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Fields of the chunk that comes before a choice's output, if there is one: `choices` and others."""
        ...

    def chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice of a chunk with text or tokens."""
        ...

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """The choice of the chunk that ends it."""
        ...

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """Fields of a response that is not streamed, without its head."""
        ...


class CompletionSerializer:
    """Choices of /v1/completions.

    Args:
        names: Names of tokens.
        logprobs: Whether log probabilities are shown.
        prompt: Fields about the prompts.
        echo: Put each prompt before its output.
        token_ids: Whether `token_ids` are shown.
    """

    def __init__(
        self,
        names: TokenNames,
        logprobs: bool,
        prompt: PromptFields,
        *,
        echo: bool = False,
        token_ids: bool = False,
    ) -> None:
        self._names = names
        self.text_only = not logprobs and not token_ids
        self._logprobs = logprobs
        self._prompt = prompt
        self._echo = echo
        self._token_ids = token_ids
        self._offsets: defaultdict[int, int] = defaultdict(int)  # where each choice's text goes on

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        return {"id": f"cmpl-{request_id}", "created": created, "model": model, "object": "text_completion"}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        if not self._echo and not self._prompt.show_token_ids:
            return None
        text = self._prompt.text(index) if self._echo else ""
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {"choices": [choice | self._prompt.token_ids_field(index) | _token_ids([], self._token_ids)]}

    def chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = self._columns(index, delta.tokens, delta.logprobs) if self._logprobs else None
        choice = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
        return choice | _token_ids(delta.tokens, self._token_ids)

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, **_finish(delta), **_token_ids([], self._token_ids)}

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        prompt_logprobs = await self._prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            text = self._prompt.text(index) if self._echo else ""
            logprobs = await self._all_columns(index, choices) if self._logprobs else None
            shown.append({
                "index": index,
                "text": text + choice.text,
                "logprobs": logprobs,
                **_finish(choice),
                **_token_ids(choice.tokens, self._token_ids),
                **prompt_logprobs[index // self._prompt.n],
                **self._prompt.token_ids_field(index),
            })  # fmt: skip
        return {"choices": shown}

    async def _all_columns(self, index: int, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """The log probabilities of a whole choice, with `echo` behind those of its prompt."""
        choice = choices[index]
        tokens: list[int] = choice.tokens
        entries: list[TokenLogprobs | None] = [*choice.logprobs]
        if self._echo:
            tokens = [*self._prompt.tokens(index), *tokens]
            entries = [None, *self._prompt.logprobs(index, choices), *entries]
        return await encode_in_slices(
            lambda start, end: self._columns(index, tokens[start:end], entries[start:end]),
            len(tokens),
            _entries_per_row(entries),
        )

    def _columns(
        self, index: int, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """OpenAI's columns for the next tokens of a choice; only the first token of a prompt has no entry."""
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += self._names.num_characters(token)
        texts = [self._names.text(token) for token in tokens]
        tops: list[dict[str, float] | None] = []
        for text, entry in zip(texts, entries, strict=True):
            if entry is None:
                tops.append(None)
                continue
            likeliest = zip(entry.top_ids, entry.top_logprobs, strict=True)
            top = {self._names.text(token): finite(logprob) for token, logprob in likeliest}
            tops.append({text: finite(entry.logprob)} | top)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "tokens": texts,
            "top_logprobs": tops,
        }


class ChatSerializer:
    """Choices of /v1/chat/completions.

    Args:
        names: Names of tokens.
        logprobs: How many likeliest tokens are shown; None for no log probabilities.
        role: Of the message.
        prompt: Fields about the prompt.
        echo: Text that begins every message.
        token_ids: Whether `token_ids` are shown.
    """

    def __init__(
        self,
        names: TokenNames,
        logprobs: int | None,
        role: str,
        prompt: PromptFields,
        *,
        echo: str = "",
        token_ids: bool = False,
    ) -> None:
        self.text_only = logprobs is None and not token_ids
        self._names = names
        self._logprobs = logprobs
        self._role = role
        self._prompt = prompt
        self._echo = echo
        self._token_ids = token_ids

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        name = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": f"chatcmpl-{request_id}", "created": created, "model": model, "object": name}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        delta = {"role": self._role, "content": self._echo}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice | _token_ids([], self._token_ids)], **self._prompt.token_ids_field(0)}

    def chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else chat_logprobs(self._names, self._logprobs, delta)
        choice = {"index": index, "delta": {"content": delta.text}, "logprobs": logprobs, "finish_reason": None}
        return choice | _token_ids(delta.tokens, self._token_ids)

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, **_finish(delta), **_token_ids([], self._token_ids)}

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (prompt_logprobs,) = await self._prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            message = {"role": self._role, "content": self._echo + choice.text}
            logprobs = await encode_chat_logprobs(self._names, self._logprobs, choice)
            field = _token_ids(choice.tokens, self._token_ids)
            shown.append({"index": index, "message": message, "logprobs": logprobs, **_finish(choice), **field})
        return {"choices": shown, **prompt_logprobs, **self._prompt.token_ids_field(0)}


class GenerateSerializer:
    """Choices of /inference/v1/generate, which have token ids and no text.

    Args:
        logprobs: How many likeliest tokens are shown; None for no log probabilities.
        prompt: Fields about the prompt.
    """

    text_only = False

    def __init__(self, logprobs: int | None, prompt: PromptFields) -> None:
        self._names = TokenNames(None)
        self._logprobs = logprobs
        self._prompt = prompt

    def head(self, request_id: str, created: int, model: str, *, stream: bool) -> dict[str, Any]:
        return {"request_id": f"generate-tokens-{request_id}"}

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else chat_logprobs(self._names, self._logprobs, delta)
        return {"index": index, "logprobs": logprobs, "finish_reason": None, "token_ids": delta.tokens}

    def last_chunk(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {"index": index, "logprobs": None, **_finish(delta), "token_ids": []}

    async def body(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        (prompt_logprobs,) = await self._prompt.logprobs_fields(choices)
        shown = []
        for index, choice in enumerate(choices):
            logprobs = await encode_chat_logprobs(self._names, self._logprobs, choice)
            shown.append({"index": index, "logprobs": logprobs, **_finish(choice), "token_ids": choice.tokens})
        return {"choices": shown, **prompt_logprobs}


def chat_logprobs(names: TokenNames, num_top: int, delta: ChoiceDelta) -> dict[str, list[Any]]:
    """Log probabilities in the form of OpenAI's chat."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": finite(logprob), "bytes": names.bytes(token)}

    content = []
    for token, entry in zip(delta.tokens, delta.logprobs, strict=True):
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
        top = [one(other, logprob) for other, logprob in likeliest]
        content.append({**one(token, entry.logprob), "top_logprobs": top})
    return {"content": content}


async def encode_chat_logprobs(names: TokenNames, num_top: int | None, choice: ChoiceDelta) -> dict[str, Any] | None:
    """The same of a whole choice, as JSON; None when they are not asked for."""
    if num_top is None:
        return None
    return await encode_in_slices(
        lambda start, end: chat_logprobs(
            names, num_top, ChoiceDelta(tokens=choice.tokens[start:end], logprobs=choice.logprobs[start:end])
        ),
        len(choice.tokens),
        _entries_per_row(choice.logprobs),
    )


def _entries_per_row(entries: Sequence[TokenLogprobs | None]) -> int:
    return 1 + max((len(entry.top_ids) for entry in entries[:2] if entry is not None), default=0)


def _token_ids(tokens: list[int], shown: bool) -> dict[str, Any]:
    return {"token_ids": tokens} if shown else {}


def _finish(delta: ChoiceDelta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
