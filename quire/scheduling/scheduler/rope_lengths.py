"""The RoPE length of each request, for models whose keys depend on their sequence's length.

Owns what follows from `RopeLengthMode` for requests: which blocks they can share, how many draft tokens they may have,
and when they must be computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.sampling_params import SamplingParams
from quire.scheduling.kvcache.rope_length_mode import RopeLengthMode
from quire.scheduling.scheduler.lengths import Lengths
from quire.scheduling.scheduler.request import Request
from quire.scheduling.scheduler.running_queue import RunningQueue


class RopeLengths:
    """Sets the RoPE length of requests. A `mode` of None means that keys do not depend on the length."""

    def __init__(
        self,
        mode: RopeLengthMode | None,
        lengths: Lengths,
        max_drafts: Callable[[SamplingParams], int] | None,
        *,
        masked_drafts: bool = False,
    ) -> None:
        self._mode = mode
        self._lengths = lengths
        self._max_drafts = max_drafts
        self._masked_drafts = masked_drafts

    def assign(self, request: Request) -> None:
        """Set the RoPE length of a request that is about to be computed from the start, and the hashes for it."""
        mode = self._mode
        if mode is None:
            return
        before, request.rope_length = request.rope_length, mode.rope_length(request.add.prompt_len, len(request.tokens))
        salt = mode.salt(request.rope_length)
        if not before or salt != mode.salt(before):
            request.rehash(f"{request.add.cache_salt}\0{salt}")
        self.limit_drafts(request)

    def limit_drafts(self, request: Request) -> None:
        """Set how many draft tokens a request may have: none before a rope switch, where it has to stop exactly."""
        mode, sampling = self._mode, request.add.sampling
        switches = mode is not None and mode.kind == "longrope" and request.rope_length <= mode.original_max_len
        has_none = switches or (request.masked and not self._masked_drafts)
        request.max_drafts = 0 if self._max_drafts is None or has_none else self._max_drafts(sampling)

    def at_rope_switch(self, running: RunningQueue) -> list[Request]:
        """Running requests whose next token lies beyond the original length, last in queue order first. All their keys
        change there, so they must be computed again from the start."""
        mode, lengths, index = self._mode, self._lengths, running.indices
        if mode is None or mode.kind != "longrope":
            return []
        continues = lengths.known[index] + lengths.in_flight_tokens[index] < lengths.limit[index] - lengths.pools[index]
        places = ((lengths.planned[index] == mode.original_max_len) & continues).nonzero()[0][::-1].tolist()
        return [running[place] for place in places if running[place].rope_length <= mode.original_max_len]
