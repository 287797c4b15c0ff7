"""Cuts what a model has written of a piece of sound into segments, and says where the next piece begins.

The rules are those of Whisper's long transcripts (Radford et al. 2022, section 3.8), as transformers applies them: what
follows the last complete segment is written anew with the next piece, so that no word is lost at a cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.text.speech_tokens import SpeechTokens


class Span(NamedTuple):
    """Tokens of a segment, with its timestamps, and when it begins and ends, in timestamps from the piece's begin."""

    start: float
    end: float
    tokens: Sequence[int]


@dataclass(frozen=True)
class Segment:
    """What is said from one time to another.

    Attributes:
        seek: The feature that the piece begins with.
        start, end: In seconds.
        tokens: With its timestamps.
        text: What is said.
        temperature: That tokens were sampled with.
        avg_logprob: Mean log probability of the piece's tokens.
        compression_ratio: Of the piece's text.
        no_speech_prob: Probability that nothing is said in the piece.
    """

    seek: int
    start: float
    end: float
    tokens: Sequence[int]
    text: str
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0

    def body(self, number: int) -> dict[str, Any]:
        """Return the segment as OpenAI's verbose_json has it."""
        return {
            "id": number, "seek": self.seek, "start": self.start, "end": self.end, "text": self.text,
            "tokens": list(self.tokens), "temperature": self.temperature, "avg_logprob": self.avg_logprob,
            "compression_ratio": self.compression_ratio, "no_speech_prob": self.no_speech_prob,
        }  # fmt: skip


def cut(tokens: Sequence[int], frames: int, marks: SpeechTokens) -> tuple[list[Span], int]:
    """Return the segments of a piece, and how many features behind its begin the next piece begins.

    Args:
        tokens: What the model has written, without the token that ends it.
        frames: Features of the piece; a timestamp is two.
        marks: The model's tokens.
    """
    begin = marks.first_timestamp
    times = [marks.is_timestamp(token) for token in tokens]
    ends_single = times[-2:] == [False, True]
    ends = [place + 1 for place in range(len(times) - 1) if times[place] and times[place + 1]]
    if not ends:
        last = next((token - begin for token in reversed(tokens) if token >= begin), 0)
        return [Span(0, last or frames // 2, tokens)], frames
    if ends_single:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # so that the last segment shows that another one began
    spans, first = [], 0
    for number, end in enumerate(ends):
        part = tokens[first:end]
        closing = -2 if number == len(ends) - 1 and not ends_single else -1
        spans.append(Span(part[0] - begin, part[closing] - begin, part))
        first = end
    if ends_single:
        return spans, frames
    return spans, 2 * (tokens[first - 2] - begin) or frames  # a piece whose segments take no time is over


def compression_ratio(text: str) -> float:
    """Return how many times longer a text is than what zlib makes of it: much for one that repeats itself."""
    content = text.encode()
    return len(content) / len(zlib.compress(content)) if content else 0.0
