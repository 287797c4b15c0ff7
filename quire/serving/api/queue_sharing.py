"""API processes tell each other whose requests they have sent to the queue. Knows nothing about limits."""

from __future__ import annotations

import asyncio

from quire.serving.api.admission_limit import AdmissionLimit, QueueShares
from quire.serving.api.peers import Answer, Peers, QueueShared

SHARE_S = 0.5
"""How often."""


class QueueSharing:
    """What this process tells and hears.

    Args:
        limit: Knows what it has sent, and is told what others have.
        peers: The others.
    """

    def __init__(self, limit: AdmissionLimit, peers: Peers) -> None:
        self._limit = limit
        self._peers = peers
        self._task: asyncio.Task[None] | None = None
        peers.on(QueueShared, self._hear)

    def start(self) -> None:
        """Begin to tell; called in the event loop. More calls do nothing."""
        if self._task is None and not self._peers.alone:
            self._task = asyncio.get_running_loop().create_task(self._tell())

    def close(self) -> None:
        """Tell nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _tell(self) -> None:
        told: QueueShares | None = None  # also that there is nothing any more of a process before this one
        while True:
            if (shares := self._limit.shares) != told:
                told = shares
                await self._peers.ask(QueueShared(self._peers.place, dict(shares.sequences), dict(shares.tokens)))
            await asyncio.sleep(SHARE_S)

    def _hear(self, news: QueueShared) -> Answer:
        self._limit.share(news.place, QueueShares(news.sequences, news.tokens))
        return {}
