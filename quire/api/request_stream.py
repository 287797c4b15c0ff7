"""The inbox of one HTTP request: what the engine sends about its sequences, until the reader takes it.

Owns merging what is not read yet, so that a slow reader costs no more than the tokens themselves, and the way past the
inbox: a reader that waits is handed what comes in the moment in which it comes, without a switch of tasks. Knows
nothing about text or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from quire.messages import Add
from quire.metrics.stats import Progress
from quire.text.choice import Delta

AtOnce = Callable[[int, Delta], bool]
"""Takes what a sequence (by index) gained; whether it can take more."""


class RequestStream:
    """The sequences of one request by their index, in the order of its Adds.

    Written by the session and read by one task, all in the event loop.

    Attributes:
        progress: What the metrics remember of each sequence.
    """

    def __init__(self, adds: Sequence[Add], progress: Sequence[Progress]) -> None:
        self.adds = tuple(adds)
        self.progress = tuple(progress)
        self._index = {add.id: index for index, add in enumerate(adds)}
        self._unread: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._at_once: AtOnce | None = None
        self._changed = asyncio.Event()

    def progress_of(self, sequence: int) -> Progress:
        """That of a sequence by its id."""
        return self.progress[self._index[sequence]]

    def put(self, sequence: int, delta: Delta) -> None:
        """Add to what the reader will see of a sequence."""
        index = self._index[sequence]
        if self._at_once is not None:
            self._hand_over(self._at_once, index, delta)
            return
        if index in self._unread:
            self._unread[index].add(delta)
        else:
            self._unread[index] = delta
        self._changed.set()

    def _hand_over(self, at_once: AtOnce, index: int, delta: Delta) -> None:
        """What goes wrong is the reader's, not the session's, which has other requests to see to."""
        try:
            if at_once(index, delta):
                return
        except Exception as error:
            self._error = error
        self._at_once = None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """The reader gets this error in place of everything else."""
        self._error = error
        self._at_once = None
        self._changed.set()

    async def read(self, at_once: AtOnce) -> list[tuple[int, Delta]]:
        """Wait for news; returns what each sequence gained, by index.

        Args:
            at_once: While nothing is unread, what comes goes to this instead, until it can take no more; the list may
                be empty then.

        Raises:
            QuireError: The request failed as a whole.
            Exception: What `at_once` raised.
        """
        if not self._changed.is_set():
            self._at_once = at_once
        try:
            await self._changed.wait()
        finally:
            self._at_once = None
        self._changed.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return sorted(unread.items())
