"""Which open requests are on the engine, and what becomes of them when it is replaced.

The next engine gets every open sequence behind the tokens that are known. Only while one of them is suspected of
killing engines, some wait (`PoisonSearch`); once it is found, it fails alone. Knows nothing about HTTP or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from quire.api.admission_limit import AdmissionLimit
from quire.api.engine_connection import EngineConnection
from quire.api.open_requests import OpenRequests, OpenSequence
from quire.api.output_collector import OutputCollector
from quire.api.poison_search import PoisonSearch
from quire.api.replay import replay_adds
from quire.messages import Add
from quire.metrics.stats import Stats
from quire.processes.launch import Recovery, SendReport

logger = logging.getLogger(__name__)

MOVED_ON = 4
"""Tokens that a sequence gains on a new engine until it is taken to be harmless: more than plans in flight bring."""


class EngineRecovery:
    """Sends requests to the engine, again if need be.

    Args:
        requests: Those that are open.
        engine: Where they go.
        stats: Counts what is sent again.
        admission: Is told what a new engine has been sent, and what waits here.
        report: Is told how a recovery goes.
    """

    def __init__(
        self,
        requests: OpenRequests,
        engine: EngineConnection,
        stats: Stats,
        admission: AdmissionLimit,
        report: SendReport,
    ) -> None:
        self._requests = requests
        self._engine = engine
        self._stats = stats
        self._admission = admission
        self._report = report
        self._search: PoisonSearch[OutputCollector] = PoisonSearch()

    def open(self, collector: OutputCollector) -> None:
        """A new request goes to the engine, by `send` or as soon as there is one that takes it."""
        self._requests.add(collector)

    def send(self, collector: OutputCollector) -> Iterator[None]:
        """Send a new request, a prompt each time the iterator is asked; between them the engine may be replaced, and
        sequences may end."""
        for add in collector.adds:
            if add.fork_of is not None:
                continue  # it travels with the first
            if self._engine.state == "ready":
                found = [self._requests.get(number) for number in (add.id, *(fork.id for fork in add.forks))]
                sequences = [sequence for sequence in found if sequence is not None and not sequence.sent]
                if len(sequences) < len(found):
                    continue
                self._send_new(add, sequences)
            yield

    def engine_died(self, in_flight: Sequence[int]) -> OutputCollector | None:
        """The engine is gone. Returns the request to blame, if it is known."""
        self._requests.engine_died()
        sequences = [self._requests.get(number) for number in in_flight]
        blamed = self._search.engine_died(sequence.collector for sequence in sequences if sequence is not None)
        if blamed is not None:
            logger.error("A request has stopped the engine again and again, and fails: %s", blamed.adds[0].id)
            self._report(Recovery(self._engine.engine.epoch, blamed=True))
        return blamed

    def engine_ready(self) -> None:
        """The next engine takes work."""
        self._admission.restart()
        resumed = self._send_unsent()
        self._admission.hold(sequence.add for sequence in self._requests.unsent(lambda collector: True))
        self._report(Recovery(self._engine.engine.epoch, resumed, complete=not self._search.unproven))

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
        if not self._search.may_run(sequences[0].collector):
            self._admission.hold(sequence.add for sequence in sequences)
            return
        for sequence in sequences:
            sequence.mark_sent()
        self._engine.send(add)

    def _look(self, collector: OutputCollector) -> None:
        """Whether all that is open of a request has moved on."""
        left = [self._requests.get(add.id) for add in collector.adds]
        if all(sequence is None or (sequence.sent and sequence.gained >= MOVED_ON) for sequence in left):
            if self._search.moved(collector) and self._engine.state == "ready":
                self._send_unsent()
            if not self._search.unproven:
                self._report(Recovery(self._engine.engine.epoch, complete=True))

    def _send_unsent(self) -> int:
        """Send what the engine does not know and may; returns how many sequences another one has known."""
        sequences = self._requests.unsent(self._search.may_run)
        for add in replay_adds(sequences):
            self._admission.expect(add)
            self._engine.send(add)
        replayed = sum(sequence.engines > 1 for sequence in sequences)
        self._stats.replayed += replayed
        return replayed
