"""What /metrics shows: what the API processes of the server have counted together, whichever is asked.

Each process writes down what it has counted once a second, and before anything of it is shown: so no counter goes back
when a process is killed, and its successor counts on. Knows nothing about Prometheus' names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from quire.engine.metrics.counts import Counts, continue_after, count_of, total
from quire.engine.metrics.prometheus import read_process
from quire.engine.metrics.server_stats import ServerStats
from quire.foundation.processes.shared_record import SharedRecord
from quire.serving.api.peers import Answer, KeepCounts, Peers

logger = logging.getLogger(__name__)

_CPU = "process_cpu_seconds_total"
KEEP_S = 1.0
"""What is counted in so many seconds may be lost with a process."""


class ShownCounts(Protocol):
    """What /metrics reads."""

    async def total(self) -> ServerStats:
        """All that was counted until now."""
        ...

    async def keep(self) -> None:
        """Write it down as long as this is not cancelled."""
        ...


class OwnCounts:
    """Of a process that serves alone, and nobody goes on from.

    Args:
        stats: What it counts.
    """

    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats

    async def total(self) -> ServerStats:
        return self._stats

    async def keep(self) -> None:
        pass


class SharedCounts:
    """Of all API processes.

    Args:
        stats: What this one counts.
        records: What each has written down, by place.
        place: Of this one.
        generation: Of the model that is served.
        peers: The others.
    """

    def __init__(
        self, stats: ServerStats, records: Sequence[SharedRecord], place: int, generation: int, peers: Peers
    ) -> None:
        self._stats = stats
        self._records = records
        self._place = place
        self._generation = generation
        self._peers = peers
        self._cpu_before = 0.0  # seconds of the processes before this one
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Counts)
        peers.on(KeepCounts, self._keep_for_peer)

    def continue_after_predecessor(self) -> None:
        """Count on from what a process in this place has written down, if there was one; before anything is
        counted."""
        if written := self._records[self._place].read():
            before = self._decoder.decode(written)
            continue_after(self._stats, before, self._generation)
            self._cpu_before = before.process.get(_CPU, 0.0)

    async def total(self) -> ServerStats:
        """All that was counted until now; by a process that does not answer, until it wrote it down last."""
        own = self._write(read_process())
        await self._peers.ask(KeepCounts())
        written = [record.read() for place, record in enumerate(self._records) if place != self._place]
        stats = total([own, *(self._decoder.decode(each) for each in written if each)])
        stats.gpus = self._stats.gpus
        return stats

    async def keep(self) -> None:
        """Write down what is counted, as long as this is not cancelled."""
        while True:
            self._write({_CPU: time.process_time()})
            await asyncio.sleep(KEEP_S)

    def _keep_for_peer(self, question: KeepCounts) -> Answer:
        self._write(read_process())
        return {}

    def _write(self, process: dict[str, float]) -> Counts:
        process = process | {_CPU: process.get(_CPU, 0.0) + self._cpu_before}
        counts = count_of(self._stats, self._generation, process)
        self._records[self._place].write(self._encoder.encode(counts))
        return counts
