"""By which length the keys of a request go, in models where that matters, and who must be computed again for it.

Owns what follows from `KeysByLength` for requests: whom they share blocks with, and how many guesses they may have.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.kvcache.keys import KeysByLength
from quire.sampling import SamplingParams
from quire.scheduler.lengths import Lengths
from quire.scheduler.request import Request
from quire.scheduler.waiting import RankedRequests


class KeyLengths:
    """What a length means for each request's keys.

    Args:
        keys: How keys depend on it; None: they do not.
        lengths: Of all requests.
        drafts: See Scheduler.
    """

    def __init__(
        self,
        keys: KeysByLength | None,
        lengths: Lengths,
        drafts: Callable[[SamplingParams], int] | None,
    ) -> None:
        self._keys = keys
        self._lengths = lengths
        self._drafts = drafts

    def count(self, request: Request) -> None:
        """How much is known of it when its keys begin to be computed decides by which length they go, and with whom it
        shares them."""
        keys = self._keys
        if keys is None:
            return
        before, request.counts_as = request.counts_as, keys.counts_as(request.add.prompt_len, len(request.tokens))
        salt = keys.salt(request.counts_as)
        if not before or salt != keys.salt(before):
            request.hashes = request.hashes.salted(f"{request.add.cache_salt}\0{salt}")
        self.limit_drafts(request)

    def limit_drafts(self, request: Request) -> None:
        """Set how many guesses it may have. None where its keys will turn, so that it meets that length exactly."""
        keys, sampling = self._keys, request.add.sampling
        turns = keys is not None and keys.change == "turn" and request.counts_as <= keys.original
        request.drafts = 0 if self._drafts is None or request.masked or turns else self._drafts(sampling)

    def turned_over(self, running: RankedRequests) -> list[Request]:
        """Requests that grow beyond the length where all keys turn into others, the last in rank first: they are to be
        computed again from the start."""
        keys, lengths, rows = self._keys, self._lengths, running.rows
        if keys is None or keys.change != "turn":
            return []
        goes_on = lengths.known[rows] + lengths.drawing[rows] < lengths.limit[rows]
        at_the_turn = ((lengths.planned[rows] == keys.original) & goes_on).nonzero()[0][::-1].tolist()
        return [running[index] for index in at_the_turn if running[index].counts_as <= keys.original]
