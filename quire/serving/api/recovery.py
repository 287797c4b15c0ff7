"""Which open requests are on an engine, and what becomes of them when it is replaced.

The next engine gets every open sequence behind the tokens that are known. Only while one of them is suspected of
killing engines, some wait (`PoisonSearch`); once it is found, it fails alone. Knows nothing about HTTP or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.engine.metrics.stats import Stats
from quire.foundation.messages.to_engine import CLIENT_SHIFT, Add
from quire.foundation.processes.launch import Recovery, SendReport
from quire.foundation.processes.orders import TakeTurn
from quire.serving.api.engine_connection import EngineConnection
from quire.serving.api.engine_queue import EngineQueue
from quire.serving.api.open_requests import OpenRequests, OpenSequence
from quire.serving.api.output_collector import OutputCollector
from quire.serving.api.poison_search import PoisonSearch
from quire.serving.api.replay import replay_adds

logger = logging.getLogger(__name__)

MOVED_ON = 4
"""Tokens that a sequence gains on a new engine until it is taken to be harmless: more than plans in flight bring."""


class EngineRecovery:
    """Sends requests to one engine, again if need be.

    Args:
        requests: Those that are open, of all engines.
        engine: Where its own go.
        stats: Counts what is sent again.
        queue: Is told what a new engine has been sent, and what waits here.
        report: Is told how a recovery goes.
    """

    def __init__(
        self,
        requests: OpenRequests,
        engine: EngineConnection,
        stats: Stats,
        queue: EngineQueue,
        report: SendReport,
    ) -> None:
        self._requests = requests
        self._engine = engine
        self._number = engine.engine.engine
        self._stats = stats
        self._queue = queue
        self._report = report
        self._search: PoisonSearch[OutputCollector] = PoisonSearch()
        self._turn: int | None = None  # which API process may send something; None: all may
        self._told_turn: TakeTurn | None = None

    @property
    def searching(self) -> bool:
        """Whether some request kills this engine, and it is not known which: new ones wait."""
        return self._search.searching or not self._has_turn

    def send(self, add: Add) -> None:
        """Send a prompt for the first time, unless the engine knows it already or some of its sequences have ended; if
        there is no engine that takes it, it goes to the next one."""
        if self._engine.state != "ready":
            return
        found = [self._requests.get(number) for number in (add.id, *(fork.id for fork in add.forks))]
        sequences = [sequence for sequence in found if sequence is not None and not sequence.sent]
        if len(sequences) == len(found):
            self._send_new(add, sequences)

    def engine_died(self, in_flight: Sequence[int], turn: int | None = None) -> OutputCollector | None:
        """The engine is gone. Returns the request to blame, if it is known.

        Args:
            in_flight, turn: See Dead.
        """
        self._requests.engine_died(self._number)
        own = self._engine.number
        alone = self._turn == own or all(number >> CLIENT_SHIFT == own for number in in_flight)
        told = self._told_turn if self._told_turn and self._told_turn.engine == self._engine.engine else None
        self._turn = turn if told is None else told.turn
        found = [self._requests.get(number) for number in in_flight]
        collectors = [sequence.collector for sequence in found if sequence is not None]
        blamed = self._search.engine_died(collectors, alone=alone)
        if told is not None and told.turn is None:
            self._search.acquit_all()
        if blamed is not None:
            logger.error("A request has stopped the engine again and again, and fails: %s", blamed.adds[0].id)
            self._report(Recovery(self._engine.engine, blamed=True))
        return blamed

    def nothing_to_recover(self) -> None:
        """This process is new: no request of its own was on an engine that died."""
        self._report(Recovery(self._engine.engine, complete=True))

    def engine_ready(self) -> None:
        """The next engine takes work."""
        self._queue.restart()
        resumed = self._send_unsent()
        self._queue.hold(sequence.add for sequence in self._requests.unsent(self._number, lambda collector: True))
        self._report(Recovery(self._engine.engine, resumed, complete=not self._search.unproven))

    def take_turn(self, told: TakeTurn) -> None:
        """Who may send something from now on. It may be said before the death that it follows is known here."""
        self._told_turn = told
        if told.engine != self._engine.engine or told.turn == self._turn:
            return
        self._turn = told.turn
        if self._turn is None:
            self._search.acquit_all()  # it was found elsewhere, or nobody did it
        if self._engine.state == "ready":
            self._send_unsent()
        if not self._search.unproven:
            self._report(Recovery(self._engine.engine, complete=True))

    @property
    def _has_turn(self) -> bool:
        return self._turn in (None, self._engine.number)

    def _may_run(self, collector: OutputCollector) -> bool:
        return self._has_turn and self._search.may_run(collector)

    def gained(self, sequence: OpenSequence) -> None:
        """A sequence has got something."""
        if sequence.gained >= MOVED_ON and self._search.is_on_trial(sequence.collector):
            self._look(sequence.collector)

    def ended(self, collector: OutputCollector) -> None:
        """A sequence of this request is over, or not wanted any more."""
        if self._search.unproven:
            self._look(collector)

    def _send_new(self, add: Add, sequences: list[OpenSequence]) -> None:
        """Send one prompt for the first time, or hold it back while another request is on trial."""
        if not self._may_run(sequences[0].collector):
            self._queue.hold(sequence.add for sequence in sequences)
            return
        for sequence in sequences:
            sequence.mark_sent()
        self._engine.send(add)

    def _look(self, collector: OutputCollector) -> None:
        """Whether all that is open of a request here has moved on."""
        found = [self._requests.get(add.id) for add in collector.adds]
        left = [sequence for sequence in found if sequence is not None and sequence.engine == self._number]
        if all(sequence.sent and sequence.gained >= MOVED_ON for sequence in left):
            if self._search.moved(collector) and self._engine.state == "ready":
                self._send_unsent()
            if not self._search.unproven:
                self._report(Recovery(self._engine.engine, complete=True))

    def _send_unsent(self) -> int:
        """Send what the engine does not know and may; returns how many sequences another one has known."""
        sequences = self._requests.unsent(self._number, self._may_run)
        for add in replay_adds(sequences):
            self._queue.expect(add)
            self._engine.send(add)
        replayed = sum(sequence.engines > 1 for sequence in sequences)
        self._stats.replayed += replayed
        return replayed
