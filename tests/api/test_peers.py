"""API processes that ask each other: who answers, who is not waited for, and who is alone for a moment."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from quire.foundation.messages.to_engine import Adapter
from quire.serving.api import peers as peers_module
from quire.serving.api.peers import AdapterLoaded, AdapterUnloaded, CountOpen, Peers


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers does so in time, on any machine."""
    monkeypatch.setattr(peers_module, "ANSWER_S", 60.0)


def three(directory: Path) -> list[Peers]:
    made = [Peers(place, 3, directory, life=place) for place in range(3)]
    for place, each in enumerate(made):
        each.on(CountOpen, lambda question, place=place: {"sequences": 10 + place})
    return made


def test_all_others_answer_and_one_process_alone_asks_nobody(tmp_path: Path) -> None:
    async def body() -> None:
        everybody = three(tmp_path)
        for each in everybody:
            each.open()
        assert await everybody[0].ask(CountOpen()) == [{"sequences": 11}, {"sequences": 12}]
        heard: list[Adapter] = []
        everybody[2].on(AdapterLoaded, lambda news: heard.append(news.adapter) or {})
        everybody[1].on(AdapterLoaded, lambda news: heard.append(news.adapter) or {})
        adapter = Adapter("poet", "/x", "d")
        await everybody[0].ask(AdapterLoaded(adapter))
        assert heard == [adapter] * 2
        for each in everybody:
            each.close()
        alone = Peers()
        alone.open()
        assert await alone.ask(CountOpen()) == []
        async with alone.exclusive():
            pass

    asyncio.run(body())


def test_a_long_question_arrives_whole(tmp_path: Path) -> None:
    async def body() -> None:
        first, second, _ = three(tmp_path)
        heard: list[AdapterUnloaded] = []
        second.on(AdapterUnloaded, lambda news: heard.append(news) or {})
        first.open()
        second.open()
        news = AdapterUnloaded("x" * 100_000)
        assert await first.ask(news) == [{}]
        assert heard == [news]
        first.close()
        second.close()

    asyncio.run(body())


def test_who_is_gone_or_stopped_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        first, second, _ = three(tmp_path)
        first.open()
        second.open()
        assert await first.ask(CountOpen()) == [{"sequences": 11}], "the third was not started yet"
        second.close()
        assert await asyncio.wait_for(first.ask(CountOpen()), 30) == [], "the second has died"
        monkeypatch.setattr(peers_module, "ANSWER_S", 0.05)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stopped:  # reads nothing, as after SIGSTOP
            stopped.bind(str(tmp_path / "api-2"))
            for _ in range(20):  # more than its queue holds
                assert await asyncio.wait_for(first.ask(CountOpen()), 30) == []
        monkeypatch.setattr(peers_module, "ANSWER_S", 60.0)
        successor = Peers(2, 3, tmp_path, life=5)
        successor.on(CountOpen, lambda question: {"sequences": 1})
        successor.open()
        assert await first.ask(CountOpen()) == [{"sequences": 1}], "it is where the one before was"
        first.close()
        successor.close()

    asyncio.run(body())


def test_only_one_process_at_a_time_is_alone(tmp_path: Path) -> None:
    async def body() -> None:
        everybody = three(tmp_path)
        for each in everybody:
            each.open()
        inside = 0

        async def enter(peers: Peers) -> None:
            nonlocal inside
            async with peers.exclusive():
                inside += 1
                assert inside == 1
                await asyncio.sleep(0.02)
                inside -= 1

        await asyncio.wait_for(asyncio.gather(*map(enter, everybody)), 60)
        for each in everybody:
            each.close()

    asyncio.run(body())
