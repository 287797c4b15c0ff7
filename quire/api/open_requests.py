"""The requests whose sequences the engine still runs, by sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from quire.api.output_collector import OutputCollector


class OpenRequests:
    """Where the output of each sequence goes, until the engine is done with it; and when all are done."""

    def __init__(self) -> None:
        self._collectors: dict[int, OutputCollector] = {}
        self._num_kept_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._collectors)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._collectors

    def get(self, sequence: int) -> OutputCollector | None:
        """Where the output of a sequence goes; None when nobody wants it any more."""
        return self._collectors.get(sequence)

    def all(self) -> list[OutputCollector]:
        """Each request once."""
        return list({id(collector): collector for collector in self._collectors.values()}.values())

    def add(self, collector: OutputCollector) -> None:
        """All sequences of a request begin."""
        self._idle.clear()
        self._collectors.update(dict.fromkeys((add.id for add in collector.adds), collector))

    def remove(self, sequence: int) -> None:
        """A sequence has ended, or is not wanted any more."""
        del self._collectors[sequence]
        self._update_idle()

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Not idle before this context is left, even while no sequence runs."""
        self._num_kept_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_kept_open -= 1
            self._update_idle()

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    def _update_idle(self) -> None:
        if not self._collectors and not self._num_kept_open:
            self._idle.set()
