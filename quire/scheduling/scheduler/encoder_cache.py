"""Which images' vectors the worker keeps, and which of them a step computes, counted in tokens.

The scheduler decides, and plans say what is computed and dropped. So pixels are sent once, and what a step's images
take of the worker's memory is bounded, even if many rows begin within images that the prefix cache has a part of.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.foundation.messages.from_engine import MediaLoad
from quire.foundation.messages.to_engine import Medium
from quire.scheduling.scheduler.request import Request


class EncoderCache:
    """Images whose vectors the worker keeps, those used longest ago first.

    Args:
        size: Most tokens of the images that are kept, and so of those that a step needs. One image always fits.

    Attributes:
        added, dropped: What the plan says: images to compute, and digests of those that are not kept any more.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # tokens by digests
        self._kept_tokens = 0
        self._needed: dict[bytes, int] = {}  # of this step's rows
        self.added: list[Medium] = []
        self.dropped: list[bytes] = []
        self._queries = self._hits = 0

    def load(self) -> MediaLoad:
        """Return counts since the start: an image counts where a row begins with it."""
        return MediaLoad(self._queries, self._hits)

    def begin_step(self) -> None:
        """Begin a plan that needs no image yet."""
        self._needed = {}
        self.added, self.dropped = [], []  # the last plan has the others

    def chunk_tokens(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a request the step has room for: those before the first image
        that is too much. What it needs counts from now on."""
        return self._room(request, request.planned, count, claims=True) if request.add.media else count

    def whole(self, request: Request, count: int, most: int) -> int:
        """Return how many of the next `most` tokens of a request are computed where `count` would be: all of those that
        see one another, or none of them."""
        end = request.planned + count
        for span in request.add.media:
            if span.medium.two_sided and span.start < end < span.end:
                if span.start > request.planned:
                    return span.start - request.planned
                rest = span.end - request.planned
                return rest if rest <= most else 0
        return count

    def can_begin(self, request: Request, start: int) -> bool:
        """Return whether the step has room for a request's token at `start`."""
        return not request.add.media or self._room(request, start, 1, claims=False) > 0

    def use(self, request: Request, start: int, end: int) -> None:
        """Note that the step computes these tokens of a request; the images among them are computed unless kept."""
        for span in request.add.media:
            if span.end <= start or span.start >= end:
                continue
            medium = span.medium
            is_kept = medium.digest in self._kept
            if span.start >= start:
                self._queries += 1
                self._hits += is_kept
            self._needed[medium.digest] = medium.count
            if is_kept:
                self._kept.move_to_end(medium.digest)
            else:
                self._add(medium)

    def _room(self, request: Request, start: int, count: int, *, claims: bool) -> int:
        needed = sum(self._needed.values())
        for span in request.add.media:
            if span.end <= start or span.start >= start + count:
                continue
            medium = span.medium
            if medium.digest not in self._needed:
                if needed and needed + medium.count > self._size:
                    return max(0, span.start - start)
                needed += medium.count
                if claims:
                    self._needed[medium.digest] = medium.count
        return count

    def _add(self, medium: Medium) -> None:
        self._kept[medium.digest] = medium.count
        self._kept_tokens += medium.count
        self.added.append(medium)
        for digest in list(self._kept) if self._kept_tokens > self._size else ():
            if self._kept_tokens > self._size and digest not in self._needed:
                self._kept_tokens -= self._kept.pop(digest)
                self.dropped.append(digest)
