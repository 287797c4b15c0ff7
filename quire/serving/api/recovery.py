"""Which open requests an engine knows, and what becomes of them when it is replaced.

The next engine gets every open sequence behind the tokens that are known. A prompt that was in flight at two deaths
runs alone there until it is past the token at which the engine died (`Add.alone`); if it kills the engine again, its
request fails, and all others go on. Knows nothing about HTTP or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from quire.engine.metrics.stats import Stats
from quire.foundation.messages.to_engine import Add
from quire.foundation.processes.launch import Recovery, SendReport
from quire.serving.api.engine_connection import EngineConnection
from quire.serving.api.engine_queue import EngineQueue
from quire.serving.api.open_requests import OpenRequests
from quire.serving.api.output_collector import OutputCollector
from quire.serving.api.replay import replay_adds

logger = logging.getLogger(__name__)


class EngineRecovery:
    """Sends requests to one engine, again if need be.

    Args:
        requests: Those that are open, of all engines.
        engine: Where its own go.
        stats: Counts what is sent again.
        queue: Is told what a new engine has been sent.
        report: Is told how many sequences go on.
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

    def send(self, add: Add) -> None:
        """Send a prompt for the first time, unless the engine knows it already or some of its sequences have ended; if
        there is no engine that takes it, it goes to the next one."""
        if self._engine.state != "ready":
            return
        found = [self._requests.get(number) for number in (add.id, *(fork.id for fork in add.forks))]
        sequences = [sequence for sequence in found if sequence is not None and not sequence.sent]
        if len(sequences) == len(found):
            for sequence in sequences:
                sequence.mark_sent()
            self._engine.send(add)

    def engine_died(self, in_flight: Sequence[int]) -> OutputCollector | None:
        """Note that the engine died while it worked on these sequences. Returns the request to blame, if there is one:
        it ran alone."""
        found = [self._requests.get(number) for number in in_flight]
        sequences = [sequence for sequence in found if sequence is not None]
        blamed = None
        if len(sequences) == len(found) and len({sequence.add.prompt_id for sequence in sequences}) == 1:
            blamed = next((sequence.collector for sequence in sequences if sequence.alone), None)
        for sequence in sequences:
            sequence.deaths += 1
        self._requests.engine_died(self._number)
        if blamed is not None:
            logger.error("A request has stopped the engine again and again, and fails: %s", blamed.adds[0].id)
        return blamed

    def engine_ready(self) -> None:
        """Send the next engine, which takes work now, all that is open."""
        self._queue.restart()
        sequences = self._requests.unsent(self._number)
        for add in replay_adds(sequences):
            self._queue.expect(add)
            self._engine.send(add)
        resumed = sum(sequence.engines > 1 for sequence in sequences)
        self._stats.replayed += resumed
        self._report(Recovery(self._engine.engine, resumed))
