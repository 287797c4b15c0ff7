"""A scrape shows what all API processes have counted, whichever is asked and whichever has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.engine.metrics.server_stats import ServerStats
from quire.engine.metrics.stats import Stats
from quire.serving.api import peers as peers_module
from quire.serving.api.peers import Peers, SharedCounts


class Process:
    """An API process that counts."""

    def __init__(self, directory: Path, place: int, life: int, count: int = 2) -> None:
        self.peers = Peers(place, count, directory, life)
        self.stats = ServerStats([Stats()])
        self.counts = SharedCounts(self.stats, self.peers)

    def serve(self, tokens: int) -> None:
        self.stats.engines[0].generation_tokens += tokens

    async def tokens(self) -> int:
        """What a scrape of it shows."""
        return (await self.counts.total()).engines[0].generation_tokens


def test_a_scrape_of_each_process_shows_the_sum_and_no_counter_goes_back_when_one_is_replaced(tmp_path: Path) -> None:
    async def body() -> None:
        first, second = Process(tmp_path, 0, 7), Process(tmp_path, 1, 8)
        first.peers.open()
        assert await first.tokens() == 0, "the second has not been started yet"
        second.peers.open()
        first.serve(5)
        second.serve(6)
        assert [await each.tokens() for each in (first, second)] == [11, 11]
        assert (await first.counts.total()).process["process_max_fds"] == 2 * first.stats.process["process_max_fds"]
        second.serve(100)  # nobody has asked since
        second.peers.close()
        assert await first.tokens() == 11
        assert (await first.counts.total()).process["process_max_fds"] == first.stats.process["process_max_fds"]
        successor = Process(tmp_path, 1, 9)
        successor.peers.open()
        successor.serve(3)
        assert [await each.tokens() for each in (first, successor)] == [14, 14]
        for each in (first, successor):
            each.peers.close()

    asyncio.run(body())


def test_a_process_that_does_not_answer_is_shown_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        first, second = Process(tmp_path, 0, 1), Process(tmp_path, 1, 2)
        for each in (first, second):
            each.peers.open()
            each.serve(5)
        assert await first.tokens() == 10
        second.serve(5)
        monkeypatch.setattr(peers_module, "ANSWER_S", 0.05)
        asyncio.get_running_loop().remove_reader(second.peers._socket.fileno())  # type: ignore[union-attr]
        assert await first.tokens() == 10
        for each in (first, second):
            each.peers.close()

    asyncio.run(body())


def test_a_process_alone_writes_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        alone = Process(tmp_path, 0, 1, count=1)
        alone.peers.open()
        alone.serve(5)
        assert await alone.tokens() == 5
        assert not list(tmp_path.iterdir())

    asyncio.run(body())
