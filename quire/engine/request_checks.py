"""What the engine checks of a request before it can harm the device; the client has checked the rest."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from quire.foundation.messages.from_engine import EndReason, Ready
from quire.foundation.messages.to_engine import Add, MediaSpan, Medium
from quire.scheduling.scheduler.media_positions import shift_behind


def refusal(message: Add, ready: Ready) -> str:
    """Why none of a prompt's sequences can run on an engine; empty if they can."""
    if not 0 < message.prompt_len <= len(message.tokens):
        return "The prompt is empty."
    if message.pooling is not None:
        return _pooling_refusal(message, ready)
    if not ready.pooling.generates:
        return "This engine generates no text."
    if not message.sampling.max_tokens:
        return "max_tokens is missing."
    if message.prompt_len + message.sampling.max_tokens > ready.capacity:
        return f"Prompt and output exceed the {ready.capacity} tokens that a sequence can hold here."
    if any(min(ids) < 0 or max(ids) >= ready.vocab_size for ids in _sampling_tokens(message) if ids):
        return f"Token ids of sampling must be in [0, {ready.vocab_size})."
    if not all(_is_image(span, message) for span in message.media):
        return "The media of the prompt do not fit it."
    if message.media and message.prompt_len + shift_behind(message.media) > ready.capacity:
        return f"A video is so long that what follows it lies behind the {ready.capacity} positions of a sequence."
    if (message.source is not None) != ready.hears:
        return "This engine's model needs something to hear." if ready.hears else "This engine's model cannot hear."
    if message.source is not None and len(message.source.pixels) != 4 * message.source.height * message.source.width:
        return "What is to be heard has another size than it says."
    if message.thinking is not None and not (
        message.thinking.start and message.thinking.ends[:1] and all(message.thinking.ends)
    ):
        return "A limit on reasoning needs the tokens that begin and end it."
    return ""


def _is_image(span: MediaSpan, message: Add) -> bool:
    medium = span.medium
    is_inside = 0 <= span.start < span.end <= message.prompt_len
    have_places = not medium.places or np.frombuffer(medium.places, np.int32)[-1] < medium.count
    return is_inside and have_places and _is_whole(medium)


def _is_whole(medium: Medium) -> bool:
    """Whether a medium has as many pixels as it says; a video has as many for each frame."""
    size = 3 * medium.height * medium.width
    if medium.kind != "video":
        return len(medium.pixels) == size
    vectors = len(medium.times) // 4 * medium.rows * medium.columns
    return bool(vectors and size) and not len(medium.pixels) % size and medium.num_vectors == vectors


def _pooling_refusal(message: Add, ready: Ready) -> str:
    if message.prompt_len != len(message.tokens) or message.forks:
        return "A pooled request has one prompt and no output."
    if message.prompt_len > ready.capacity:
        return f"The prompt exceeds the {ready.capacity} tokens that a sequence can hold here."
    if message.pooling is None or message.pooling.task not in ready.pooling.tasks:
        return "This engine does not serve the request's pooling task."
    named = message.pooling.returned_token_ids or ()
    if named and not (message.pooling.per_token and 0 <= min(named) <= max(named) < len(ready.pooling.labels)):
        return "returned_token_ids names labels that the model does not have."
    if message.token_types and len(message.token_types) != message.prompt_len:
        return "token_types has another length than the prompt."
    if not 0 <= message.prompt_skip < message.prompt_len:
        return "prompt_skip leaves nothing to pool."
    return ""


def ended_before(sequence: Add) -> EndReason | None:
    """Why a replayed sequence is over already, if it is: its last message may have been lost with its engine."""
    if sequence.pooling is not None:
        return None
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
    if message.transcript is not None:
        yield message.transcript.tokens
    yield from message.bad_words
    if message.thinking is not None:
        yield message.thinking.start
        yield from message.thinking.ends
