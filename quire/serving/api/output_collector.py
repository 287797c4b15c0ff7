"""What the engine sends about one HTTP request, until its reader takes it.

Owns merging what is not read yet, so that a slow reader costs no more than its tokens. A reader that already waits gets
each delta by a direct call, without a task switch. Knows nothing about text or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quire.engine.metrics.stats import SequenceStats
from quire.foundation.messages.to_engine import Add
from quire.text.deltas import SequenceDelta

OnDelta = Callable[[int, SequenceDelta], bool]
"""Takes what a sequence (by index) gained; returns whether it can take more."""


class OutputCollector:
    """The output of one request, by the index of its sequences, which is the order of its Adds.

    Filled by the session and read by one task, all in the event loop.

    Attributes:
        stats: What the metrics know about each sequence.
        form: What the client called the form of its output, for error messages; None: it asked for none.
    """

    def __init__(self, adds: Sequence[Add], stats: Sequence[SequenceStats], form: str | None = None) -> None:
        self.adds = tuple(adds)
        self.form = form
        self.stats = tuple(stats)
        self._index = {add.id: index for index, add in enumerate(adds)}
        self._unread: dict[int, SequenceDelta] = {}
        self._error: Exception | None = None
        self._on_delta: OnDelta | None = None
        self._changed = asyncio.Event()

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt, as the engine got them."""
        return [add.tokens[: add.prompt_len] for add in self.adds[:: self.adds[0].sampling.n]]

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
        """An exception is for the reader alone: the session, which calls this, has other requests to serve."""
        try:
            if on_delta(index, delta):
                return
        except Exception as error:
            self._error = error
        self._on_delta = None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """The reader gets this error in place of everything else."""
        self._error = error
        self._on_delta = None
        self._changed.set()

    async def wait(self) -> None:
        """Until anything is unread.

        Raises:
            QuireError: The request failed as a whole.
        """
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def read(self, on_delta: OnDelta) -> list[tuple[int, SequenceDelta]]:
        """Wait for output; returns what each sequence gained, by index.

        Args:
            on_delta: While nothing is unread, each delta goes to this instead, until it can take no more; the list may
                be empty then.

        Raises:
            QuireError: The request failed as a whole.
            Exception: What `on_delta` raised.
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
