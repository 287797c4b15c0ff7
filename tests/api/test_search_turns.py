"""The search for a request that kills engines, of a process that is not alone: its turn, and that of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from quire.foundation.messages.from_engine import Dead, Deltas, EngineId
from quire.foundation.messages.to_engine import CLIENT_SHIFT, Add
from quire.foundation.processes.orders import TakeTurn
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server
from tests.api.test_lifetimes import LONG, eventually, in_background

OWN, OTHER = ScriptedClient.number, 5
FOREIGN = OTHER << CLIENT_SHIFT | 1


class Search:
    """A server with so many open requests."""

    def __init__(self, scripted: tuple[Server, ScriptedClient], count: int) -> None:
        self.server, self.client = scripted
        self.asking = []
        for number in range(count):
            self.asking.append(in_background(lambda n=number: self.server.post("/v1/completions", body(n))))
            self.client.wait_for_adds(number + 1)
        self.ids = [add.id for add in self.client.adds]

    def die(self, in_flight: Sequence[int], turn: int | None = None) -> None:
        """The engine does, and the next one is ready."""
        successor = EngineId(0, self.client.engine.epoch + 1)
        self.client.say(Dead("planted", successor, list(in_flight), turn, source=self.client.engine))
        eventually(lambda: self.client.engine == successor)
        self.client.say(replace(READY, source=successor))
        eventually(lambda: self.server.session.state == "ready")

    def turn(self, turn: int | None, epoch: int | None = None) -> None:
        engine = EngineId(0, self.client.engine.epoch if epoch is None else epoch)
        self.server.loop.call_soon_threadsafe(self.server.session.take_turn, TakeTurn(engine, turn))

    def moves_on(self, *adds: Add) -> None:
        for add in adds:
            self.client.say(Deltas([add.id], [4], [70] * 4, source=self.client.engine))

    def finish(self) -> list[int]:
        """All that is open ends; the status of each answer."""
        for add in self.client.adds:
            end = ScriptedClient.end(add, "stop")
            self.client.say(Deltas([add.id], [1], [70], ends=[end], source=self.client.engine))
        for thread, _ in self.asking:
            thread.join(20)
        return [answer[0].status_code for _, answer in self.asking]


def body(number: int) -> dict[str, Any]:
    return LONG | {"prompt": [5 + number, 6], "max_tokens": 20, "stream": False}


def test_nobody_is_blamed_for_a_death_that_may_be_anothers(scripted: tuple[Server, ScriptedClient]) -> None:
    search = Search(scripted, 1)
    client = search.client
    search.die([*search.ids, FOREIGN])
    client.wait_for_adds(1)
    search.die([*search.ids, FOREIGN], turn=OTHER)
    assert client.adds == [], "it is not its turn"
    thread, _ = in_background(lambda: search.server.post("/v1/completions", body(3)))
    eventually(lambda: search.server.session.num_sequences == 2)
    assert client.adds == [], "new ones wait as well"
    search.die([FOREIGN], turn=OTHER)
    search.turn(None)  # it was found there
    client.wait_for_adds(2)
    assert search.finish() == [200]
    thread.join(20)


def test_in_its_turn_it_looks_by_halves_and_blames(scripted: tuple[Server, ScriptedClient]) -> None:
    search = Search(scripted, 4)
    client = search.client
    search.die([*search.ids, FOREIGN])
    client.wait_for_adds(4)
    search.die([*search.ids, FOREIGN], turn=OTHER)
    search.turn(OWN, epoch=1)  # of an engine before: too late
    assert client.adds == []
    search.turn(OWN)
    first = list(client.wait_for_adds(2))
    assert [add.id for add in first] == search.ids[:2]
    search.moves_on(*first)
    third = client.wait_for_adds(3)[2]
    assert third.id == search.ids[2]
    search.moves_on(third)
    client.wait_for_adds(4)
    search.die(search.ids, turn=OWN)  # alone: the one that has not moved on did it
    client.wait_for_adds(3)
    assert search.ids[3] not in [add.id for add in client.adds]
    search.turn(None)
    assert sorted(search.finish()) == [200, 200, 200, 500]


def test_a_turn_that_is_told_before_the_death_it_follows_counts(scripted: tuple[Server, ScriptedClient]) -> None:
    search = Search(scripted, 2)
    search.die([*search.ids, FOREIGN])
    search.client.wait_for_adds(2)
    search.turn(None, epoch=2)
    search.die([*search.ids, FOREIGN], turn=OTHER)
    search.client.wait_for_adds(2)
    assert search.finish() == [200, 200]
