"""Where media stand in a prompt: their placeholders make room for all their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quire.errors import RequestError
from quire.foundation.messages.to_engine import MediaSpan, Medium, MediumKind

NAMES: dict[str, str] = {"image": "images", "audio": "sounds", "video": "videos"}
"""What several media of a kind are called."""


class Marks(NamedTuple):
    """How a prompt shows media of a kind.

    Attributes:
        placeholder: The token that prompts have for each of them.
        vector: The token that stands for each of their vectors.
        behind: Returns the tokens of the one of a number, from 0, behind other tokens, by those that it has alone;
            None: they are the same. Raises ValueError if there are more of them than have numbers.
        around: The tokens before and behind a placeholder that are left out, because a medium's own text has them.
    """

    placeholder: int
    vector: int
    behind: Callable[[Sequence[int], int, list[int]], list[int]] | None = None
    around: tuple[int, int] | None = None

    def text(self, medium: Medium, before: Sequence[int], number: int) -> list[int]:
        """Return all tokens of the medium of a number, from 0, behind the tokens `before`. Raises RequestError if there
        are more of them than have numbers."""
        text = array("i", medium.text).tolist()
        if self.behind is None or not text:
            return text or [self.vector] * medium.count
        try:
            return self.behind(before, number, text)
        except ValueError as error:
            raise RequestError(f"{str(error).capitalize()}: send fewer.") from None


def placed(
    tokens: Sequence[int], media: Sequence[Medium], marks: Mapping[MediumKind, Marks]
) -> tuple[list[int], list[MediaSpan]]:
    """Return a prompt with all tokens of its media in place of their placeholders, and where they are.

    Args:
        tokens: The prompt; each medium has one placeholder token, or all of its tokens.
        media: Its media, those of a kind in order.
        marks: How the kinds that the model reads are shown.

    Raises:
        RequestError: There are more or fewer placeholders than media.
    """
    whole, single = list[MediaSpan](), dict[int, tuple[int, Medium]]()
    for kind, mark in marks.items():
        own = [medium for medium in media if medium.kind == kind]
        found = [place for place, token in enumerate(tokens) if token == mark.placeholder]
        if not own and kind == "video":
            continue  # its token was no mark before videos were read
        if found and len(found) == sum(medium.num_vectors for medium in own) != len(own):
            whole += _in_place(tokens, found, own, mark)
        elif len(found) != len(own):
            name = NAMES[kind]
            raise RequestError(
                f"The prompt has {len(found)} placeholders for {name} and {len(own)} {name}: write one for each, and "
                "none into texts."
            )
        else:
            single |= zip(found, enumerate(own), strict=True)
    result, spans, start = list[int](), list[MediaSpan](), 0
    later = iter(sorted(whole, key=lambda span: span.start))
    waiting = next(later, None)
    for place in (*sorted(single), len(tokens)):
        while waiting is not None and waiting.start < place:
            spans.append(MediaSpan(waiting.start - start + len(result), waiting.medium))
            waiting = next(later, None)
        result += tokens[start:place]
        start = place
        if (found_here := single.get(place)) is not None:
            number, medium = found_here
            mark = marks[medium.kind]
            is_around = mark.around is not None and (*result[-1:], *tokens[place + 1 : place + 2]) == mark.around
            if is_around:
                result.pop()
            text = mark.text(medium, result, number)
            spans.append(MediaSpan(len(result) + text.index(mark.vector), medium))
            result += text
            start = place + 1 + is_around
    return result, spans


def _in_place(tokens: Sequence[int], found: Sequence[int], media: Sequence[Medium], mark: Marks) -> list[MediaSpan]:
    """Return the spans of media whose tokens are there already, a placeholder for each vector."""
    spans, first = [], 0
    for number, medium in enumerate(media):
        places = found[first : first + medium.num_vectors]
        if places[-1] - places[0] != medium.count - 1:
            raise RequestError(
                f"The placeholders of {NAMES[medium.kind]} must stand together, all {medium.num_vectors} of them."
            )
        if medium.text:
            text = mark.text(medium, tokens[: found[first - 1] + 2] if first else (), number)
            begin = places[0] - text.index(tokens[places[0]])
            if begin < 0 or list(tokens[begin : begin + len(text)]) != text:
                raise RequestError("The tokens around an image's placeholders must be those of the model's processor.")
        spans.append(MediaSpan(places[0], medium))
        first += medium.num_vectors
    return spans
