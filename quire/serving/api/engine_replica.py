"""One engine as the session sees it: its connection, its queue, its statistics, and what becomes of its requests.

Owns what one engine says and how that reaches readers. Knows nothing about the other engines; what concerns more than
one is the session's (`RequestOwner`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.engine.client import EngineClient, Lost
from quire.engine.metrics.stats import Stats
from quire.errors import GenerationError, QuireError, RequestError, RequestTimeoutError
from quire.foundation.clock import Clock
from quire.foundation.messages.from_engine import Deltas, EndReason, Heartbeat, Ready
from quire.foundation.processes.launch import SendReport
from quire.serving.api.engine_connection import EngineConnection
from quire.serving.api.engine_queue import EngineQueue
from quire.serving.api.engine_receiver import MakeReceiver
from quire.serving.api.open_requests import OpenRequests
from quire.serving.api.output_collector import OutputCollector
from quire.serving.api.recovery import EngineRecovery
from quire.text.deltas import SequenceDelta, deltas_by_sequence

_TOO_LATE = "The request's time was over before it had any output. Send it again, with more time or later."
_BLAMED = "The engine stopped each time it worked on this request. Do not send it again; the server's log says why."


class RequestOwner(Protocol):
    """Owns the requests that an engine works on, and is told what becomes of the engine."""

    def on_engine_ready(self) -> None:
        """An engine takes work: it has started, or has taken the place of one that died."""
        ...

    def on_engine_died(self, engine: int, in_flight: Sequence[int]) -> None:
        """An engine died while it worked on the sequences `in_flight`, and another one is being started."""
        ...

    def on_engine_gone(self) -> None:
        """An engine is gone for good, and the server ends with it."""
        ...

    def close_request(self, collector: OutputCollector, reason: EndReason) -> None:
        """Abort the sequences of a request that still run, on whichever engine."""
        ...

    def fail_requests(self, collectors: Iterable[OutputCollector], error: QuireError, reason: EndReason) -> None:
        """Abort the sequences of requests that still run, and tell the requests' readers why."""
        ...


class EngineReplica:
    """One engine with its connection, queue, statistics and recovery. Everything runs in the event loop.

    Args:
        client: The way to the engine.
        slots: Sequences that it runs at once.
        requests: The open requests of all engines.
        owner: Owns these requests.
        clock: For all times.

    Attributes:
        number: The engine's number.
        connection: The connection to the engine.
        queue, stats: The engine's queue and statistics.
        recovery: Sends requests to the engine.
    """

    def __init__(
        self, client: EngineClient, slots: int, requests: OpenRequests, owner: RequestOwner, clock: Clock,
        report: SendReport, make_receiver: MakeReceiver,
    ) -> None:  # fmt: skip
        self.number = client.engine.engine
        self.queue = EngineQueue(slots)
        self.stats = Stats(self.number, client.engine.epoch)
        self.connection = EngineConnection(client, clock, self, make_receiver)
        self.recovery = EngineRecovery(requests, self.connection, self.stats, self.queue, report)
        self._requests = requests
        self._owner = owner
        self._was_ready = False

    # --- what it says -----------------------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        if not self._was_ready:
            self._was_ready = True
            self.stats.set_max_model_len(ready.max_model_len)
            self._owner.on_engine_ready()
        else:
            self._owner.on_engine_ready()
            self.recovery.engine_ready()

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.stats.record_heartbeat(beat)
        self.queue.observe(beat.load, beat.last_add)

    def on_deltas(self, deltas: Deltas, now: float) -> None:
        self.stats.record_load(deltas.load)
        self.queue.observe(deltas.load, deltas.last_add)
        for number, delta in deltas_by_sequence(deltas).items():
            self._on_delta(number, delta, now)

    def _on_delta(self, number: int, delta: SequenceDelta, now: float) -> None:
        sequence = self._requests.get(number)
        if sequence is None:
            return
        collector = sequence.collector
        sequence.record(delta)
        stats = collector.stats_of(number)
        self.stats.record_tokens(stats, len(delta.tokens), now, delta.cached_tokens)
        if delta.end is not None:  # first, because the reader may close the request when it gets the end
            stats.end = delta.end
            self._requests.remove(number)
            if delta.end.reason == "error":
                message = delta.end.message or "The engine could not go on with this request."
                collector.fail(GenerationError(message))
                return
            if delta.end.reason == "refused":
                named = f"{collector.form}: " if collector.form else ""
                collector.fail(RequestError(named + delta.end.message, param=collector.form))
                return
            if delta.end.reason == "timeout" and not any(stats.received for stats in collector.stats):
                collector.fail(RequestTimeoutError(_TOO_LATE))
                return
        collector.put(number, delta)

    def on_lost(self, message: Lost) -> None:
        error = GenerationError("A message of the engine was lost. Send the request again.")
        self._owner.fail_requests(self._requests.collectors(self.number), error, "error")

    def on_engine_died(self, in_flight: Sequence[int]) -> None:
        self._owner.on_engine_died(self.number, in_flight)
        waiting = self._requests.of_engine(self.number)
        prompts = [sequence.add for sequence in waiting if sequence.add.fork_of is None]
        queued_tokens = sum(add.queued_tokens(self.stats.load.expected_output) for add in prompts)
        self.stats.record_engine_death(self.connection.engine.epoch, len(waiting), queued_tokens)
        blamed = self.recovery.engine_died(in_flight)
        if blamed is not None:
            self._owner.fail_requests([blamed], GenerationError(_BLAMED), "error")

    def on_dead(self) -> None:
        self._owner.on_engine_gone()
