"""Collects the output of one request until its reader takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quire.engine.metrics.stats import SequenceStats
from quire.engine.structured_output.messages import LenientSchema
from quire.foundation.messages.to_engine import Add
from quire.text.deltas import SequenceDelta

OnDelta = Callable[[int, SequenceDelta], bool]
"""Takes what a sequence (by index) gained; returns whether it can take more."""


class OutputCollector:
    """The output of one request, by the index of its sequences, which is the order of its Adds.

    The session fills it and one task reads it, all in the event loop. Unread output is merged, so a slow reader costs
    no more than its tokens. `form` is the field that asked for a form of the output, None if none did; `lenient` are
    the schemas that finished outputs must be checked against. `part_of` is the first part of the client's request, if
    this is another one.
    """

    def __init__(
        self,
        adds: Sequence[Add],
        stats: Sequence[SequenceStats],
        form: str | None = None,
        lenient: Sequence[LenientSchema] = (),
        part_of: OutputCollector | None = None,
    ) -> None:
        self.adds = tuple(adds)
        self.form = form
        self.lenient = lenient
        self.part_of = part_of
        self.stats = tuple(stats)
        self._index = {add.id: index for index, add in enumerate(adds)}
        self._unread: dict[int, SequenceDelta] = {}
        self._error: Exception | None = None
        self._on_delta: OnDelta | None = None
        self._changed = asyncio.Event()

    def stats_of(self, sequence: int) -> SequenceStats:
        """The metrics of a sequence by its id."""
        return self.stats[self._index[sequence]]

    def put(self, sequence: int, delta: SequenceDelta) -> None:
        """Add what a sequence gained."""
        index = self._index[sequence]
        if self._on_delta is not None:
            self._call_reader(self._on_delta, index, delta)
            return
        if index in self._unread:
            self._unread[index].add(delta)
        else:
            self._unread[index] = delta
        self._changed.set()

    def _call_reader(self, on_delta: OnDelta, index: int, delta: SequenceDelta) -> None:
        """Hand a delta to the reader. Its exception is for it alone: other requests of the session go on."""
        try:
            if on_delta(index, delta):
                return
        except Exception as error:
            self._error = error
        self._on_delta = None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Let the reader get this error in place of everything else."""
        self._error = error
        self._on_delta = None
        self._changed.set()

    async def wait(self) -> None:
        """Wait until anything is unread; raises a QuireError if the request failed as a whole."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def read(self, on_delta: OnDelta) -> list[tuple[int, SequenceDelta]]:
        """Wait for output; returns what each sequence gained, by index. Raises a QuireError if the request failed, or
        what `on_delta` raised.

        While nothing is unread, `on_delta` gets each delta as it comes, until it can take no more; the list may be
        empty then.
        """
        if not self._changed.is_set():
            self._on_delta = on_delta
        try:
            await self._changed.wait()
        finally:
            self._on_delta = None
        self._changed.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return sorted(unread.items())
