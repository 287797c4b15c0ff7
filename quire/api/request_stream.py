"""The inbox of one HTTP request: what the engine sends about its sequences, until the reader takes it.

Owns merging what is not read yet, so that a slow reader costs no more than the tokens themselves. Knows nothing about
text or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.errors import QuireError
from quire.messages import Add
from quire.metrics.stats import Progress
from quire.text.choice import Delta


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
        self._error: QuireError | None = None
        self._changed = asyncio.Event()

    def progress_of(self, sequence: int) -> Progress:
        """That of a sequence by its id."""
        return self.progress[self._index[sequence]]

    def put(self, sequence: int, delta: Delta) -> None:
        """Add to what the reader will see of a sequence."""
        index = self._index[sequence]
        if index in self._unread:
            self._unread[index].add(delta)
        else:
            self._unread[index] = delta
        self._changed.set()

    def fail(self, error: QuireError) -> None:
        """The reader gets this error in place of everything else."""
        self._error = error
        self._changed.set()

    async def read(self) -> list[tuple[int, Delta]]:
        """Wait for news; returns what each sequence gained, by index.

        Raises:
            QuireError: The request failed as a whole.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return sorted(unread.items())
