"""What the engine checks of a request before it can harm the device; the client has checked the rest."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from quire.foundation.messages.from_engine import EndReason, Ready
from quire.foundation.messages.to_engine import Add


def refusal(message: Add, ready: Ready) -> str:
    """Why none of a prompt's sequences can run on an engine; empty if they can."""
    if not 0 < message.prompt_len <= len(message.tokens):
        return "The prompt is empty."
    if not message.sampling.max_tokens:
        return "max_tokens is missing."
    if message.prompt_len + message.sampling.max_tokens > ready.capacity:
        return f"Prompt and output exceed the {ready.capacity} tokens that a sequence can hold here."
    if any(min(ids) < 0 or max(ids) >= ready.vocab_size for ids in _sampling_tokens(message) if ids):
        return f"Token ids of sampling must be in [0, {ready.vocab_size})."
    if message.thinking is not None and not (
        message.thinking.start and message.thinking.ends[:1] and all(message.thinking.ends)
    ):
        return "A limit on reasoning needs the tokens that begin and end it."
    return ""


def ended_before(sequence: Add) -> EndReason | None:
    """Why a replayed sequence is over already, if it is: its last message may have been lost with its engine."""
    output_len = len(sequence.tokens) - sequence.prompt_len
    if output_len and output_len >= sequence.sampling.min_tokens and sequence.tokens[-1] in sequence.stop_ids:
        return "stop"
    return "length" if output_len >= (sequence.sampling.max_tokens or 0) else None


def to_int64(tokens: Sequence[int], vocab_size: int) -> bytes | None:
    """The tokens as int64 bytes; None if one is not in the vocabulary. There is at least one."""
    try:
        ids = array("q", tokens)
    except (OverflowError, TypeError):
        return None
    column = np.frombuffer(ids, dtype=np.int64)
    return ids.tobytes() if 0 <= column.min() <= column.max() < vocab_size else None


def _sampling_tokens(message: Add) -> Iterator[Collection[int]]:
    """Token ids other than the prompt's that the device indexes with."""
    yield from (ids for _, ids in message.sampling.named_token_ids())
    yield message.stop_ids
    yield from message.bad_words
    if message.thinking is not None:
        yield message.thinking.start
        yield from message.thinking.ends
