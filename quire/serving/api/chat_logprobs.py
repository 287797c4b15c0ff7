"""Log probabilities of tokens in the form of OpenAI's chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api.sliced_json import encode_in_slices
from quire.serving.api.token_names import TokenNames, finite
from quire.text.deltas import ChoiceDelta


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
