"""Which API process may look for a request that kills an engine, and tells them so.

An API process knows its own requests, and finds the one that does it by running some of them at a time. Two that looked
at the same time would blame what the other's request has done. So after a second death those whose requests the engine
was working on take turns, in which nobody else sends anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from quire.foundation.messages.to_engine import CLIENT_SHIFT
from quire.foundation.processes.child import Child
from quire.foundation.processes.launch import Recovery
from quire.foundation.processes.orders import TakeTurn
from quire.serving.supervisor.children import Children, Place


class Searches:
    """The searches at all engines for a request that kills them.

    Args:
        children: The processes.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._turns: defaultdict[Place, SearchTurns] = defaultdict(SearchTurns)

    def unproven(self, engine: Place) -> bool:
        """Whether requests of the engine's last plans have not all moved on since it died."""
        return self._turns[engine].unproven

    def turn_at(self, engine: Place) -> int | None:
        """Whose turn it is at an engine, see `Dead`."""
        return self._turns[engine].turn

    def engine_died(self, engine: Place, in_flight: Collection[int]) -> int | None:
        """Note that an engine died while it worked on these sequences. Returns whose turn it is, see `Dead`."""
        turns = self._turns[engine]
        turns.engine_died(in_flight, self._children.apis.numbers)
        return turns.turn

    def recovered(self, api: Child, report: Recovery) -> None:
        """Take in the report of an API process. One about an earlier life of the engine comes too late."""
        engine = report.generation, report.engine.engine
        if not self._children.is_present(engine, report.engine):
            return
        turns, number = self._turns[engine], self._children.apis.number_of(api)
        if not report.complete:
            turns.not_proven(number)
        if (report.complete and turns.proven(number)) or (report.blamed and turns.found()):
            self._tell(engine)

    def api_gone(self, number: int) -> None:
        """Note that an API process is dead, and its requests with it."""
        for engine, turns in self._turns.items():
            if turns.proven(number):
                self._tell(engine)

    def api_started(self) -> None:
        """Tell API processes whose turn it is: a new one does not know."""
        for engine, turns in self._turns.items():
            if turns.turn is not None:
                self._tell(engine)

    def _tell(self, engine: Place) -> None:
        self._children.tell(TakeTurn(self._children.id_of(engine), self._turns[engine].turn))


class SearchTurns:
    """The turns at one engine. API processes are known by their numbers.

    Attributes:
        turn: Whose it is; None: there is nothing to look for, and all may send what they like.
    """

    def __init__(self) -> None:
        self._unproven: set[int] = set()
        self._waiting: list[int] = []  # the first one has the turn

    @property
    def turn(self) -> int | None:
        return self._waiting[0] if self._waiting else None

    @property
    def unproven(self) -> bool:
        """Whether requests of the engine's last plans have not all moved on since it died."""
        return bool(self._unproven)

    def engine_died(self, in_flight: Collection[int], processes: Collection[int]) -> None:
        """Note that the engine died while it worked on these sequences.

        Args:
            processes: All API processes. One alone needs no turns.
        """
        if self._unproven and not self._waiting and len(processes) > 1:
            self._waiting = sorted({sequence >> CLIENT_SHIFT for sequence in in_flight} & set(processes))
        self._unproven = set(processes)

    def not_proven(self, process: int) -> None:
        """Note that some requests of a process have not moved on yet."""
        self._unproven.add(process)

    def proven(self, process: int) -> bool:
        """Note that all requests of a process have moved on, or that it is gone. Returns whether the turn is another's
        now."""
        before = self.turn
        self._unproven.discard(process)
        self._waiting = [other for other in self._waiting if other != process]
        return self.turn != before

    def found(self) -> bool:
        """Note that a request was blamed, so that all turns end. Returns whether it was somebody's turn."""
        before = self.turn
        self._waiting.clear()
        return before is not None
